/* SPDX-License-Identifier: Apache-2.0 */
/* The router of a mixture of experts: which rows go where. */
#include "codelets/ops/routes.h"

#include <math.h>
#include <string.h>

#include "codelets/base/build.h"
#include "codelets/ops/gpu_ops.h"
#include "codelets/ops/row_math.h"

enum { PARTS = 64 }; /* of what a router on a GPU tells */

static void check_router(const struct iz_routes *r)
{
    iz_routes_check(r);
    assert(r->p.rows == r->place.rows && r->p.cols == r->end.cols);
    assert(r->groups <= IZ_GROUPS_MOST);
    assert(r->lse.rows == r->place.rows);
}

static double routes_bytes(const struct iz_routes *r)
{
    return (double)(iz_view_bytes(r->p) + iz_view_bytes(r->weight) +
                    iz_view_bytes(r->place) + iz_view_bytes(r->chosen));
}

IZ_SIMD static void sigmoid_rows(float *p, float *lse, int64_t m, int64_t e)
{
    for (int64_t i = 0; i < m * e; i++)
        p[i] = 1 / (1 + iz_math_expf(-p[i]));
    memset(lse, 0, (size_t)m * sizeof(*lse));
}

IZ_SIMD static void softmax_rows(float *p, float *lse, int64_t m, int64_t e)
{
    for (int64_t t = 0; t < m; t++, p += e) {
        float most = iz_row_max(p, e), sum = iz_row_exp(p, most, e);
        float by = 1 / sum;
        for (int64_t i = 0; i < e; i++)
            p[i] *= by;
        lse[t] = most + (float)log((double)sum);
    }
}

/* The largest from `from` on and before `to` that is not taken.  Where nothing
 * can be compared (NaN), the first that is left. */
static int64_t best_of(const float *p, const bool *taken, int64_t from,
                       int64_t to)
{
    int64_t best = -1;
    for (int64_t i = from; i < to; i++)
        if (!taken[i] && (best < 0 || p[i] > p[best]))
            best = i;
    return best;
}

/* Takes all experts but those of the kept groups. */
static void take_groups(bool *taken, const float *p, int64_t e,
                        const struct iz_routes *r)
{
    int64_t each = e / r->groups;
    bool kept[IZ_GROUPS_MOST] = {false};
    float sum[IZ_GROUPS_MOST];
    for (int64_t g = 0; g < r->groups; g++) {
        int64_t first = best_of(p, taken, g * each, (g + 1) * each);
        taken[first] = true;
        sum[g] = p[first] + p[best_of(p, taken, g * each, (g + 1) * each)];
        taken[first] = false;
    }
    for (int64_t j = 0; j < r->kept; j++)
        kept[best_of(sum, kept, 0, r->groups)] = true;
    for (int64_t i = 0; i < e; i++)
        taken[i] = !kept[i / each];
}

/* The k largest of a row, in ascending order of their numbers: always k
 * different ones. */
static void choose_experts(int32_t *chosen, const float *p,
                           const struct iz_routes *r)
{
    int64_t e = r->p.cols, k = r->weight.cols;
    bool taken[IZ_EXPERTS_MOST] = {false}, here[IZ_EXPERTS_MOST] = {false};
    float score[IZ_EXPERTS_MOST];
    for (int64_t i = 0; i < e; i++)
        score[i] = p[i] + (r->choice.rows ? ((float *)r->choice.p)[i] : 0);
    if (r->groups > 1)
        take_groups(taken, score, e, r);
    for (int64_t j = 0; j < k; j++) {
        int64_t best = best_of(score, taken, 0, e);
        taken[best] = here[best] = true;
    }
    for (int64_t i = 0; i < e; i++)
        if (here[i])
            *chosen++ = (int32_t)i;
}

static float weight_scale(const struct iz_routes *r)
{
    return r->scale != 0 ? r->scale : 1;
}

static void weigh_chosen(float *weight, const int32_t *chosen, const float *p,
                         const struct iz_routes *r)
{
    int64_t k = r->weight.cols;
    float sum = 0;
    for (int64_t j = 0; j < k; j++)
        sum += p[chosen[j]];
    for (int64_t j = 0; j < k; j++)
        weight[j] = (r->normalise ? p[chosen[j]] / sum : p[chosen[j]]) *
                    weight_scale(r);
}

/* Rows by expert: counted, then dealt in ascending order of rows.  end[i] goes
 * from the first row of expert i to behind its last. */
static void place_rows(int32_t *place, int32_t *end, const int32_t *chosen,
                       int64_t n, int64_t e)
{
    int32_t at = 0;
    memset(end, 0, (size_t)e * sizeof(*end));
    for (int64_t i = 0; i < n; i++)
        end[chosen[i]]++;
    for (int64_t i = 0; i < e; i++) {
        int32_t rows = end[i];
        end[i] = at;
        at += rows;
    }
    for (int64_t i = 0; i < n; i++)
        place[i] = end[chosen[i]]++;
}

void iz_route_fwd(struct iz_exec *x, const struct iz_routes *r)
{
    int64_t m = r->p.rows, e = r->p.cols, k = r->weight.cols;
    float *p = r->p.p, *weight = r->weight.p;
    int32_t *chosen = r->chosen.p;
    int64_t mark = iz_exec_mark(x);
    struct iz_view scratch =
        iz_exec_work(x, IZ_I32, 1, x->backend == IZ_CUDA ? e : 0);
    check_router(r);
    iz_exec_count(x, 0, routes_bytes(r));
    if (iz_exec_runs(x, IZ_CUDA))
        iz_route_fwd_cuda(x, r, scratch);
    iz_exec_release(x, mark);
    if (!iz_exec_runs(x, IZ_CPU))
        return;
    (r->sigmoid ? sigmoid_rows : softmax_rows)(p, r->lse.p, m, e);
    for (int64_t t = 0; t < m; t++) {
        choose_experts(chosen + t * k, p + t * e, r);
        weigh_chosen(weight + t * k, chosen + t * k, p + t * e, r);
    }
    place_rows(r->place.p, r->end.p, chosen, m * k, e);
}

static int64_t rows_of(const struct iz_routes *r, int64_t i, int64_t *first)
{
    return iz_routes_rows(r->end.p, i, 1, first);
}

/* E times the sum over experts of their rows and of their p: B, but for the
 * number of rows. */
static double rows_by_mean(const struct iz_routes *r)
{
    int64_t m = r->p.rows, e = r->p.cols, first;
    const float *p = r->p.p;
    double mean[IZ_EXPERTS_MOST] = {0}, sum = 0;
    for (int64_t t = 0; t < m; t++)
        for (int64_t i = 0; i < e; i++)
            mean[i] += (double)p[t * e + i];
    for (int64_t i = 0; i < e; i++)
        sum += (double)rows_of(r, i, &first) * mean[i];
    return sum * (double)e;
}

void iz_aux_add(struct iz_aux *to, const struct iz_aux *t)
{
    to->loss += t->loss;
    to->balance += t->balance;
    to->z += t->z;
    to->routers += t->routers;
    to->least = fmin(to->least, t->least);
    to->most = fmax(to->most, t->most);
    to->pairs += t->pairs;
    for (int i = 0; i < IZ_PAIR_FIGURES; i++)
        to->pair[i] += t->pair[i];
}

void iz_route_aux(struct iz_exec *x, struct iz_aux *aux,
                  const struct iz_routes *r, double balance, double z)
{
    int64_t m = r->p.rows, e = r->p.cols, first;
    double even = (double)(m * r->weight.cols) / (double)e, z_sum = 0;
    int64_t mark = iz_exec_mark(x), wide = sizeof(double);
    struct iz_view scratch =
        iz_exec_work(x, IZ_U8, wide, x->backend == IZ_CUDA ? 2 * PARTS : 0);
    check_router(r);
    iz_exec_count(x, 0, (double)iz_view_bytes(r->p));
    if (iz_exec_runs(x, IZ_CUDA) && aux)
        iz_route_aux_cuda(x, aux, r, balance, z, scratch);
    iz_exec_release(x, mark);
    if (!iz_exec_runs(x, IZ_CPU) || !aux)
        return;
    for (int64_t t = 0; t < m; t++)
        z_sum += pow((double)((float *)r->lse.p)[t], 2);
    double b = rows_by_mean(r) / ((double)m * (double)m);
    aux->loss += balance * b + z * z_sum / (double)m;
    aux->balance += b;
    aux->z += z_sum / (double)m;
    aux->routers++;
    for (int64_t i = 0; i < e; i++) {
        double load = (double)rows_of(r, i, &first) / even;
        aux->least = fmin(aux->least, load);
        aux->most = fmax(aux->most, load);
    }
}

/* dp of a row, without that of the balance: through the weights of the chosen.
 */
static void chosen_bwd(float *dp, const float *dweight, const float *weight,
                       const float *p, const int32_t *chosen,
                       const struct iz_routes *r)
{
    int64_t k = r->weight.cols;
    float sum = 0, dot = 0, scale = weight_scale(r);
    for (int64_t j = 0; j < k; j++) {
        sum += p[chosen[j]];
        dot += dweight[j] * weight[j];
    }
    for (int64_t j = 0; j < k; j++)
        dp[chosen[j]] += r->normalise ? (scale * dweight[j] - dot) / sum
                                      : scale * dweight[j];
}

/* The same of a sigmoid: d, which holds dp, becomes that of a row's logits. */
static void sigmoid_bwd(float *d, const float *p, int64_t e)
{
    for (int64_t i = 0; i < e; i++)
        d[i] *= p[i] * (1 - p[i]);
}

/* d, which holds dp, becomes the gradient of a row's logits. */
IZ_SIMD static void softmax_bwd(float *restrict d, const float *restrict p,
                                float dlse, int64_t e)
{
    float dot = 0;
#pragma omp simd reduction(+ : dot)
    for (int64_t i = 0; i < e; i++)
        dot += d[i] * p[i];
    for (int64_t i = 0; i < e; i++)
        d[i] = p[i] * (d[i] - dot + dlse);
}

void iz_route_bwd(struct iz_exec *x, struct iz_view dlogits,
                  struct iz_view dweight, const struct iz_routes *r,
                  float balance, float z)
{
    int64_t m = r->p.rows, e = r->p.cols, k = r->weight.cols, first;
    check_router(r);
    assert(dlogits.rows == m && dlogits.cols == e && dweight.cols == k);
    iz_exec_count(x, 0, routes_bytes(r) + (double)iz_view_bytes(dlogits));
    if (iz_exec_runs(x, IZ_CUDA))
        iz_route_bwd_cuda(x, dlogits, dweight, r, balance, z);
    if (!iz_exec_runs(x, IZ_CPU))
        return;
    float by = balance * (float)e / ((float)m * (float)m);
    for (int64_t t = 0; t < m; t++) {
        float *d = (float *)dlogits.p + t * e;
        const float *p = (float *)r->p.p + t * e;
        for (int64_t i = 0; i < e; i++)
            d[i] = balance != 0 ? by * (float)rows_of(r, i, &first) : 0;
        chosen_bwd(d, (float *)dweight.p + t * k, (float *)r->weight.p + t * k,
                   p, (int32_t *)r->chosen.p + t * k, r);
        if (r->sigmoid)
            sigmoid_bwd(d, p, e);
        else
            softmax_bwd(d, p, z * 2 * ((float *)r->lse.p)[t] / (float)m, e);
    }
}
