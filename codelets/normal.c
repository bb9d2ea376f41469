/* SPDX-License-Identifier: Apache-2.0 */
/* Normal random numbers from a counter: Box-Muller on two hashed uniforms per
 * pair of elements.  Logarithm, sine and cosine are our own series in double,
 * because libm's bits differ between machines: build this file with
 * -ffp-contract=off. */
#include "codelets/flat.h"

#include <math.h>
#include <string.h>

#include "codelets/build.h"
#include "codelets/mix.h"

enum { PAIRS = 128 }; /* generated at a time */

static inline double bits_double(uint64_t u)
{
    double x;

    memcpy(&x, &u, sizeof x);
    return x;
}

static inline uint64_t double_bits(double x)
{
    uint64_t u;

    memcpy(&u, &x, sizeof u);
    return u;
}

/* The upper 52 bits as a multiple of 2^-52 in [0, 1). */
static inline double uniform(uint64_t h)
{
    return bits_double((h >> 12) | 0x3ff0000000000000u) - 1.0;
}

/* log(x) of a normal x > 0: x = 2^e m with m in [0.70, 1.41), then
 * log(m) = 2 atanh(s), s = (m - 1) / (m + 1), |s| < 0.18. */
static inline double log_series(double x)
{
    uint64_t u = double_bits(x) - 0x3fe6a09e00000000u;
    /* e + 2048 in the low bits of 2^52, to convert it without an int64
     * instruction */
    double e =
        bits_double(((u + 0x8000000000000000u) >> 52) | 0x4330000000000000u) -
        (0x1p52 + 2048.0);
    double m = bits_double((u & 0x000fffffffffffffu) + 0x3fe6a09e00000000u);
    double s = (m - 1.0) / (m + 1.0), q = s * s;
    double sum = 1.0 / 13.0;

    sum = sum * q + 1.0 / 11.0;
    sum = sum * q + 1.0 / 9.0;
    sum = sum * q + 1.0 / 7.0;
    sum = sum * q + 1.0 / 5.0;
    sum = sum * q + 1.0 / 3.0;
    sum = sum * q + 1.0;
    return e * 0.69314718055994530942 + 2.0 * s * sum;
}

/* sin(x) and cos(x) for |x| <= pi / 4. */
static inline double sin_series(double x)
{
    double q = x * x, sum = 1.0 / 6227020800.0;

    sum = sum * q - 1.0 / 39916800.0;
    sum = sum * q + 1.0 / 362880.0;
    sum = sum * q - 1.0 / 5040.0;
    sum = sum * q + 1.0 / 120.0;
    sum = sum * q - 1.0 / 6.0;
    return x + x * q * sum;
}

static inline double cos_series(double x)
{
    double q = x * x, sum = 1.0 / 479001600.0;

    sum = sum * q - 1.0 / 3628800.0;
    sum = sum * q + 1.0 / 40320.0;
    sum = sum * q - 1.0 / 720.0;
    sum = sum * q + 1.0 / 24.0;
    sum = sum * q - 0.5;
    return 1.0 + q * sum;
}

/* Elements 2k and 2k+1 for k = first, ..., first + PAIRS - 1.  The angle is an
 * eighth of a turn to either side of a quadrant that two bits of h choose. */
IZ_SIMD static void pairs(float *restrict out, uint64_t key, uint64_t first,
                          double std)
{
    for (int i = 0; i < PAIRS; i++) {
        uint64_t n = 2 * (first + (uint64_t)i);
        uint64_t h = iz_mix(key + (n + 1) * IZ_GOLDEN);
        double u = 1.0 - uniform(iz_mix(key + n * IZ_GOLDEN));
        double r = std * sqrt(-2.0 * log_series(u));
        double x = (uniform(h << 2) - 0.5) * 1.57079632679489661923;
        double s = sin_series(x), c = cos_series(x);
        double a = h >> 63 ? s : c, b = h >> 63 ? c : s;

        out[2 * i] = (float)(r * ((h >> 62) & 1 ? -a : a));
        out[2 * i + 1] = (float)(r * ((h >> 63) ^ ((h >> 62) & 1) ? -b : b));
    }
}

void iz_flat_normal(float *out, int64_t n, uint64_t seed, uint64_t stream,
                    int64_t first, float std)
{
    uint64_t key = iz_mix(iz_mix(seed + IZ_GOLDEN) + stream);
    float buf[2 * PAIRS];

    while (n > 0) {
        int64_t skip = first & 1, k = 2 * PAIRS - skip;

        if (k > n)
            k = n;
        pairs(buf, key, (uint64_t)first / 2, std);
        memcpy(out, buf + skip, (size_t)k * sizeof *out);
        out += k;
        first += k;
        n -= k;
    }
}
