/* SPDX-License-Identifier: Apache-2.0 */
/* Memory and reproducible random numbers of the kernel tests; after cmocka.h.
 */
#pragma once

#include <stdint.h>
#include <stdlib.h>

static inline void *take(size_t bytes)
{
    void *p = malloc(bytes > 0 ? bytes : 1);

    assert_non_null(p);
    return p;
}

/* xorshift64: not the program's own generator. */
static inline uint64_t random_bits(void)
{
    static uint64_t state = 88172645463325252u;

    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state;
}

static inline float random_float(double scale)
{
    return (float)(scale * ((double)(random_bits() >> 11) * 0x1p-53 - 0.5));
}
