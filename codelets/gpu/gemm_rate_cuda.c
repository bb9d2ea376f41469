/* SPDX-License-Identifier: Apache-2.0 */
/* How fast matrix products are on this GPU: the reference GEMM.  Outside of
 * steps, so it takes memory of its own. */

#include <stdlib.h>

#include <cuda_runtime_api.h>

#include "codelets/base/die.h"
#include "codelets/base/int64.h"
#include "codelets/base/mix.h"
#include "codelets/base/take.h"
#include "codelets/kernels/cuda_lib.h"
#include "codelets/ops/gpu_ops.h"

enum {
    PRODUCTS = 10,     /* between two looks at the clock */
    PATTERN = 1 << 18, /* elements that repeat */
};

static void gemm_rate_cuda_check(cudaError_t e, const char *call)
{
    if (e != cudaSuccess)
        iz_die("%s: %s", call, cudaGetErrorString(e));
}

/* Fills p with numbers uniform in [-1, 1), the same every time, by doubling
 * what is there: a product of zeros would draw less power and run faster.
 * Waits. */
static void fill_randomly(char *p, int64_t bytes, enum iz_dtype t)
{
    int64_t each = iz_dtype_bytes(t), done = PATTERN * each;
    char *pattern = iz_take(done, 1, "random numbers");
    for (int64_t i = 0; i < PATTERN; i++) {
        float f = (float)(iz_mix((uint64_t)i * IZ_GOLDEN) >> 40) * 0x1p-23f - 1;
        iz_cast(pattern + i * each, t, &f, IZ_F32, 1);
    }
    done = done < bytes ? done : bytes;
    gemm_rate_cuda_check(
        cudaMemcpy(p, pattern, (size_t)done, cudaMemcpyHostToDevice),
        "cudaMemcpy");
    free(pattern);
    while (done < bytes) {
        int64_t n = done < bytes - done ? done : bytes - done;
        gemm_rate_cuda_check(
            cudaMemcpy(p + done, p, (size_t)n, cudaMemcpyDeviceToDevice),
            "cudaMemcpy");
        done += n;
    }
    gemm_rate_cuda_check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

/* Seconds of PRODUCTS products. */
static double time_products(struct iz_exec *x, const struct iz_product *p,
                            struct iz_view scratch, const cudaEvent_t at[2])
{
    float ms;
    gemm_rate_cuda_check(cudaEventRecord(at[0], (cudaStream_t)x->stream),
                         "cudaEventRecord");
    for (int i = 0; i < PRODUCTS; i++)
        iz_product_cuda(x, p, scratch);
    gemm_rate_cuda_check(cudaEventRecord(at[1], (cudaStream_t)x->stream),
                         "cudaEventRecord");
    gemm_rate_cuda_check(cudaEventSynchronize(at[1]), "cudaEventSynchronize");
    gemm_rate_cuda_check(cudaEventElapsedTime(&ms, at[0], at[1]),
                         "cudaEventElapsedTime");
    return (double)ms / 1e3;
}

/* flop/s of the series that end in the last third of the time: clocks fall
 * while the GPU works.  The first series only warms up. */
static double last_rate(struct iz_exec *x, const struct iz_product *p,
                        struct iz_view scratch, double seconds)
{
    double flops = 2. * (double)iz_view_len(p->d) * (double)iz_product_k(p);
    double total = 0, last = 0;
    int series = 0;
    cudaEvent_t at[2];
    gemm_rate_cuda_check(cudaEventCreate(&at[0]), "cudaEventCreate");
    gemm_rate_cuda_check(cudaEventCreate(&at[1]), "cudaEventCreate");
    time_products(x, p, scratch, at);
    do {
        double s = time_products(x, p, scratch, at);
        total += s;
        if (total < seconds * 2 / 3)
            continue;
        last += s;
        series++;
    } while (total < seconds);
    gemm_rate_cuda_check(cudaEventDestroy(at[0]), "cudaEventDestroy");
    gemm_rate_cuda_check(cudaEventDestroy(at[1]), "cudaEventDestroy");
    return series * PRODUCTS * flops / (last > 1e-9 ? last : 1e-9);
}

static struct iz_view matrix(const struct iz_exec *x, int64_t rows,
                             int64_t cols)
{
    return (struct iz_view){.dtype = x->act, .rows = rows, .cols = cols};
}

/* Bytes of a matrix, so that the next one is well aligned. */
static int64_t room(struct iz_view v)
{
    return round_up(iz_view_bytes(v), 256);
}

/* 0 where the GPU has no room for the matrices. */
double iz_gemm_rate_cuda(struct iz_exec *x, int64_t m, int64_t n, int64_t k,
                         double seconds)
{
    struct iz_product p = {
        .a = matrix(x, m, k), .b = matrix(x, k, n), .d = matrix(x, m, n)};
    int64_t operands = room(p.a) + room(p.b);
    char *mem;
    if (cudaMalloc((void **)&mem, (size_t)(IZ_PRODUCT_SCRATCH + operands +
                                           room(p.d))) != cudaSuccess) {
        cudaGetLastError(); /* forget it: nothing is broken */
        return 0;
    }
    p.a.p = mem + IZ_PRODUCT_SCRATCH;
    p.b.p = (char *)p.a.p + room(p.a);
    p.d.p = (char *)p.a.p + operands;
    fill_randomly(p.a.p, operands, x->act);
    double rate = last_rate(
        x, &p,
        (struct iz_view){
            .p = mem, .dtype = IZ_U8, .rows = 1, .cols = IZ_PRODUCT_SCRATCH},
        seconds);
    gemm_rate_cuda_check(cudaFree(mem), "cudaFree");
    return rate;
}
