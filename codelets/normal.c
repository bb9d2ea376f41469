/* SPDX-License-Identifier: Apache-2.0 */
/* Normal random numbers from a counter, however a buffer is cut; the numbers
 * themselves come from exact.c. */
#include "codelets/flat.h"

#include <string.h>

#include "codelets/mix.h"
#include "codelets/simd.h"

void iz_flat_normal(float *out, int64_t n, uint64_t seed, uint64_t stream,
                    int64_t first, float std)
{
    uint64_t key = iz_mix(iz_mix(seed + IZ_GOLDEN) + stream);
    float buf[2 * IZ_NORMAL_PAIRS];

    while (n > 0) {
        int64_t skip = first & 1, k = 2 * IZ_NORMAL_PAIRS - skip;

        if (k > n)
            k = n;
        iz_simd()->normal(buf, key, (uint64_t)first / 2, std);
        memcpy(out, buf + skip, (size_t)k * sizeof *out);
        out += k;
        first += k;
        n -= k;
    }
}
