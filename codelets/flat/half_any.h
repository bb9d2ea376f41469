/* SPDX-License-Identifier: Apache-2.0 */
/* Rows of 16 bits, for levels without an instruction for it: included by
 * loops.c alone. */
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
        y[i] = iz_upper(x[i]);
}

static inline void round_bf16(uint16_t *restrict y, const float *restrict x,
                              int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        y[i] = iz_bf16_round(x[i]);
}
