/* SPDX-License-Identifier: Apache-2.0 */
/* Registration of memory with StarPU; see alloc.h. */
#include "runtime/engine/alloc.h"

#include <stdlib.h>

#include "codelets/base/die.h"

const struct iz_datum_info iz_datum_infos[IZ_DATA] = {
    [IZ_DATUM_PARAM] = {"param", IZ_MEM_PARAM},
    [IZ_DATUM_FROZEN] = {"param frozen", IZ_MEM_PARAM},
    [IZ_DATUM_QUANT] = {"param quant", IZ_MEM_PARAM},
    [IZ_DATUM_COPY] = {"param copy", IZ_MEM_COPY},
    [IZ_DATUM_GRAD] = {"grad", IZ_MEM_GRAD},
    [IZ_DATUM_STATE] = {"state", IZ_MEM_STATE},
    [IZ_DATUM_GATHERED] = {"gathered", IZ_MEM_RING},
    [IZ_DATUM_UNIT_GRAD] = {"unit grad", IZ_MEM_GRAD_RING},
    [IZ_DATUM_OWN_SUM] = {"own sum", IZ_MEM_GRAD},
    [IZ_DATUM_RING_SUM] = {"ring sum", IZ_MEM_GRAD_RING},
    [IZ_DATUM_BOUNDARY] = {"boundary", IZ_MEM_BOUNDARY},
    [IZ_DATUM_REFERENCE] = {"reference", IZ_MEM_BOUNDARY},
    [IZ_DATUM_RAISED] = {"raised", IZ_MEM_BOUNDARY},
    [IZ_DATUM_SAVED] = {"saved", IZ_MEM_SAVED},
    [IZ_DATUM_DY] = {"dy", IZ_MEM_BOUNDARY},
    [IZ_DATUM_BATCH] = {"batch", IZ_MEM_BATCH},
    [IZ_DATUM_STAGING] = {"staging", IZ_MEM_STAGING},
    [IZ_DATUM_SPLIT_STATE] = {"split state", IZ_MEM_STATE},
    [IZ_DATUM_SPLIT_STAGING] = {"split staging", IZ_MEM_STAGING},
    [IZ_DATUM_SPLIT_GRAD] = {"split grad", IZ_MEM_GRAD},
    [IZ_DATUM_BLOCK_SUMS] = {"block sums", IZ_MEM_BATCH},
    [IZ_DATUM_SQUARES] = {"squares", IZ_MEM_BATCH},
    [IZ_DATUM_SCALAR] = {"scalar", IZ_MEM_CLASSES},
    [IZ_DATUM_MATRIX] = {"matrices", IZ_MEM_MATRIX},
    [IZ_DATUM_MATRIX_ABOVE] = {"matrices above", IZ_MEM_MATRIX},
    [IZ_DATUM_MATRIX_PART] = {"matrix", IZ_MEM_CLASSES},
    [IZ_DATUM_QUANT_STAGING] = {"staging quant", IZ_MEM_STAGING},
    [IZ_DATUM_PIECE] = {"piece", IZ_MEM_CLASSES},
};

enum iz_tier iz_handle_datum_tier(const struct iz_plan *p, enum iz_datum d)
{
    switch (d) {
    case IZ_DATUM_PARAM:
    case IZ_DATUM_COPY:
        return iz_plan_tier(p->zero.param_home);
    case IZ_DATUM_FROZEN:
    case IZ_DATUM_QUANT:
        return iz_plan_tier(p->zero.frozen_home);
    case IZ_DATUM_STATE:
        return iz_plan_tier(p->zero.state_home);
    case IZ_DATUM_GRAD:
        return iz_plan_grad_tier(p);
    case IZ_DATUM_STAGING:
        return IZ_TIER_CPU;
    case IZ_DATUM_QUANT_STAGING:
        return p->target.gpu ? IZ_TIER_DEVICE : IZ_TIER_CPU;
    case IZ_DATUM_BOUNDARY:
        return iz_plan_tier(p->act.boundary_home);
    case IZ_DATUM_MATRIX:
    case IZ_DATUM_BATCH:
    case IZ_DATUM_BLOCK_SUMS:
    case IZ_DATUM_SQUARES:
        return p->target.gpu ? IZ_TIER_CPU : IZ_TIER_DEVICE;
    default:
        return IZ_TIER_DEVICE;
    }
}

void iz_handle_name(starpu_data_handle_t h, enum iz_datum d, int x)
{
    starpu_data_set_name(h, iz_datum_infos[d].name);
    starpu_data_set_coordinates(h, 2, x, (int)d);
}

starpu_data_handle_t iz_handle_keep(struct iz_engine *e, starpu_data_handle_t h,
                                    enum iz_datum d, int x)
{
    struct iz_handles *k = &e->handles;
    if (k->n == k->room) {
        k->room = k->room ? 2 * k->room : 256;
        k->list = realloc(k->list, (size_t)k->room * sizeof(*k->list));
        if (!k->list)
            iz_die("no memory for %d handles", k->room);
    }
    k->list[k->n++] = h;
    iz_handle_name(h, d, x);
    return h;
}

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
    return iz_handle_keep(e, h, d, x);
}

starpu_data_handle_t iz_handle_token(struct iz_engine *e, enum iz_datum d,
                                     int x)
{
    starpu_data_handle_t h;
    starpu_void_data_register(&h);
    return iz_handle_keep(e, h, d, x);
}

void *iz_handle_take(struct iz_engine *e, starpu_data_handle_t *h,
                     enum iz_datum d, int x, int64_t bytes)
{
    void *p = iz_memory_take(e->memory, iz_handle_datum_tier(&e->plan, d),
                             iz_datum_infos[d].class, bytes);
    if (p)
        *h = iz_handle_open(e, p, bytes, d, x);
    return p;
}

void iz_handles_close(struct iz_engine *e)
{
    for (int i = 0; i < e->handles.n; i++)
        starpu_data_unregister(e->handles.list[i]);
    free(e->handles.list);
}

enum iz_tier iz_handle_tier(const struct iz_engine *e)
{
    return e->plan.target.gpu ? IZ_TIER_CPU : IZ_TIER_DEVICE;
}
