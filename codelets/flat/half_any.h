/* SPDX-License-Identifier: Apache-2.0 */
/* Rows of 16 bits and of codes, for levels without an instruction for it:
 * included by loops.c alone. */
static inline void load_f16(float *restrict y, const uint16_t *restrict x,
                            int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        y[i] = iz_f16_load(x[i]);
}

static inline void round_f16(uint16_t *restrict y, const float *restrict x,
                             int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        y[i] = iz_f16_round(x[i]);
}

static inline void round_upper(uint16_t *restrict y, const float *restrict x,
                               int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        y[i] = iz_half_upper(x[i]);
}

/* round_upper past the caches, and the end of such stores. */
static inline void stream_upper(uint16_t *restrict y, const float *restrict x,
                                int64_t n)
{
    round_upper(y, x, n);
}

static inline void stream_end(void)
{
}

static inline void round_bf16(uint16_t *restrict y, const float *restrict x,
                              int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        y[i] = iz_bf16_round(x[i]);
}

/* y[2i] and y[2i + 1]: what the tables have for the upper and the lower half of
 * x[i], for 32 bytes; a table has the lower bytes of 16 numbers, and the upper
 * ones. */
static inline void look_up(uint16_t *restrict y, const uint8_t *restrict x,
                           const uint8_t *restrict lower,
                           const uint8_t *restrict upper)
{
    uint16_t table[16];
    for (int c = 0; c < 16; c++)
        table[c] = (uint16_t)(lower[c] | upper[c] << 8);
    for (int i = 0; i < 32; i++) {
        uint32_t two = table[x[i] >> 4] | (uint32_t)table[x[i] & 15] << 16;
        memcpy(y + 2 * i, &two, sizeof(two));
    }
}
