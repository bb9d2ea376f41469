/* SPDX-License-Identifier: Apache-2.0 */
/* What a plan's parts take, class by class and tier by tier; see plan.h. */
#include "codelets/base/int64.h"
#include "runtime/plan/plan.h"

#include <string.h>

#include "codelets/flat/flat.h"
#include "codelets/flat/touched_rows.h"
#include "runtime/comm/coll.h"

#define PAGE_BYTES 4096 /* of a disk */
/* Slots of boundaries beyond one for each track: one is copied down or up, one
 * is in reserve. */
#define SPARE_SLOTS 2

/* Boundaries between a GPU and their file at once: two are written or read
 * while two more are copied. */
#define BOUNDARY_STAGING 4

/* Quantised units: while one is turned into weights, the next one is gathered,
 * or copied to the GPU. */
#define QUANT_STAGING 2

/* What a process has beside its plan: libraries with their buffers, StarPU,
 * MPI, the log of tasks.  The resident set of an almost empty run is 211 MiB
 * with one worker, 216 with 2, 225 with 4, 279 with 16, 351 with 32.  StarPU's
 * state of a chunk's two handles: 40 units of 12 and of 48 chunks took 28 and
 * 107 MiB more than such of one chunk. */
#define PROCESS_BYTES (INT64_C(212) << 20)
#define WORKER_BYTES (INT64_C(5) << 20)
#define CHUNK_BYTES (INT64_C(60) << 10)

/* The GPU's page tables have an entry of 8 bytes for each page of pinned
 * memory, and these are of 4 KiB unless the system has put them together: at
 * most one part in 512.  The driver keeps them on the GPU if nothing else is
 * asked for (its open modules: NV_MMU_VER3_PTE__SIZE, uvm_page_table_location).
 * The levels above them are less than a hundredth of that. */
#define TABLE_PART 512 /* so have the kernel's, of all that a process maps */

enum iz_tier iz_plan_tier(enum iz_home h)
{
    static const enum iz_tier tiers[] = {IZ_TIER_DEVICE, IZ_TIER_CPU,
                                         IZ_TIER_NVME};
    return tiers[h];
}

int64_t iz_plan_chunk_bytes(const struct iz_plan *p,
                            const struct iz_plan_unit *g, int chunk)
{
    return round_up(iz_plan_states(p, p->zero.state_home, g->chunk,
                                   iz_plan_chunk_lacks(p, g, chunk))
                        .bytes,
                    PAGE_BYTES);
}

/* In memory the last one has no room for more than it has. */
static void count_states(struct iz_plan *p, const struct iz_plan_unit *g)
{
    for (int i = 0; i < g->chunks; i++) {
        enum iz_home home =
            i < g->host_chunks ? p->zero.state_home : IZ_HOME_NONE;
        p->bytes.b[iz_plan_tier(home)][IZ_MEM_STATE] +=
            home == IZ_HOME_NVME
                ? iz_plan_chunk_bytes(p, g, i)
                : iz_plan_states(p, home,
                                 min64(g->chunk, g->owned - i * g->chunk),
                                 iz_plan_chunk_lacks(p, g, i))
                      .bytes;
    }
}

static void count_units(struct iz_plan *p)
{
    int64_t param = iz_dtype_bytes(p->param_type);
    int64_t grad = iz_dtype_bytes(p->grad_type);
    enum iz_tier grad_tier = iz_plan_grad_tier(p);
    int64_t(*b)[IZ_MEM_CLASSES] = p->bytes.b;
    for (int u = 0; u < p->n_units; u++) {
        const struct iz_plan_unit *g = &p->unit[u];
        int64_t grads = iz_plan_grads(p, g) * grad;
        int accumulators = g->split_accum ? 2 : 1;
        int below = p->zero.sums_near ? 1 : accumulators;
        bool file = p->zero.frozen_home == IZ_HOME_NVME;
        b[IZ_TIER_NVME][IZ_MEM_PARAM] += iz_plan_filed(p, g) * param;
        b[iz_plan_tier(p->zero.param_home)][IZ_MEM_PARAM] +=
            iz_plan_held(p, g) * param;
        b[iz_plan_tier(p->zero.frozen_home)][IZ_MEM_PARAM] +=
            iz_plan_held_apart(p, g) * param +
            (file ? iz_plan_quant_filed(g) : iz_plan_quant_held(p, g));
        b[iz_plan_tier(p->zero.param_home)][IZ_MEM_COPY] +=
            iz_plan_copied(p, g) * param;
        int64_t apart = iz_plan_grads_apart(p, g) * grad;
        b[grad_tier][IZ_MEM_GRAD] += (grads - apart) * below;
        b[IZ_TIER_DEVICE][IZ_MEM_GRAD] += apart * accumulators;
        b[IZ_TIER_DEVICE][IZ_MEM_GRAD] +=
            iz_plan_own_sum(p, g) * grad * accumulators;
        count_states(p, g);
    }
}

/* n buffers, if there is anything to go through them. */
static void add_staging(struct iz_plan *p, enum iz_staging_kind k, int n,
                        int64_t bytes)
{
    bool near = k == IZ_STAGING_QUANT && p->target.gpu;
    p->staging[k] = (struct iz_plan_staging){bytes ? n : 0, bytes};
    p->bytes.b[near ? IZ_TIER_DEVICE : IZ_TIER_CPU][IZ_MEM_STAGING] +=
        p->staging[k].n * bytes;
}

static void count_staging(struct iz_plan *p, const struct iz_config *c)
{
    int64_t chunk = 0, shard = 0, state = 0, quant = 0;
    int64_t size = iz_dtype_bytes(p->param_type);
    for (int u = 0; u < p->n_units; u++) {
        const struct iz_plan_unit *g = &p->unit[u];
        if (g->n)
            chunk = max64(chunk, g->chunk);
        for (int i = 0; i < g->chunks; i++)
            state = max64(state, iz_plan_chunk_bytes(p, g, i));
        shard = max64(shard, iz_plan_filed(p, g) * size +
                                 (p->zero.frozen_home == IZ_HOME_NVME
                                      ? iz_plan_quant_filed(g)
                                      : 0));
        quant = max64(quant, iz_plan_quant_whole(p, g));
    }
    bool states = p->zero.state_home == IZ_HOME_NVME;
    bool params = p->zero.param_home == IZ_HOME_NVME;
    add_staging(p, IZ_STAGING_STATE, c->zero.optimizer.buffer_count,
                (states ? state : 0) + (params ? chunk * size : 0));
    add_staging(p, IZ_STAGING_PARAM, c->zero.param.buffer_count, shard);
    bool up = p->target.gpu && p->zero.frozen_home != IZ_HOME_NONE;
    add_staging(p, IZ_STAGING_QUANT, QUANT_STAGING,
                up || (p->ranks > 1 && !p->zero.params_full) ? quant : 0);
}

static void count_saves(struct iz_plan *p, const struct iz_config *c)
{
    bool disk = p->zero.state_home == IZ_HOME_NVME ||
                p->zero.param_home == IZ_HOME_NVME ||
                p->zero.frozen_home == IZ_HOME_NVME;
    /* Parts of what a checksum covers cannot be checked, and states in fewer
     * bytes are read as a whole, or are widened on the host. */
    bool far = p->zero.state_home == IZ_HOME_NVME || p->zero.split ||
               (p->target.gpu && p->zero.state_home == IZ_HOME_NONE);
    bool wait = c->run.save_mode == IZ_SAVE_SYNC ||
                (disk && c->run.nvme_checksum) ||
                (far && p->optimizer.moments != IZ_MOMENT_F32) ||
                p->optimizer.remainder;
    int64_t elems = 0;
    p->staging[IZ_STAGING_SAVE].n = 0;
    if (!c->run.save_interval || wait)
        return;
    for (int u = 0; u < p->n_units; u++) {
        int64_t frozen = p->unit[u].frozen.shard;
        elems = max64(elems, round_up(p->unit[u].shard, IZ_CHUNK_ALIGN));
        elems = max64(elems, round_up(frozen, IZ_CHUNK_ALIGN));
        elems = max64(elems, iz_plan_quant_filed(&p->unit[u]) / 4);
    }
    add_staging(p, IZ_STAGING_SAVE, c->run.save_buffers,
                4 * min64(elems, IZ_CKPT_BLOCK));
}

/* Of a contribution that the host adds: not where its accumulator takes the
 * only one as it comes. */
static int64_t staged_elems(const struct iz_plan *p,
                            const struct iz_plan_unit *g)
{
    return p->zero.sums_near || iz_plan_straight(p, g->reductions == 1)
               ? 0
               : g->shard - iz_plan_grads_apart(p, g);
}

static void count_copies(struct iz_plan *p)
{
    int64_t unit = 0, whole = 0, chunk = 0, down = 0, quant = 0;
    int64_t size = iz_dtype_bytes(p->param_type);
    bool many = p->ranks > 1;
    for (int u = 0; u < p->n_units; u++) {
        unit = max64(unit, p->unit[u].padded);
        down = max64(down, staged_elems(p, &p->unit[u]));
        whole = max64(whole, p->unit[u].frozen.padded);
        quant = max64(quant, iz_plan_quant_whole(p, &p->unit[u]));
        if (p->unit[u].n && p->unit[u].host_chunks)
            chunk = max64(chunk, p->unit[u].chunk);
    }
    whole = max64(whole, unit);
    if (!p->target.gpu)
        return;
    /* The host's collectives add to its accumulators themselves. */
    if (p->zero.grads_down && (!many || p->target.nccl))
        add_staging(p, IZ_STAGING_GRAD, 2, down * (many ? 4 : size));
    /* Every worker of the host has one, and one is on its way up. */
    if (p->zero.params_up)
        add_staging(p, IZ_STAGING_UPDATE, p->target.workers + 1, chunk * size);
    if (many && p->target.nccl)
        p->comm.exchange_bytes = unit * size;
    else if (many)
        p->comm.staging_bytes =
            max64(max64(whole * size, quant),
                  unit * max64(size, iz_dtype_bytes(p->grad_type)) +
                      (p->zero.grads_down ? 0 : unit / p->ranks * 4));
    p->bytes.b[IZ_TIER_CPU][IZ_MEM_STAGING] +=
        p->comm.staging_bytes + IZ_BOUNCE_BYTES;
    p->bytes.b[IZ_TIER_DEVICE][IZ_MEM_STAGING] +=
        p->staging[IZ_STAGING_SPLIT].bytes * p->staging[IZ_STAGING_SPLIT].n;
    p->bytes.b[IZ_TIER_DEVICE][IZ_MEM_COMM] += p->comm.exchange_bytes;
}

int64_t iz_plan_boundary_bytes(const struct iz_plan *p,
                               const struct iz_model *m, int unit)
{
    return iz_dtype_bytes(p->target.act) * m->unit[unit].out_elems * p->samples;
}

int64_t iz_plan_boundary_room(const struct iz_plan *p)
{
    return iz_dtype_bytes(p->target.act) * p->act.boundary_elems;
}

int64_t iz_plan_boundary_at(const struct iz_plan *p, int track, int unit)
{
    return (track * (int64_t)(p->n_units - 2) + unit) *
           iz_plan_boundary_room(p);
}

int64_t iz_plan_boundary_file(const struct iz_plan *p)
{
    bool file = p->act.boundary_home == IZ_HOME_NVME;
    return file ? iz_plan_boundary_at(p, p->tracks, 0) : 0;
}

/* One of each unit and a gradient, per track.  Elsewhere all but the last,
 * which backward begins with; slots then have what is under way. */
static void count_boundaries(struct iz_plan *p, const struct iz_model *m)
{
    int64_t sum = 0, largest = 0, bytes = 0;
    enum iz_home to = p->act.boundary_home;
    bool slots = to == IZ_HOME_NVME || (to == IZ_HOME_CPU && p->target.gpu);
    for (int u = 0; u + 1 < m->n_units; u++) {
        bytes = iz_plan_boundary_bytes(p, m, u);
        sum += bytes;
        largest = max64(largest, bytes);
    }
    p->act.boundary_elems = largest / iz_dtype_bytes(p->target.act);
    if (to == IZ_HOME_NVME)
        p->act.boundary_elems = round_up(p->act.boundary_elems, IZ_CHUNK_ALIGN);
    p->act.boundary_slots = slots ? (int)min64(p->tracks + SPARE_SLOTS,
                                               p->tracks * (m->n_units - 1))
                                  : 0;
    int64_t home = p->tracks * (slots ? sum - bytes : sum);
    if (to == IZ_HOME_NVME)
        home = iz_plan_boundary_file(p);
    for (int t = 0; t < IZ_TIERS; t++)
        p->bytes.b[t][IZ_MEM_BOUNDARY] = 0;
    p->bytes.b[IZ_TIER_DEVICE][IZ_MEM_BOUNDARY] =
        (p->tracks + p->act.boundary_slots) * iz_plan_boundary_room(p);
    p->bytes.b[iz_plan_tier(to)][IZ_MEM_BOUNDARY] += home;
    if (m->preference) /* two of the reference */
        p->bytes.b[IZ_TIER_DEVICE][IZ_MEM_BOUNDARY] +=
            2 * p->tracks * iz_plan_boundary_room(p);
}

/* Sums of the blocks of pieces. */
static int64_t square_bytes(const struct iz_plan *p)
{
    int64_t blocks = 0;
    for (int u = 0; u < p->n_units; u++)
        blocks += iz_norm2_blocks(iz_plan_squared(p, &p->unit[u]));
    return 8 * blocks;
}

int64_t iz_plan_saved(const struct iz_plan *p, const struct iz_model *m,
                      int unit, enum iz_repeat repeat)
{
    return m->unit[unit].forward && unit >= p->first_trained
               ? p->cost[unit].save_bytes[repeat]
               : 0;
}

int64_t iz_plan_sums_bytes(const struct iz_plan *p, const struct iz_model *m)
{
    int64_t told = iz_model_tells(m) ? (int64_t)sizeof(struct iz_told) : 0;
    return 8 * (int64_t)p->n_units + p->tracks * (2 * 8 + told);
}

void iz_plan_count_activations(struct iz_plan *p, const struct iz_model *m)
{
    int64_t saved = 0;
    for (int u = 0; u < m->n_units; u++)
        saved += iz_plan_saved(p, m, u, p->unit[u].repeat);
    count_boundaries(p, m);
    int64_t(*b)[IZ_MEM_CLASSES] = p->bytes.b;
    /* Kernels read samples and write losses and logits in pinned memory. */
    enum iz_tier near = p->target.gpu ? IZ_TIER_CPU : IZ_TIER_DEVICE;
    b[IZ_TIER_DEVICE][IZ_MEM_SAVED] = saved * p->tracks;
    b[near][IZ_MEM_BATCH] = p->tracks * p->samples * iz_model_sample_bytes(m) +
                            4 * (int64_t)m->vocab + iz_plan_sums_bytes(p, m) +
                            square_bytes(p) + 2 * iz_plan_list_bytes(p) +
                            iz_plan_list_scratch_bytes(p, m);
    b[IZ_TIER_DEVICE][IZ_MEM_SCRATCH] = p->act.scratch_bytes * p->tasks_at_once;
}

static void count_rings(struct iz_plan *p)
{
    int64_t size = iz_dtype_bytes(p->param_type);
    for (int i = 0; i < p->n_rings; i++) {
        const struct iz_plan_ring *r = &p->ring[i];
        p->bytes.b[IZ_TIER_DEVICE][IZ_MEM_RING] += r->elems * r->params * size;
        p->bytes.b[IZ_TIER_DEVICE][IZ_MEM_GRAD_RING] +=
            r->grad_elems * r->grads * size +
            r->sum_elems * r->sums * iz_dtype_bytes(p->grad_type);
    }
}

int64_t iz_plan_host_scratch(const struct iz_plan *p)
{
    return p->target.gpu && !p->matrices.on_gpu ? p->matrices.work_bytes : 0;
}

static void count_matrices(struct iz_plan *p)
{
    const struct iz_plan_matrices *a = &p->matrices;
    int64_t bytes = a->buffers * a->elems * (int64_t)sizeof(float);
    enum iz_tier host = p->target.gpu ? IZ_TIER_CPU : IZ_TIER_DEVICE;
    if (a->below)
        p->bytes.b[host][IZ_MEM_MATRIX] += bytes;
    if (a->above)
        p->bytes.b[IZ_TIER_DEVICE][IZ_MEM_MATRIX] += bytes;
    p->bytes.b[IZ_TIER_CPU][IZ_MEM_SCRATCH] =
        iz_plan_host_scratch(p) * p->target.workers;
}

void iz_plan_count(struct iz_plan *p, const struct iz_config *c,
                   const struct iz_model *m)
{
    memset(&p->bytes, 0, sizeof(p->bytes));
    count_units(p);
    count_staging(p, c);
    count_saves(p, c);
    count_copies(p);
    iz_plan_count_activations(p, m);
    if (p->act.boundary_home == IZ_HOME_NVME && p->target.gpu)
        add_staging(p, IZ_STAGING_BOUNDARY, BOUNDARY_STAGING,
                    iz_plan_boundary_room(p));
    count_rings(p);
    count_matrices(p);
    int64_t shard = 0;
    for (int u = 0; u < p->n_units; u++)
        shard = max64(shard, p->unit[u].shard * 4);
    enum iz_tier near = p->target.gpu ? IZ_TIER_CPU : IZ_TIER_DEVICE;
    if (p->ranks > 1 && !p->target.nccl)
        p->bytes.b[near][IZ_MEM_COMM] += iz_coll_scratch_bytes(p->ranks, shard);
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

int64_t iz_plan_beside(const struct iz_plan *p)
{
    int64_t chunks = 0;
    for (int u = 0; u < p->n_units; u++)
        chunks += p->unit[u].chunks + p->unit[u].pieces / 2;
    return PROCESS_BYTES + p->target.workers * WORKER_BYTES +
           chunks * CHUNK_BYTES + iz_plan_host_bytes(p) / TABLE_PART;
}

int64_t iz_plan_host_need(const struct iz_plan *p, const struct iz_limits *l)
{
    return iz_plan_host_bytes(p) + (l->beside ? iz_plan_beside(p) : 0);
}

/* All of the host's tier is pinned but the states; see iz_memory_open_gpu. */
static int64_t table_bytes(const struct iz_plan *p)
{
    int64_t pinned = iz_bytes_tier(&p->bytes, IZ_TIER_CPU) -
                     p->bytes.b[IZ_TIER_CPU][IZ_MEM_STATE];
    return p->target.gpu ? (pinned + TABLE_PART - 1) / TABLE_PART : 0;
}

int64_t iz_plan_device_need(const struct iz_plan *p, const struct iz_limits *l)
{
    return iz_plan_device_bytes(p) + (l->tables ? table_bytes(p) : 0);
}

bool iz_plan_within(const struct iz_plan *p, const struct iz_limits *l)
{
    return iz_plan_host_need(p, l) <= l->host &&
           iz_plan_device_need(p, l) <= l->device;
}

bool iz_plan_fetches(const struct iz_plan *p, const struct iz_plan_unit *g)
{
    return p->zero.fetch || g->quant.n;
}

int64_t iz_plan_gathered(const struct iz_plan_unit *g)
{
    return g->rows ? g->packed : g->padded + g->frozen.padded + g->quant.n;
}

int64_t iz_plan_quant_shard(const struct iz_plan_unit *g)
{
    return g->quant.shard * iz_quant_bytes(g->quant.format);
}

int64_t iz_plan_quant_whole(const struct iz_plan *p,
                            const struct iz_plan_unit *g)
{
    return iz_plan_quant_shard(g) * p->ranks;
}

int64_t iz_plan_quant_held(const struct iz_plan *p,
                           const struct iz_plan_unit *g)
{
    return p->zero.params_full ? iz_plan_quant_whole(p, g)
                               : iz_plan_quant_shard(g);
}

int64_t iz_plan_quant_filed(const struct iz_plan_unit *g)
{
    return round_up(iz_plan_quant_shard(g), PAGE_BYTES);
}

int64_t iz_plan_held(const struct iz_plan *p, const struct iz_plan_unit *g)
{
    int64_t frozen = p->zero.frozen_apart ? 0 : g->frozen.shard;
    return p->zero.param_home == IZ_HOME_NVME ? 0
           : p->zero.params_full              ? (g->shard + frozen) * p->ranks
                                              : g->shard + frozen;
}

int64_t iz_plan_held_apart(const struct iz_plan *p,
                           const struct iz_plan_unit *g)
{
    bool memory = p->zero.frozen_home != IZ_HOME_NVME;
    return p->zero.frozen_apart && memory ? g->frozen.shard : 0;
}

int64_t iz_plan_copied(const struct iz_plan *p, const struct iz_plan_unit *g)
{
    return p->zero.group < p->ranks
               ? (g->padded + g->frozen.padded) / p->zero.group
               : 0;
}

int64_t iz_plan_sent(const struct iz_plan_unit *g)
{
    return g->rows ? g->packed : g->padded;
}

int64_t iz_plan_sum(const struct iz_plan *p, const struct iz_plan_unit *g)
{
    bool local = iz_sum_is_local(&p->sum) && !p->zero.sums_in_place;
    if (p->zero.sums_near)
        return g->n && g->contributions > 1 ? iz_plan_host_elems(g) : 0;
    return local && g->n ? iz_plan_sent(g) : 0;
}

/* Not near that of a unit with two uses: others come between them. */
bool iz_plan_ring_sum(const struct iz_plan *p, const struct iz_plan_unit *g)
{
    return p->zero.sums_ring && !(p->zero.sums_near && g->ties);
}

int64_t iz_plan_own_sum(const struct iz_plan *p, const struct iz_plan_unit *g)
{
    return iz_plan_ring_sum(p, g) ? 0 : iz_plan_sum(p, g);
}

int64_t iz_plan_squared(const struct iz_plan *p, const struct iz_plan_unit *g)
{
    bool comm = p->ranks > 1 && !p->target.nccl && !g->split_accum;
    bool cut = p->target.gpu ? p->zero.grads_down : g->pieces > 1;
    return cut && !comm && g->n ? g->owned : 0;
}

int64_t iz_plan_piece(const struct iz_plan *p, const struct iz_plan_unit *g,
                      int i)
{
    int64_t apart = iz_plan_grads_apart(p, g);
    return i == g->pieces
               ? apart
               : min64(iz_plan_grads(p, g) - apart - i * g->piece, g->piece);
}

int64_t iz_plan_grads(const struct iz_plan *p, const struct iz_plan_unit *g)
{
    int64_t n = p->zero.grads_full ? g->padded : g->shard;
    return g->rows ? min64(n, g->packed) : n;
}

bool iz_plan_straight(const struct iz_plan *p, bool first)
{
    return first && (p->ranks > 1 || p->param_type == p->grad_type);
}

int64_t iz_plan_list_bytes(const struct iz_plan *p)
{
    return p->touched.reads ? iz_touched_list_bytes(p->n_units, p->touched.rows)
                            : 0;
}

/* Keys to sort, twice, and samples. */
int64_t iz_plan_list_scratch_bytes(const struct iz_plan *p,
                                   const struct iz_model *m)
{
    return p->touched.reads
               ? 2 * (int64_t)sizeof(uint64_t) * p->touched.reads +
                     p->samples * (m->input_bytes + m->target_bytes)
               : 0;
}

int64_t iz_plan_filed(const struct iz_plan *p, const struct iz_plan_unit *g)
{
    return (p->zero.param_home == IZ_HOME_NVME ? g->chunk * g->chunks : 0) +
           (p->zero.frozen_home == IZ_HOME_NVME
                ? g->frozen.chunk * g->frozen.chunks
                : 0);
}

enum iz_tier iz_plan_grad_tier(const struct iz_plan *p)
{
    return p->zero.state_home == IZ_HOME_NONE || p->zero.grads_full
               ? IZ_TIER_DEVICE
               : IZ_TIER_CPU;
}

int64_t iz_plan_buffers(const struct iz_plan *p)
{
    int64_t n = 16 + 2 * p->matrices.buffers + p->target.workers +
                p->act.boundary_slots +
                p->tracks * (2 * (int64_t)p->n_units + 5);
    for (int k = 0; k < IZ_STAGINGS; k++)
        n += p->staging[k].n;
    for (int i = 0; i < p->n_rings; i++)
        n += p->ring[i].params + p->ring[i].grads + p->ring[i].sums;
    for (int u = 0; u < p->n_units; u++)
        n += 10 + p->unit[u].chunks;
    return n;
}
