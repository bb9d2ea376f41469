/* SPDX-License-Identifier: Apache-2.0 */
/* The loops of simd.h: compiled once per SIMD level, each time with another
 * IZ_SIMD_TABLE as the name of the table at the end and another IZ_HALF_ROWS,
 * always with -ffp-contract=off. */
#include "codelets/flat/simd.h"

#include <math.h>
#include <string.h>

#include "codelets/base/build.h"
#include "codelets/base/mix.h"
#include "codelets/flat/half.h"
#include "codelets/flat/moment_code.h"
#include "codelets/flat/nf4.h"

/* load_f16, round_f16, round_bf16, round_upper, stream_upper and look_up. */
#include IZ_HALF_ROWS

extern const struct iz_simd IZ_SIMD_TABLE;

/* ---- conversions and sums ---- */

static inline void load_bf16(float *restrict y, const uint16_t *restrict x,
                             int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        y[i] = iz_bf16_load(x[i]);
}

static void keep_lower(uint16_t *restrict y, const float *restrict x, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        y[i] = iz_half_lower(x[i]);
}

static void join(float *restrict y, const uint16_t *restrict upper,
                 const uint16_t *restrict lower, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        y[i] = iz_half_join(upper[i], lower[i]);
}

static void loops_add(float *y, const float *a, const float *b, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        y[i] = a[i] + b[i];
}

/* bf16 numbers are widened on the way: no pass over an expansion of them. */
static void add_bf16(float *restrict y, const uint16_t *restrict x, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        y[i] = y[i] + iz_bf16_load(x[i]);
}

static void set_pair(float *restrict y, const uint16_t *restrict a,
                     const uint16_t *restrict b, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        y[i] = iz_bf16_load(a[i]) + iz_bf16_load(b[i]);
}

static void add_pair(float *restrict y, const uint16_t *restrict a,
                     const uint16_t *restrict b, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        y[i] = y[i] + (iz_bf16_load(a[i]) + iz_bf16_load(b[i]));
}

/* Elements fetched ahead of a sum: at the end of a block the processor would
 * forget what it had found out about the stream. */
enum { AHEAD = 1024 };

/* The square of an fp32 is exact in double. */
static double squares(const float *x, int64_t n)
{
    double lane[IZ_NORM_LANES] = {0};
    int64_t i = 0;
    for (; i + IZ_NORM_LANES <= n; i += IZ_NORM_LANES) {
        __builtin_prefetch(x + i + AHEAD);
        __builtin_prefetch(x + i + AHEAD + 16);
        for (int j = 0; j < IZ_NORM_LANES; j++)
            lane[j] += (double)x[i + j] * (double)x[i + j];
    }
    for (int j = 0; i + j < n; j++)
        lane[j] += (double)x[i + j] * (double)x[i + j];
    return iz_simd_sum(lane);
}

static uint64_t hash(uint64_t first, const float *x, int64_t n)
{
    uint64_t sum = 0;
    for (int64_t i = 0; i < n; i++)
        sum += iz_mix((first + (uint64_t)i) * IZ_GOLDEN +
                      iz_float_bits(x[i]) * 0xd1342543de82ef95u);
    return sum;
}

/* ---- normal numbers ----
 *
 * Box-Muller in fp32 (Box and Muller, A note on the generation of random normal
 * deviates, 1958).  Logarithm, sine and cosine are our own minimax polynomials,
 * because libm's bits differ between machines.  Their terms are added by twos:
 * a chain of them would leave the processor waiting. */

/* -2 log(k / 2^31) of 0 < k <= 2^31, never negative: k / 2^31 is m / 2^e with m
 * in [0.70, 1.42), and log(m) / (m - 1) is the polynomial.  Relative error
 * below 5e-7. */
static inline float minus_2_log(float k)
{
    const uint32_t least = 0x3f3504f3u; /* sqrt(0.5) */
    uint32_t i = iz_float_bits(k) - least + (1u << 23);
    float e = (float)(int32_t)(32u - (i >> 23));
    float f = iz_float_of_bits((i & 0x7fffffu) + least) - 1.0f, g = f * f;
    float high =
        (f * 0.20213768f - 0.32445152f) * g + (f * 0.34501663f - 0.39800332f);
    float low =
        (f * 0.49939818f - 0.66670118f) * g + (f * 1.0000073f - 1.99999989f);
    return e * 1.38629436f + f * (high * (g * g) + low);
}

/* sin(pi / 2 x) and cos(pi / 2 x) for |x| <= 1 and q = x^2. */
static inline float sin_quarters(float x, float q)
{
    float high = (q * 1.51485131e-4f - 4.67376661e-3f) * (q * q);
    return x * 1.57079633f +
           x * q * (high + (q * 7.96896789e-2f - 0.645963711f));
}

static inline float cos_quarters(float q)
{
    float high = (q * 8.59690047e-4f - 2.08139666e-2f) * (q * q);
    return 1.0f + q * (high + (q * 0.253653209f - 1.23369888f));
}

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
               "normal() takes a hash as its lower and its upper half");

/* Each hash is two words of 32 bits.  Pair i is elements i and PAIRS + i: word
 * i has the radius in its upper 31 bits and which half of the circle in the
 * last one; word PAIRS + i the angle in it, from -1 to 1 quarters of a turn. */
static void normal(float *restrict out, uint64_t key, uint64_t block, float std)
{
    enum { PAIRS = IZ_NORMAL_BLOCK / 2 };
    union {
        uint64_t hash[PAIRS];
        uint32_t word[2 * PAIRS];
    } h;
    for (int i = 0; i < PAIRS; i++)
        h.hash[i] = iz_mix(key + (block * PAIRS + (uint64_t)i) * IZ_GOLDEN);
    for (int i = 0; i < PAIRS; i++) {
        uint32_t w = h.word[i];
        float r = sqrtf(minus_2_log((float)(int32_t)(w >> 1) + 0.5f)) * std;
        float x = (float)(int32_t)h.word[PAIRS + i] * 0x1p-31f, q = x * x;
        r = iz_float_of_bits(iz_float_bits(r) ^ (w << 31));
        out[i] = r * cos_quarters(q);
        out[PAIRS + i] = r * sin_quarters(x, q);
    }
}

/* ---- updates: see adam.h, lion.h, muon.h ---- */

static inline void moments(const struct iz_adam_consts *c, bool l2, int64_t n,
                           const float *restrict p, float *restrict m,
                           float *restrict v, const float *restrict g)
{
    const struct iz_adam_consts k = *c;
    for (int64_t i = 0; i < n; i++) {
        float gi = iz_adam_gradient(&k, l2, g[i], p[i]);
        m[i] = iz_adam_m(&k, m[i], gi);
        v[i] = iz_adam_v(&k, v[i], gi);
    }
}

static inline void adam_step(const struct iz_adam_consts *c, int64_t n,
                             float *restrict p, const float *restrict m,
                             const float *restrict v)
{
    const struct iz_adam_consts k = *c;
    for (int64_t i = 0; i < n; i++)
        p[i] = iz_adam_p(&k, p[i], m[i], v[i]);
}

/* So that all streams are read and written at the same time. */
enum { TILE = 128 };

/* The step of a tile and the moments of the next one, whose gradient is g.
 * Neither waits for the other: a root, a quotient and what follows take some
 * 60 cycles, and a processor that has nothing else to do in them is soon full
 * of what waits. */
static inline void step_and_moments(const struct iz_adam_consts *c, bool l2,
                                    float *restrict p, float *restrict m,
                                    float *restrict v, const float *restrict g)
{
    const struct iz_adam_consts k = *c;
    const float *next_p = p + TILE;
    float *restrict next_m = m + TILE, *restrict next_v = v + TILE;
    for (int i = 0; i < TILE; i++) {
        float gi = iz_adam_gradient(&k, l2, g[i], next_p[i]);
        next_m[i] = iz_adam_m(&k, next_m[i], gi);
        next_v[i] = iz_adam_v(&k, next_v[i], gi);
        p[i] = iz_adam_p(&k, p[i], m[i], v[i]);
    }
}

/* Elements of an update whose arrays are in no cache when it is done.  A copy
 * in bf16 then goes past the caches: they would read it first. */
enum { MANY = 1 << 18 };

/* n <= TILE gradients from i on in fp32, if need be in buf [TILE]. */
static inline const float *gradients(const struct iz_streams *s, float *buf,
                                     int64_t i, int64_t n)
{
    if (s->g_type == IZ_F32)
        return (const float *)s->g + i;
    if (s->g_type == IZ_BF16)
        load_bf16(buf, (const uint16_t *)s->g + i, n);
    else
        load_f16(buf, (const uint16_t *)s->g + i, n);
    return buf;
}

static inline void copy_out(const struct iz_streams *s, int64_t i, int64_t n)
{
    if (!s->out)
        return;
    if (s->out_type == IZ_F32)
        memcpy((float *)s->out + i, s->p + i, (size_t)n * sizeof(float));
    else if (s->out_type == IZ_BF16 && s->many)
        stream_upper((uint16_t *)s->out + i, s->p + i, n);
    else if (s->out_type == IZ_BF16)
        round_upper((uint16_t *)s->out + i, s->p + i, n);
    else
        round_f16((uint16_t *)s->out + i, s->p + i, n);
}

static inline int64_t tile(int64_t left)
{
    return left < TILE ? left : TILE;
}

static inline void adam_in_tiles(const struct iz_adam_consts *c, bool l2,
                                 const struct iz_streams *s, int64_t n)
{
    float *p = s->p, *m = s->state[0], *v = s->state[1];
    float buf[TILE];
    int64_t len = tile(n), next;
    moments(c, l2, len, p, m, v, gradients(s, buf, 0, len));
    for (int64_t i = 0; i < n; i += len, len = next) {
        int64_t j = i + len;
        next = tile(n - j);
        if (next == TILE) {
            step_and_moments(c, l2, p + i, m + i, v + i,
                             gradients(s, buf, j, TILE));
        } else {
            adam_step(c, len, p + i, m + i, v + i);
            moments(c, l2, next, p + j, m + j, v + j,
                    gradients(s, buf, j, next));
        }
        copy_out(s, i, len);
    }
}

static void adam_streams(const struct iz_adam_consts *k,
                         const struct iz_streams *streams, int64_t n)
{
    struct iz_streams s = *streams;
    s.many = n >= MANY;
    if (k->l2 == 0)
        adam_in_tiles(k, false, &s, n);
    else
        adam_in_tiles(k, true, &s, n);
    stream_end();
}

static void loops_adam(const union iz_consts *k,
                       const struct iz_streams *streams, int64_t n)
{
    adam_streams(&k->adam, streams, n);
}

/* Optimizers whose elements wait for nothing: a is p, and b m or d. */
typedef void tile_loop(const union iz_consts *c, int64_t n, float *restrict a,
                       float *restrict b, const float *restrict g);

IZ_INLINE void in_tiles(const union iz_consts *k,
                        const struct iz_streams *streams, int64_t n,
                        tile_loop *loop, float *a, float *b, bool writes)
{
    const struct iz_streams s = *streams;
    float buf[TILE];
    for (int64_t i = 0, len; i < n; i += len) {
        len = tile(n - i);
        loop(k, len, a + i, b ? b + i : NULL, gradients(&s, buf, i, len));
        if (writes)
            copy_out(&s, i, len);
    }
}

static inline void lion_tile(const union iz_consts *c, int64_t n,
                             float *restrict p, float *restrict m,
                             const float *restrict g)
{
    const struct iz_lion_consts k = c->lion;
    for (int64_t i = 0; i < n; i++) {
        float gi = g[i] * k.scale;
        p[i] = iz_lion_p(&k, p[i], m[i], gi);
        m[i] = iz_lion_m(&k, m[i], gi);
    }
}

static void lion(const union iz_consts *k, const struct iz_streams *s,
                 int64_t n)
{
    in_tiles(k, s, n, lion_tile, s->p, s->state[0], true);
}

static inline void muon_tile(const union iz_consts *c, int64_t n,
                             float *restrict m, float *restrict d,
                             const float *restrict g)
{
    const struct iz_muon_consts k = c->muon;
    for (int64_t i = 0; i < n; i++) {
        float gi = g[i] * k.adam.scale;
        m[i] = iz_muon_m(&k, m[i], gi);
        d[i] = iz_muon_d(&k, m[i], gi);
    }
}

/* The parameters of matrices stay as they are. */
static void muon(const union iz_consts *k, const struct iz_streams *s,
                 int64_t n)
{
    if (k->muon.matrix)
        in_tiles(k, s, n, muon_tile, s->state[0], s->d, false);
    else
        adam_streams(&k->muon.adam, s, n);
}

static inline void along_tile(const union iz_consts *c, int64_t n,
                              float *restrict p, float *restrict none,
                              const float *restrict o)
{
    const struct iz_along_consts k = c->along;
    for (int64_t i = 0; i < n; i++)
        p[i] = iz_along_p(&k, p[i], o[i]);
}

static void along(const union iz_consts *k, const struct iz_streams *s,
                  int64_t n)
{
    in_tiles(k, s, n, along_tile, s->p, NULL, true);
}

#include "codelets/flat/moment_loops.h"

/* ---- weights in 4 bits: see nf4.h ---- */

static const float nf4_value[16] = {
    -1.0f,         -0.696192801f, -0.525073051f,  -0.394917488f,
    -0.284441382f, -0.184773430f, -0.0910500363f, 0.0f,
    0.0795802996f, 0.160930201f,  0.246112302f,   0.337915242f,
    0.440709829f,  0.562617004f,  0.722956836f,   1.0f};

/* A code is the number of limits below x: the middle between two values, which
 * itself has the lower code. */
static inline uint32_t nf4_code(float x)
{
    uint32_t c = 0;
    for (int i = 0; i < 15; i++)
        c += x > (nf4_value[i] + nf4_value[i + 1]) / 2;
    return c;
}

static void store_4(uint8_t *restrict y, float *restrict scale,
                    const float *restrict x, int64_t n)
{
    for (int64_t b = 0; b < n; b += IZ_QUANT_BLOCK) {
        uint8_t code[IZ_QUANT_BLOCK];
        float most = 0;
        for (int i = 0; i < IZ_QUANT_BLOCK; i++)
            most = fabsf(x[b + i]) > most ? fabsf(x[b + i]) : most;
        float inverse = 1.0f / (most > 1e-38f ? most : 1e-38f);
        for (int i = 0; i < IZ_QUANT_BLOCK; i++)
            code[i] = (uint8_t)nf4_code(x[b + i] * inverse);
        for (int i = 0; i < IZ_QUANT_BLOCK / 2; i++)
            y[b / 2 + i] = (uint8_t)(code[2 * i] << 4 | code[2 * i + 1]);
        scale[b / IZ_QUANT_BLOCK] = most;
    }
}

static void load_4(float *restrict y, const uint8_t *restrict x,
                   const float *restrict scale, int64_t n)
{
    float pair[256][2], values[IZ_QUANT_BLOCK];
    for (int c = 0; c < 256; c++) {
        pair[c][0] = nf4_value[c >> 4];
        pair[c][1] = nf4_value[c & 15];
    }
    for (int64_t b = 0; b < n; b += IZ_QUANT_BLOCK) {
        float s = scale[b / IZ_QUANT_BLOCK];
        for (int i = 0; i < IZ_QUANT_BLOCK / 2; i++)
            memcpy(values + 2 * i, pair[x[b / 2 + i]], sizeof(pair[0]));
        for (int i = 0; i < IZ_QUANT_BLOCK; i++)
            y[b + i] = values[i] * s;
    }
}

/* A block has 16 different weights at most: these are rounded, and then copied.
 */
static void load_4_to_16(uint16_t *restrict y, enum iz_dtype type,
                         const uint8_t *restrict x, const float *restrict scale,
                         int64_t n)
{
    enum { BLOCKS = 16 }; /* at a time */
    float value[16 * BLOCKS];
    uint16_t table[16 * BLOCKS];
    uint8_t lower[16 * BLOCKS], upper[16 * BLOCKS];
    for (int64_t b = 0, k; b < n / IZ_QUANT_BLOCK; b += k) {
        k = n / IZ_QUANT_BLOCK - b < BLOCKS ? n / IZ_QUANT_BLOCK - b : BLOCKS;
        for (int64_t i = 0; i < k; i++) {
            IZ_APART
            for (int c = 0; c < 16; c++)
                value[16 * i + c] = nf4_value[c] * scale[b + i];
        }
        if (type == IZ_BF16)
            round_bf16(table, value, 16 * k);
        else
            round_f16(table, value, 16 * k);
        for (int64_t i = 0; i < 16 * k; i++) {
            lower[i] = (uint8_t)table[i];
            upper[i] = (uint8_t)(table[i] >> 8);
        }
        for (int64_t i = 0; i < k; i++)
            look_up(y + (b + i) * IZ_QUANT_BLOCK,
                    x + (b + i) * IZ_QUANT_BLOCK / 2, lower + 16 * i,
                    upper + 16 * i);
    }
}

const struct iz_simd IZ_SIMD_TABLE = {
    .load_bf16 = load_bf16,
    .load_f16 = load_f16,
    .round_bf16 = round_bf16,
    .round_f16 = round_f16,
    .round_upper = round_upper,
    .keep_lower = keep_lower,
    .join = join,
    .add = loops_add,
    .add_bf16 = add_bf16,
    .set_pair = set_pair,
    .add_pair = add_pair,
    .squares = squares,
    .hash = hash,
    .normal = normal,
    .update =
        {
            [IZ_OPTIMIZER_ADAM] = loops_adam,
            [IZ_OPTIMIZER_ADAMW] = loops_adam,
            [IZ_OPTIMIZER_LION] = lion,
            [IZ_OPTIMIZER_MUON] = muon,
            [IZ_OPTIMIZER_DIRECTION] = muon,
            [IZ_OPTIMIZER_ALONG] = along,
        },
    .adam_coded = adam_coded,
    .store_16 = store_16,
    .load_8 = load_8,
    .store_8 = store_8,
    .store_4 = store_4,
    .load_4 = load_4,
    .load_4_to_16 = load_4_to_16,
};
