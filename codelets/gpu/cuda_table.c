/* SPDX-License-Identifier: Apache-2.0 */
/* The table of a build with CUDA, and the handles of its libraries. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#include "codelets/gpu/attention_cudnn.h"
#include "codelets/kernels/cuda_lib.h"
#include "codelets/kernels/launch.h"
#include "codelets/ops/gpu_ops.h"

static void libraries_close(struct iz_cuda **c)
{
    if (*c) {
        iz_cudnn_close(&(*c)->dnn);
        iz_cublas_close(&(*c)->blas);
    }
    free(*c);
    *c = NULL;
}

static int libraries_open(struct iz_cuda **out, void *stream)
{
    struct iz_cuda *c = calloc(1, sizeof *c);
    int err;

    (void)stream;
    *out = c;
    if (!c) {
        fprintf(stderr, "izar: no memory for the handles of CUDA\n");
        return -ENOMEM;
    }
    err = iz_cublas_open(&c->blas);
    if (err)
        libraries_close(out);
    return err;
}

/* Activations are as wide as the parameters: a product takes both in one type,
 * and fp32 parameters are asked for by who wants fp32 arithmetic. */
static enum iz_dtype act_of(enum iz_dtype param)
{
    return param;
}

static const struct iz_cuda_ops table = {
    .matmul_fwd = iz_matmul_fwd_cuda,
    .matmul_da = iz_matmul_da_cuda,
    .matmul_dw = iz_matmul_dw_cuda,
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
    .attention_fwd = iz_attention_fwd_cuda,
    .attention_bwd = iz_attention_bwd_cuda,
    .attention_cudnn = iz_attention_fwd_cudnn,
    .attention_ask = iz_attention_ask_cudnn,
    .cudnn_missing = iz_cudnn_missing,
    .embedding_fwd = iz_embedding_fwd_cuda,
    .embedding_bwd = iz_embedding_bwd_cuda,
    .table_fwd = iz_table_fwd_cuda,
    .table_bwd = iz_table_bwd_cuda,
    .interact_fwd = iz_interact_fwd_cuda,
    .interact_bwd = iz_interact_bwd_cuda,
    .classifier_fwd = iz_classifier_fwd_cuda,
    .classifier_bwd = iz_classifier_bwd_cuda,
    .sum = iz_flat_sum_cuda,
    .squares = iz_flat_squares_cuda,
    .norm2 = iz_flat_norm2_cuda,
    .update = iz_update_cuda,
    .gemm_rate = iz_gemm_rate_cuda,
    .open = libraries_open,
    .close = libraries_close,
    .capability = IZ_CUDA_CAPABILITY,
    .act = act_of,
};

const struct iz_cuda_ops *const iz_cuda_ops = &table;
