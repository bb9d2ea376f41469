/* SPDX-License-Identifier: Apache-2.0 */
/* Every op and every function on flat buffers on a GPU, against double
 * precision or the bits of the CPU; also runs on the stand-in.  Ends with 77
 * where there is no GPU.
 *
 * usage: test_ops_gpu [GROUP ...] */
#include "tests/codelets/gpu/ops_gpu.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "codelets/ops/gemm.h"

static const struct group {
    const char *name;
    int (*run)(void); /* returns how many tests failed */
} groups[] = {
    {"matmul", ops_gpu_matmul}, {"rows", ops_gpu_rows},
    {"llama", ops_gpu_llama},   {"attention", ops_gpu_attention},
    {"tokens", ops_gpu_tokens}, {"tables", ops_gpu_tables},
    {"flat", ops_gpu_flat},
};
#define GROUPS (sizeof(groups) / sizeof(groups[0]))

static const struct group *find(const char *name)
{
    for (size_t i = 0; i < GROUPS; i++)
        if (!strcmp(groups[i].name, name))
            return &groups[i];
    fprintf(stderr, "test_ops_gpu: no group %s, but", name);
    for (size_t i = 0; i < GROUPS; i++)
        fprintf(stderr, " %s", groups[i].name);
    fprintf(stderr, "\n");
    exit(2);
}

int main(int argc, char **argv)
{
    int failed = 0;

    for (int i = 1; i < argc; i++)
        find(argv[i]);
    setvbuf(stdout, NULL, _IOLBF, 0); /* it may be ended from outside */
    setenv("IZ_STANDIN_MEM_MB", "2048", 0);
    setenv("IZ_STANDIN_PAGEABLE", "abort", 0);
    if (!iz_cuda_ops || !gpu_open())
        return 77;
    iz_gemm_open();
    for (size_t i = 0; i < GROUPS && argc == 1; i++)
        failed += groups[i].run();
    for (int i = 1; i < argc; i++)
        failed += find(argv[i])->run();
    gpu_close();
    return failed != 0;
}
