/* SPDX-License-Identifier: Apache-2.0 */
/* Which matrices are updated as such, where they lie in their units, and which
 * rank makes the update of each; see plan.h. */
#include <errno.h>
#include <stdlib.h>

#include "codelets/base/int64.h"
#include "codelets/ops/orthogonal.h"
#include "runtime/plan/plan.h"

static int matrices_of(const struct iz_param *p)
{
    int n = 0;
    while (p->by_matrix && !p->frozen && n < IZ_STACKED && p->outputs[n])
        n++;
    return n;
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

/* Matrix i of a parameter which begins at `at` in its unit. */
static struct iz_plan_matrix
matrix_of(const struct iz_param *p, const struct iz_hyper *o, int i, int64_t at)
{
    struct iz_plan_matrix a = {.begin = at,
                               .end = at + p->rows * p->cols,
                               .first = at,
                               .rows = p->out_rows ? p->outputs[i] : p->rows,
                               .cols = p->out_rows ? p->cols : p->outputs[i],
                               .stride = p->cols,
                               .owner = -1};
    for (int k = 0; k < i; k++)
        a.first += p->outputs[k] * (p->out_rows ? p->cols : 1);
    a.scale =
        iz_shape_scale_of(o, p->outputs[i], p->out_rows ? p->cols : p->rows);
    return a;
}

/* What a dry run counts. */
static void count_matrix(struct iz_plan *p, struct iz_plan_matrix *a)
{
    struct iz_exec x =
        iz_exec_dry(p->matrices.on_gpu ? IZ_CUDA : IZ_CPU, IZ_F32);
    struct iz_orthogonal m = iz_plan_orthogonal(p, a, NULL);
    x.bf16_products = p->target.bf16_products;
    iz_orthogonal(&x, &m);
    a->flops = x.flops;
    a->bytes = x.bytes;
    p->matrices.work_bytes = max64(p->matrices.work_bytes, x.work.peak);
}

/* Matrices of one parameter stay together: theirs is one range.  The flops of
 * the one that begins with matrix i. */
static double stack_flops(const struct iz_plan_matrix *a, int n, int i)
{
    double flops = 0;
    for (int k = i; k < n && a[k].begin == a[i].begin; k++)
        flops += a[k].flops;
    return flops;
}

/* The parameter with the most flops that has no owner yet; -1: all have. */
static int largest_stack(const struct iz_plan_matrix *a, int n)
{
    int best = -1;
    for (int i = 0; i < n; i++)
        if (a[i].owner < 0 && (i == 0 || a[i].begin != a[i - 1].begin) &&
            (best < 0 || stack_flops(a, n, i) > stack_flops(a, n, best)))
            best = i;
    return best;
}

/* Ranks share a unit: the next one waits for all of it.  Where they are equal
 * there, the one with less in all takes more.  load: of this unit, then all. */
static void choose_owners(struct iz_plan_matrix *a, int n, int ranks,
                          double *load)
{
    double *all = load + ranks;
    for (int r = 0; r < ranks; r++)
        load[r] = 0;
    for (int i; (i = largest_stack(a, n)) >= 0;) {
        double flops = stack_flops(a, n, i);
        int64_t begin = a[i].begin;
        int best = 0;
        for (int r = 1; r < ranks; r++)
            if (load[r] < load[best] ||
                (load[r] == load[best] && all[r] < all[best]))
                best = r;
        load[best] += flops;
        all[best] += flops;
        for (; i < n && a[i].begin == begin; i++)
            a[i].owner = best;
    }
}

static void add_unit(struct iz_plan *p, const struct iz_config *c,
                     const struct iz_unit *unit, struct iz_plan_unit *g,
                     double *load)
{
    struct iz_plan_matrix *a = p->matrices.list + p->matrices.n;
    int64_t at = 0;
    for (int i = 0; i < unit->n_params; i++) {
        const struct iz_param *q = &unit->param[i];
        for (int k = 0; k < matrices_of(q); k++) {
            a[g->matrices] = matrix_of(q, &c->optimizer, k, at);
            count_matrix(p, &a[g->matrices++]);
        }
        at += q->frozen ? 0 : q->rows * q->cols;
    }
    g->matrix = p->matrices.n;
    p->matrices.n += g->matrices;
    if (!g->matrices)
        return;
    choose_owners(a, g->matrices, p->ranks, load);
    p->matrices.most =
        p->matrices.most > g->matrices ? p->matrices.most : g->matrices;
    p->matrices.chunks =
        p->matrices.chunks > g->chunks ? p->matrices.chunks : g->chunks;
    p->matrices.elems = max64(p->matrices.elems, g->padded);
    p->matrices.buffers = p->matrices.buffers < 2 ? p->matrices.buffers + 1 : 2;
    for (int i = 0; i < g->matrices; i++)
        p->matrices.flops += a[i].owner == p->rank ? a[i].flops : 0;
}

int iz_plan_find_matrices(struct iz_plan *p, const struct iz_config *c,
                          const struct iz_model *m)
{
    int n = 0;
    bool gpu = p->target.gpu;
    bool near = gpu && p->zero.state_home == IZ_HOME_NONE;
    p->matrices.steps = c->optimizer.ns_steps;
    p->matrices.gram = c->optimizer.ns_method == IZ_NS_GRAM;
    p->matrices.on_gpu = gpu && c->run.muon_products != IZ_MUON_HOST;
    p->matrices.above = gpu && (near || p->zero.split || p->matrices.on_gpu);
    p->matrices.below = !near || !p->matrices.on_gpu || p->ranks > 1;
    for (int u = 0; u < m->n_units; u++)
        for (int i = 0; i < m->unit[u].n_params; i++)
            n += matrices_of(&m->unit[u].param[i]);
    if (!n)
        return 0;
    double *load = calloc(2 * (size_t)p->ranks, sizeof(*load));
    p->matrices.list = calloc((size_t)n, sizeof(*p->matrices.list));
    if (load && p->matrices.list)
        for (int u = 0; u < m->n_units; u++)
            add_unit(p, c, &m->unit[u], &p->unit[u], load);
    free(load);
    return load && p->matrices.list ? 0 : -ENOMEM;
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
        int64_t first = at + (p->zero.states_full ? 0 : q * g->shard);
        least = min64(least, iz_plan_lacks(p, g, first + n) -
                                 iz_plan_lacks(p, g, first));
    }
    return least;
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
