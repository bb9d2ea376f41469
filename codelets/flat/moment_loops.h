/* SPDX-License-Identifier: Apache-2.0 */
/* The loops over states in fewer bytes, by moment_code.h: included by loops.c
 * alone. */

enum { BLOCK = IZ_MOMENT_BLOCK, WORDS = BLOCK / 4 };

typedef uint32_t __attribute__((may_alias, aligned(1))) word;

static void store_16(uint16_t *restrict y, const float *restrict x, int64_t n,
                     uint64_t key, int64_t first, bool v)
{
    for (int64_t b = 0; b < n; b += BLOCK) {
        uint32_t h = iz_moment_block_bits(key, first + b);
        for (uint32_t i = 0; i < BLOCK; i++) {
            uint32_t noise = iz_moment_noise(h * iz_moment_odd(i), 16, v);
            y[b + i] = (uint16_t)(iz_moment_bf16_random(x[b + i], noise) >> 16);
        }
    }
}

static inline uint32_t block_power(const float *x, bool v)
{
    uint32_t most = 0;
    for (int i = 0; i < BLOCK; i++) {
        uint32_t u = iz_float_bits(x[i]) & (v ? 0xffffffffu : 0x7fffffffu);
        most = u > most ? u : most;
    }
    return iz_moment_block_power(most, v ? IZ_V_BINADES : IZ_M_BINADES);
}

static void load_8(float *restrict y, const uint8_t *restrict x,
                   const uint8_t *restrict power, int64_t n, bool v)
{
    for (int64_t b = 0; b < n; b += BLOCK) {
        float unit = iz_code_unit(power[b / BLOCK]);
        const word *c = (const word *)(x + b);
        for (int w = 0; w < WORDS; w++)
            for (int j = 0; j < 4; j++)
                y[b + iz_code_place(w, j)] =
                    (v ? iz_moment_v8(c[w], j) : iz_moment_m8(c[w], j)) * unit;
    }
}

static void store_8(uint8_t *restrict y, uint8_t *restrict power,
                    const float *restrict x, int64_t n, uint64_t key,
                    int64_t first, bool v)
{
    for (int64_t b = 0; b < n; b += BLOCK) {
        uint32_t h = iz_moment_block_bits(key, first + b);
        uint32_t p = block_power(x + b, v);
        float inverse = iz_code_inverse(p);
        word *c = (word *)(y + b);
        power[b / BLOCK] = (uint8_t)p;
        for (int w = 0; w < WORDS; w++) {
            uint32_t to = 0;
            for (int j = 0; j < 4; j++) {
                int i = iz_code_place(w, j);
                uint32_t noise = iz_moment_noise(h * iz_moment_odd((uint32_t)i),
                                                 IZ_CODE_CUT, v);
                to |= iz_code_byte(
                    v ? iz_moment_v8_random(x[b + i], inverse, noise)
                      : iz_moment_m8_random(x[b + i], inverse, noise),
                    j);
            }
            c[w] = to;
        }
    }
}

/* ---- Adam on such states, in one pass ----
 *
 * Numbers of 16 bits are read and written two at a time, codes of 8 bits four
 * at a time, as words of 32 bits from which shifts make fp32: a processor would
 * need more instructions to bring them into the order of an array of fp32. */

/* The bf16 in half j of a word. */
static inline float half_of(uint32_t w, int j)
{
    return iz_float_of_bits(j ? w & 0xffff0000u : w << 16);
}

/* The upper halves of two words. */
static inline uint32_t upper_halves(uint32_t a, uint32_t b)
{
    return a >> 16 | (b & 0xffff0000u);
}

/* What an update of whole blocks needs beside the states.  The master is p, or
 * with `halves` in two arrays; the gradient is g, or bf16 without `wide`. */
struct row {
    float *restrict p;
    word *restrict upper, *restrict lower;
    const float *restrict g;
    const word *restrict g16;
};

/* Element 2w + j. */
IZ_INLINE float master_of(const struct row *r, bool halves, int w, int j)
{
    if (!halves)
        return r->p[2 * w + j];
    uint32_t low = j ? r->lower[w] : r->lower[w] << 16;
    uint32_t high = iz_float_bits(half_of(r->upper[w], j));
    return iz_float_of_bits(high + (uint32_t)((int32_t)low >> 16));
}

IZ_INLINE float gradient_of(const struct row *r, bool wide, int w, int j)
{
    return wide ? r->g[2 * w + j] : half_of(r->g16[w], j);
}

/* Elements 2w and 2w + 1. */
IZ_INLINE void keep_master(const struct row *r, bool halves, int w, float p0,
                           float p1)
{
    if (halves) {
        r->upper[w] = upper_halves(iz_moment_bf16_random(p0, 0x8000u),
                                   iz_moment_bf16_random(p1, 0x8000u));
        r->lower[w] = (iz_float_bits(p0) & 0xffffu) | iz_float_bits(p1) << 16;
    } else {
        r->p[2 * w] = p0;
        r->p[2 * w + 1] = p1;
    }
}

/* iz_moment_odd by halves of words of 16 bits. */
struct odds {
    _Alignas(64) uint32_t half[2][BLOCK / 2]; /* whole vectors */
};

static inline struct odds all_odds(void)
{
    struct odds odd;
    for (uint32_t i = 0; i < BLOCK; i++)
        odd.half[i % 2][i / 2] = iz_moment_odd(i);
    return odd;
}

/* The block at element b. */
IZ_INLINE struct row row_of(const struct iz_streams *s, float *buf, int64_t b,
                            bool halves, bool wide)
{
    return (struct row){
        .p = halves ? NULL : s->p + b,
        .upper = halves ? (word *)((uint16_t *)s->out + b) : NULL,
        .lower = halves ? (word *)(s->lower + b) : NULL,
        .g = wide ? gradients(s, buf, b, BLOCK) : NULL,
        .g16 = wide ? NULL : (const word *)((const uint16_t *)s->g + b)};
}

IZ_INLINE void adam_16(const struct iz_adam_consts *c,
                       const struct iz_streams *s, int64_t n, bool halves,
                       bool wide)
{
    const struct iz_adam_consts k = *c;
    const struct odds odd = all_odds();
    float buf[BLOCK];
    for (int64_t b = 0; b < n; b += BLOCK) {
        struct row r = row_of(s, buf, b, halves, wide);
        word *m = (word *)(s->code[0] + 2 * b);
        word *v = (word *)(s->code[1] + 2 * b);
        uint32_t h = iz_moment_block_bits(s->key, s->first + b);
        IZ_APART
        for (int w = 0; w < BLOCK / 2; w++) {
            uint32_t to_m[2], to_v[2];
            float p[2];
            for (int j = 0; j < 2; j++) {
                uint32_t x = h * odd.half[j][w];
                float g = gradient_of(&r, wide, w, j) * k.scale;
                float mj = iz_adam_m(&k, half_of(m[w], j), g);
                float vj = iz_adam_v(&k, half_of(v[w], j), g);
                p[j] = iz_adam_p(&k, master_of(&r, halves, w, j), mj, vj);
                to_m[j] =
                    iz_moment_bf16_random(mj, iz_moment_noise(x, 16, false));
                to_v[j] =
                    iz_moment_bf16_random(vj, iz_moment_noise(x, 16, true));
            }
            m[w] = upper_halves(to_m[0], to_m[1]);
            v[w] = upper_halves(to_v[0], to_v[1]);
            keep_master(&r, halves, w, p[0], p[1]);
        }
        if (!halves)
            copy_out(s, b, BLOCK);
    }
}

/* A block's new states, still in fp32, and the inverses of their units. */
struct fresh {
    _Alignas(64) float m[4][WORDS];
    _Alignas(64) float v[4][WORDS];
    float by_m, by_v;
};

/* The unit of a block goes into the factor of its old state: the product of
 * both is exact. */
IZ_INLINE void adam_block_8(const struct iz_adam_consts *c,
                            const struct iz_streams *s, int64_t b, bool halves,
                            bool wide, struct fresh *to)
{
    struct iz_adam_consts k = *c;
    float buf[BLOCK];
    struct row r = row_of(s, buf, b, halves, wide);
    const word *m = (const word *)(s->code[0] + b);
    const word *v = (const word *)(s->code[1] + b);
    uint8_t *m_power = s->power[0] + b / BLOCK;
    uint8_t *v_power = s->power[1] + b / BLOCK;
    k.beta1 *= iz_code_unit(*m_power);
    k.beta2 *= iz_code_unit(*v_power);
    IZ_APART
    for (int w = 0; w < WORDS; w++) {
        float p[4];
        for (int j = 0; j < 4; j++) {
            int at = w + j / 2 * WORDS;
            float g = gradient_of(&r, wide, at, j % 2) * k.scale;
            float mj = iz_adam_m(&k, iz_moment_m8(m[w], j), g);
            float vj = iz_adam_v(&k, iz_moment_v8(v[w], j), g);
            p[j] = iz_adam_p(&k, master_of(&r, halves, at, j % 2), mj, vj);
            to->m[j][w] = mj;
            to->v[j][w] = vj;
        }
        keep_master(&r, halves, w, p[0], p[1]);
        keep_master(&r, halves, w + WORDS, p[2], p[3]);
    }
    if (!halves)
        copy_out(s, b, BLOCK);
    *m_power = (uint8_t)block_power(to->m[0], false);
    *v_power = (uint8_t)block_power(to->v[0], true);
    to->by_m = iz_code_inverse(*m_power);
    to->by_v = iz_code_inverse(*v_power);
}

IZ_INLINE void keep_8(const struct iz_streams *s, int64_t b,
                      const struct odds *odd, const struct fresh *from)
{
    word *m = (word *)(s->code[0] + b), *v = (word *)(s->code[1] + b);
    float by_m = from->by_m, by_v = from->by_v;
    uint32_t h = iz_moment_block_bits(s->key, s->first + b);
    IZ_APART
    for (int w = 0; w < WORDS; w++) {
        uint32_t to_m = 0, to_v = 0;
        for (int j = 0; j < 4; j++) {
            uint32_t x = h * odd->half[j % 2][w + j / 2 * WORDS];
            uint32_t m_noise = iz_moment_noise(x, IZ_CODE_CUT, false);
            uint32_t v_noise = iz_moment_noise(x, IZ_CODE_CUT, true);
            to_m |= iz_code_byte(
                iz_moment_m8_random(from->m[j][w], by_m, m_noise), j);
            to_v |= iz_code_byte(
                iz_moment_v8_random(from->v[j][w], by_v, v_noise), j);
        }
        m[w] = to_m;
        v[w] = to_v;
    }
}

/* The codes of a block are made while the next one is updated: they wait for
 * its largest number. */
IZ_INLINE void adam_8(const struct iz_adam_consts *k,
                      const struct iz_streams *s, int64_t n, bool halves,
                      bool wide)
{
    const struct odds odd = all_odds();
    struct fresh fresh[2];
    adam_block_8(k, s, 0, halves, wide, &fresh[0]);
    for (int64_t b = BLOCK; b < n; b += BLOCK) {
        adam_block_8(k, s, b, halves, wide, &fresh[b / BLOCK % 2]);
        keep_8(s, b - BLOCK, &odd, &fresh[1 - b / BLOCK % 2]);
    }
    keep_8(s, n - BLOCK, &odd, &fresh[(n / BLOCK + 1) % 2]);
}

IZ_INLINE void adam_by_master(const struct iz_adam_consts *k,
                              const struct iz_streams *s, int64_t n, bool fp8,
                              bool wide)
{
    if (fp8 && s->lower)
        adam_8(k, s, n, true, wide);
    else if (fp8)
        adam_8(k, s, n, false, wide);
    else if (s->lower)
        adam_16(k, s, n, true, wide);
    else
        adam_16(k, s, n, false, wide);
}

/* n > 0. */
static void adam_coded(const struct iz_adam_consts *k,
                       const struct iz_streams *streams, int64_t n)
{
    struct iz_streams s = *streams;
    s.many = n >= MANY;
    bool wide = s.g_type != IZ_BF16;
    if (s.power[0] && wide)
        adam_by_master(k, &s, n, true, true);
    else if (s.power[0])
        adam_by_master(k, &s, n, true, false);
    else if (wide)
        adam_by_master(k, &s, n, false, true);
    else
        adam_by_master(k, &s, n, false, false);
    stream_end();
}
