/* SPDX-License-Identifier: Apache-2.0 */
/* The program's own ops of a GPU on the stand-in:
 * kernels and products that tests/fake/cuda_on_cpu and tests/codelets/gpu
 * compute wait in its streams, and get at its memory only. */
#include "tests/fake/cuda_on_cpu/launch.h"

#include <cuda_runtime_api.h>
#include <stdint.h>
#include <string.h>

#include "codelets/base/die.h"
#include "codelets/ops/classifier.h"
#include "codelets/ops/gemm_rate.h"
#include "codelets/ops/gpu_ops.h"
#include "tests/fake/cuda_on_cpu/device.h"
#include "tests/fake/standin/standin.h"

/* 20 rows of 256 logits. */
const int64_t iz_classifier_chunk_bytes = 20 << 10;

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
    tell_capability();
    if (cudaLaunchHostFunc(stream, run, arg))
        iz_die("the stand-in refuses a launch: is %p a stream?", stream);
}

void *emu_reach(const void *p, size_t n)
{
    return p ? iz_standin_kernel(p, n) : NULL;
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

/* The measurement's products would take an emulation hours. */
double iz_gemm_rate_cuda(struct iz_exec *x, int64_t m, int64_t n, int64_t k,
                         double seconds)
{
    return iz_blas_rate(512, 512, 512, 0);
}
