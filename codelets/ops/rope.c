/* SPDX-License-Identifier: Apache-2.0 */
/* Rotary positions.  An angle is the position times a frequency in full
 * circles, in double, of which only the fraction counts; its sine and cosine
 * are fp32, so that a position of a million is as exact as the first. */
#include "codelets/ops/ops.h"

#include <assert.h>
#include <math.h>

#include "codelets/base/build.h"
#include "codelets/ops/gpu_ops.h"

#define TWO_PI 6.28318530717958647692

/* How much of a frequency that turns n times in the original context is kept
 * as it is. */
static double kept(const struct iz_rope *r, double n)
{
    double part =
        (n - r->low_freq_factor) / (r->high_freq_factor - r->low_freq_factor);
    return fmin(fmax(part, 0), 1);
}

/* The number of the frequency that turns n times there, within 0..last. */
static double number_of(const struct iz_rope *r, double n, bool up)
{
    int turned = iz_rope_turned(r);
    double i = turned * log(r->original_seq / (n * TWO_PI)) / 2 / log(r->theta);
    i = r->fractions ? i : up ? ceil(i) : floor(i);
    return fmin(fmax(i, 0), turned - 1);
}

static double kept_by_number(const struct iz_rope *r, int i)
{
    double low = number_of(r, r->high_freq_factor, false);
    double high = number_of(r, r->low_freq_factor, true);
    double width = high == low ? 0.001 : high - low;
    return 1 - fmin(fmax((i - low) / width, 0), 1);
}

void iz_rope_turns_of(struct iz_rope_turns *out, const struct iz_rope *r)
{
    int n = iz_rope_turned(r);
    out->amplitude = r->amplitude != 0 ? r->amplitude : 1;
    for (int i = 0; i < n / 2; i++) {
        double f = pow(r->theta, -2. * i / n) / TWO_PI;
        double keep = r->factor == 1                 ? 1
                      : r->scaling == IZ_ROPE_LINEAR ? 0
                      : r->scaling == IZ_ROPE_YARN
                          ? kept_by_number(r, i)
                          : kept(r, f * r->original_seq);
        out->f[i] = f * keep + f * (1 - keep) / r->factor;
    }
}

/* Cosines and sines of position t, [n/2] each. */
static void angles(float *restrict cs, float *restrict sn,
                   const struct iz_rope_turns *f, int64_t t, int half,
                   bool back)
{
    for (int i = 0; i < half; i++) {
        double turns = (double)t * f->f[i];
        float angle = (float)((turns - rint(turns)) * TWO_PI);
        cs[i] = cosf(angle) * f->amplitude;
        sn[i] = (back ? -sinf(angle) : sinf(angle)) * f->amplitude;
    }
}

static void turn_pairs(float *row, const float *cs, const float *sn,
                       const struct iz_rope *r, int half)
{
    for (int h = 0; h < r->heads; h++, row += r->d)
        for (int i = 0; i < half; i++) {
            float a = row[2 * i], b = row[2 * i + 1];
            row[2 * i] = a * cs[i] - b * sn[i];
            row[2 * i + 1] = b * cs[i] + a * sn[i];
        }
}

IZ_SIMD static void turn_halves(float *row, const float *cs, const float *sn,
                                int heads, int d, int half)
{
    for (int h = 0; h < heads; h++) {
        float *lo = row + (int64_t)h * d, *hi = lo + half;
#pragma omp simd
        for (int i = 0; i < half; i++) {
            float a = lo[i], b = hi[i];
            lo[i] = a * cs[i] - b * sn[i];
            hi[i] = b * cs[i] + a * sn[i];
        }
    }
}

static void scale_queries(float *row, const struct iz_rope *r, int64_t t)
{
    float by = iz_rope_query_factor(t, r->query_beta, r->original_seq);
    for (int64_t i = 0; i < (int64_t)r->queries * r->d; i++)
        row[i] *= by;
}

/* Row by row of all samples, so that rows at the same position in their
 * documents share its angles. */
static void turn_cpu(struct iz_view a, const int32_t *begins,
                     const struct iz_rope *r, bool back)
{
    struct iz_rope_turns f;
    float cs[IZ_ROPE_MOST / 2], sn[IZ_ROPE_MOST / 2];
    iz_rope_turns_of(&f, r);
    int64_t now = -1;
    int half = iz_rope_turned(r) / 2;
    for (int64_t t = 0; t < r->seq; t++)
        for (int64_t row = t; row < a.rows; row += r->seq) {
            int64_t at = (r->first + row) % r->seq - (begins ? begins[row] : 0);
            if (at != now)
                angles(cs, sn, &f, at, half, back);
            now = at;
            float *p = (float *)a.p + row * a.cols;
            if (r->pairs)
                turn_pairs(p, cs, sn, r, half);
            else
                turn_halves(p, cs, sn, r->heads, r->d, half);
            if (r->query_beta != 0)
                scale_queries(p, r, at);
        }
}

void iz_rope(struct iz_exec *x, struct iz_view a, struct iz_view begins,
             const struct iz_rope *r, bool back)
{
    int64_t cols = (int64_t)r->heads * r->d;
    assert(iz_rope_turned(r) % 2 == 0 && iz_rope_turned(r) <= r->d);
    assert(r->d <= IZ_ROPE_MOST && cols <= a.cols);
    assert(r->factor > 0);
    assert(a.rows % r->seq == 0 || r->first + a.rows <= r->seq);
    assert(r->query_beta == 0 || iz_rope_turned(r) == r->d);
    iz_exec_count(x, 0, 2. * (double)(a.rows * cols * iz_dtype_bytes(a.dtype)));
    if (iz_exec_runs(x, IZ_CPU))
        turn_cpu(a, begins.p, r, back);
    if (iz_exec_runs(x, IZ_CUDA))
        iz_rope_cuda(x, a, begins, r, back);
}
