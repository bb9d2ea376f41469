/* SPDX-License-Identifier: Apache-2.0 */
/* Registration of memory with StarPU; see handle.h. */
#include "runtime/engine/handle.h"
#include "runtime/engine/trace.h"

uintptr_t iz_handle_address(const struct iz_engine *e, const void *p)
{
    struct iz_shadow s = iz_memory_shadow(e->memory);
    const char *c = p;
    if (c >= s.base && c < s.base + s.bytes)
        return (uintptr_t)(s.shadow + (c - s.base));
    return (uintptr_t)p;
}

starpu_data_handle_t iz_handle_open(struct iz_engine *e, void *p, int64_t bytes,
                                    enum iz_datum d, int x)
{
    starpu_data_handle_t h;
    starpu_variable_data_register(&h, STARPU_MAIN_RAM, iz_handle_address(e, p),
                                  (size_t)bytes);
    iz_trace_datum(h, d, x);
    return h;
}

void iz_handle_close(starpu_data_handle_t *h)
{
    if (*h)
        starpu_data_unregister(*h);
    *h = NULL;
}

enum iz_tier iz_handle_tier(const struct iz_engine *e)
{
    return e->plan.target.gpu ? IZ_TIER_CPU : IZ_TIER_DEVICE;
}
