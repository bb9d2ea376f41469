/* SPDX-License-Identifier: Apache-2.0 */
/* Runs a group of tests at every SIMD level that this processor has. */
#pragma once

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <cmocka.h>

#include "codelets/flat/simd.h"

/* How many failed. */
static inline int levels_run(const struct CMUnitTest *tests, size_t n)
{
    int failed = 0;

    for (const struct iz_simd_level *l = iz_simd_levels; l->name; l++) {
        if (iz_simd_use(l))
            failed += _cmocka_run_group_tests(l->name, tests, n, NULL, NULL);
        else
            printf("this processor has no %s\n", l->name);
    }
    return failed;
}
