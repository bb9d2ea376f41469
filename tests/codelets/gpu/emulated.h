/* SPDX-License-Identifier: Apache-2.0 */
/* What the tests of CUDA kernels on the CPU share, beside
 * tests/codelets/ops/fixture.h.
 */
#ifndef IZ_TESTS_CODELETS_GPU_EMULATED_H
#define IZ_TESTS_CODELETS_GPU_EMULATED_H

#include "tests/codelets/ops/fixture.h"

/* Calls op dry, then with the CUDA backend, activations of type act and arenas
 * of the peaks found, filled with NaN; checks that peaks, flops and bytes
 * agree. */
void emulated_run(void (*op)(struct iz_exec *x, void *arg), void *arg,
                  enum iz_dtype act);

int gpu_flat(void);
int gpu_llama(void);
int gpu_narrow(void);
int gpu_rows(void);
int gpu_tokens(void);
int gpu_tables(void);

#endif
