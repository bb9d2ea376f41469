/* SPDX-License-Identifier: Apache-2.0 */
/* Which matrices are updated as such, where they lie in their units, and which
 * rank makes the update of each; see plan.h. */
#include <stdlib.h>

#include "codelets/base/int64.h"
#include "codelets/base/take.h"
#include "codelets/ops/orthogonal.h"
#include "runtime/plan/matrices.h"
#include "runtime/plan/unit_sizes.h"

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

/* Matrix i of a parameter which begins at `at` in its unit.  What belongs
 * together is the parameter, or what it has of an expert. */
static struct iz_plan_matrix
matrix_of(const struct iz_param *p, const struct iz_hyper *o, int i, int64_t at)
{
    int64_t times = p->times ? p->times : 1, rows = p->rows / times;
    int n = (int)(iz_param_matrices(p) / times);
    at += i / n * rows * p->cols;
    i %= n;
    struct iz_plan_matrix a = {.begin = at,
                               .end = at + rows * p->cols,
                               .first = at,
                               .rows = p->out_rows ? p->outputs[i] : p->rows,
                               .cols = p->out_rows ? p->cols : p->outputs[i],
                               .stride = p->cols,
                               .owner = -1};
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
    a->flops = x.flops;
    a->bytes = x.bytes;
    p->matrices.work_bytes = max64(p->matrices.work_bytes, x.work.peak);
}

/* Matrices of one parameter, or of an expert, stay together: theirs is one
 * range, which begins with this one. */
struct stack {
    struct iz_plan_matrix *first;
    double flops;
};

/* Those with the most flops first; of equal ones in their order. */
static int by_flops(const void *a, const void *b)
{
    const struct stack *x = a, *y = b;
    if (x->flops != y->flops)
        return x->flops < y->flops ? 1 : -1;
    return x->first < y->first ? -1 : x->first > y->first;
}

/* Ranks share a unit: the next one waits for all of it.  Where they are equal
 * there, the one with less in all takes more.  load: of this unit, then all. */
static void choose_owners(struct iz_plan_matrix *a, int n, int ranks,
                          double *load, struct stack *stack)
{
    double *all = load + ranks;
    int stacks = 0;
    for (int i = 0; i < n; i++) {
        if (i == 0 || a[i].begin != a[i - 1].begin)
            stack[stacks++] = (struct stack){.first = &a[i]};
        stack[stacks - 1].flops += a[i].flops;
    }
    qsort(stack, (size_t)stacks, sizeof(*stack), by_flops);
    for (int r = 0; r < ranks; r++)
        load[r] = 0;
    for (struct stack *s = stack; s < stack + stacks; s++) {
        struct iz_plan_matrix *m = s->first;
        int best = 0;
        for (int r = 1; r < ranks; r++)
            if (load[r] < load[best] ||
                (load[r] == load[best] && all[r] < all[best]))
                best = r;
        load[best] += s->flops;
        all[best] += s->flops;
        for (; m < a + n && m->begin == s->first->begin; m++)
            m->owner = best;
    }
}

static void add_unit(struct iz_plan *p, const struct iz_config *c,
                     const struct iz_unit *unit, struct iz_plan_unit *g,
                     double *load, struct stack *stack)
{
    struct iz_plan_matrix *a = p->matrices.list + p->matrices.n;
    int64_t at = 0;
    for (int i = 0; i < unit->n_params; i++) {
        const struct iz_param *q = &unit->param[i];
        for (int k = 0; k < matrices_of(q); k++) {
            a[g->matrices] = matrix_of(q, &c->optimizer, k, at);
            count_matrix(p, &a[g->matrices], g->matrices);
            g->matrices++;
        }
        at += q->frozen ? 0 : q->rows * q->cols;
    }
    g->matrix = p->matrices.n;
    p->matrices.n += g->matrices;
    if (!g->matrices)
        return;
    choose_owners(a, g->matrices, p->ranks, load, stack);
    p->matrices.most =
        p->matrices.most > g->matrices ? p->matrices.most : g->matrices;
    p->matrices.chunks =
        p->matrices.chunks > g->chunks ? p->matrices.chunks : g->chunks;
    p->matrices.elems = max64(p->matrices.elems, g->padded);
    p->matrices.buffers = p->matrices.buffers < 2 ? p->matrices.buffers + 1 : 2;
    for (int i = 0; i < g->matrices; i++)
        p->matrices.flops += a[i].owner == p->rank ? a[i].flops : 0;
}

void iz_plan_find_matrices(struct iz_plan *p, const struct iz_config *c,
                           const struct iz_model *m)
{
    int n = 0;
    bool gpu = p->target.gpu;
    bool near = gpu && p->zero.state.home == IZ_HOME_NONE;
    p->matrices.steps = c->optimizer.ns_steps;
    p->matrices.gram = c->optimizer.ns_method == IZ_NS_GRAM;
    p->matrices.on_gpu = gpu && c->run.muon_products != IZ_MUON_HOST;
    p->matrices.on_device =
        gpu && (near || p->zero.split || p->matrices.on_gpu);
    p->matrices.on_host = !near || !p->matrices.on_gpu || p->ranks > 1;
    for (int u = 0; u < m->n_units; u++)
        for (int i = 0; i < m->unit[u].n_params; i++)
            n += matrices_of(&m->unit[u].param[i]);
    if (!n)
        return;
    double *load = iz_take(2 * (int64_t)p->ranks, sizeof(*load), "matrices");
    struct stack *stack = iz_take(n, sizeof(*stack), "matrices");
    p->matrices.list = iz_take(n, sizeof(*p->matrices.list), "matrices");
    for (int u = 0; u < m->n_units; u++)
        add_unit(p, c, &m->unit[u], &p->unit[u], load, stack);
    free(load);
    free(stack);
}

/* ---- states of elements ---- */

/* Whole blocks of a matrix's parameter, [*begin, *end); false: of a matrix
 * before it, or there are none. */
static bool whole_blocks(const struct iz_plan *p, const struct iz_plan_unit *g,
                         int i, int64_t *begin, int64_t *end)
{
    const struct iz_plan_matrix *a = p->matrices.list + g->matrix + i;
    *begin = round_up(a->begin, IZ_MOMENT_BLOCK);
    *end = a->end - a->end % IZ_MOMENT_BLOCK;
    return *begin < *end && (i == 0 || a[-1].begin != a->begin);
}

int64_t iz_plan_lacks(const struct iz_plan *p, const struct iz_plan_unit *g,
                      int64_t at)
{
    int64_t n = 0, begin, end;
    for (int i = 0; i < g->matrices; i++)
        if (whole_blocks(p, g, i, &begin, &end))
            n += max64(min64(at, end) - begin, 0);
    return n;
}

bool iz_plan_lacks_from(const struct iz_plan *p, const struct iz_plan_unit *g,
                        int64_t at, int64_t *end)
{
    int64_t from, to;
    *end = INT64_MAX;
    for (int i = 0; i < g->matrices; i++) {
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
        if (at == a->begin && !q[i].frozen)
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
