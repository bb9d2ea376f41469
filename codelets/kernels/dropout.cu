/* SPDX-License-Identifier: Apache-2.0 */
/* Dropout on a GPU: the same elements as in dropout.c, by the same hash of
 * their place. */
#include "codelets/kernels/launch.cuh"

#include "codelets/base/mix.h"
#include "codelets/ops/gpu_ops.h"

enum { THREADS = 256, PER_THREAD = 8 };

/* y = c + a, as far as elements of a are kept; `at`: the first one's number.
 * c NULL: absent; it may be y.  Moves two or three elements: 4 or 6 bytes with
 * 16-bit types. */
template <class T>
static __global__ void __launch_bounds__(THREADS)
    drop(T *y, const T *c, const T *a, int64_t n, uint64_t at, uint64_t key,
         uint32_t least, float by, bool aligned)
{
    iz_each<THREADS, PER_THREAD>(n, aligned, [&](int64_t i, auto count) {
        constexpr int N = decltype(count)::value;
        float v[N], sum[N] = {};
        iz_load_row(v, a + i);
        if (c)
            iz_load_row(sum, c + i);
        for (int j = 0; j < N; j++) {
            uint64_t place = at + (uint64_t)(i + j);
            uint32_t bits = (uint32_t)(iz_mix(key + place * IZ_GOLDEN) >> 32);
            sum[j] += bits < least ? 0 : v[j] * by;
        }
        iz_store_row(y + i, sum);
    });
}

void iz_dropout_cuda(struct iz_exec *x, struct iz_view y, struct iz_view c,
                     struct iz_view a, const struct iz_drop *d)
{
    int64_t n = iz_view_len(a);
    uint64_t at = (uint64_t)(d->sample * (a.rows / d->samples) * a.cols);
    uint32_t least = (uint32_t)(d->p * 0x1p32);
    float by = (float)(1 / (1 - d->p));
    iz_by_type(a.dtype, [&](auto zero) {
        using T = decltype(zero);
        bool aligned = iz_aligned(y.p, a.p) && (!c.p || iz_aligned(c.p));
        IZ_LAUNCH(drop<T>, iz_blocks(n, THREADS * PER_THREAD), THREADS, 0,
                  x->stream, (T *)y.p, (const T *)c.p, (const T *)a.p, n, at,
                  d->key, least, by, aligned);
    });
}
