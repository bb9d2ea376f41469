/* SPDX-License-Identifier: Apache-2.0 */
/* What the tests of flat kernels share: memory of exactly the size asked for,
 * reproducible random numbers, and runs at every SIMD level. */
#pragma once

#include <stdio.h>
#include <stdlib.h>

#include "codelets/flat/simd.h"
#include "tests/codelets/ops/fixture.h"

static inline void *take(size_t bytes)
{
    void *p = malloc(bytes > 0 ? bytes : 1);
    assert_non_null(p);
    return p;
}

/* xorshift64: not the program's own generator. */
static uint64_t random_state = 88172645463325252u;

static inline uint64_t random_bits(void)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state;
}

/* The same numbers again. */
static inline void random_again(void)
{
    random_state = 88172645463325252u;
}

static inline float random_float(double scale)
{
    return (float)(scale * ((double)(random_bits() >> 11) * 0x1p-53 - 0.5));
}

/* Of 1 to `most`, but not more than `rest`. */
static inline int64_t random_piece(int64_t most, int64_t rest)
{
    int64_t n = 1 + (int64_t)(random_bits() % (uint64_t)most);
    return n < rest ? n : rest;
}

static inline void flat_fill(void *x, enum iz_dtype t, int64_t n, double scale)
{
    for (int64_t i = 0; i < n; i++) {
        float f = random_float(scale);
        iz_cast(fixture_at(x, t, i), t, &f, IZ_F32, 1);
    }
}

/* Runs a group of n tests at every level that this processor has.  How many
 * failed.  Each group has a name of its own, since its report is a file of that
 * name. */
static inline int levels_run(const char *group, const struct CMUnitTest *tests,
                             size_t n)
{
    int failed = 0;
    for (const struct iz_simd_level *l = iz_simd_levels; l->name; l++) {
        char name[64];
        snprintf(name, sizeof(name), "%s-%s", group, l->name);
        if (!iz_simd_use(l)) {
            printf("this processor has no %s\n", l->name);
            continue;
        }
        failed += _cmocka_run_group_tests(name, tests, n, NULL, NULL);
    }
    return failed;
}
