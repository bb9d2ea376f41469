/* SPDX-License-Identifier: Apache-2.0 */
/* Which matrices are updated as such, where they lie in their units, and which
 * rank makes the update of each; see plan.h. */
#include <stdlib.h>

#include "codelets/base/int64.h"
#include "codelets/base/take.h"
#include "codelets/ops/orthogonal.h"
#include "runtime/plan/matrices.h"

static int matrices_of(const struct iz_param *p)
{
    return p->by_matrix && !p->frozen ? (int)iz_param_matrices(p) : 0;
}

struct iz_orthogonal iz_plan_orthogonal(const struct iz_plan *p,
                                        const struct iz_plan_matrix *a,
                                        float *unit)
{
    return (struct iz_orthogonal){.p = unit ? unit + a->first : NULL,
                                  .rows = a->rows,
                                  .cols = a->cols,
                                  .stride = a->stride,
                                  .steps = p->matrices.steps,
                                  .gram = p->matrices.gram,
                                  .scale = a->scale};
}

/* Matrix i of a stack of a parameter, which begins at `at` in its unit. */
static struct iz_plan_matrix
matrix_of(const struct iz_param *p, const struct iz_hyper *o, int i, int64_t at)
{
    struct iz_plan_matrix a = {.first = at,
                               .rows = p->out_rows ? p->outputs[i] : p->rows,
                               .cols = p->out_rows ? p->cols : p->outputs[i],
                               .stride = p->cols};
    for (int k = 0; k < i; k++)
        a.first += p->outputs[k] * (p->out_rows ? p->cols : 1);
    a.scale =
        iz_hyper_shape_scale(o, p->outputs[i], p->out_rows ? p->cols : p->rows);
    return a;
}

/* What a dry run counts, or counted for one of the last few.  before: matrices
 * before it. */
static void count_matrix(struct iz_plan *p, struct iz_plan_matrix *a,
                         int before)
{
    for (int k = 1; k <= IZ_STACKED && k <= before; k++)
        if (a[-k].rows == a->rows && a[-k].cols == a->cols &&
            a[-k].stride == a->stride) {
            a->flops = a[-k].flops;
            a->bytes = a[-k].bytes;
            return;
        }
    struct iz_exec x =
        iz_exec_dry(p->matrices.on_gpu ? IZ_CUDA : IZ_CPU, IZ_F32);
    struct iz_orthogonal m = iz_plan_orthogonal(p, a, NULL);
    x.numerics = p->target.numerics;
    iz_orthogonal(&x, &m);
    a->flops = x.cost.flops;
    a->bytes = x.cost.bytes;
    p->matrices.work_bytes = max64(p->matrices.work_bytes, x.work.peak);
}

/* Those with the most flops first; of equal ones in their order. */
static int by_flops(const void *a, const void *b)
{
    const struct iz_plan_stack *x = *(struct iz_plan_stack *const *)a;
    const struct iz_plan_stack *y = *(struct iz_plan_stack *const *)b;
    if (x->flops != y->flops)
        return x->flops < y->flops ? 1 : -1;
    return x < y ? -1 : x > y;
}

/* Ranks share a unit: the next one waits for all of it.  Where they are equal
 * there, the one with less in all takes more.  load: of this unit, then all. */
static void choose_owners(struct iz_plan_stack *stack, int n, int ranks,
                          double *load, struct iz_plan_stack **order)
{
    double *all = load + ranks;
    for (int i = 0; i < n; i++)
        order[i] = &stack[i];
    qsort(order, (size_t)n, sizeof(struct iz_plan_stack *), by_flops);
    for (int r = 0; r < ranks; r++)
        load[r] = 0;
    for (int i = 0; i < n; i++) {
        int best = 0;
        for (int r = 1; r < ranks; r++)
            if (load[r] < load[best] ||
                (load[r] == load[best] && all[r] < all[best]))
                best = r;
        load[best] += order[i]->flops;
        all[best] += order[i]->flops;
        order[i]->owner = best;
    }
}

/* The stacks of a parameter that begins at `at` in its unit. */
static void add_param(struct iz_plan *p, const struct iz_hyper *o,
                      const struct iz_param *q, struct iz_plan_unit *g,
                      int64_t at)
{
    struct iz_plan_matrix *a = p->matrices.list + g->matrix;
    int stacks = q->times ? (int)q->times : 1, n = matrices_of(q) / stacks;
    int64_t elems = q->rows / stacks * q->cols;
    for (int s = 0; n && s < stacks; s++, at += elems) {
        int to = g->stack + g->stacks++;
        p->matrices.stack[to] =
            (struct iz_plan_stack){.begin = at, .end = at + elems};
        for (int i = 0; i < n; i++, g->matrices++) {
            a[g->matrices] = matrix_of(q, o, i, at);
            a[g->matrices].stack = to;
            count_matrix(p, &a[g->matrices], g->matrices);
            p->matrices.stack[to].flops += a[g->matrices].flops;
        }
    }
}

static void add_unit(struct iz_plan *p, const struct iz_config *c,
                     const struct iz_unit *unit, struct iz_plan_unit *g,
                     double *load, struct iz_plan_stack **order)
{
    struct iz_plan_stack *stack = p->matrices.stack + p->matrices.stacks;
    int64_t at = 0;
    g->matrix = p->matrices.n;
    g->stack = p->matrices.stacks;
    for (int i = 0; i < unit->n_params; i++) {
        const struct iz_param *q = &unit->param[i];
        add_param(p, &c->optimizer, q, g, at);
        at += q->frozen ? 0 : q->rows * q->cols;
    }
    p->matrices.n += g->matrices;
    p->matrices.stacks += g->stacks;
    if (!g->matrices)
        return;
    choose_owners(stack, g->stacks, p->ranks, load, order);
    p->matrices.most =
        p->matrices.most > g->matrices ? p->matrices.most : g->matrices;
    p->matrices.chunks =
        p->matrices.chunks > g->chunks ? p->matrices.chunks : g->chunks;
    p->matrices.elems = max64(p->matrices.elems, g->padded);
    p->matrices.buffers = p->matrices.buffers < 2 ? p->matrices.buffers + 1 : 2;
    for (int i = 0; i < g->stacks; i++)
        p->matrices.flops += stack[i].owner == p->rank ? stack[i].flops : 0;
}

void iz_plan_find_matrices(struct iz_plan *p, const struct iz_config *c,
                           const struct iz_model *m)
{
    int n = 0;
    bool gpu = p->target.gpu;
    bool states_on_gpu = gpu && p->zero.state.home == IZ_HOME_NONE;
    p->matrices.steps = c->optimizer.ns_steps;
    p->matrices.gram = c->optimizer.ns_method == IZ_NS_GRAM;
    p->matrices.on_gpu = gpu && c->run.muon_products != IZ_MUON_HOST;
    p->matrices.on_device =
        gpu && (states_on_gpu || p->zero.split || p->matrices.on_gpu);
    p->matrices.on_host = !states_on_gpu || !p->matrices.on_gpu || p->ranks > 1;
    for (int u = 0; u < m->n_units; u++)
        for (int i = 0; i < m->unit[u].n_params; i++)
            n += matrices_of(&m->unit[u].param[i]);
    if (!n)
        return;
    double *load = iz_take(2 * (int64_t)p->ranks, sizeof(*load), "matrices");
    struct iz_plan_stack **order =
        iz_take(n, sizeof(struct iz_plan_stack *), "matrices");
    p->matrices.list = iz_take(n, sizeof(*p->matrices.list), "matrices");
    p->matrices.stack = iz_take(n, sizeof(*p->matrices.stack), "matrices");
    for (int u = 0; u < m->n_units; u++)
        add_unit(p, c, &m->unit[u], &p->unit[u], load, order);
    free(load);
    free(order);
}

/* ---- states of elements ---- */

/* Whole blocks of a stack, [*begin, *end); false: there are none. */
static bool whole_blocks(const struct iz_plan *p, const struct iz_plan_unit *g,
                         int i, int64_t *begin, int64_t *end)
{
    const struct iz_plan_stack *a = p->matrices.stack + g->stack + i;
    *begin = round_up(a->begin, IZ_MOMENT_BLOCK);
    *end = a->end - a->end % IZ_MOMENT_BLOCK;
    return *begin < *end;
}

int64_t iz_plan_lacks(const struct iz_plan *p, const struct iz_plan_unit *g,
                      int64_t at)
{
    int64_t n = 0, begin, end;
    for (int i = 0; i < g->stacks; i++)
        if (whole_blocks(p, g, i, &begin, &end))
            n += max64(min64(at, end) - begin, 0);
    return n;
}

bool iz_plan_lacks_from(const struct iz_plan *p, const struct iz_plan_unit *g,
                        int64_t at, int64_t *end)
{
    int64_t from, to;
    *end = INT64_MAX;
    for (int i = 0; i < g->stacks; i++) {
        if (!whole_blocks(p, g, i, &from, &to) || at >= to)
            continue;
        *end = at < from ? from : to;
        return at >= from;
    }
    return false;
}

int64_t iz_plan_chunk_lacks(const struct iz_plan *p,
                            const struct iz_plan_unit *g, int chunk)
{
    int64_t at = chunk * g->chunk, n = min64(g->chunk, g->owned - at);
    int64_t least = g->matrices ? n : 0;
    for (int q = 0; q < p->ranks && g->matrices; q++) {
        int64_t first = at + (p->zero.state.whole ? 0 : q * g->shard);
        least = min64(least, iz_plan_lacks(p, g, first + n) -
                                 iz_plan_lacks(p, g, first));
    }
    return least;
}

int64_t iz_plan_host_scratch(const struct iz_plan *p)
{
    return p->target.gpu && !p->matrices.on_gpu ? p->matrices.work_bytes : 0;
}

void iz_plan_matrices_print(const struct iz_plan *p, FILE *out)
{
    const struct iz_plan_matrices *a = &p->matrices;
    if (a->n)
        fprintf(out,
                "      %d matrices are updated as such%s: %.3g Gflop a step on "
                "rank %d, %d unit%s at a time\n",
                a->n,
                !p->target.gpu ? ""
                : a->on_gpu    ? " on the GPU"
                               : " on the host",
                a->flops / 1e9, p->rank, a->buffers, a->buffers > 1 ? "s" : "");
}

static int64_t bytes_of_update(const struct iz_plan_matrix *a)
{
    int64_t side = min64(a->rows, a->cols);
    return (a->rows * a->cols + 2 * side * side) * (int64_t)sizeof(float);
}

/* Whose update takes most, of all units; its unit in *unit. */
static const struct iz_plan_matrix *largest_matrix(const struct iz_plan *p,
                                                   int *unit)
{
    const struct iz_plan_matrix *best = p->matrices.list;
    for (int u = 0; u < p->n_units; u++)
        for (int i = 0; i < p->unit[u].matrices; i++) {
            const struct iz_plan_matrix *a =
                &p->matrices.list[p->unit[u].matrix + i];
            if (a != best && bytes_of_update(a) <= bytes_of_update(best))
                continue;
            best = a;
            *unit = u;
        }
    return best;
}

void iz_plan_matrices_refuse(const struct iz_plan *p, const struct iz_model *m,
                             int64_t left, FILE *err)
{
    int u = 0, i = 0;
    int64_t work = p->matrices.work_bytes;
    int64_t beside = p->act.scratch_bytes - round_up(work, 64);
    left = left / p->tasks_at_once - beside;
    if (p->target.gpu || !p->matrices.n || left <= 0 || left >= work ||
        beside != p->act.save_bytes + IZ_SCRATCH_SPARE)
        return;
    const struct iz_plan_matrix *a = largest_matrix(p, &u);
    const struct iz_param *q = m->unit[u].param;
    for (int64_t at = 0;; at += q[i].frozen ? 0 : q[i].rows * q[i].cols, i++)
        if (at == p->matrices.stack[a->stack].begin && !q[i].frozen)
            break;
    fprintf(err,
            "izar: %s: Muon updates a matrix of %lld x %lld as such, which "
            "takes %.2f MiB in each of %d workers, and %.2f MiB would fit: "
            "with {\"match\": \"%s\", \"use_muon\": false} in "
            "\"parameters\" it is AdamW's\n",
            q[i].name, (long long)a->rows, (long long)a->cols,
            (double)work / (1 << 20), p->tasks_at_once,
            (double)left / (1 << 20), q[i].name);
}
