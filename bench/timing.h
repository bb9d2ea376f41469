/* SPDX-License-Identifier: Apache-2.0 */
/* What the programs that measure share: clocks, the middle of many figures,
 * memory as a run has it, threads, and Adam's options. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "codelets/flat/optimizer.h"

/* What Adam is timed with: every option, the first step. */
extern const struct iz_hyper_at bench_adamw;

double bench_now_s(void);
/* CPU time of the calling thread. */
double bench_cpu_s(void);

/* Ascending, in place: v[n / 2] is the median. */
void bench_sort(double *v, int n);

/* Untouched memory on huge pages where the system has them, for free(); exits
 * where there is none. */
void *bench_new(int64_t bytes);
void *bench_zeros(int64_t bytes); /* touched */

/* Runs work(each + i * bytes) on n threads of their own and returns when all
 * have ended; exits where a thread cannot be had. */
void bench_threads(int n, void *(*work)(void *), void *each, size_t bytes);
