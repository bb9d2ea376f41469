/* SPDX-License-Identifier: Apache-2.0 */
/* Touched rows on their ways; see rows_move.h. */
#include "runtime/step/rows_move.h"

#include "runtime/engine/buffers.h"
#include "runtime/step/rows_list.h"
#include "runtime/step/zero.h"

struct rows_arg {
    struct iz_touched_in in;
    struct iz_coll *coll;
    int64_t elem_bytes;
    _Atomic int64_t *fetched; /* counts the bytes; NULL: nobody does */
    const char *unit;
};

static struct rows_arg rows_arg(struct iz_engine *e, int group,
                                int64_t elem_bytes)
{
    return (struct rows_arg){.in = iz_touched_in(e, group),
                             .coll = e->coll,
                             .elem_bytes = elem_bytes,
                             .unit = iz_unit_name(e, group)};
}

/* Of all touched rows in `packed` this rank's part is there; the others'. */
static void rows_move_gather(const struct rows_arg *a,
                             const struct iz_touched *r, void *packed)
{
    iz_touched_parts(&a->in, r, a->coll, a->elem_bytes);
    iz_coll_all_gather_parts(a->coll, packed, a->unit);
}

/* This rank's part of the rows, from its shard at `from` into its place. */
static void pack_own(const struct rows_arg *a, const struct iz_touched *r,
                     void *packed, const void *from)
{
    int64_t begin = a->in.shard * a->in.rank;
    iz_touched_pack(r, begin, begin + a->in.shard, a->elem_bytes, packed, from);
}

static void rows_move_count(const struct rows_arg *a,
                            const struct iz_touched *r)
{
    if (a->fetched)
        *a->fetched += iz_touched_elems(r) * a->elem_bytes;
}

/* buf: list, shard, slot. */
static void run_fetch(struct iz_exec *x, void **buf, const void *arg)
{
    const struct rows_arg *a = arg;
    struct iz_touched r = iz_touched_get(&a->in, buf[0]);
    pack_own(a, &r, buf[2], buf[1]);
    if (a->in.ranks > 1)
        rows_move_gather(a, &r, buf[2]);
    rows_move_count(a, &r);
}

/* buf: list, whole accumulator of touched rows. */
static void run_gather(struct iz_exec *x, void **buf, const void *arg)
{
    const struct rows_arg *a = arg;
    struct iz_touched r = iz_touched_get(&a->in, buf[0]);
    rows_move_gather(a, &r, buf[1]);
}

/* buf: list, parameters that are whole on every rank, room for touched rows. */
static void run_publish(struct iz_exec *x, void **buf, const void *arg)
{
    const struct rows_arg *a = arg;
    struct iz_touched r = iz_touched_get(&a->in, buf[0]);
    int64_t own = a->in.shard * a->in.rank, end = own + a->in.shard;
    char *param = buf[1];
    pack_own(a, &r, buf[2], param + own * a->elem_bytes);
    rows_move_gather(a, &r, buf[2]);
    iz_touched_unpack(&r, 0, own, a->elem_bytes, param, buf[2]);
    iz_touched_unpack(&r, end, a->in.shard * a->in.ranks, a->elem_bytes,
                      param + end * a->elem_bytes, buf[2]);
    rows_move_count(a, &r);
}

/* What the network moves at most, or a copy reads and writes. */
static void rows_move_submit(struct iz_engine *e, int group, struct iz_task t,
                             const struct rows_arg *a)
{
    const struct iz_plan_group *g = e->group[group].plan;
    int ranks = e->plan.ranks;
    t.where = IZ_ON_COMM;
    t.arg = a;
    t.arg_bytes = sizeof(*a);
    t.bytes = (double)(g->packed * a->elem_bytes) *
              (ranks > 1 ? (double)(ranks - 1) / ranks : 2);
    t.gathers = ranks > 1;
    t.unit = group;
    t.step = (int)e->step;
    iz_submit(e->graph, &t);
}

void iz_touched_fetch(struct iz_engine *e, int group,
                      starpu_data_handle_t shard, starpu_data_handle_t slot)
{
    struct rows_arg a = rows_arg(e, group, iz_dtype_bytes(e->plan.param_type));
    a.fetched = &e->counts.fetched_bytes;
    rows_move_submit(
        e, group,
        (struct iz_task){.kind = IZ_FETCH,
                         .run = run_fetch,
                         .data = {{iz_touched_list(e, group), STARPU_R},
                                  {shard, STARPU_R},
                                  {slot, STARPU_W}}},
        &a);
}

void iz_touched_gather(struct iz_engine *e, enum iz_kind kind, int group,
                       starpu_data_handle_t whole, int64_t elem_bytes)
{
    struct rows_arg a = rows_arg(e, group, elem_bytes);
    rows_move_submit(
        e, group,
        (struct iz_task){.kind = kind,
                         .run = run_gather,
                         .data = {{iz_touched_list(e, group), STARPU_R},
                                  {whole, STARPU_RW}}},
        &a);
}

/* Through a buffer for the unit's gradient, which has been read by now. */
void iz_touched_publish(struct iz_engine *e, int group)
{
    struct rows_arg a = rows_arg(e, group, iz_dtype_bytes(e->plan.param_type));
    a.fetched = &e->counts.fetched_bytes;
    rows_move_submit(
        e, group,
        (struct iz_task){.kind = IZ_FETCH,
                         .run = run_publish,
                         .data = {{iz_touched_list(e, group), STARPU_R},
                                  {e->group[group].param_handle, STARPU_RW},
                                  {iz_next_grad(e, group), STARPU_W}}},
        &a);
}
