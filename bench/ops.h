/* SPDX-License-Identifier: Apache-2.0 */
/* What the parts of bench/ops share: times, lines of the result, and memory of
 * the backend, which is that of the cases of tests/codelets/ops. */
#pragma once

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "bench/timing.h"
#include "codelets/ops/gpu_ops.h"
#include "tests/codelets/ops/scene.h"

struct bench {
    FILE *json;     /* may be NULL */
    bool tiny;      /* small sizes: to try the program */
    double copy;    /* bytes/s of a copy, read and written */
    double gemm;    /* best flop/s of a product so far */
    int lines;      /* of ops in the result so far */
    int skip;       /* so many ops that an earlier result has */
    char *pattern;  /* numbers in -1..1 of the type act */
    char *positive; /* fp32 numbers in 0..1 */
};

/* Bytes of each of the two patterns. */
#define PATTERN_BYTES (INT64_C(16) << 20)

/* Sets of tensors that the inputs of an op rotate over, at most. */
enum { BENCH_SETS = 8 };

/* Memory of the backend, and memory of the host that a GPU can read, with what
 * is at `from` or zeros; exits where there is none. */
char *bench_device(int64_t bytes);
void bench_device_give(char *p);
char *bench_pinned(int64_t bytes, const void *from);
void bench_unpin(char *p);

/* Copies a pattern until p is full. */
void bench_fill(char *p, int64_t bytes, const void *pattern);

/* Returns when the stream, if there is one, has done all; never sleeps. */
void bench_wait(void *stream);

/* Median seconds of one call of run(arg, i), i counting the calls; on a GPU it
 * enqueues on the stream. */
double bench_time(const struct bench *b, void (*run)(void *arg, int i),
                  void *arg);

/* An op's surroundings, with scratch at `base`. */
struct iz_exec bench_exec(char *base, int64_t bytes);

/* Every op, on a GPU in the shapes of a 1.5B, a 7B and a 14B model. */
void bench_models(struct bench *b);
