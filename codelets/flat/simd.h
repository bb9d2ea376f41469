/* SPDX-License-Identifier: Apache-2.0 */
/* The loops whose bits are part of the contract, compiled once per SIMD level
 * (loops.c) and chosen by the processor when the first of them is needed.  All
 * levels give the same bits: every operation is rounded by itself, none is
 * fused, and the order of a sum is written down in flat.h. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "codelets/flat/consts.h"
#include "codelets/flat/dtype.h"
#include "codelets/flat/flat.h"
#include "codelets/flat/optimizer.h"

/* The arrays of an update; out may be NULL.  States are in fp32, or for
 * adam_coded in whole blocks of moment.h, rounded by (key, first). */
struct iz_streams {
    float *p, *state[IZ_STATES_MAX];
    float *d; /* Muon's, of matrices */
    const void *g;
    enum iz_dtype g_type;
    void *out;
    enum iz_dtype out_type;
    uint16_t *lower; /* adam_coded: of the master, whose rest is out; or NULL */
    uint8_t *code[IZ_STATES_MAX], *power[IZ_STATES_MAX]; /* bf16: no powers */
    uint64_t key;
    int64_t first;
    bool many; /* set by the loops */
};

/* Buffers do not overlap, but for y = a or y = b in add. */
struct iz_simd {
    void (*load_bf16)(float *y, const uint16_t *x, int64_t n);
    void (*load_f16)(float *y, const uint16_t *x, int64_t n);
    void (*round_bf16)(uint16_t *y, const float *x, int64_t n);
    void (*round_f16)(uint16_t *y, const float *x, int64_t n);
    /* The halves of half.h. */
    void (*round_upper)(uint16_t *y, const float *x, int64_t n);
    void (*keep_lower)(uint16_t *y, const float *x, int64_t n);
    void (*join)(float *y, const uint16_t *upper, const uint16_t *lower,
                 int64_t n);
    void (*add)(float *y, const float *a, const float *b, int64_t n);
    void (*add_bf16)(float *y, const uint16_t *x, int64_t n);
    /* y = a + b, and y = y + (a + b), of bf16. */
    void (*set_pair)(float *y, const uint16_t *a, const uint16_t *b, int64_t n);
    void (*add_pair)(float *y, const uint16_t *a, const uint16_t *b, int64_t n);
    /* At most a block of the norm. */
    double (*squares)(const float *x, int64_t n);
    uint64_t (*hash)(uint64_t first, const float *x, int64_t n);
    /* out [IZ_NORMAL_BLOCK]: the elements from block * IZ_NORMAL_BLOCK on. */
    void (*normal)(float *out, uint64_t key, uint64_t block, float std);
    /* n elements by the formula of an optimizer. */
    void (*update[IZ_UPDATES])(const union iz_consts *k,
                               const struct iz_streams *s, int64_t n);
    /* Adam without L2 decay, on whole blocks of states in fewer bytes. */
    void (*adam_coded)(const struct iz_adam_consts *k,
                       const struct iz_streams *s, int64_t n);
    /* The arrays of moment.h: bf16; codes and powers of two; of v or of m. */
    void (*store_16)(uint16_t *y, const float *x, int64_t n, uint64_t key,
                     int64_t first, bool v);
    void (*load_8)(float *y, const uint8_t *x, const uint8_t *power, int64_t n,
                   bool v);
    void (*store_8)(uint8_t *y, uint8_t *power, const float *x, int64_t n,
                    uint64_t key, int64_t first, bool v);
    /* Whole blocks of nf4.h: codes, and scales in fp32. */
    void (*store_4)(uint8_t *y, float *scale, const float *x, int64_t n);
    void (*load_4)(float *y, const uint8_t *x, const float *scale, int64_t n);
    void (*load_4_to_16)(uint16_t *y, enum iz_dtype type, const uint8_t *x,
                         const float *scale, int64_t n);
};

enum { IZ_NORMAL_BLOCK = 256 }; /* normal numbers generated at a time */

static inline void iz_simd_fold(double *lane, int half)
{
    for (int j = 0; j < half; j++)
        lane[j] += lane[j + half];
}

/* The sum of the lanes of a block.  Calls with constants, which a compiler
 * turns into a few vector additions. */
static inline double iz_simd_sum(double *lane)
{
    iz_simd_fold(lane, 16);
    iz_simd_fold(lane, 8);
    iz_simd_fold(lane, 4);
    iz_simd_fold(lane, 2);
    iz_simd_fold(lane, 1);
    return lane[0];
}

/* What this build has for its kind of processor, best first; the last runs on
 * all.  The list ends with a NULL name. */
struct iz_simd_level {
    const char *name;
    const struct iz_simd *loops;
    const struct iz_attention_loops *fused; /* attention.h */
    bool (*runs)(void); /* on this processor; NULL: on all */
};

extern const struct iz_simd_level iz_simd_levels[];

/* The loops of the level that IZ_SIMD names, or of the best one.  iz_die if
 * this processor or this build does not have it. */
const struct iz_simd *iz_simd(void);
const struct iz_attention_loops *iz_attention_loops(void);
const char *iz_simd_name(void);

/* For tests: uses this level from now on.  false: the processor lacks it. */
bool iz_simd_use(const struct iz_simd_level *l);
