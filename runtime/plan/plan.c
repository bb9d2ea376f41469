/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/plan/plan.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "codelets/base/int64.h"
#include "codelets/base/take.h"
#include "codelets/base/units.h"
#include "codelets/flat/flat.h"
#include "runtime/base/text.h"
#include "runtime/model/rules.h"
#include "runtime/plan/fit.h"
#include "runtime/plan/matrices.h"
#include "runtime/plan/split.h"
#include "runtime/plan/unit_sizes.h"

#define ALIGN_SHARD 64       /* elements: whole cache lines for every type */
#define CHUNK_HOST (1 << 20) /* enough chunks for all workers, few tasks */
/* A GPU that has all states updates them alone: a task of 2^20 elements takes
 * 27 us on an H100, and its kernel 10. */
#define CHUNK_GPU (1 << 24)
#define CHUNKS_MAX 64 /* submission cost grows with the square */

/* ---- units ---- */

/* All chunks of a unit are about as long: the last one has whole arrays on
 * disk and a whole staging buffer, too. */
static int64_t chunk_elems(const struct iz_plan *p, const struct iz_config *c,
                           int64_t owned)
{
    bool on_gpu = p->target.gpu && c->zero.optimizer.home == IZ_HOME_NONE;
    int64_t most = on_gpu ? CHUNK_GPU : CHUNK_HOST, chunks;
    int64_t chunk = min64(c->zero.sub_group_size, most);
    chunk = max64(chunk, (owned + CHUNKS_MAX - 1) / CHUNKS_MAX);
    chunk = round_up(max64(min64(chunk, owned), 1), IZ_CHUNK_ALIGN);
    chunks = max64((owned + chunk - 1) / chunk, 1);
    return round_up(max64((owned + chunks - 1) / chunks, 1), IZ_CHUNK_ALIGN);
}

/* What a step touches of a sparse table: every sample of every rank may read
 * other rows. */
static void plan_rows(struct iz_plan *p, const struct iz_model *m, int u)
{
    const struct iz_unit *unit = &m->unit[u];
    struct iz_plan_unit *g = &p->unit[u];
    int64_t samples =
        (int64_t)p->samples * p->slices * p->micro_batches * p->ranks;
    if (!unit->table_reads || !unit->param[0].sparse)
        return;
    g->rows = min64(unit->param[0].rows, samples * unit->table_reads);
    g->cols = unit->param[0].cols;
    g->packed = round_up(g->rows * g->cols, ALIGN_SHARD);
    p->touched.reads = samples * m->table_reads;
    p->touched.rows = min64(p->touched.rows + g->rows, p->touched.reads);
}

/* Whether the last contribution to an accumulator is added to it, or written,
 * by a sum of the host: not by a GPU, and not by the backward or a copy. */
static bool sums_squares(const struct iz_plan *p, const struct iz_plan_unit *g)
{
    bool many = p->ranks > 1, gpu = p->target.gpu;
    bool none = p->zero.grads_apart && !g->host_chunks;
    if (g->split_accum || (g->direct && !many) || none || p->zero.sums_on_gpu)
        return false;
    if (!gpu || (many && !p->target.nccl))
        return !gpu || iz_plan_grads_to_host(p);
    return iz_plan_grads_to_host(p) && !iz_plan_straight(p, g->reductions == 1);
}

static void plan_quant(const struct iz_plan *p, const struct iz_unit *u,
                       struct iz_plan_quant *q)
{
    struct iz_quant_matrix all = {0};
    while (iz_unit_next_quant(u, &all))
        ;
    *q = (struct iz_plan_quant){.n = all.first, .format = iz_unit_quant(u)};
    int64_t words = iz_quant_bytes(q->format) / 4;
    int64_t shard = (all.group + p->ranks - 1) / p->ranks * words;
    q->words = (struct iz_plan_frozen){
        all.group * words, shard,
        shard * p->ranks,  shard,
        IZ_CKPT_BLOCK,     (int)((shard + IZ_CKPT_BLOCK - 1) / IZ_CKPT_BLOCK)};
}

static void plan_unit(struct iz_plan *p, const struct iz_config *c,
                      const struct iz_model *m, int u)
{
    struct iz_plan_unit *g = &p->unit[u];
    struct iz_plan_frozen part[2]; /* trained, frozen */
    for (int i = 0; i < 2; i++) {
        int64_t n = iz_unit_elems(&m->unit[u], (enum iz_unit_part)i);
        int64_t shard = round_up((n + p->ranks - 1) / p->ranks, ALIGN_SHARD);
        int64_t owned = p->zero.state.whole ? shard * p->ranks : shard;
        int64_t chunk = chunk_elems(p, c, owned);
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
    plan_quant(p, &m->unit[u], &g->quant);
    plan_rows(p, m, u);
    bool many = p->micro_batches > 1;
    g->split_accum = g->ties && many;
    g->direct = p->zero.grad.whole && !many && p->slices == 1 && !g->ties;
    g->contributions = p->micro_batches * (g->split_accum ? 1 : 1 + g->ties);
    g->reductions = iz_sum_is_local(&p->sum) ? 1 : g->contributions;
}

/* Where the host adds to it its workers do, each to other pieces.  They are not
 * cut where a rank updates a part of one that has all ranks' parts, where a
 * backward or a list of rows writes it as one, and where a collective adds all
 * that there is to add. */
static void cut_accumulator(const struct iz_plan *p, struct iz_plan_unit *g)
{
    bool gpu = p->target.gpu, many = p->ranks > 1;
    bool adds = !many || (g->split_accum && !p->zero.grad.whole);
    bool cut = gpu ? iz_plan_grads_to_host(p) && !p->zero.sums_on_gpu
                   : adds && !g->direct && !g->rows;
    int64_t n = iz_plan_grads(p, g) - iz_plan_grads_apart(p, g);
    int64_t chunks = (n + g->chunk - 1) / g->chunk, most = IZ_PIECES_MAX;
    if (!gpu)
        most = max64(min64(most, p->target.workers), 1);
    g->piece = (cut ? (chunks + most - 1) / most : chunks) * g->chunk;
    g->pieces = n ? (int)((n + g->piece - 1) / g->piece) : 0;
}

/* Of a shared ring one sum is sent while the next one is formed. */
static void plan_sums(struct iz_plan *p)
{
    for (int i = 0; i < p->n_rings; i++)
        p->ring[i].sum_elems = p->ring[i].sums = 0;
    for (int u = 0; u < p->n_units; u++) {
        struct iz_plan_unit *g = &p->unit[u];
        struct iz_plan_ring *r = &p->ring[g->ring];
        g->sums_squares = sums_squares(p, g);
        cut_accumulator(p, g);
        if (iz_plan_ring_sum(p, g))
            r->sum_elems = max64(r->sum_elems, iz_plan_sum(p, g));
        r->sums = !r->sum_elems ? 0 : iz_plan_ring_shared(p, g->ring) ? 2 : 1;
    }
}

void iz_plan_sum_on_gpu(struct iz_plan *p, const struct iz_config *c,
                        const struct iz_model *m, bool on_gpu)
{
    if (p->ranks > 1 || !iz_plan_grads_to_host(p))
        return;
    p->zero.sums_on_gpu = on_gpu;
    p->zero.sums = !on_gpu || p->micro_batches == 1 ? IZ_SUMS_NONE
                   : p->wave == p->micro_batches    ? IZ_SUMS_IN_RING
                                                    : IZ_SUMS_OF_UNIT;
    plan_sums(p);
    iz_plan_list(p, c, m);
}

/* ---- schedule ---- */

int iz_plan_slices(const struct iz_config *c, int workers)
{
    int most = 1;
    for (int n = 1; n <= c->micro_batch && n <= IZ_SLICES_MAX; n++) {
        if (c->micro_batch % (n * c->data.group))
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
        c->run.slices ? c->run.slices : iz_plan_slices(c, p->tasks_at_once);
    if (p->target.gpu)
        p->slices = 1; /* more would only be smaller kernels */
    p->samples = c->micro_batch / p->slices;
    p->micro_batches = c->grad_accum;
    int wave = c->run.parallel_micro_batches;
    if (!wave) {
        int first = p->target.first_workers;
        int tasks = first && !p->target.gpu ? first : p->tasks_at_once;
        wave = (tasks + p->slices - 1) / p->slices;
    }
    if (c->run.schedule == IZ_BREADTH_FIRST)
        wave = c->grad_accum;
    p->wave = wave < c->grad_accum ? wave : c->grad_accum;
    p->tracks = p->wave * p->slices;
}

/* ---- costs ---- */

/* Whether what unit v costs holds for u, too. */
static bool same_cost(const struct iz_plan *p, const struct iz_model *m, int u,
                      int v)
{
    const struct iz_unit *a = &m->unit[u], *b = &m->unit[v];
    bool same = a->kind == b->kind && a->n_params == b->n_params &&
                p->unit[u].rows == p->unit[v].rows &&
                a->n_adapters == b->n_adapters &&
                iz_unit_ties_trained(m, u) == iz_unit_ties_trained(m, v);
    for (int i = 0; same && i < a->n_params; i++)
        same = a->param[i].frozen == b->param[i].frozen &&
               a->param[i].quant == b->param[i].quant &&
               a->param[i].adapts == b->param[i].adapts &&
               a->param[i].first == b->param[i].first &&
               a->param[i].rows == b->param[i].rows;
    return same;
}

static void plan_costs(struct iz_plan *p, const struct iz_model *m)
{
    int tasks = p->micro_batches * p->slices;
    struct iz_exec like = {.backend = p->target.gpu ? IZ_CUDA : IZ_CPU,
                           .act = p->target.act,
                           .numerics = p->target.numerics,
                           .rate = p->target.compute};
    for (int u = 0; u < m->n_units; u++) {
        int same = 0;
        while (same < u && !same_cost(p, m, same, u))
            same++;
        p->cost[u] = same < u ? p->cost[same]
                              : iz_unit_cost(m, u, p->samples, p->unit[u].rows,
                                             p->param_type, &like);
        /* Every kept buffer is a whole number of cache lines. */
        int64_t *save = p->cost[u].save_bytes;
        for (int r = 0; r < IZ_RECOMPUTES; r++)
            save[r] = round_up(save[r], 64);
        /* In chunks of rows what nobody keeps is in the scratch of a chunk. */
        if (!p->target.numerics.chunk_rows)
            p->act.save_bytes =
                max64(p->act.save_bytes, save[IZ_RECOMPUTE_NONE]);
        p->act.scratch_bytes =
            max64(p->act.scratch_bytes, p->cost[u].work_bytes);
        bool trained = u >= p->first_trained;
        p->attends |= p->cost[u].attends;
        p->why_own = p->why_own ? p->why_own : p->cost[u].why_own;
        p->step_flops += tasks * (p->cost[u].forward.flops *
                                      (m->preference && trained ? 2 : 1) +
                                  (trained ? p->cost[u].backward.flops : 0));
    }
    if (p->matrices.on_gpu == p->target.gpu)
        p->act.scratch_bytes =
            max64(p->act.scratch_bytes, p->matrices.work_bytes);
    /* Tasks on flat buffers need little: the norm's partial sums. */
    if (p->target.gpu)
        for (int u = 0; u < p->n_units; u++)
            p->act.scratch_bytes =
                max64(p->act.scratch_bytes,
                      iz_flat_norm2_scratch_bytes(p->unit[u].padded));
    p->act.scratch_bytes = round_up(p->act.scratch_bytes, 64) +
                           p->act.save_bytes + IZ_SCRATCH_SPARE;
}

/* Whether groups of this kind are equal. */
static bool divides(int group, int ranks)
{
    return group == 0 || ranks % group == 0;
}

/* What a GPU cannot do, in words of the config; NULL: nothing. */
static const char *gpu_cannot(const struct iz_config *c)
{
    if (c->run.slices > 1)
        return "run.slices: slices give several CPU workers something to do; "
               "set it to 1 on a GPU";
    if (c->zero.param.home != IZ_HOME_NONE &&
        c->zero.optimizer.home == IZ_HOME_NONE)
        return "zero_optimization.offload_param.device: the optimizer on the "
               "GPU cannot update parameters on the host: offload the "
               "optimizer too";
    if (c->run.state_dtype != IZ_MOMENT_F32 &&
        c->run.save_mode == IZ_SAVE_ASYNC &&
        (c->zero.optimizer.home == IZ_HOME_NONE || c->zero.optimizer.ratio < 1))
        return "run.save_mode: async cannot read m and v of run.state_dtype "
               "from a GPU; use auto or sync";
    return NULL;
}

static int check_target(const struct iz_config *c,
                        const struct iz_target *target, int ranks, FILE *err)
{
    int have = target->numerics.capability;
    const char *key = c->dtype == IZ_BF16 ? "bf16.enabled: true"
                      : c->run.tf32       ? "run.tf32: true"
                                          : NULL;
    const char *cudnn = c->run.gpu_attention == IZ_ATTENTION_CUDNN
                            ? "run.gpu_attention: cudnn"
                        : c->run.gpu_attention_backward == IZ_ATTENTION_CUDNN
                            ? "run.gpu_attention_backward: cudnn"
                            : NULL;
    if (!divides(c->zero.hpz_partition, ranks))
        return iz_text_refuse(
            err,
            "zero_optimization.zero_hpz_partition_size: %d: groups of so many "
            "do not divide %d rank%s: set a divisor, or 1",
            c->zero.hpz_partition, ranks, ranks > 1 ? "s" : "");
    if (!divides(c->run.sum_group, ranks))
        return iz_text_refuse(err,
                              "run.sum_group: %d: groups of so many do not "
                              "divide %d rank%s: set a divisor, or 0",
                              c->run.sum_group, ranks, ranks > 1 ? "s" : "");
    if (!iz_sum_possible(c, ranks))
        return iz_text_refuse(
            err, "run.sum_order: local_first: in stage 3 a rank has no whole "
                 "gradient to add its micro-batches in, unless each unit's "
                 "come together: set run.schedule to breadth_first, or use "
                 "ranks_first, which has other bits");
    const char *why = target->gpu ? gpu_cannot(c) : NULL;
    if (why)
        return iz_text_refuse(err, "%s", why);
    if (!target->gpu && c->zero.optimizer.ratio < 1)
        return iz_text_refuse(
            err,
            "zero_optimization.offload_optimizer.ratio: %.15g leaves chunks to "
            "a GPU, and units are computed on the CPU: use 1.0",
            c->zero.optimizer.ratio);
    if (target->gpu && have < 80 && iz_optimizer(c->optimizer.type)->matrices &&
        c->optimizer.ns_method == IZ_NS_STANDARD &&
        c->run.muon_products != IZ_MUON_HOST)
        return iz_text_refuse(
            err,
            "optimizer.params.ns_method: standard: its products on a GPU are "
            "of bf16, which needs compute capability 8.0, the GPU has %d.%d: "
            "use gram, whose are of fp16, or run.muon_products: host",
            have / 10, have % 10);
    if (!target->gpu || have >= 80 || (!key && !cudnn))
        return 0;
    return iz_text_refuse(
        err, "%s: needs compute capability 8.0, the GPU has %d.%d: use %s",
        key ? key : cudnn, have / 10, have % 10,
        key ? "fp16.enabled or fp32, or run.device: cpu" : "own");
}

/* Of the tokens that a task has, whose numbers are of 32 bits. */
static int check_rows(const struct iz_config *c, const struct iz_model *m,
                      FILE *err)
{
    int64_t slices = max64(c->run.slices, 1), most = INT32_MAX;
    if (c->micro_batch / slices * m->tokens <= most)
        return 0;
    return iz_text_refuse(
        err,
        "train_micro_batch_size_per_gpu: %d: in %" PRId64
        " slice%s of samples of %d tokens a task has more than %" PRId64
        " tokens: set %" PRId64 " or more slices",
        c->micro_batch, slices, slices > 1 ? "s" : "", m->tokens, most,
        most / m->tokens * slices);
}

int iz_plan_check(const struct iz_config *c, const struct iz_model *m,
                  const struct iz_target *target, int ranks, FILE *err)
{
    int s = check_rows(c, m, err);
    if (!s)
        s = iz_rules_check_sparse(m, c, target->gpu, err);
    if (!s)
        s = iz_rules_check_matrices(m, c, err);
    return s ? s : check_target(c, target, ranks, err);
}

/* A chunk of all tokens of a sample is none.  The last unit reads pairs whole,
 * and so where it computes. */
static void set_numerics(struct iz_target *t, const struct iz_run_config *c,
                         const struct iz_model *m, bool boundaries_apart)
{
    struct iz_numerics *n = &t->numerics;
    n->tf32 = c->tf32;
    n->cudnn = t->gpu && c->gpu_attention == IZ_ATTENTION_CUDNN;
    n->cudnn_bwd = t->gpu && c->gpu_attention_backward == IZ_ATTENTION_CUDNN;
    n->chunk_rows = c->sequence_chunk > 0 && c->sequence_chunk < m->tokens
                        ? c->sequence_chunk
                        : 0;
    n->host_boundaries =
        t->gpu && n->chunk_rows && boundaries_apart && !m->preference;
    n->logits_bytes =
        c->gpu_logits_bytes ? c->gpu_logits_bytes : IZ_LOGITS_BYTES;
}

int iz_plan_make(struct iz_plan *p, const struct iz_config *c,
                 const struct iz_model *m, int ranks, int rank,
                 const struct iz_target *target)
{
    memset(p, 0, sizeof(*p));
    if (!iz_sum_possible(c, ranks) || !divides(c->run.sum_group, ranks) ||
        !divides(c->zero.hpz_partition, ranks))
        return -EINVAL;
    p->ranks = ranks;
    p->rank = rank;
    p->target = *target;
    p->act.boundary_home = c->boundary_path[0]    ? IZ_HOME_NVME
                           : c->cpu_checkpointing ? IZ_HOME_CPU
                                                  : IZ_HOME_NONE;
    set_numerics(&p->target, &c->run, m, p->act.boundary_home != IZ_HOME_NONE);
    p->n_units = m->n_units;
    p->unit = iz_take(m->n_units, sizeof(*p->unit), "the plan");
    p->ring = iz_take(m->n_units + 1, sizeof(*p->ring), "the plan");
    p->cost = iz_take(m->n_units, sizeof(*p->cost), "the plan");
    plan_schedule(p, c);
    iz_plan_stage(p, c);
    for (int u = 0; u < m->n_units; u++)
        if (iz_unit_ties_trained(m, u))
            p->unit[m->unit[u].tied_unit].ties++;
    for (int u = 0; u < m->n_units; u++)
        plan_unit(p, c, m, u);
    iz_plan_split(p, c);
    iz_plan_find_matrices(p, c, m);
    iz_plan_rings(p, c);
    while (p->first_trained + 1 < m->n_units && !p->unit[p->first_trained].n)
        p->first_trained++;
    plan_costs(p, m);
    plan_sums(p);
    p->zero.early = c->dtype != IZ_F16 && c->gradient_clipping == 0;
    iz_plan_list(p, c, m);
    iz_plan_recompute(p, m,
                      c->run.recompute == IZ_RECOMPUTE_AUTO ? IZ_RECOMPUTE_FULL
                                                            : c->run.recompute);
    return 0;
}

void iz_plan_clear(struct iz_plan *p)
{
    free(p->unit);
    free(p->ring);
    free(p->cost);
    free(p->matrices.list);
    free(p->matrices.stack);
    free(p->places.list);
    memset(p, 0, sizeof(*p));
}

/* Unless it is sparse, all rows of a table are gathered, reduced and updated,
 * whether a step reads them or not. */
static void print_tables(const struct iz_plan *p, const struct iz_model *m,
                         FILE *out)
{
    int64_t rows = m->table_rows, samples = p->samples * p->slices;
    int64_t read = samples * p->micro_batches * p->ranks * m->table_reads;
    bool dense = false;
    for (int u = 0; u < p->n_units; u++)
        dense |= m->unit[u].table_reads && !p->unit[u].rows;
    const char *what = !p->touched.reads ? "all"
                       : dense           ? "these and whole dense tables"
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
    static const char *const boundaries[] = {
        [IZ_HOME_NONE] = "",
        [IZ_HOME_CPU] = ", boundaries on the host",
        [IZ_HOME_NVME] = ", boundaries on nvme"};
    int64_t n = 0, frozen = 0, quant = 0, quant_bytes = 0;
    enum iz_quant format = IZ_QUANT_NONE;
    for (int u = 0; u < p->n_units; u++) {
        n += p->unit[u].n;
        frozen += p->unit[u].frozen.n + p->unit[u].quant.n;
        quant += p->unit[u].quant.n;
        if (p->unit[u].quant.n)
            format = p->unit[u].quant.format;
        quant_bytes += 4 * p->unit[u].quant.words.padded;
    }
    fprintf(out, "plan: %s, %.2fM parameters", m->name,
            (double)(n + frozen) / 1e6);
    if (frozen)
        fprintf(out, " (%.2fM trained)", (double)n / 1e6);
    fprintf(out, " in %d units, %d rank%s, %s, activations %s%s\n", m->n_units,
            p->ranks, p->ranks > 1 ? "s" : "", iz_dtype_name(p->param_type),
            !iz_plan_recomputed(p)                     ? "kept"
            : p->bytes.b[IZ_TIER_DEVICE][IZ_MEM_SAVED] ? "kept in part"
                                                       : "recomputed",
            boundaries[p->act.boundary_home]);
    fprintf(out,
            "      %d micro-batch%s a step, %d at a time, %d slice%s of %d "
            "sample%s; %d worker%s; ring of %d units\n",
            p->micro_batches, p->micro_batches > 1 ? "es" : "", p->wave,
            p->slices, p->slices > 1 ? "s" : "", p->samples,
            p->samples > 1 ? "s" : "", p->target.workers,
            p->target.workers > 1 ? "s" : "", p->ring[0].params);
    if (quant)
        fprintf(out,
                "      %.2fM of the parameters are in %s: %.2f MiB on all "
                "ranks together, %.2f bits each\n",
                (double)quant / 1e6, iz_quant_name(format),
                iz_units_mib(quant_bytes),
                8 * (double)quant_bytes / (double)quant);
    iz_plan_recompute_print(p, m, out);
    if (p->ranks > 1 &&
        (p->micro_batches > 1 || iz_sum_group(&p->sum) < p->ranks)) {
        fprintf(out, "      gradients are added over ");
        iz_sum_order_print(&p->sum, out);
        fprintf(out, "\n");
    }
    if (p->zero.group < p->ranks)
        fprintf(out,
                "      every %d ranks have a copy of the parameters: a fetch "
                "does not leave them\n",
                p->zero.group);
    if (p->zero.sums_on_gpu && p->micro_batches > 1)
        fprintf(out, "      the GPU adds the micro-batches; their sums come "
                     "down once a step\n");
    if (m->table_rows)
        print_tables(p, m, out);
    iz_plan_print_attention(p, out);
    iz_plan_split_print(p, out);
    iz_plan_matrices_print(p, out);
    iz_bytes_print(&p->bytes, out);
}
