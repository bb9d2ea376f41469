/* SPDX-License-Identifier: Apache-2.0 */
/* Dropout (Srivastava et al. 2014) by a counter: nothing is kept, a backward
 * finds the elements of its forward again.  See ops.h. */
#include "codelets/ops/ops.h"

#include <assert.h>
#include <stddef.h>

#include "codelets/base/build.h"
#include "codelets/base/mix.h"
#include "codelets/ops/gpu_ops.h"

/* y = c + a, as far as a's elements from `at` on are kept. */
IZ_SIMD static void drop_row(float *y, const float *c, const float *a,
                             int64_t n, uint64_t at, uint64_t key,
                             uint32_t least, float by)
{
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits =
            (uint32_t)(iz_mix(key + (at + (uint64_t)i) * IZ_GOLDEN) >> 32);
        float kept = bits < least ? 0 : a[i] * by;
        y[i] = c ? c[i] + kept : kept;
    }
}

void iz_dropout(struct iz_exec *x, struct iz_view y, struct iz_view c,
                struct iz_view a, const struct iz_drop *d)
{
    int64_t n = a.cols;
    assert(d->samples > 0);
    assert(y.rows == a.rows && y.cols == n && a.rows % d->samples == 0);
    iz_exec_count(
        x, 0, (double)(iz_view_bytes(y) + iz_view_bytes(c) + iz_view_bytes(a)));
    if (iz_exec_runs(x, IZ_CUDA))
        iz_dropout_cuda(x, y, c, a, d);
    if (!iz_exec_runs(x, IZ_CPU))
        return;
    uint64_t first = (uint64_t)(d->sample * (a.rows / d->samples));
    uint32_t least = (uint32_t)(d->p * 0x1p32);
    for (int64_t r = 0; r < a.rows; r++)
        drop_row((float *)y.p + r * n, c.p ? (float *)c.p + r * n : NULL,
                 (float *)a.p + r * n, n, (first + (uint64_t)r) * (uint64_t)n,
                 d->key, least, (float)(1 / (1 - d->p)));
}
