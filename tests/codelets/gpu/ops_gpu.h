/* SPDX-License-Identifier: Apache-2.0 */
/* What the tests of ops on a GPU share: the run of one op with every tensor in
 * device memory between two strips that nobody may touch. */
#ifndef IZ_TESTS_CODELETS_GPU_OPS_GPU_H
#define IZ_TESTS_CODELETS_GPU_OPS_GPU_H

#include "tests/codelets/ops/fixture.h"

#include "codelets/ops/gpu_ops.h"

/* An op on n tensors: v[i] is t[i] in device memory.  In the dry run v[i].p is
 * NULL. */
struct gpu_op {
    void (*run)(struct iz_exec *x, const struct iz_view *v, const void *arg);
    const void *arg;
    struct tensor *t;
    int n;
    unsigned reads, writes; /* bit i: tensor i */
    unsigned unwanted;      /* bit i: v[i].p is NULL in the real run too */
    enum iz_dtype act;
};

/* Runs the op dry and then twice with a work arena of exactly the size found,
 * which is full of NaN the first time and of something else the second, and
 * checks: the same bits both times, tensors that it only reads unchanged,
 * strips untouched, the counters those of the dry run.  What the op only writes
 * is NaN before.  Results are in t[i].v, t[i].d is as it was. */
void gpu_run(const struct gpu_op *op);

/* Pinned host memory. */
void *gpu_pinned(int64_t bytes);
void gpu_unpin(void *p);

/* A number that is expected, and the sum of the magnitudes that it is made of.
 */
struct want {
    double is, size;
};

/* Checks elements of t against want(arg, i, j): all, or of a large tensor the
 * first, the last and some thousand others.  The bound is
 * 2^-21 size + (rounding of t's type) |is|: eight roundings to fp32 of
 * the largest sum there can be on the way. */
void gpu_check(const char *what, struct tensor *t,
               struct want (*want)(const void *arg, int64_t i, int64_t j),
               const void *arg);

/* Half an ulp of the type at x. */
double gpu_rounding(enum iz_dtype t, double x);

/* Opens the GPU and its libraries; false with the reason printed. */
bool gpu_open(void);
/* Whether products are made of this type: bf16 from capability 8.0 on. */
bool gpu_computes(enum iz_dtype t);
/* Of the opened GPU: 90 for 9.0. */
int gpu_capability(void);
void gpu_close(void);

int ops_gpu_matmul(void);
int ops_gpu_rows(void);
int ops_gpu_llama(void);
int ops_gpu_attention(void);
int ops_gpu_tokens(void);
int ops_gpu_tables(void);
int ops_gpu_flat(void);

#endif
