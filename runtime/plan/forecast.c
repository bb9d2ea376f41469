/* SPDX-License-Identifier: Apache-2.0 */
/* What a step of a plan with a GPU takes: unit by unit, in the order of the
 * passes, each worker and link is followed as to when it is free again.  It
 * knows no tasks, and takes microseconds where a simulation takes seconds. */
#include "runtime/plan/forecast.h"

#include <math.h>
#include <stdlib.h>

#include "codelets/base/int64.h"
#include "codelets/base/take.h"
#include "runtime/plan/split.h"
#include "runtime/plan/state_layout.h"
#include "runtime/plan/unit_sizes.h"

/* A buffer of a ring: the unit that it holds, and when its last use ends. */
struct slot {
    int unit;
    double end_s;
};

/* A chunk of those that the GPU updates, in their order; past the last one its
 * unit is n_units. */
struct chunk {
    int unit, of_unit, number;
};

/* Seconds since the `clip` before at which each is free again. */
struct course {
    const struct iz_plan *p;
    const struct iz_rate *rate;
    double gpu_s, up_s, down_s, comm_s, io_s, sums_s;
    double busy_s;   /* until then the host's workers update */
    double *updated; /* [units] when its new parameters are at home */
    /* Of the GPU's chunks: when each is there to be updated, and later when its
     * buffer is free; the next one to go up, and to be updated. */
    double *chunk;
    struct chunk raise, update;
    struct slot *slot; /* of all rings, in their order */
    double *grad;      /* two of each ring */
    int64_t sent;      /* gradients so on_host */
};

static double copy(struct course *c, enum iz_where link, double bytes,
                   double from)
{
    const struct iz_rate *r = &c->rate[link];
    bool up = link == IZ_ON_H2D;
    double *free = up ? &c->up_s : &c->down_s, rate = r->bytes_per_s;
    double begin = fmax(*free, from);
    if (bytes <= 0)
        return from;
    if (r->both_bytes_per_s > 0 && (up ? c->down_s : c->up_s) > begin)
        rate = fmin(rate, r->both_bytes_per_s);
    if (r->busy_bytes_per_s > 0 && begin < c->busy_s)
        rate = fmin(rate, r->busy_bytes_per_s);
    return *free = begin + r->latency_s + bytes / rate;
}

/* The network, or the disk. */
static double pass(double *free, const struct iz_rate *r, double bytes,
                   double from)
{
    if (bytes <= 0)
        return from;
    return *free = fmax(*free, from) + r->latency_s + bytes / r->bytes_per_s;
}

/* Of the host's workers together, all of them busy. */
static double host_s(const struct course *c, double bytes, double moments)
{
    const struct iz_rate *r = &c->rate[IZ_ON_HOST];
    double all = c->p->target.workers * r->bytes_per_s;
    double each =
        c->p->target.workers * r->moments_per_s[c->p->optimizer.moments];
    if (r->all_bytes_per_s > 0)
        all = fmin(all, r->all_bytes_per_s);
    return fmax(bytes / all, each > 0 ? moments / each : 0);
}

static double compute_s(const struct course *c, enum iz_where what,
                        double bytes)
{
    const struct iz_rate *r = &c->rate[what];
    return bytes > 0 ? r->latency_s + bytes / r->bytes_per_s : 0;
}

/* ---- the optimizer ---- */

static int gpu_chunks(const struct iz_plan *p, int u)
{
    const struct iz_plan_unit *g = &p->unit[u];
    return !g->n                                ? 0
           : p->zero.state.home == IZ_HOME_NONE ? g->chunks
                                                : g->chunks - g->host_chunks;
}

/* The host's workers take the chunks in order, and end a unit together with as
 * many of the next ones as are under way.  `before`: seconds that it has had
 * already. */
static void update_on_host(struct course *c, double before)
{
    const struct iz_plan *p = c->p;
    double sum = -before, chunks = 0, workers = p->target.workers;
    bool disk = p->zero.state.home == IZ_HOME_NVME;
    for (int u = 0; u < p->n_units; u++) {
        const struct iz_plan_unit *g = &p->unit[u];
        double n = (double)iz_plan_host_elems(g), states = 0;
        c->updated[u] = 0;
        if (!g->n || gpu_chunks(p, u) == g->chunks)
            continue;
        double all = host_s(c, iz_state_traffic(p, (int64_t)n, 0), n);
        chunks += g->host_chunks;
        sum += all + g->host_chunks / workers * c->rate[IZ_ON_HOST].latency_s;
        c->updated[u] = sum + fmod(workers - fmod(chunks, workers), workers) *
                                  all / g->host_chunks;
        for (int i = 0; disk && i < g->chunks; i++)
            states += 2.0 * (double)iz_plan_chunk_bytes(p, g, i);
        c->updated[u] = fmax(c->updated[u],
                             pass(&c->io_s, &c->rate[IZ_ON_IO], states / 2, 0));
        c->updated[u] = fmax(c->updated[u], 0);
    }
    c->busy_s = fmax(sum, 0);
}

static void next_chunk(const struct iz_plan *p, struct chunk *k, int by)
{
    k->number += by;
    k->of_unit += by;
    while (k->unit < p->n_units && k->of_unit == gpu_chunks(p, k->unit)) {
        k->unit++;
        k->of_unit = 0;
    }
}

/* Bytes of a chunk's parameters, or gradients, that are on the host. */
static double host_bytes(const struct iz_plan *p, int unit, bool params)
{
    const struct iz_plan_unit *g = &p->unit[unit];
    bool on_host =
        p->zero.state.home != IZ_HOME_NONE &&
        (params ? p->zero.param.home != IZ_HOME_NONE : !p->zero.grads_apart);
    int64_t size = iz_dtype_bytes(params ? p->param_type : p->grad_type);
    return on_host ? (double)(min64(g->chunk, g->owned) * size) : 0;
}

/* When a chunk has a buffer; INFINITY: the one before it in there is not known
 * to have left. */
static double buffer_s(const struct course *c, const struct chunk *k)
{
    int n = c->p->staging[IZ_STAGING_SPLIT].n;
    return k->unit == c->p->n_units           ? INFINITY
           : !n || k->number < n              ? 0
           : k->number - n < c->update.number ? c->chunk[k->number - n]
                                              : INFINITY;
}

/* Brings up what the next chunk's update reads. */
static void raise_chunk(struct course *c)
{
    const struct iz_plan *p = c->p;
    struct chunk *k = &c->raise;
    double up = host_bytes(p, k->unit, false) +
                (p->optimizer.remainder ? host_bytes(p, k->unit, true) : 0);
    c->chunk[k->number] = copy(c, IZ_ON_H2D, up, buffer_s(c, k));
    next_chunk(p, k, 1);
}

/* Updates the next chunk on the GPU: then it is where a fetch takes it. */
static void update_chunk(struct course *c)
{
    const struct iz_plan *p = c->p;
    struct chunk *k = &c->update;
    int64_t n = min64(p->unit[k->unit].chunk, p->unit[k->unit].owned);
    c->gpu_s = fmax(c->gpu_s, c->chunk[k->number]) +
               compute_s(c, IZ_ON_COMPUTE, iz_state_traffic(p, n, 0));
    c->chunk[k->number] =
        copy(c, IZ_ON_D2H, host_bytes(p, k->unit, true), c->gpu_s);
    c->updated[k->unit] = fmax(c->updated[k->unit], c->chunk[k->number]);
    next_chunk(p, k, 1);
}

/* ---- parameters ---- */

/* Bytes of a unit's shard that come from this home or from beyond it. */
static double shard_bytes(const struct iz_plan *p, const struct iz_plan_unit *g,
                          enum iz_home home)
{
    int64_t size = iz_dtype_bytes(p->param_type), bytes = 0;
    if (p->zero.param.home >= home)
        bytes += g->shard * size;
    if (p->zero.frozen.home >= home)
        bytes += g->frozen.shard * size + 4 * g->quant.words.shard;
    return (double)bytes;
}

/* A slot with unit u, and whether it holds it already; NULL: it has none. */
static struct slot *find_slot(struct course *c, int u, bool *there)
{
    const struct iz_plan *p = c->p;
    struct slot *s = c->slot, *best = NULL;
    *there = true;
    if (!iz_plan_fetches(p, &p->unit[u]))
        return NULL;
    for (int r = 0; r < p->unit[u].ring; r++)
        s += p->ring[r].params;
    for (int i = 0; i < p->ring[p->unit[u].ring].params; i++) {
        if (s[i].unit == u)
            return &s[i];
        if (!best || s[i].end_s < best->end_s)
            best = &s[i];
    }
    *there = false;
    return best;
}

/* When the parameters of unit u, which are at home at `from`, are there. */
static double fetch(struct course *c, int u, double from, struct slot **slot)
{
    const struct iz_plan *p = c->p;
    const struct iz_plan_unit *g = &p->unit[u];
    bool there;
    *slot = find_slot(c, u, &there);
    if (there)
        return from;
    double t = fmax(from, (*slot)->end_s);
    t = pass(&c->io_s, &c->rate[IZ_ON_IO], shard_bytes(p, g, IZ_HOME_NVME) / 2,
             t);
    t = copy(c, IZ_ON_H2D, shard_bytes(p, g, IZ_HOME_CPU), t);
    if (p->ranks > 1)
        t = pass(
            &c->comm_s,
            &c->rate[p->zero.group < p->ranks ? IZ_RATE_GROUP : IZ_RATE_GATHER],
            shard_bytes(p, g, IZ_HOME_NONE) * (p->zero.group - 1), t);
    (*slot)->unit = u;
    return t;
}

/* ---- passes ---- */

/* When unit u is updated and in its slot, in the first pass after an update.
 * The link does not wait for a unit while chunks can go up; but when the GPU
 * can go on with the unit, it does not wait for chunks. */
static double update_and_fetch(struct course *c, int u, struct slot **slot)
{
    const struct iz_plan *p = c->p;
    const struct iz_plan_unit *g = &p->unit[u];
    double home, ready = INFINITY;
    while (c->update.unit <= u) {
        if (c->raise.number == c->update.number)
            raise_chunk(c);
        update_chunk(c);
    }
    home = c->updated[u];
    while (fmax(buffer_s(c, &c->raise), c->up_s) < home)
        raise_chunk(c);
    if (iz_plan_params_to_gpu(p) && g->n && g->host_chunks)
        home = copy(
            c, IZ_ON_H2D,
            (double)(iz_plan_host_elems(g) * iz_dtype_bytes(p->param_type)),
            home);
    ready = fetch(c, u, home, slot);
    while (c->update.unit < p->n_units) {
        if (c->raise.number == c->update.number)
            raise_chunk(c);
        if (fmax(c->gpu_s, c->chunk[c->update.number]) >= ready)
            break;
        update_chunk(c);
    }
    return ready;
}

/* The forwards of a wave.  first: before them each unit is updated. */
static void forward(struct course *c, int micros, bool first)
{
    const struct iz_plan *p = c->p;
    for (int u = 0; u + 1 < p->n_units; u++) {
        struct slot *slot = NULL;
        double ready =
            first ? update_and_fetch(c, u, &slot) : fetch(c, u, 0, &slot);
        c->gpu_s = fmax(c->gpu_s, ready) + micros * p->cost[u].forward.seconds;
        if (slot)
            slot->end_s = c->gpu_s;
        if (p->act.boundary_slots && iz_plan_boundaries_pass(p))
            copy(c, IZ_ON_D2H, micros * (double)iz_plan_boundary_room(p),
                 c->gpu_s);
    }
}

/* A micro-batch's gradient of unit u, which the GPU has at c->gpu_s; i: of the
 * step's. */
static void reduce(struct course *c, int u, int i)
{
    const struct iz_plan *p = c->p;
    const struct iz_plan_unit *g = &p->unit[u];
    double size = (double)iz_dtype_bytes(p->grad_type);
    double wire = (double)iz_dtype_bytes(p->param_type);
    double host = (double)iz_plan_host_elems(g), apart = 0, on_gpu = 0;
    bool last = i + 1 == p->micro_batches, first = i == 0;
    double sum = wire + size * (first ? 1 : 2), *grad;
    if (!g->n)
        return;
    if (iz_plan_grads_to_host(p))
        apart = (double)iz_plan_grads_apart(p, g);
    else
        on_gpu = (double)g->shard;
    if (p->zero.sums_on_gpu && iz_plan_sum(p, g))
        on_gpu = host;
    grad = &c->grad[2 * g->ring + c->sent++ % 2];
    if (p->ranks > 1)
        pass(&c->comm_s, &c->rate[IZ_ON_COMM],
             wire * (double)g->shard * (p->ranks - 1), c->gpu_s);
    c->gpu_s += compute_s(c, IZ_ON_COMPUTE, apart * sum);
    c->gpu_s += g->direct ? 0 : compute_s(c, IZ_ON_COMPUTE, on_gpu * sum);
    if (last)
        c->gpu_s += compute_s(
            c, IZ_RATE_SQUARES,
            (p->zero.sums_on_gpu ? (double)g->shard : apart + on_gpu) * size);
    double t = fmax(c->gpu_s, p->ranks > 1 ? c->comm_s : 0);
    if (!iz_plan_grads_to_host(p) || (p->zero.sums_on_gpu && !last)) {
        *grad = t;
        return;
    }
    bool straight = p->zero.sums_on_gpu || iz_plan_straight(p, first);
    /* Of two buffers that the host adds from, one is free. */
    if (!straight)
        t = fmax(t, c->sums_s - host_s(c, host * sum, 0));
    *grad = copy(c, IZ_ON_D2H, host * (p->zero.sums_on_gpu ? size : wire), t);
    if (!straight)
        c->sums_s = fmax(c->sums_s, *grad) + host_s(c, host * sum, 0);
}

static void backward(struct course *c, int first, int micros)
{
    const struct iz_plan *p = c->p;
    for (int u = p->n_units - 1; u >= p->first_trained; u--) {
        const struct iz_unit_cost *k = &p->cost[u];
        struct slot *slot;
        double t = !first && u + 1 == p->n_units ? update_and_fetch(c, u, &slot)
                                                 : fetch(c, u, 0, &slot);
        if (p->act.boundary_slots && iz_plan_boundaries_pass(p))
            copy(c, IZ_ON_H2D, micros * (double)iz_plan_boundary_room(p), 0);
        for (int i = 0; i < micros; i++) {
            double *grad = &c->grad[2 * p->unit[u].ring + c->sent % 2];
            c->gpu_s = fmax(fmax(c->gpu_s, t), *grad) + k->backward.seconds +
                       k->recompute[p->unit[u].recompute].seconds;
            reduce(c, u, first + i);
        }
        if (slot)
            slot->end_s = c->gpu_s;
    }
}

static double passes_s(const struct iz_plan *p)
{
    double s = 0;
    for (int u = 0; u < p->n_units; u++)
        s += p->cost[u].forward.seconds +
             (u < p->first_trained
                  ? 0
                  : p->cost[u].backward.seconds +
                        p->cost[u].recompute[p->unit[u].recompute].seconds);
    return s * p->micro_batches;
}

static double step_s(struct course *c, double before)
{
    const struct iz_plan *p = c->p;
    update_on_host(c, before);
    next_chunk(p, &c->raise, 0);
    next_chunk(p, &c->update, 0);
    for (int g = 0; g < p->micro_batches; g += p->wave) {
        int micros = p->micro_batches - g;
        micros = micros < p->wave ? micros : p->wave;
        forward(c, micros, g == 0);
        backward(c, g, micros);
    }
    return fmax(fmax(c->gpu_s, c->sums_s), fmax(c->down_s, c->comm_s));
}

/* Whether all rates are known that the step needs: 1 stands for none, as of the
 * disks of a machine that was measured, and of a GPU that is only described. */
static bool knows(const struct iz_plan *p, const struct iz_rate *rate)
{
    bool many = p->ranks > 1;
    const struct {
        bool used;
        enum iz_where where;
    } all[] = {{true, IZ_ON_H2D},
               {true, IZ_ON_D2H},
               {true, IZ_ON_COMPUTE},
               {iz_bytes_tier(&p->bytes, IZ_TIER_NVME) > 0, IZ_ON_IO},
               {many, IZ_ON_COMM},
               {many, IZ_RATE_GATHER}};
    bool known = p->target.gpu && p->target.compute.flops_per_s > 0;
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++)
        known &= !all[i].used || rate[all[i].where].bytes_per_s > 1;
    return known;
}

struct iz_forecast iz_forecast(const struct iz_plan *p,
                               const struct iz_rate *rate)
{
    struct iz_forecast f = {0};
    int slots = 0, chunks = 0;
    if (!knows(p, rate))
        return f;
    for (int r = 0; r < p->n_rings; r++)
        slots += p->ring[r].params;
    for (int u = 0; u < p->n_units; u++)
        chunks += gpu_chunks(p, u);
    struct course c = {.p = p, .rate = rate};
    double *s =
        iz_take(p->n_units + chunks + 2 * p->n_rings, sizeof(*s), "a forecast");
    c.slot = iz_take(slots, sizeof(*c.slot), "a forecast");
    c.updated = s;
    c.chunk = s + p->n_units;
    c.grad = c.chunk + chunks;
    for (int i = 0; i < slots; i++)
        c.slot[i].unit = -1;
    f.compute_s = passes_s(p);
    f.step_s = step_s(&c, p->zero.early ? f.compute_s / 2 : 0);
    f.host_s = c.busy_s;
    free(s);
    free(c.slot);
    return f;
}

void iz_forecast_print(const struct iz_plan *p, const struct iz_rate *rate,
                       FILE *out)
{
    struct iz_forecast f = iz_forecast(p, rate);
    if (f.step_s > 0)
        fprintf(out,
                "predicted: a step takes %.3f s, %.3f of it forward and "
                "backward; the host's part of the optimizer takes %.3f s\n",
                f.step_s, f.compute_s, f.host_s);
}
