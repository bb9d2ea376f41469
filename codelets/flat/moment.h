/* SPDX-License-Identifier: Apache-2.0 */
/* An optimizer's states in fewer bytes.  They are rounded stochastically with a
 * counter-based generator: the bits depend on the key and on the position in
 * the group alone, not on chunks, ranks, stages or the SIMD level.  Without
 * that, Adam's v would stand still: an update changes it by 1 - beta2, less
 * than half a step of these types.
 *
 * fp8 shares a power of two per block of 64 elements, as block formats do
 * (OCP Microscaling; block-wise 8-bit optimizers: Dettmers et al., 2021,
 * arXiv:2110.02861).  A state with a sign, such as m: sign, 4 bits of exponent,
 * 3 of mantissa; one that is never negative, such as v: 5 and 3.  What is below
 * the smallest m is rounded stochastically to 0 or to it; a v that is not 0
 * stays at least the smallest, or an element would divide by eps.
 * A value that these types hold exactly is stored exactly.  The codes of a
 * block are in the order of iz_code_place: neighbours in a word of 32 bits are
 * neighbours in a word of two bf16, too. */
#pragma once

#include <stdint.h>

#include "codelets/base/build.h"

IZ_C_BEGIN

enum iz_moment_type { IZ_MOMENT_F32, IZ_MOMENT_BF16, IZ_MOMENT_FP8 };
enum iz_moment { IZ_MOMENT_M, IZ_MOMENT_V }; /* with a sign; without one */

enum { IZ_MOMENT_BLOCK = 64 };

/* What a checkpoint calls the rounding of today: another name with the next
 * change of its bits. */
#define IZ_MOMENT_ROUNDING "mul32"

/* An array of n elements: the codes, then in fp8 a byte per block. */
struct iz_moments {
    void *p;
    enum iz_moment_type type;
    enum iz_moment which;
    int64_t n;
};

/* The bytes of an array of n elements. */
int64_t iz_moment_bytes(enum iz_moment_type t, int64_t n);

/* out[i] = element at + i as fp32, 0 <= i < n; here and in iz_moment_store at,
 * n and first are multiples of IZ_MOMENT_BLOCK. */
void iz_moment_load(float *out, const struct iz_moments *x, int64_t at,
                    int64_t n);

/* The element at + i becomes in[i], rounded by (key, first + i). */
void iz_moment_store(const struct iz_moments *x, int64_t at, const float *in,
                     int64_t n, uint64_t key, int64_t first);

/* Load and store for any at and n; first and at are as far from the begin of a
 * block.  An array can be copied to another one of its type in any pieces. */
void iz_moment_get(float *out, const struct iz_moments *x, int64_t at,
                   int64_t n);
void iz_moment_put(const struct iz_moments *x, int64_t at, const float *in,
                   int64_t n, uint64_t key, int64_t first);

IZ_C_END
