/* SPDX-License-Identifier: Apache-2.0 */
/* What the ops of routers and of experts share. */
#pragma once

#include <assert.h>

#include "codelets/base/die.h"
#include "codelets/ops/ops.h"

/* Of those of experts; a router has p and lse, too. */
static inline void iz_routes_check(const struct iz_routes *r)
{
    int64_t m = r->place.rows, e = r->end.cols, k = r->place.cols;
    assert(e <= IZ_EXPERTS_MOST && k <= e);
    if (m * k > INT32_MAX)
        iz_die("%lld tokens with %lld experts each: a task can place %d, it "
               "needs fewer or shorter samples",
               (long long)m, (long long)k, INT32_MAX);
    assert(r->weight.rows == m && r->chosen.rows == m);
    assert(r->weight.cols == k && r->chosen.cols == k);
    assert(r->first >= 0 && r->first + iz_route_experts_here(r) <= e);
    (void)e;
}

/* Rows of n experts from i on, and in *first the first of them; `end` as in
 * struct iz_routes. */
static inline int64_t iz_routes_rows(const int32_t *end, int64_t i, int64_t n,
                                     int64_t *first)
{
    *first = i ? end[i - 1] : 0;
    return end[i + n - 1] - *first;
}
