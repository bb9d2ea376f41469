/* SPDX-License-Identifier: Apache-2.0 */
/* The table of kernels that the fronts of the ops call here: those whose .cu
 * file is compiled for the CPU. */
#include "tests/codelets/gpu/emulated.h"

#include <stdlib.h>

#include "codelets/kernels/launch.h"
#include "codelets/ops/gpu_ops.h"

static const struct iz_cuda_ops ops = {
    .layernorm_fwd = iz_layernorm_fwd_cuda,
    .layernorm_again = iz_layernorm_again_cuda,
    .layernorm_bwd = iz_layernorm_bwd_cuda,
    .gelu_fwd = iz_gelu_fwd_cuda,
    .gelu_bwd = iz_gelu_bwd_cuda,
    .rmsnorm_fwd = iz_rmsnorm_fwd_cuda,
    .rmsnorm_again = iz_rmsnorm_again_cuda,
    .rmsnorm_bwd = iz_rmsnorm_bwd_cuda,
    .headnorm_fwd = iz_headnorm_fwd_cuda,
    .headnorm_bwd = iz_headnorm_bwd_cuda,
    .rope = iz_rope_cuda,
    .swiglu_fwd = iz_swiglu_fwd_cuda,
    .swiglu_bwd = iz_swiglu_bwd_cuda,
    .embedding_fwd = iz_embedding_fwd_cuda,
    .embedding_bwd = iz_embedding_bwd_cuda,
    .table_fwd = iz_table_fwd_cuda,
    .table_bwd = iz_table_bwd_cuda,
    .interact_fwd = iz_interact_fwd_cuda,
    .interact_bwd = iz_interact_bwd_cuda,
    .sum = iz_flat_sum_cuda,
    .squares = iz_flat_squares_cuda,
    .norm2 = iz_flat_norm2_cuda,
    .update = iz_update_cuda,
};

const struct iz_cuda_ops *const iz_cuda_ops = &ops;

void emulated_run(void (*op)(struct iz_exec *x, void *arg), void *arg,
                  enum iz_dtype act)
{
    struct iz_exec dry = iz_exec_dry(IZ_CUDA, act);
    struct iz_exec x = {.backend = IZ_CUDA, .act = act};

    op(&dry, arg);
    assert_int_equal(dry.work.used, 0);
    x.work = (struct iz_arena){.base = fixture_take(dry.work.peak),
                               .size = dry.work.peak};
    op(&x, arg);
    assert_int_equal(x.work.used, 0);
    assert_int_equal(x.work.peak, dry.work.peak);
    assert_true(x.flops == dry.flops && x.bytes == dry.bytes);
    free(x.work.base);
}
