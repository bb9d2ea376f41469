/* SPDX-License-Identifier: Apache-2.0 */
/* Checks every op against the double-precision reference; with --bench times
 * them instead. */
#include "codelets/ops/gemm.h"
#include "tests/codelets/ops/fixture.h"

#include <string.h>

int main(int argc, char **argv)
{
    iz_gemm_open();
    if (argc > 1 && strcmp(argv[1], "--bench") == 0)
        return ops_bench();
    return ops_matmul() + ops_rows() + ops_llama() + ops_attention() +
           ops_tokens() + ops_tables();
}
