/* SPDX-License-Identifier: Apache-2.0 */
/* See emulated.h. */
#include "tests/codelets/gpu/emulated.h"

#include <stdlib.h>

#include "codelets/ops/gpu_ops.h"
#include "tests/fake/cuda_on_cpu/launch.h"

static enum iz_dtype act_of(enum iz_dtype param)
{
    return param;
}

static void become(int capability)
{
    backend.x.numerics.capability = capability;
    emu_device(capability);
}

/* A few rows of logits are several chunks. */
struct backend backend = {
    .x = {.backend = IZ_CUDA,
          .numerics = {.capability = 90, .logits_bytes = 64 << 10}},
    .act = act_of,
    .refuses = true,
    .piece = 128,
    .become = become,
    .ends = emu_ends};

/* A measurement, which nobody asks for here. */
double iz_gemm_rate_cuda(struct iz_exec *x, int64_t m, int64_t n, int64_t k,
                         double seconds)
{
    abort();
}
