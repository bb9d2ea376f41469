/* SPDX-License-Identifier: Apache-2.0 */
/* The choice of a SIMD level; see simd.h. */
#include "codelets/flat/simd.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "codelets/base/die.h"

/* NULL until somebody asks.  Two threads that ask first find the same. */
static _Atomic(const struct iz_simd_level *) in_use;

static bool level_runs(const struct iz_simd_level *l)
{
    return !l->runs || l->runs();
}

static const struct iz_simd_level *simd_choose(void)
{
    const char *wanted = getenv("IZ_SIMD");
    const struct iz_simd_level *l = iz_simd_levels;
    while (l->name && (wanted ? strcmp(l->name, wanted) != 0 : !level_runs(l)))
        l++;
    if (!l->name)
        iz_die("IZ_SIMD=%s: no such SIMD level in this build", wanted);
    if (!level_runs(l))
        iz_die("IZ_SIMD=%s: this processor does not have it", wanted);
    return l;
}

static const struct iz_simd_level *level(void)
{
    const struct iz_simd_level *l =
        atomic_load_explicit(&in_use, memory_order_relaxed);
    if (!l) {
        l = simd_choose();
        atomic_store_explicit(&in_use, l, memory_order_relaxed);
    }
    return l;
}

const struct iz_simd *iz_simd(void)
{
    return level()->loops;
}

const struct iz_attention_loops *iz_attention_loops(void)
{
    return level()->fused;
}

const char *iz_simd_name(void)
{
    return level()->name;
}

bool iz_simd_use(const struct iz_simd_level *l)
{
    if (!level_runs(l))
        return false;
    atomic_store_explicit(&in_use, l, memory_order_relaxed);
    return true;
}
