/* SPDX-License-Identifier: Apache-2.0 */
/* See emulated.h. */
#include "tests/codelets/gpu/emulated.h"

#include <stdlib.h>

#include "codelets/ops/classifier.h"
#include "codelets/ops/gpu_ops.h"
#include "tests/fake/cuda_on_cpu/launch.h"

/* So small that a few rows of logits are several chunks. */
const int64_t iz_classifier_chunk_bytes = 64 << 10;

static enum iz_dtype act_of(enum iz_dtype param)
{
    return param;
}

static void become(int capability)
{
    backend.x.capability = capability;
    emu_device(capability);
}

struct backend backend = {.x = {.backend = IZ_CUDA, .capability = 90},
                          .act = act_of,
                          .refuses = true,
                          .piece = 128,
                          .become = become};

/* A measurement, which nobody asks for here. */
double iz_gemm_rate_cuda(struct iz_exec *x, int64_t m, int64_t n, int64_t k,
                         double seconds)
{
    abort();
}
