/* SPDX-License-Identifier: Apache-2.0 */
/* Without the headers of cuBLASLt there are no products: the cases that need
 * them are left out (backend_multiplies). */
#include <stdio.h>

#include "codelets/base/die.h"
#include "codelets/kernels/cuda_lib.h"
#include "codelets/ops/gpu_ops.h"
#include "tests/codelets/gpu/emulated.h"

int iz_cublas_open(struct iz_cublas **out)
{
    *out = NULL;
    printf("no products: cublasLt.h is missing\n");
    return 0;
}

void iz_cublas_close(struct iz_cublas **b)
{
    *b = NULL;
}

bool iz_product_cuda(struct iz_exec *x, const struct iz_product *p,
                     struct iz_view scratch)
{
    iz_die("a product without cuBLASLt");
}

void iz_matmul_fwd_cuda(struct iz_exec *x, struct iz_view y, struct iz_view r,
                        struct iz_view a, const struct iz_linear *l,
                        struct iz_view scratch)
{
    iz_product_cuda(x, NULL, scratch);
}

void iz_matmul_dw_cuda(struct iz_exec *x, struct iz_view dy, struct iz_view a,
                       const struct iz_linear *l, struct iz_view scratch)
{
    iz_product_cuda(x, NULL, scratch);
}

int kernels_library(void)
{
    return 0;
}
