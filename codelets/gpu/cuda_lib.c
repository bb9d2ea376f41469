/* SPDX-License-Identifier: Apache-2.0 */
/* The handles of CUDA's libraries, and what the kernels were built for. */
#include "codelets/kernels/cuda_lib.h"

#include <stdlib.h>

#include "codelets/base/take.h"
#include "codelets/gpu/attention_cudnn.h"
#include "codelets/gpu/device.h"
#include "codelets/ops/gpu_ops.h"

int iz_cuda_open(struct iz_cuda **out)
{
    *out = iz_take(1, sizeof(**out), "the handles of CUDA");
    int err = iz_cublas_open(&(*out)->blas);
    if (err)
        iz_cuda_close(out);
    return err;
}

void iz_cuda_close(struct iz_cuda **c)
{
    if (*c) {
        iz_cudnn_close(&(*c)->dnn);
        iz_cublas_close(&(*c)->blas);
        if ((*c)->ends_pinned)
            iz_device_unpin((*c)->ends);
    }
    free(*c);
    *c = NULL;
}

int iz_cuda_capability(void)
{
    return IZ_CUDA_CAPABILITY;
}

/* Activations are as wide as the parameters: a product takes both in one type,
 * and fp32 parameters are asked for by who wants fp32 arithmetic. */
enum iz_dtype iz_cuda_act(enum iz_dtype param)
{
    return param;
}
