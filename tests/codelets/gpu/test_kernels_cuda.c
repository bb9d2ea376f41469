/* SPDX-License-Identifier: Apache-2.0 */
/* Every op with emulated kernels, which run blocks and threads in another order
 * each time.
 *
 * usage: test_kernels_cuda [parts | GROUP ...] */
#include <string.h>

#include "codelets/ops/gpu_ops.h"
#include "tests/codelets/gpu/emulated.h"

int main(int argc, char **argv)
{
    bool parts = argc > 1 && !strcmp(argv[1], "parts");
    int failed = 0;
    backend_renew(NULL);
    if (!parts)
        failed += ops_groups(argc, argv);
    if (parts || argc == 1)
        failed += kernels_attention() + kernels_library();
    iz_cuda_close(&backend.x.cuda);
    return failed;
}
