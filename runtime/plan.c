/* SPDX-License-Identifier: Apache-2.0 */
/* The memory plan; see plan.h. */
#include "runtime/plan.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "codelets/flat.h"
#include "codelets/rows.h"
#include "runtime/coll.h"
#include "runtime/nvme.h"
#include "runtime/safetensors.h"

/* Shards and chunks are multiples of this many elements: whole cache lines, and
 * whole disk pages for every element type. */
#define ALIGN_SHARD 64
#define ALIGN_CHUNK 2048
#define CHUNK_DEFAULT (1 << 20) /* enough chunks for all workers, few tasks */
#define CHUNKS_MAX 64           /* submission cost grows with the square */
#define PAGE_BYTES 4096         /* of a disk */
/* Slots of boundaries beyond one for each lane: one is copied down or up, one
 * is in reserve. */
#define SPARE_SLOTS 2

static int64_t round_up(int64_t n, int64_t to)
{
    return (n + to - 1) / to * to;
}

static int64_t min64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static int64_t max64(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* ---- groups ---- */

static int64_t chunk_elems(const struct iz_config *c, int64_t owned)
{
    int64_t chunk = min64(c->zero.sub_group_size, CHUNK_DEFAULT);
    chunk = max64(chunk, (owned + CHUNKS_MAX - 1) / CHUNKS_MAX);
    return round_up(max64(min64(chunk, owned), 1), ALIGN_CHUNK);
}

/* What a step touches of a sparse table: every sample of every rank may read
 * other rows. */
static void plan_rows(struct iz_plan *p, const struct iz_model *m, int u)
{
    const struct iz_unit *unit = &m->unit[u];
    struct iz_plan_group *g = &p->group[u];
    int64_t samples =
        (int64_t)p->samples * p->slices * p->micro_batches * p->ranks;
    if (!unit->table_reads || !unit->param[0].sparse)
        return;
    g->rows = min64(unit->param[0].rows, samples * unit->table_reads);
    g->cols = unit->param[0].cols;
    g->packed = round_up(g->rows * g->cols, ALIGN_SHARD);
    p->step_reads = samples * m->table_reads;
    p->step_rows = min64(p->step_rows + g->rows, p->step_reads);
}

static void plan_group(struct iz_plan *p, const struct iz_config *c,
                       const struct iz_model *m, int u)
{
    struct iz_plan_group *g = &p->group[u];
    struct iz_plan_frozen part[2]; /* trained, frozen */
    for (int i = 0; i < 2; i++) {
        int64_t n = iz_unit_elems(&m->unit[u], i == 1);
        int64_t shard = round_up((n + p->ranks - 1) / p->ranks, ALIGN_SHARD);
        int64_t owned = p->states_full ? shard * p->ranks : shard;
        int64_t chunk = chunk_elems(c, owned);
        part[i] = (struct iz_plan_frozen){
            n,     shard, shard * p->ranks,
            owned, chunk, (int)((owned + chunk - 1) / chunk)};
    }
    g->n = part[0].n;
    g->shard = part[0].shard;
    g->padded = part[0].padded;
    g->owned = part[0].owned;
    g->chunk = part[0].chunk;
    g->chunks = part[0].chunks;
    g->frozen = part[1];
    plan_rows(p, m, u);
    for (int v = 0; v < m->n_units; v++)
        if (m->unit[v].tied_unit == u && iz_unit_ties_trained(m, v))
            g->tied = true;
    bool many = p->micro_batches > 1;
    g->split_accum = g->tied && many;
    g->direct = c->zero.stage <= 1 && !many && p->slices == 1 && !g->tied &&
                !p->grads_down;
}

/* ---- rings ---- */

static int by_size(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

static int64_t median_padded(const struct iz_plan *p)
{
    int64_t *n = malloc((size_t)p->n_groups * sizeof(*n));
    if (!n)
        return 0;
    for (int i = 0; i < p->n_groups; i++)
        n[i] = iz_plan_gathered(&p->group[i]);
    qsort(n, (size_t)p->n_groups, sizeof(*n), by_size);
    int64_t median = n[p->n_groups / 2];
    free(n);
    return median;
}

/* Slots of the common ring: asked for directly, or as DeepSpeed's elements to
 * fetch ahead, bounded by its live parameters; two are the least that overlap.
 */
static int ring_slots(const struct iz_config *c, int64_t elems, int members)
{
    int64_t k = c->run.ring;
    if (!k) {
        k = 1 + (c->zero.prefetch_bucket_size + elems - 1) / elems;
        k = min64(k, max64(c->zero.max_live_parameters / elems, 1));
        k = max64(k, 2);
    }
    return (int)min64(k, members);
}

/* Units near the median size share ring 0; a much larger or smaller one gets a
 * slot of its own, or every slot of the ring would have the size of the
 * largest. */
static void plan_rings(struct iz_plan *p, const struct iz_config *c)
{
    int64_t median = median_padded(p);
    int members = 0, parallel = (int)min64(p->lanes, p->tasks_at_once);
    p->n_rings = 1;
    for (int u = 0; u < p->n_groups; u++) {
        struct iz_plan_group *g = &p->group[u];
        int64_t elems = iz_plan_gathered(g);
        bool common = elems * 4 <= median * 5 && elems * 4 >= median;
        g->ring = common ? 0 : p->n_rings++;
        struct iz_plan_ring *r = &p->ring[g->ring];
        r->elems = max64(r->elems, elems);
        int64_t grad = g->rows ? g->packed : g->padded;
        r->grad_elems = max64(r->grad_elems, grad);
        members += common;
        if (!common)
            *r = (struct iz_plan_ring){elems, grad, 1, parallel};
    }
    p->ring[0].params = ring_slots(c, p->ring[0].elems, members);
    p->ring[0].grads = 2 * parallel;
    for (int i = 0; i < p->n_rings; i++) {
        bool needed = false;
        for (int u = 0; u < p->n_groups; u++)
            needed |=
                p->group[u].ring == i && p->group[u].n && !p->group[u].direct;
        if (!p->fetch)
            p->ring[i].params = 0;
        if (!needed)
            p->ring[i].grads = 0;
        /* All slices of a micro-batch are held until they are added. */
        else if (p->ring[i].grads < p->slices)
            p->ring[i].grads = p->slices;
    }
}

/* ---- schedule ---- */

/* A micro-batch is cut into slices when there would be fewer tasks than
 * workers. */
static int auto_slices(const struct iz_config *c, int workers)
{
    int most = 1;
    for (int n = 1; n <= c->micro_batch && n <= IZ_SLICES_MAX; n++) {
        if (c->micro_batch % n)
            continue;
        most = n;
        if (n * c->grad_accum >= workers)
            break;
    }
    return most;
}

static void plan_schedule(struct iz_plan *p, const struct iz_config *c)
{
    p->tasks_at_once = p->target.gpu ? 1 : p->target.workers;
    p->slices =
        c->run.slices ? c->run.slices : auto_slices(c, p->tasks_at_once);
    if (p->target.gpu)
        p->slices = 1; /* more would only be smaller kernels */
    p->samples = c->micro_batch / p->slices;
    p->micro_batches = c->grad_accum;
    int wave = c->run.parallel_micro_batches;
    if (!wave)
        wave = (p->tasks_at_once + p->slices - 1) / p->slices;
    if (c->run.schedule == IZ_BREADTH_FIRST)
        wave = c->grad_accum;
    p->wave = wave < c->grad_accum ? wave : c->grad_accum;
    p->lanes = p->wave * p->slices;
}

static void plan_stage(struct iz_plan *p, const struct iz_config *c)
{
    int stage = c->zero.stage;
    bool once = c->grad_accum == 1 && p->slices == 1;
    bool gpu = p->target.gpu;
    p->params_full = stage < 3;
    p->states_full = stage < 1;
    p->param_home = c->zero.param.home;
    p->state_home = c->zero.optimizer.home;
    p->grads_down = gpu && p->state_home != IZ_HOME_NONE;
    p->params_up = p->grads_down && p->param_home == IZ_HOME_NONE;
    p->grads_full = stage < 1 || (stage == 1 && once && !p->grads_down);
    /* On a CPU the cpu tier is the memory that units are computed in: one rank
     * reads its parameters where they are. */
    enum iz_home near = gpu ? IZ_HOME_NONE : IZ_HOME_CPU;
    p->fetch = stage == 3 && (p->ranks > 1 || p->param_home > near);
    p->param_type = c->dtype;
    p->grad_type = c->grad_accum_fp32 && !once ? IZ_F32 : c->dtype;
    p->moments = c->run.state_dtype;
    p->pin_cpu =
        (p->state_home != IZ_HOME_NONE && c->zero.optimizer.pin_memory) ||
        (p->param_home != IZ_HOME_NONE && c->zero.param.pin_memory);
}

/* ---- bytes ---- */

static enum iz_tier tier_of(enum iz_home h)
{
    static const enum iz_tier tiers[] = {IZ_TIER_DEVICE, IZ_TIER_CPU,
                                         IZ_TIER_NVME};
    return tiers[h];
}

int64_t iz_plan_state_bytes(const struct iz_plan *p, enum iz_home home,
                            int64_t n)
{
    int64_t master = iz_plan_arrays(p, home) == 3 ? 4 * n : 0;

    return master + 2 * iz_moment_bytes(p->moments, n);
}

int64_t iz_plan_chunk_bytes(const struct iz_plan *p,
                            const struct iz_plan_group *g)
{
    return round_up(iz_plan_state_bytes(p, p->state_home, g->chunk),
                    PAGE_BYTES);
}

static void count_groups(struct iz_plan *p)
{
    int64_t param = iz_dtype_bytes(p->param_type);
    int64_t grad = iz_dtype_bytes(p->grad_type);
    enum iz_tier grad_tier = iz_plan_grad_tier(p);
    int64_t(*b)[IZ_MEM_CLASSES] = p->bytes.b;
    for (int u = 0; u < p->n_groups; u++) {
        const struct iz_plan_group *g = &p->group[u];
        int64_t grads = iz_plan_grads(p, g) * grad;
        int64_t host = iz_plan_host_elems(g);
        bool file = p->param_home == IZ_HOME_NVME;
        b[tier_of(p->param_home)][IZ_MEM_PARAM] +=
            (file ? iz_plan_filed(g) : iz_plan_held(p, g)) * param;
        b[grad_tier][IZ_MEM_GRAD] += grads * (g->split_accum ? 2 : 1);
        file = p->state_home == IZ_HOME_NVME;
        b[tier_of(p->state_home)][IZ_MEM_STATE] +=
            file ? g->chunks * iz_plan_chunk_bytes(p, g)
                 : iz_plan_state_bytes(p, p->state_home, host);
        b[IZ_TIER_DEVICE][IZ_MEM_STATE] +=
            iz_plan_state_bytes(p, IZ_HOME_NONE, g->owned - host);
    }
}

static void count_staging(struct iz_plan *p, const struct iz_config *c)
{
    int64_t chunk = 0, shard = 0, state = 0;
    for (int u = 0; u < p->n_groups; u++) {
        if (p->group[u].n)
            chunk = max64(chunk, p->group[u].chunk);
        state = max64(state, iz_plan_chunk_bytes(p, &p->group[u]));
        shard = max64(shard, iz_plan_filed(&p->group[u]));
    }
    int64_t param = iz_dtype_bytes(p->param_type);
    if (p->state_home == IZ_HOME_NVME)
        p->state_stage_bytes = state;
    if (p->param_home == IZ_HOME_NVME) {
        p->state_stage_bytes += chunk * param;
        p->param_stage_bytes = shard * param;
    }
    p->state_stages = p->state_stage_bytes ? c->zero.optimizer.buffer_count : 0;
    p->param_stages = p->param_stage_bytes ? c->zero.param.buffer_count : 0;
    p->bytes.b[IZ_TIER_CPU][IZ_MEM_STAGING] =
        p->state_stage_bytes * p->state_stages +
        p->param_stage_bytes * p->param_stages;
}

static void count_saves(struct iz_plan *p, const struct iz_config *c)
{
    bool disk = p->state_home == IZ_HOME_NVME || p->param_home == IZ_HOME_NVME;
    /* Parts of what a checksum covers cannot be checked, and m and v in fewer
     * bytes are read as a whole. */
    bool wait = c->run.save_mode == IZ_SAVE_SYNC ||
                (disk && c->run.nvme_checksum) ||
                (p->state_home == IZ_HOME_NVME && p->moments != IZ_MOMENT_F32);
    int64_t elems = 0;
    p->save_stages = 0;
    if (!c->run.save_interval || wait)
        return;
    for (int u = 0; u < p->n_groups; u++) {
        int64_t frozen = p->group[u].frozen.shard;
        elems = max64(elems, round_up(p->group[u].shard, ALIGN_CHUNK));
        elems = max64(elems, round_up(frozen, ALIGN_CHUNK));
    }
    p->save_stages = c->run.save_buffers;
    p->save_stage_bytes = 4 * min64(elems, IZ_BLOCK);
    p->bytes.b[IZ_TIER_CPU][IZ_MEM_STAGING] +=
        p->save_stages * p->save_stage_bytes;
}

static void count_copies(struct iz_plan *p)
{
    int64_t unit = 0, whole = 0, chunk = 0;
    int64_t size = iz_dtype_bytes(p->param_type);
    bool many = p->ranks > 1, once = p->micro_batches == 1, tied = false;
    for (int u = 0; u < p->n_groups; u++) {
        tied |= p->group[u].tied;
        unit = max64(unit, p->group[u].padded);
        whole = max64(whole, p->group[u].frozen.padded);
        if (p->group[u].n && p->group[u].host_chunks)
            chunk = max64(chunk, p->group[u].chunk);
    }
    whole = max64(whole, unit);
    if (!p->target.gpu)
        return;
    /* One contribution goes straight to its accumulator; the host's
     * collectives add to it themselves. */
    if (p->grads_down && (!once || tied) && (!many || p->target.nccl))
        p->grad_stage_bytes = many ? unit / p->ranks * 4 : unit * size;
    p->grad_stages = p->grad_stage_bytes ? 2 : 0;
    p->update_stage_bytes = p->params_up ? chunk * size : 0;
    /* Every worker of the host has one, and one is on its way up. */
    p->update_stages = p->update_stage_bytes ? p->target.workers + 1 : 0;
    if (many && p->target.nccl)
        p->exchange_bytes = unit * size;
    else if (many)
        p->comm_stage_bytes = max64(
            whole * size, unit * max64(size, iz_dtype_bytes(p->grad_type)) +
                              (p->grads_down ? 0 : unit / p->ranks * 4));
    p->bytes.b[IZ_TIER_CPU][IZ_MEM_STAGING] +=
        p->grad_stage_bytes * p->grad_stages +
        p->update_stage_bytes * p->update_stages + p->comm_stage_bytes +
        IZ_BOUNCE_BYTES;
    p->bytes.b[IZ_TIER_DEVICE][IZ_MEM_STAGING] +=
        p->split_stage_bytes * p->split_stages;
    p->bytes.b[IZ_TIER_DEVICE][IZ_MEM_COMM] += p->exchange_bytes;
}

int64_t iz_plan_boundary_bytes(const struct iz_plan *p,
                               const struct iz_model *m, int unit)
{
    return iz_dtype_bytes(p->target.act) * m->unit[unit].out_elems * p->samples;
}

/* One of each unit and a gradient, per lane.  On the host all but the last,
 * which backward begins with; the GPU then has slots for what is under way. */
static void count_boundaries(struct iz_plan *p, const struct iz_model *m)
{
    int64_t sum = 0, largest = 0, bytes = 0;
    bool slots = p->boundaries_down && p->target.gpu;
    for (int u = 0; u + 1 < m->n_units; u++) {
        bytes = iz_plan_boundary_bytes(p, m, u);
        sum += bytes;
        largest = max64(largest, bytes);
    }
    p->boundary_elems = largest / iz_dtype_bytes(p->target.act);
    p->boundary_slots =
        slots ? (int)min64(p->lanes + SPARE_SLOTS, p->lanes * (m->n_units - 1))
              : 0;
    int64_t home = p->lanes * (slots ? sum - bytes : sum);
    int64_t device = (p->lanes + p->boundary_slots) * largest;
    p->bytes.b[IZ_TIER_CPU][IZ_MEM_BOUNDARY] = p->boundaries_down ? home : 0;
    p->bytes.b[IZ_TIER_DEVICE][IZ_MEM_BOUNDARY] =
        device + (p->boundaries_down ? 0 : home);
}

static void count_activations(struct iz_plan *p, const struct iz_model *m)
{
    int64_t saved = 0;
    for (int u = 0; u < m->n_units; u++)
        if (m->unit[u].forward && u >= p->first_trained)
            saved += p->cost[u].save_bytes;
    count_boundaries(p, m);
    int64_t(*b)[IZ_MEM_CLASSES] = p->bytes.b;
    /* Kernels read samples and write losses and logits in pinned memory. */
    enum iz_tier near = p->target.gpu ? IZ_TIER_CPU : IZ_TIER_DEVICE;
    b[IZ_TIER_DEVICE][IZ_MEM_SAVED] = p->recompute ? 0 : saved * p->lanes;
    b[near][IZ_MEM_BATCH] =
        p->lanes * p->samples * (m->input_bytes + m->target_bytes) +
        4 * (int64_t)m->vocab + 8 * ((int64_t)p->n_groups + 2 * p->lanes) +
        2 * iz_plan_list_bytes(p) + iz_plan_list_scratch_bytes(p, m);
    b[IZ_TIER_DEVICE][IZ_MEM_SCRATCH] = p->scratch_bytes * p->tasks_at_once;
}

static void count_rings(struct iz_plan *p)
{
    int64_t size = iz_dtype_bytes(p->param_type);
    for (int i = 0; i < p->n_rings; i++) {
        const struct iz_plan_ring *r = &p->ring[i];
        p->bytes.b[IZ_TIER_DEVICE][IZ_MEM_RING] += r->elems * r->params * size;
        p->bytes.b[IZ_TIER_DEVICE][IZ_MEM_GRAD_RING] +=
            r->grad_elems * r->grads * size;
    }
}

static void count_bytes(struct iz_plan *p, const struct iz_config *c,
                        const struct iz_model *m)
{
    memset(&p->bytes, 0, sizeof(p->bytes));
    count_groups(p);
    count_staging(p, c);
    count_saves(p, c);
    count_copies(p);
    count_activations(p, m);
    count_rings(p);
    int64_t shard = 0;
    for (int u = 0; u < p->n_groups; u++)
        shard = max64(shard, p->group[u].shard * 4);
    struct iz_coll coll = {.size = p->ranks, .rank = p->rank};
    enum iz_tier near = p->target.gpu ? IZ_TIER_CPU : IZ_TIER_DEVICE;
    if (p->ranks > 1 && !p->target.nccl)
        p->bytes.b[near][IZ_MEM_COMM] += iz_coll_scratch_bytes(&coll, shard);
}

/* ---- costs ---- */

/* Whether what unit v costs holds for u, too. */
static bool same_cost(const struct iz_plan *p, const struct iz_model *m, int u,
                      int v)
{
    const struct iz_unit *a = &m->unit[u], *b = &m->unit[v];
    bool same = a->kind == b->kind && a->n_params == b->n_params &&
                p->group[u].rows == p->group[v].rows &&
                a->n_adapters == b->n_adapters &&
                iz_unit_ties_trained(m, u) == iz_unit_ties_trained(m, v);
    for (int i = 0; same && i < a->n_params; i++)
        same = a->param[i].frozen == b->param[i].frozen &&
               a->param[i].adapts == b->param[i].adapts;
    return same;
}

static void plan_costs(struct iz_plan *p, const struct iz_model *m)
{
    int tasks = p->micro_batches * p->slices;
    struct iz_exec like = {.backend = p->target.gpu ? IZ_CUDA : IZ_CPU,
                           .act = p->target.act,
                           .rate = p->target.compute};
    for (int u = 0; u < m->n_units; u++) {
        int same = 0;
        while (same < u && !same_cost(p, m, same, u))
            same++;
        p->cost[u] = same < u ? p->cost[same]
                              : iz_unit_cost(m, u, p->samples, p->group[u].rows,
                                             p->param_type, &like);
        /* Every kept buffer is a whole number of cache lines. */
        p->cost[u].save_bytes = round_up(p->cost[u].save_bytes, 64);
        p->save_bytes = max64(p->save_bytes, p->cost[u].save_bytes);
        p->scratch_bytes = max64(p->scratch_bytes, p->cost[u].work_bytes);
        p->step_flops +=
            tasks * (p->cost[u].forward_flops +
                     (u < p->first_trained ? 0 : p->cost[u].backward_flops));
    }
    /* Tasks on flat buffers need little: the norm's partial sums. */
    if (p->target.gpu)
        for (int u = 0; u < p->n_groups; u++)
            p->scratch_bytes =
                max64(p->scratch_bytes,
                      iz_flat_norm2_scratch_bytes(p->group[u].padded));
    p->scratch_bytes = round_up(p->scratch_bytes, 64) + p->save_bytes + 4096;
}

int iz_plan_make(struct iz_plan *p, const struct iz_config *c,
                 const struct iz_model *m, int ranks, int rank,
                 const struct iz_target *target)
{
    memset(p, 0, sizeof(*p));
    p->ranks = ranks;
    p->rank = rank;
    p->target = *target;
    p->n_groups = m->n_units;
    p->group = calloc((size_t)m->n_units, sizeof(*p->group));
    p->ring = calloc((size_t)m->n_units + 1, sizeof(*p->ring));
    p->cost = calloc((size_t)m->n_units, sizeof(*p->cost));
    if (!p->group || !p->ring || !p->cost) {
        iz_plan_clear(p);
        return -ENOMEM;
    }
    plan_schedule(p, c);
    plan_stage(p, c);
    for (int u = 0; u < m->n_units; u++)
        plan_group(p, c, m, u);
    iz_plan_split(p, c);
    while (p->first_trained + 1 < m->n_units && !p->group[p->first_trained].n)
        p->first_trained++;
    plan_costs(p, m);
    plan_rings(p, c);
    p->recompute = c->run.recompute != IZ_RECOMPUTE_NONE;
    p->boundaries_down = c->cpu_checkpointing;
    count_bytes(p, c, m);
    return 0;
}

void iz_plan_keep(struct iz_plan *p, const struct iz_model *m, bool keep)
{
    p->recompute = !keep;
    count_activations(p, m);
}

void iz_plan_clear(struct iz_plan *p)
{
    free(p->group);
    free(p->ring);
    free(p->cost);
    memset(p, 0, sizeof(*p));
}

int64_t iz_plan_host_bytes(const struct iz_plan *p)
{
    int64_t cpu = iz_bytes_tier(&p->bytes, IZ_TIER_CPU);
    return p->target.gpu ? cpu : cpu + iz_bytes_tier(&p->bytes, IZ_TIER_DEVICE);
}

int64_t iz_plan_device_bytes(const struct iz_plan *p)
{
    return p->target.gpu ? iz_bytes_tier(&p->bytes, IZ_TIER_DEVICE) : 0;
}

int64_t iz_plan_gathered(const struct iz_plan_group *g)
{
    return g->rows ? g->packed : g->padded + g->frozen.padded;
}

int64_t iz_plan_held(const struct iz_plan *p, const struct iz_plan_group *g)
{
    return p->params_full ? g->padded + g->frozen.padded
                          : g->shard + g->frozen.shard;
}

int64_t iz_plan_grads(const struct iz_plan *p, const struct iz_plan_group *g)
{
    int64_t n = p->grads_full ? g->padded : g->shard;
    return g->rows ? min64(n, g->packed) : n;
}

int64_t iz_plan_list_bytes(const struct iz_plan *p)
{
    return p->step_reads ? iz_rows_list_bytes(p->n_groups, p->step_rows) : 0;
}

/* Keys to sort, twice, and samples. */
int64_t iz_plan_list_scratch_bytes(const struct iz_plan *p,
                                   const struct iz_model *m)
{
    return p->step_reads ? 2 * (int64_t)sizeof(uint64_t) * p->step_reads +
                               p->samples * (m->input_bytes + m->target_bytes)
                         : 0;
}

int64_t iz_plan_filed(const struct iz_plan_group *g)
{
    return g->chunk * g->chunks + g->frozen.chunk * g->frozen.chunks;
}

int64_t iz_up_bytes(const struct iz_plan *p, const struct iz_plan_group *g)
{
    int64_t size = iz_dtype_bytes(p->param_type);
    if (p->ranks > 1 && !p->target.nccl)
        return iz_plan_gathered(g) * size; /* the collective's result */
    return p->param_home == IZ_HOME_NONE ? 0
                                         : (g->shard + g->frozen.shard) * size;
}

enum iz_tier iz_plan_grad_tier(const struct iz_plan *p)
{
    return p->state_home == IZ_HOME_NONE || p->grads_full ? IZ_TIER_DEVICE
                                                          : IZ_TIER_CPU;
}

int64_t iz_plan_buffers(const struct iz_plan *p)
{
    int64_t n = 16 + p->state_stages + p->param_stages + p->grad_stages +
                p->update_stages + p->split_stages + p->boundary_slots +
                p->save_stages + p->lanes * (2 * (int64_t)p->n_groups + 3);
    for (int i = 0; i < p->n_rings; i++)
        n += p->ring[i].params + p->ring[i].grads;
    for (int u = 0; u < p->n_groups; u++)
        n += 3 + p->group[u].chunks;
    return n;
}

/* Unless it is sparse, all rows of a table are gathered, reduced and updated,
 * whether a step reads them or not. */
static void print_tables(const struct iz_plan *p, const struct iz_model *m,
                         FILE *out)
{
    int64_t rows = m->table_rows, samples = p->samples * p->slices;
    int64_t read = samples * p->micro_batches * p->ranks * m->table_reads;
    bool dense = false;
    for (int u = 0; u < p->n_groups; u++)
        dense |= m->unit[u].table_reads && !p->group[u].rows;
    const char *what = !p->step_reads ? "all"
                       : dense        ? "these and whole dense tables"
                                      : "only these";
    read = min64(read, rows);
    fprintf(out,
            "      %.2fM rows of tables: a step reads at most %lld of them "
            "(%.3g %%), %s are moved and updated\n",
            (double)rows / 1e6, (long long)read,
            100 * (double)read / (double)rows, what);
}

void iz_plan_print(const struct iz_plan *p, const struct iz_model *m, FILE *out)
{
    int64_t n = 0, frozen = 0;
    for (int u = 0; u < p->n_groups; u++) {
        n += p->group[u].n;
        frozen += p->group[u].frozen.n;
    }
    fprintf(out, "plan: %s, %.2fM parameters", m->name,
            (double)(n + frozen) / 1e6);
    if (frozen)
        fprintf(out, " (%.2fM trained)", (double)n / 1e6);
    fprintf(out, " in %d units, %d rank%s, %s, activations %s%s\n", m->n_units,
            p->ranks, p->ranks > 1 ? "s" : "", iz_dtype_name(p->param_type),
            p->recompute ? "recomputed" : "kept",
            p->boundaries_down ? ", boundaries on the host" : "");
    fprintf(out,
            "      %d micro-batch%s a step, %d at a time, %d slice%s of %d "
            "sample%s; %d worker%s; ring of %d units\n",
            p->micro_batches, p->micro_batches > 1 ? "es" : "", p->wave,
            p->slices, p->slices > 1 ? "s" : "", p->samples,
            p->samples > 1 ? "s" : "", p->target.workers,
            p->target.workers > 1 ? "s" : "", p->ring[0].params);
    if (m->table_rows)
        print_tables(p, m, out);
    iz_plan_split_print(p, out);
    iz_bytes_print(&p->bytes, out);
}
