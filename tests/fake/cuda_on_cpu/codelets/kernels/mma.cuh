/* SPDX-License-Identifier: Apache-2.0 */
/* codelets/kernels/mma.cuh for kernels that run on the CPU: the same movement
 * of data, lane by lane.  The lanes of a warp meet where the instruction would
 * make them meet.  A copy to shared memory arrives as late as it may: until its
 * wait, the destination holds NaN.  Blocks are one-dimensional. */
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "codelets/flat/dtype.h"
#include "codelets/flat/half.h"
#include "codelets/kernels/launch.cuh"

enum { COPIES = 256 };

/* One copy on its way; a group's end is an entry without bytes. */
struct copy {
    void *dst;
    const void *src;
    int bytes;
    bool valid;
};

static struct {
    struct copy copy[COPIES];
    int n, groups;
} on_way[1024];

template <enum iz_dtype T> static inline float half_of(uint32_t r, int i)
{
    uint16_t h = (uint16_t)(r >> 16 * i);
    return T == IZ_BF16 ? iz_bf16_load(h) : iz_f16_load(h);
}

/* The registers of lane 4g + t have of a the rows g and g + 8 and of b the
 * column g, at k = 2t, 2t + 1, 2t + 8 and 2t + 9. */
template <enum iz_dtype T>
static inline void iz_mma(float (&c)[4], const uint32_t (&a)[4],
                          const uint32_t *b)
{
    struct numbers {
        float row[2][4], col[4];
    } mine;
    int g = emu_lane() / 4, t = emu_lane() % 4;
    emu_needs(80, "mma");
    for (int i = 0; i < 4; i++) {
        mine.row[0][i] = half_of<T>(a[i / 2 * 2], i % 2);
        mine.row[1][i] = half_of<T>(a[i / 2 * 2 + 1], i % 2);
        mine.col[i] = half_of<T>(b[i / 2], i % 2);
    }
    emu_lanes<numbers> all = emu_exchange("mma", IZ_ALL_LANES, mine);
    for (int k = 0; k < 16; k++) {
        int from = k % 8 / 2, i = k / 8 * 2 + k % 2;
        const numbers &rows = all.at(4 * g + from);
        const numbers *cols[] = {&all.at(8 * t + from),
                                 &all.at(8 * t + 4 + from)};
        for (int j = 0; j < 4; j++)
            c[j] += rows.row[j / 2][i] * cols[j % 2]->col[i];
    }
}

template <enum iz_dtype T> static inline uint32_t iz_pack(float lo, float hi)
{
    emu_needs(80, "cvt to two numbers");
    if (T == IZ_BF16)
        return iz_bf16_round(lo) | (uint32_t)iz_bf16_round(hi) << 16;
    return iz_f16_round(lo) | (uint32_t)iz_f16_round(hi) << 16;
}

static inline float iz_exp2(float x)
{
    float y = exp2f(x);
    return y < 0x1p-126f ? 0 : y;
}

/* The address of row r of matrix i, as its lane gave it. */
static inline const uint16_t *row_of(emu_lanes<const uint16_t *> rows, int i,
                                     int r)
{
    const uint16_t *p = rows.at(8 * i + r);
    emu_aligned(p, 16);
    return p;
}

static inline void iz_load_matrices(uint32_t (&r)[4], const uint16_t *row)
{
    int g = emu_lane() / 4, t = emu_lane() % 4;
    emu_needs(75, "ldmatrix");
    auto rows = emu_exchange("ldmatrix", IZ_ALL_LANES, row);
    for (int i = 0; i < 4; i++)
        memcpy(&r[i], row_of(rows, i, g) + 2 * t, sizeof(r[i]));
}

static inline void iz_load_transposed(uint32_t (&r)[4], const uint16_t *row)
{
    int g = emu_lane() / 4, t = emu_lane() % 4;
    emu_needs(75, "ldmatrix");
    auto rows = emu_exchange("ldmatrix.trans", IZ_ALL_LANES, row);
    for (int i = 0; i < 4; i++)
        r[i] = row_of(rows, i, 2 * t)[g] |
               (uint32_t)row_of(rows, i, 2 * t + 1)[g] << 16;
}

static inline void iz_move16(void *dst, const void *src)
{
    emu_aligned(dst, 16);
    emu_aligned(src, 16);
    memcpy(dst, src, 16);
}

static inline void iz_put_pair(uint16_t *dst, uint32_t pair)
{
    emu_aligned(dst, 4);
    memcpy(dst, &pair, sizeof(pair));
}

static inline void put_on_way(struct copy c)
{
    auto *q = &on_way[threadIdx.x];
    if (q->n == COPIES)
        emu_fail("more than %d copies on their way", COPIES);
    q->copy[q->n++] = c;
}

template <int BYTES>
static inline void iz_copy_start(void *dst, const void *src, bool valid)
{
    static_assert(BYTES == 16 || BYTES == 4, "what the instruction can");
    emu_needs(80, "cp.async");
    emu_aligned(dst, BYTES);
    if (valid)
        emu_aligned(src, BYTES);
    memset(dst, 0xff, BYTES);
    put_on_way({dst, src, BYTES, valid});
}

static inline void iz_copy_group(void)
{
    put_on_way({});
    on_way[threadIdx.x].groups++;
}

/* Lets the oldest groups arrive. */
template <int LEFT> static inline void iz_copy_wait(void)
{
    auto *q = &on_way[threadIdx.x];
    int i = 0;
    for (; q->groups > LEFT; i++) {
        const struct copy *c = &q->copy[i];
        if (c->valid)
            memcpy(c->dst, c->src, (size_t)c->bytes);
        else if (c->bytes)
            memset(c->dst, 0, (size_t)c->bytes);
        q->groups -= !c->bytes;
    }
    q->n -= i;
    memmove(q->copy, q->copy + i, (size_t)q->n * sizeof(*q->copy));
}
