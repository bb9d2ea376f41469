/* SPDX-License-Identifier: Apache-2.0 */
/* Runs the CUDA kernels of rows, tokens and flat buffers on the CPU and checks
 * what they compute. */
#include "tests/codelets/gpu/emulated.h"

int main(void)
{
    return gpu_flat() + gpu_llama() + gpu_narrow() + gpu_rows() + gpu_tokens() +
           gpu_tables();
}
