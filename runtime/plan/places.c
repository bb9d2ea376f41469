/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/plan/places.h"

#include "codelets/base/int64.h"
#include "codelets/base/take.h"
#include "codelets/flat/flat.h"
#include "codelets/flat/touched_rows.h"
#include "runtime/comm/coll.h"
#include "runtime/plan/matrices.h"
#include "runtime/plan/unit_sizes.h"

const struct iz_datum_info iz_datum_infos[IZ_DATA] = {
    [IZ_DATUM_SCRATCH] = {"scratch", IZ_MEM_SCRATCH, false},
    [IZ_DATUM_BOUNCE] = {"bounce", IZ_MEM_STAGING, false},
    [IZ_DATUM_SQUARES] = {"squares", IZ_MEM_BATCH, false},
    [IZ_DATUM_LOGITS] = {"logits", IZ_MEM_BATCH, false},
    [IZ_DATUM_PARAM] = {"param", IZ_MEM_PARAM, true},
    [IZ_DATUM_FROZEN] = {"param frozen", IZ_MEM_PARAM, true},
    [IZ_DATUM_QUANT] = {"param quant", IZ_MEM_PARAM, true},
    [IZ_DATUM_SECONDARY] = {"param copy", IZ_MEM_SECONDARY, true},
    [IZ_DATUM_STATE] = {"state", IZ_MEM_STATE, true},
    [IZ_DATUM_SPLIT_STATE] = {"split state", IZ_MEM_STATE, true},
    [IZ_DATUM_GRAD] = {"grad", IZ_MEM_GRAD, true},
    [IZ_DATUM_SPLIT_GRAD] = {"split grad", IZ_MEM_GRAD, true},
    [IZ_DATUM_OWN_SUM] = {"own sum", IZ_MEM_GRAD, true},
    [IZ_DATUM_BLOCK_SUMS] = {"block sums", IZ_MEM_BATCH, true},
    [IZ_DATUM_STAGING] = {"staging", IZ_MEM_STAGING, false},
    [IZ_DATUM_SPLIT_STAGING] = {"split staging", IZ_MEM_STAGING, false},
    [IZ_DATUM_QUANT_STAGING] = {"staging quant", IZ_MEM_STAGING, false},
    [IZ_DATUM_MATRIX] = {"matrices", IZ_MEM_MATRIX, false},
    [IZ_DATUM_MATRIX_DEVICE] = {"matrices above", IZ_MEM_MATRIX, false},
    [IZ_DATUM_TOUCHED] = {"touched rows", IZ_MEM_BATCH, false},
    [IZ_DATUM_TOUCHED_SCRATCH] = {"touched scratch", IZ_MEM_BATCH, false},
    [IZ_DATUM_GATHERED] = {"gathered", IZ_MEM_RING, false},
    [IZ_DATUM_UNIT_GRAD] = {"unit grad", IZ_MEM_GRAD_RING, false},
    [IZ_DATUM_RING_SUM] = {"ring sum", IZ_MEM_GRAD_RING, false},
    [IZ_DATUM_COLL] = {"mpi", IZ_MEM_COMM, false},
    [IZ_DATUM_COLL_STAGING] = {"mpi staging", IZ_MEM_STAGING, false},
    [IZ_DATUM_COLL_EXCHANGE] = {"nccl", IZ_MEM_COMM, false},
    [IZ_DATUM_BOUNDARY_SLOT] = {"raised", IZ_MEM_BOUNDARY, false},
    [IZ_DATUM_BATCH] = {"batch", IZ_MEM_BATCH, false},
    [IZ_DATUM_DY] = {"dy", IZ_MEM_BOUNDARY, false},
    [IZ_DATUM_REFERENCE] = {"reference", IZ_MEM_BOUNDARY, false},
    [IZ_DATUM_BOUNDARY] = {"boundary", IZ_MEM_BOUNDARY, true},
    [IZ_DATUM_SAVED] = {"saved", IZ_MEM_SAVED, true},
    [IZ_DATUM_SCALAR] = {"scalar", IZ_MEM_CLASSES, false},
    [IZ_DATUM_MATRIX_PART] = {"matrix", IZ_MEM_CLASSES, false},
    [IZ_DATUM_PARAM_CHILD] = {"piece", IZ_MEM_CLASSES, false},
};

/* ---- the list ---- */

/* Counts what is put as it comes: a list and its sums are always together. */
static void append(struct iz_plan *p, struct iz_place a)
{
    struct iz_places *l = &p->places;
    int64_t *sum = &p->bytes.b[a.tier][iz_datum_infos[a.what].class];
    l->list = iz_take_more(l->list, l->n, &l->room, sizeof(*l->list),
                           "places of a plan");
    a.at = *sum;
    *sum += a.bytes;
    l->list[l->n++] = a;
}

/* What has no bytes has no place. */
static void put(struct iz_plan *p, enum iz_datum what, enum iz_tier tier,
                int of, int index, int64_t bytes)
{
    if (bytes)
        append(p, (struct iz_place){what, tier, of, index, bytes, 0});
}

static void put_each(struct iz_plan *p, enum iz_datum what, enum iz_tier tier,
                     int of, int n, int64_t bytes)
{
    for (int i = 0; i < n; i++)
        put(p, what, tier, of, i, bytes);
}

static enum iz_tier tier_of(enum iz_home h)
{
    static const enum iz_tier tiers[] = {IZ_TIER_DEVICE, IZ_TIER_CPU,
                                         IZ_TIER_NVME};
    return tiers[h];
}

/* ---- units ---- */

/* Trained and frozen parameters have one buffer unless they are apart.  Chunks
 * of a file are all as long as the first. */
static void put_params(struct iz_plan *p, const struct iz_plan_unit *g, int u)
{
    const struct iz_plan_zero *z = &p->zero;
    bool frozen_file = z->frozen.home == IZ_HOME_NVME;
    int64_t size = iz_dtype_bytes(p->param_type);
    int64_t frozen = g->frozen.shard * size;
    int64_t held = g->shard * size + (iz_plan_frozen_apart(p) ? 0 : frozen);
    if (z->param.home == IZ_HOME_NVME)
        put_each(p, IZ_DATUM_PARAM, IZ_TIER_NVME, u, g->chunks,
                 g->chunk * size);
    else
        put(p, IZ_DATUM_PARAM, tier_of(z->param.home), u, 0,
            held * (z->param.whole ? p->ranks : 1));
    if (frozen_file)
        put_each(p, IZ_DATUM_FROZEN, IZ_TIER_NVME, u, g->frozen.chunks,
                 g->frozen.chunk * size);
    else if (iz_plan_frozen_apart(p))
        put(p, IZ_DATUM_FROZEN, tier_of(z->frozen.home), u, 0, frozen);
    for (int i = 0; frozen_file && i < g->quant.words.chunks; i++)
        put(p, IZ_DATUM_QUANT, IZ_TIER_NVME, u, i,
            4 * iz_plan_quant_filed(g, i));
    if (!frozen_file)
        put(p, IZ_DATUM_QUANT, tier_of(z->frozen.home), u, 0,
            4 * (z->param.whole ? g->quant.words.padded
                                : g->quant.words.shard));
    if (z->group < p->ranks)
        put(p, IZ_DATUM_SECONDARY, tier_of(z->param.home), u, 0,
            (g->padded + g->frozen.padded) / z->group * size);
}

/* In memory the last chunk has no room for more than it has.  A state without
 * bytes has a place: its handle says who updates the chunk. */
static void put_states(struct iz_plan *p, const struct iz_plan_unit *g, int u)
{
    for (int i = 0; i < g->chunks; i++) {
        bool split = i >= g->host_chunks;
        enum iz_home home = split ? IZ_HOME_NONE : p->zero.state.home;
        int64_t n = min64(g->chunk, g->owned - i * g->chunk);
        int64_t bytes =
            home == IZ_HOME_NVME
                ? iz_plan_chunk_bytes(p, g, i)
                : iz_plan_states(p, home, n, iz_plan_chunk_lacks(p, g, i))
                      .bytes;
        append(p,
               (struct iz_place){split ? IZ_DATUM_SPLIT_STATE : IZ_DATUM_STATE,
                                 tier_of(home), u, i, bytes, 0});
    }
}

static void put_grads(struct iz_plan *p, const struct iz_plan_unit *g, int u)
{
    int64_t size = iz_dtype_bytes(p->grad_type);
    int64_t apart = iz_plan_grads_apart(p, g) * size, blocks = 0;
    bool own = !iz_plan_ring_sum(p, g);
    for (int i = 0; i <= g->split_accum; i++) {
        if (i == 0 || !p->zero.sums_on_gpu)
            put(p, IZ_DATUM_GRAD, tier_of(p->zero.grad.home), u, i,
                iz_plan_grads(p, g) * size - apart);
        put(p, IZ_DATUM_SPLIT_GRAD, IZ_TIER_DEVICE, u, i, apart);
        put(p, IZ_DATUM_OWN_SUM, IZ_TIER_DEVICE, u, i,
            own ? iz_plan_sum(p, g) * size : 0);
    }
    for (int i = 0; iz_plan_squared(p, g) && i <= g->pieces; i++)
        blocks += iz_norm2_blocks(iz_plan_piece(p, g, i));
    put(p, IZ_DATUM_BLOCK_SUMS, iz_plan_shared_tier(p), u, 0,
        blocks * (int64_t)sizeof(double));
}

/* Of the units, and of the tracks' losses, weights and what they tell. */
static int64_t sums_bytes(const struct iz_plan *p, const struct iz_model *m)
{
    int64_t aux = iz_model_has_aux(m) ? (int64_t)sizeof(struct iz_aux) : 0;
    return 8 * (int64_t)p->n_units + p->tracks * (2 * 8 + aux);
}

/* ---- what units take turns in ---- */

static void put_staging(struct iz_plan *p)
{
    for (int k = 0; k < IZ_STAGINGS; k++) {
        bool split = k == IZ_STAGING_SPLIT, quant = k == IZ_STAGING_QUANT;
        bool above = p->target.gpu && (split || quant);
        put_each(p,
                 split   ? IZ_DATUM_SPLIT_STAGING
                 : quant ? IZ_DATUM_QUANT_STAGING
                         : IZ_DATUM_STAGING,
                 above ? IZ_TIER_DEVICE : IZ_TIER_CPU, k, p->staging[k].n,
                 p->staging[k].bytes);
    }
}

static void put_rings(struct iz_plan *p)
{
    int64_t size = iz_dtype_bytes(p->param_type);
    int64_t sum = iz_dtype_bytes(p->grad_type);
    for (int i = 0; i < p->n_rings; i++) {
        const struct iz_plan_ring *r = &p->ring[i];
        put_each(p, IZ_DATUM_GATHERED, IZ_TIER_DEVICE, i, r->params,
                 r->elems * size);
        put_each(p, IZ_DATUM_UNIT_GRAD, IZ_TIER_DEVICE, i, r->grads,
                 r->grad_elems * size);
        put_each(p, IZ_DATUM_RING_SUM, IZ_TIER_DEVICE, i, r->sums,
                 r->sum_elems * sum);
    }
}

static void put_matrices(struct iz_plan *p)
{
    const struct iz_plan_matrices *a = &p->matrices;
    int64_t bytes = a->elems * (int64_t)sizeof(float);
    if (a->on_host)
        put_each(p, IZ_DATUM_MATRIX, iz_plan_shared_tier(p), 0, a->buffers,
                 bytes);
    if (a->on_device)
        put_each(p, IZ_DATUM_MATRIX_DEVICE, IZ_TIER_DEVICE, 0, a->buffers,
                 bytes);
}

/* Two lists of touched rows; keys to sort, twice, and samples to make one of.
 */
static void put_touched(struct iz_plan *p, const struct iz_model *m)
{
    enum iz_tier tier = iz_plan_shared_tier(p);
    if (!p->touched.reads)
        return;
    put_each(p, IZ_DATUM_TOUCHED, tier, 0, 2,
             iz_touched_list_bytes(p->n_units, p->touched.rows));
    put(p, IZ_DATUM_TOUCHED_SCRATCH, tier, 0, 0,
        2 * (int64_t)sizeof(uint64_t) * p->touched.reads +
            p->samples * (m->input_bytes + m->target_bytes));
}

/* Of those that compute units, then of the host's workers beside a GPU. */
static void put_scratch(struct iz_plan *p)
{
    int units = p->tasks_at_once;
    put_each(p, IZ_DATUM_SCRATCH, IZ_TIER_DEVICE, 0, units,
             p->act.scratch_bytes);
    for (int w = 0; w < p->target.workers; w++)
        put(p, IZ_DATUM_SCRATCH, IZ_TIER_CPU, 0, units + w,
            iz_plan_host_scratch(p));
}

static void put_comm(struct iz_plan *p)
{
    int64_t shard = 0;
    for (int u = 0; u < p->n_units; u++)
        shard = max64(shard, p->unit[u].shard * 4);
    if (p->ranks > 1 && !p->target.nccl)
        put(p, IZ_DATUM_COLL, iz_plan_shared_tier(p), 0, 0,
            iz_coll_scratch_bytes(p->ranks, shard));
    put(p, IZ_DATUM_COLL_STAGING, IZ_TIER_CPU, 0, 0, p->comm.staging_bytes);
    put(p, IZ_DATUM_COLL_EXCHANGE, IZ_TIER_DEVICE, 0, 0,
        p->comm.exchange_bytes);
}

/* ---- activations ---- */

/* Where those are that a unit reads and writes. */
static enum iz_tier boundary_tier(const struct iz_plan *p)
{
    return p->target.numerics.host_boundaries ? IZ_TIER_CPU : IZ_TIER_DEVICE;
}

/* The last boundary, which backward begins with, never goes elsewhere where
 * slots have what is under way. */
static void put_track(struct iz_plan *p, const struct iz_model *m, int t)
{
    int64_t room = iz_plan_boundary_room(p);
    enum iz_home home = p->act.boundary_home;
    put(p, IZ_DATUM_BATCH, iz_plan_shared_tier(p), 0, t,
        p->samples * iz_model_sample_bytes(m));
    put(p, IZ_DATUM_DY, boundary_tier(p), 0, t, room);
    for (int i = 0; i < 2 && m->preference; i++)
        put(p, IZ_DATUM_REFERENCE, IZ_TIER_DEVICE, t, i, room);
    for (int u = 0; u + 1 < m->n_units; u++) {
        if (!p->act.boundary_slots || u + 2 < m->n_units)
            put(p, IZ_DATUM_BOUNDARY, tier_of(home), u, t,
                home == IZ_HOME_NVME ? room : iz_plan_boundary_bytes(p, m, u));
        put(p, IZ_DATUM_SAVED, IZ_TIER_DEVICE, u, t,
            iz_plan_saved(p, m, u, p->unit[u].recompute));
    }
}

void iz_places_list_activations(struct iz_plan *p, const struct iz_model *m)
{
    p->places.n = p->places.fixed;
    p->bytes = p->places.fixed_bytes;
    put_each(p, IZ_DATUM_BOUNDARY_SLOT, boundary_tier(p), 0,
             p->act.boundary_slots, iz_plan_boundary_room(p));
    for (int t = 0; t < p->tracks; t++)
        put_track(p, m, t);
}

void iz_places_list(struct iz_plan *p, const struct iz_model *m)
{
    enum iz_tier shared = iz_plan_shared_tier(p);
    p->places.n = 0;
    p->bytes = (struct iz_bytes){0};
    put_scratch(p);
    if (p->target.gpu)
        put(p, IZ_DATUM_BOUNCE, IZ_TIER_CPU, 0, 0, IZ_BOUNCE_BYTES);
    put(p, IZ_DATUM_SQUARES, shared, 0, 0, sums_bytes(p, m));
    put(p, IZ_DATUM_LOGITS, shared, 0, 0, 4 * (int64_t)m->vocab);
    for (int u = 0; u < p->n_units; u++) {
        put_params(p, &p->unit[u], u);
        put_states(p, &p->unit[u], u);
        put_grads(p, &p->unit[u], u);
    }
    put_staging(p);
    put_matrices(p);
    put_touched(p, m);
    put_rings(p);
    put_comm(p);
    p->places.fixed = p->places.n;
    p->places.fixed_bytes = p->bytes;
    iz_places_list_activations(p, m);
}

/* ---- questions ---- */

const struct iz_place *iz_places_find(const struct iz_places *l,
                                      enum iz_datum what)
{
    for (int i = 0; i < l->n; i++)
        if (l->list[i].what == what)
            return &l->list[i];
    return NULL;
}
