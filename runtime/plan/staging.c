/* SPDX-License-Identifier: Apache-2.0 */
/* How many staging buffers of each kind there are, and how large: what is on
 * the way between disk, host and GPU at once. */
#include "codelets/base/int64.h"
#include "runtime/plan/unit_sizes.h"

/* Slots of boundaries beyond one for each track: one is copied down or up, one
 * is in reserve. */
#define SPARE_SLOTS 2

/* Boundaries between a GPU and their file at once: two are written or read
 * while two more are copied. */
#define BOUNDARY_STAGING 4

/* Quantised units: while one is turned into weights, the next one is gathered,
 * or copied to the GPU. */
#define QUANT_STAGING 2

/* The largest of all units, elements and bytes. */
struct largest {
    int64_t unit, frozen, chunk, host_chunk, state, filed, quant, staged, save;
};

/* Of a contribution that the host adds: not where its accumulator takes the
 * only one as it comes. */
static int64_t staged_elems(const struct iz_plan *p,
                            const struct iz_plan_unit *g)
{
    return p->zero.sums_on_gpu || iz_plan_straight(p, g->reductions == 1)
               ? 0
               : g->shard - iz_plan_grads_apart(p, g);
}

static struct largest find_largest(const struct iz_plan *p)
{
    struct largest l = {0};
    bool file = p->zero.frozen.home == IZ_HOME_NVME;
    for (int u = 0; u < p->n_units; u++) {
        const struct iz_plan_unit *g = &p->unit[u];
        int64_t quant = 0;
        for (int i = 0; i < g->quant.words.chunks; i++)
            quant += 4 * iz_plan_quant_filed(g, i);
        l.unit = max64(l.unit, g->padded);
        l.frozen = max64(l.frozen, g->frozen.padded);
        l.chunk = max64(l.chunk, g->n ? g->chunk : 0);
        l.host_chunk =
            max64(l.host_chunk, g->n && g->host_chunks ? g->chunk : 0);
        for (int i = 0; i < g->chunks; i++)
            l.state = max64(l.state, iz_plan_chunk_bytes(p, g, i));
        l.filed =
            max64(l.filed, iz_plan_filed(p, g) * iz_dtype_bytes(p->param_type) +
                               (file ? quant : 0));
        l.quant = max64(l.quant, 4 * g->quant.words.padded);
        l.staged = max64(l.staged, staged_elems(p, g));
        l.save = max64(l.save, round_up(g->shard, IZ_CHUNK_ALIGN));
        l.save = max64(l.save, round_up(g->frozen.shard, IZ_CHUNK_ALIGN));
        l.save = max64(l.save, quant / 4);
    }
    return l;
}

/* n buffers, if there is anything to go through them. */
static void set(struct iz_plan *p, enum iz_staging_kind k, int n, int64_t bytes)
{
    p->staging[k] = (struct iz_plan_staging){n && bytes ? n : 0, bytes};
}

/* Parts of what a checksum covers cannot be checked, and states in fewer bytes
 * are read as a whole, or are widened on the host: training waits while such
 * are saved. */
static bool saves_wait(const struct iz_plan *p, const struct iz_config *c)
{
    bool disk = p->zero.state.home == IZ_HOME_NVME ||
                p->zero.param.home == IZ_HOME_NVME ||
                p->zero.frozen.home == IZ_HOME_NVME;
    bool apart = p->zero.state.home == IZ_HOME_NVME || p->zero.split ||
                 (p->target.gpu && p->zero.state.home == IZ_HOME_NONE);
    return !c->run.save_interval || c->run.save_mode == IZ_SAVE_SYNC ||
           (disk && c->run.nvme_checksum) ||
           (apart && p->optimizer.moments != IZ_MOMENT_F32) ||
           p->optimizer.remainder;
}

/* Between files and memory. */
static void size_files(struct iz_plan *p, const struct iz_config *c,
                       const struct largest *l)
{
    int64_t size = iz_dtype_bytes(p->param_type);
    bool states = p->zero.state.home == IZ_HOME_NVME;
    bool params = p->zero.param.home == IZ_HOME_NVME;
    set(p, IZ_STAGING_STATE, c->zero.optimizer.buffer_count,
        (states ? l->state : 0) + (params ? l->chunk * size : 0));
    set(p, IZ_STAGING_PARAM, c->zero.param.buffer_count, l->filed);
    set(p, IZ_STAGING_CKPT, saves_wait(p, c) ? 0 : c->run.save_buffers,
        4 * min64(l->save, IZ_CKPT_BLOCK));
}

/* Between host and GPU; the host's collectives add to its accumulators
 * themselves. */
static void size_copies(struct iz_plan *p, const struct largest *l)
{
    int64_t size = iz_dtype_bytes(p->param_type);
    int64_t grad = iz_dtype_bytes(p->grad_type);
    bool many = p->ranks > 1, gpu = p->target.gpu, nccl = p->target.nccl;
    bool down = iz_plan_grads_to_host(p) && (!many || nccl);
    bool up = gpu && p->zero.frozen.home != IZ_HOME_NONE;
    int64_t sums = iz_plan_grads_to_host(p) ? 0 : l->unit / p->ranks * 4;
    set(p, IZ_STAGING_QUANT, QUANT_STAGING,
        up || (many && !p->zero.param.whole) ? l->quant : 0);
    set(p, IZ_STAGING_GRAD, down ? 2 : 0, l->staged * (many ? 4 : size));
    /* Every worker of the host has one, and one is on its way. */
    set(p, IZ_STAGING_UPDATE,
        iz_plan_params_to_gpu(p) ? p->target.workers + 1 : 0,
        l->host_chunk * size);
    p->comm.exchange_bytes = gpu && many && nccl ? l->unit * size : 0;
    p->comm.staging_bytes =
        gpu && many && !nccl
            ? max64(max64(max64(l->frozen, l->unit) * size, l->quant),
                    l->unit * max64(size, grad) + sums)
            : 0;
}

/* One of each unit and a gradient, per track.  Elsewhere all but the last,
 * which backward begins with; slots then have what is under way. */
static void size_boundaries(struct iz_plan *p, const struct iz_model *m)
{
    int64_t largest = 0;
    enum iz_home to = p->act.boundary_home;
    bool file = to == IZ_HOME_NVME;
    bool passes = iz_plan_boundaries_pass(p);
    bool slots = file || (to == IZ_HOME_CPU && passes);
    for (int u = 0; u + 1 < m->n_units; u++)
        largest = max64(largest, iz_plan_boundary_bytes(p, m, u));
    p->act.boundary_elems = largest / iz_dtype_bytes(p->target.act);
    if (file)
        p->act.boundary_elems = round_up(p->act.boundary_elems, IZ_CHUNK_ALIGN);
    p->act.boundary_slots = slots ? (int)min64(p->tracks + SPARE_SLOTS,
                                               p->tracks * (m->n_units - 1))
                                  : 0;
    set(p, IZ_STAGING_BOUNDARY, file && passes ? BOUNDARY_STAGING : 0,
        iz_plan_boundary_room(p));
}

void iz_plan_list(struct iz_plan *p, const struct iz_config *c,
                  const struct iz_model *m)
{
    struct largest l = find_largest(p);
    size_files(p, c, &l);
    size_copies(p, &l);
    size_boundaries(p, m);
    iz_places_list(p, m);
}
