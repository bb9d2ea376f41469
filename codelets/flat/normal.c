/* SPDX-License-Identifier: Apache-2.0 */
/* Normal random numbers from a counter, however a buffer is cut; the numbers
 * themselves come from loops.c. */
#include "codelets/flat/flat.h"

#include <string.h>

#include "codelets/base/mix.h"
#include "codelets/flat/simd.h"

void iz_flat_normal(float *out, int64_t n, uint64_t seed, uint64_t stream,
                    int64_t first, float std)
{
    uint64_t key = iz_mix(iz_mix(seed + IZ_GOLDEN) + stream);
    float buf[IZ_NORMAL_BLOCK];
    while (n > 0) {
        uint64_t block = (uint64_t)first / IZ_NORMAL_BLOCK;
        int64_t skip = first % IZ_NORMAL_BLOCK, k = IZ_NORMAL_BLOCK - skip;
        bool whole = k == IZ_NORMAL_BLOCK && k <= n;
        if (k > n)
            k = n;
        iz_simd()->normal(whole ? out : buf, key, block, std);
        if (!whole)
            memcpy(out, buf + skip, (size_t)k * sizeof(*out));
        out += k;
        first += k;
        n -= k;
    }
}
