/* SPDX-License-Identifier: Apache-2.0 */
/* What runs on a GPU waits in the stand-in's streams and gets at its memory
 * only: the ops of ops.cc, or the program's own kernels and products, as
 * tests/fake/cuda_on_cpu and tests/fake/cublaslt.c compute them. */
#include "tests/fake/cuda_on_cpu/launch.h"

#include <cuda_runtime_api.h>
#include <stdint.h>
#include <string.h>

#include "codelets/base/die.h"
#include "codelets/ops/gemm_rate.h"
#include "codelets/ops/gpu_ops.h"
#include "tests/fake/standin/standin.h"

/* Where there are no kernels, nobody asks what they may use. */
void emu_device(int capability) __attribute__((weak));

/* Of the device on which the calling thread works. */
static void tell_capability(void)
{
    int device, major, minor;
    if (cudaGetDevice(&device) ||
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor,
                               device) ||
        cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor,
                               device))
        iz_die("a launch without a device");
    emu_device(10 * major + minor);
}

void emu_enqueue(void *stream, void (*run)(void *arg), void *arg)
{
    if (emu_device)
        tell_capability();
    if (cudaLaunchHostFunc(stream, run, arg))
        iz_die("the stand-in refuses a launch: is %p a stream?", stream);
}

void *emu_reach(const void *p, size_t n)
{
    return p && n ? iz_standin_kernel(p, n) : (void *)(uintptr_t)p;
}

void emu_reach_words(void *words, size_t bytes)
{
    for (size_t at = 0; at + sizeof(void *) <= bytes; at += sizeof(void *)) {
        void *p;
        memcpy(&p, (char *)words + at, sizeof(p));
        if (iz_standin_host(p) == p)
            continue; /* a number, or memory of the host */
        p = iz_standin_kernel(p, 1);
        memcpy((char *)words + at, &p, sizeof(p));
    }
}

/* One small product: the rate of a CPU stands for that of the GPU, and an
 * emulation would take hours. */
double iz_gemm_rate_cuda(struct iz_exec *x, int64_t m, int64_t n, int64_t k,
                         double seconds)
{
    return iz_rate_blas(512, 512, 512, 0);
}
