/* SPDX-License-Identifier: Apache-2.0 */
/* The place of every block of attention; and one warp with one product: by the
 * formulas of the PTX ISA, "Matrix Fragments for
 * mma.m16n8k16 with floating point type", written down once more. */
#include "tests/codelets/gpu/parts.h"

#include "codelets/kernels/attention.cuh"
#include "codelets/kernels/mma.cuh"

/* c[i], i = 0 ... 3. */
static __device__ void write_result(float *c, const float (&r)[4])
{
    int group = (int)threadIdx.x / 4, in_group = (int)threadIdx.x % 4;
    for (int i = 0; i < 4; i++) {
        int row = i < 2 ? group : group + 8, col = in_group * 2 + (i & 1);
        c[row * 8 + col] = r[i];
    }
}

template <enum iz_dtype T>
static __global__ void by_formulas(float *c, const uint16_t *a,
                                   const uint16_t *b)
{
    int group = (int)threadIdx.x / 4, in_group = (int)threadIdx.x % 4;
    uint32_t ra[4] = {}, rb[2] = {};
    float r[4] = {};
    for (int i = 0; i < 8; i++) {
        int row = i < 2 || (i >= 4 && i < 6) ? group : group + 8;
        int col = in_group * 2 + (i & 1) + (i < 4 ? 0 : 8);
        ra[i / 2] |= (uint32_t)a[row * 16 + col] << 16 * (i & 1);
    }
    for (int i = 0; i < 4; i++) {
        int row = in_group * 2 + (i & 1) + (i < 2 ? 0 : 8);
        rb[i / 2] |= (uint32_t)b[row * 8 + group] << 16 * (i & 1);
    }
    iz_mma<T>(r, ra, rb);
    write_result(c, r);
}

/* The second half of a load of b repeats the first. */
template <enum iz_dtype T>
static __global__ void by_loads(float *c, const uint16_t *a, const uint16_t *b,
                                int as_rows)
{
    IZ_SHARED(uint16_t, as);
    uint16_t *bs = as + 256;
    int lane = (int)threadIdx.x;
    uint32_t ra[4], rb[4];
    float r[4] = {};

    iz_copy_start<16>(as + 8 * lane, a + 8 * lane, true);
    iz_copy_group();
    iz_copy_start<16>(bs + 8 * (lane % 16), b + 8 * (lane % 16), true);
    iz_copy_group();
    iz_copy_wait<1>();
    __syncthreads();
    iz_load_matrices(ra, as + lane % 16 * 16 + lane / 16 * 8);
    iz_copy_wait<0>();
    __syncthreads();
    if (as_rows)
        iz_load_matrices(rb, bs + lane % 8 * 16 + lane / 8 % 2 * 8);
    else
        iz_load_transposed(rb, bs + lane % 16 * 8);
    iz_mma<T>(r, ra, rb);
    write_result(c, r);
}

void mma_by_formulas(float *c, const uint16_t *a, const uint16_t *b,
                     enum iz_dtype t, void *stream)
{
    void (*k)(float *, const uint16_t *, const uint16_t *) =
        t == IZ_BF16 ? by_formulas<IZ_BF16> : by_formulas<IZ_F16>;
    IZ_LAUNCH(k, 1, 32, 0, stream, c, a, b);
}

void mma_by_loads(float *c, const uint16_t *a, const uint16_t *b, int as_rows,
                  enum iz_dtype t, void *stream)
{
    void (*k)(float *, const uint16_t *, const uint16_t *, int) =
        t == IZ_BF16 ? by_loads<IZ_BF16> : by_loads<IZ_F16>;
    IZ_LAUNCH(k, 1, 32, 1024, stream, c, a, b, as_rows);
}

static __global__ void places(int *head, int *tile, int *after,
                              struct iz_heads a)
{
    struct iz_attention_place here = iz_attention_place(a, a.group);
    head[blockIdx.x] = here.head;
    tile[blockIdx.x] = here.tile;
    after[blockIdx.x] = here.after;
}

void attention_order(int *head, int *tile, int *after, int blocks, int all,
                     int chunk, int group)
{
    struct iz_heads a = {};
    a.all = all;
    a.chunk = chunk;
    a.group = group;
    IZ_LAUNCH(places, blocks, 1, 0, NULL, head, tile, after, a);
}
