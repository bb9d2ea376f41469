/* SPDX-License-Identifier: Apache-2.0 */
/* Products of all pairs of a sample's vectors: small ones, so a loop per pair
 * and no matrix product. */
#include "codelets/ops/ops.h"

#include <assert.h>
#include <string.h>

#include "codelets/base/build.h"
#include "codelets/ops/gpu_ops.h"

/* Vector i of a sample: z is its own row, e its first of n. */
static inline const float *vector(const float *z, const float *e, int64_t i,
                                  int64_t d)
{
    return i ? e + (i - 1) * d : z;
}

IZ_SIMD static void sample_fwd(float *y, const float *z, const float *e,
                               int64_t n, int64_t d)
{
    memcpy(y, z, (size_t)d * sizeof(*y));
    y += d;
    for (int64_t i = 1; i <= n; i++)
        for (int64_t j = 0; j < i; j++) {
            const float *a = vector(z, e, i, d), *b = vector(z, e, j, d);
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int64_t k = 0; k < d; k++)
                sum += a[k] * b[k];
            *y++ = sum;
        }
}

/* Every product gives each of its two vectors the other one. */
IZ_SIMD static void sample_bwd(float *dz, float *de, const float *dy,
                               const float *z, const float *e, int64_t n,
                               int64_t d)
{
    memcpy(dz, dy, (size_t)d * sizeof(*dz));
    memset(de, 0, (size_t)(n * d) * sizeof(*de));
    dy += d;
    for (int64_t i = 1; i <= n; i++)
        for (int64_t j = 0; j < i; j++) {
            const float *a = vector(z, e, i, d), *b = vector(z, e, j, d);
            float *da = de + (i - 1) * d, *db = j ? de + (j - 1) * d : dz;
            float g = *dy++;
            for (int64_t k = 0; k < d; k++) {
                da[k] += g * b[k];
                db[k] += g * a[k];
            }
        }
}

static void interact_check(struct iz_view y, struct iz_view z, struct iz_view e)
{
    int64_t n = z.rows ? e.rows / z.rows : 0;
    assert(e.rows == n * z.rows && e.cols == z.cols && y.rows == z.rows);
    assert(y.cols == z.cols + n * (n + 1) / 2);
}

/* One product of all pairs. */
static double flops(struct iz_view z, struct iz_view e)
{
    return (double)iz_view_len(e) * (double)(e.rows / z.rows + 1);
}

void iz_interact_fwd(struct iz_exec *x, struct iz_view y, struct iz_view z,
                     struct iz_view e)
{
    int64_t n = e.rows / z.rows, d = z.cols;
    interact_check(y, z, e);
    iz_exec_count(
        x, flops(z, e),
        (double)(iz_view_bytes(y) + iz_view_bytes(z) + iz_view_bytes(e)));
    for (int64_t i = 0; iz_exec_runs(x, IZ_CPU) && i < z.rows; i++)
        sample_fwd((float *)y.p + i * y.cols, (float *)z.p + i * d,
                   (float *)e.p + i * n * d, n, d);
    if (iz_exec_runs(x, IZ_CUDA))
        iz_interact_fwd_cuda(x, y, z, e);
}

void iz_interact_bwd(struct iz_exec *x, struct iz_view dz, struct iz_view de,
                     struct iz_view dy, struct iz_view z, struct iz_view e)
{
    int64_t n = e.rows / z.rows, d = z.cols;
    interact_check(dy, z, e);
    interact_check(dy, dz, de);
    iz_exec_count(x, 2 * flops(z, e),
                  (double)(iz_view_bytes(dy) + 2 * iz_view_bytes(z) +
                           2 * iz_view_bytes(e)));
    for (int64_t i = 0; iz_exec_runs(x, IZ_CPU) && i < z.rows; i++)
        sample_bwd((float *)dz.p + i * d, (float *)de.p + i * n * d,
                   (float *)dy.p + i * dy.cols, (float *)z.p + i * d,
                   (float *)e.p + i * n * d, n, d);
    if (iz_exec_runs(x, IZ_CUDA))
        iz_interact_bwd_cuda(x, dz, de, dy, z, e);
}
