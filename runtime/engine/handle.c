/* SPDX-License-Identifier: Apache-2.0 */
/* What the engine owns: handles of StarPU, and arrays; see alloc.h. */
#include "runtime/engine/alloc.h"

#include <stdlib.h>

#include "codelets/base/take.h"

void iz_handle_name(starpu_data_handle_t h, enum iz_datum d, int x)
{
    starpu_data_set_name(h, iz_datum_infos[d].name);
    starpu_data_set_coordinates(h, 2, x, (int)d);
}

static starpu_data_handle_t
handle_keep(struct iz_engine *e, starpu_data_handle_t h, enum iz_datum d, int x)
{
    struct iz_handles *k = &e->handles;
    k->list =
        iz_take_more(k->list, k->n, &k->room, sizeof(*k->list), "handles");
    k->list[k->n++] = h;
    iz_handle_name(h, d, x);
    return h;
}

/* The address that StarPU is given: a stand-in for memory on a GPU. */
static uintptr_t shadow_address(const struct iz_engine *e, const void *p)
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
    starpu_variable_data_register(&h, STARPU_MAIN_RAM, shadow_address(e, p),
                                  (size_t)bytes);
    return handle_keep(e, h, d, x);
}

starpu_data_handle_t iz_handle_token(struct iz_engine *e, enum iz_datum d,
                                     int x)
{
    starpu_data_handle_t h;
    starpu_void_data_register(&h);
    return handle_keep(e, h, d, x);
}

void iz_handles_close(struct iz_engine *e)
{
    for (int i = 0; i < e->handles.n; i++)
        starpu_data_unregister(e->handles.list[i]);
    free(e->handles.list);
}

void *iz_engine_own(struct iz_engine *e, void *p)
{
    struct iz_taken *t = &e->taken;
    t->list = iz_take_more(t->list, t->n, &t->room, sizeof(*t->list), "arrays");
    return t->list[t->n++] = p;
}

void *iz_engine_take(struct iz_engine *e, int64_t n, size_t size)
{
    return iz_engine_own(e, iz_take(n, (int64_t)size, "what was planned"));
}
