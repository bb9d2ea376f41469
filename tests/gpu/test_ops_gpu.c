/* SPDX-License-Identifier: Apache-2.0 */
/* Every op and every function on flat buffers on a GPU, against double
 * precision or the bits of the CPU; also runs on the stand-in.  Ends with 77
 * where there is no GPU. */
#include "tests/gpu/ops_gpu.h"

#include <stdlib.h>

#include "codelets/gemm.h"

int main(void)
{
    int failed;

    setenv("IZ_STANDIN_MEM_MB", "2048", 0);
    setenv("IZ_STANDIN_PAGEABLE", "abort", 0);
    if (!iz_cuda_ops || !gpu_open())
        return 77;
    iz_gemm_open();
    failed = ops_gpu_matmul() + ops_gpu_rows() + ops_gpu_llama() +
             ops_gpu_attention() + ops_gpu_tokens() + ops_gpu_tables() +
             ops_gpu_flat();
    gpu_close();
    return failed != 0;
}
