/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/machine/arithmetic.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "codelets/base/int64.h"
#include "codelets/ops/blas.h"
#include "codelets/ops/gemm16.h"
#include "codelets/ops/gemm_rate.h"
#include "codelets/ops/gpu_ops.h"
#include "runtime/base/hash.h"
#include "runtime/plan/plan.h"

/* A product that is timed: at most so many rows, and a matrix of at most so
 * many elements, with which it takes some milliseconds and MiB.  A larger
 * product has the rates of this one. */
#define ROWS_MOST 512
#define MATRIX_MOST (INT64_C(1) << 20)
#define LAYER_MOST (INT64_C(1) << 18) /* where several kernels are timed */

#define LEAST_GAIN 1.2 /* less is no reason to tell a user */

#define OWN_KERNELS "BLAS" /* the library's, whatever they are called */

/* What may go on in the place of a choice that a resumed run began with; NULL:
 * it did not. */
static const char *kept_or(const struct iz_config *c, const char *key,
                           const char *instead)
{
    return iz_config_is_kept(c, key) ? instead : NULL;
}

/* Refuses run.WORD if any rank has a reason against it.  kept: of kept_or; if
 * that is NULL, `advice` follows. */
static int refuse_word(struct iz_coll *coll, const char *word, const char *why,
                       const char *kept, const char *advice)
{
    int q = iz_coll_refuser(coll, why != NULL);
    if (q == coll->rank)
        fprintf(stderr, "izar: run.%s: rank %d: %s%s%s%s\n", word, q, why,
                kept ? "; this run began with it: " : advice, kept ? kept : "",
                kept ? " goes on with other bits" : "");
    return q < 0 ? 0 : -ENOTSUP;
}

/* ---- products on CPUs ---- */

/* The unit that most time goes into, or one like it: the middle one, but for
 * tables, from which rows are only read. */
static const struct iz_unit *middle_unit(const struct iz_model *m)
{
    int u = m->n_units / 2;
    while (u < m->n_units - 1 && m->unit[u].table_reads)
        u++;
    return &m->unit[u];
}

/* A layer like the model's: [rows,in] times [in,out]. */
struct layer_shape {
    int64_t rows, in, out;
};

/* The largest matrix of the middle unit, made smaller than `most` elements, and
 * what one task multiplies with it; rows 0: there is none. */
static struct layer_shape middle_layer(const struct iz_model *m, int samples,
                                       int64_t most)
{
    const struct iz_unit *u = middle_unit(m);
    if (!u->n_params)
        return (struct layer_shape){0};
    const struct iz_param *w = &u->param[0];
    for (int i = 1; i < u->n_params; i++)
        if (u->param[i].rows * u->param[i].cols > w->rows * w->cols)
            w = &u->param[i];
    struct layer_shape l = {.in = w->rows, .out = w->cols};
    l.rows =
        u->out_elems ? samples * u->out_elems / min64(l.in, l.out) : samples;
    while (l.in * l.out > most)
        *(l.in > l.out ? &l.in : &l.out) /= 2;
    l.rows = min64(max64(l.rows, 1), ROWS_MOST);
    return l;
}

/* How many times faster bf16 is than fp32; 0: not known. */
static double bf16_gain(const struct iz_model *m, int samples)
{
    struct layer_shape l = middle_layer(m, samples, MATRIX_MOST);
    return l.rows ? iz_rate_gemm16_gain((int)l.rows, (int)l.out, (int)l.in) : 0;
}

static int samples_of_task(const struct iz_config *c, int workers)
{
    int samples = c->micro_batch / (workers > 0 ? workers : 1);
    return samples > 0 ? samples : 1;
}

/* The kernels that are best on the slowest rank, or the user's.  Ranks whose
 * libraries take different ones have no common own ones. */
static void measure_kernels(struct iz_arithmetic *a, const char **name,
                            const struct iz_model *m, int samples,
                            struct iz_coll *coll)
{
    struct layer_shape l = middle_layer(m, samples, LAYER_MOST);
    enum { OWN = IZ_BLAS_KERNELS, USERS, NUMBERS };
    const char *own = iz_blas_kernels(0);
    int64_t mine[NUMBERS] = {[OWN] =
                                 (int64_t)iz_hash(own, (int64_t)strlen(own)),
                             [USERS] = iz_blas_is_users()};
    double rate[IZ_BLAS_KERNELS] = {0}, best = 0;
    if (l.rows)
        iz_blas_rates(rate, (int)l.rows, (int)l.in, (int)l.out);
    for (int i = 0; i < IZ_BLAS_KERNELS; i++)
        mine[i] = (int64_t)rate[i];
    int64_t *all = iz_agree_numbers(coll, mine, NUMBERS, "kernels");
    bool same = true, users = false;
    for (const int64_t *n = all; n < all + NUMBERS * coll->size; n += NUMBERS) {
        same = same && n[OWN] == all[OWN];
        users = users || n[USERS];
        for (int i = 0; i < IZ_BLAS_KERNELS; i++)
            rate[i] = fmin(rate[i], (double)n[i]);
    }
    free(all);
    rate[0] = same ? rate[0] : 0;
    for (int i = 1; i < IZ_BLAS_KERNELS; i++)
        best = fmax(best, rate[i]);
    if (users && rate[0] > 0 && best > LEAST_GAIN * rate[0])
        snprintf(a->note, sizeof(a->note),
                 "OPENBLAS_CORETYPE is set: without it products are %.1f times "
                 "as fast here",
                 best / rate[0]);
    int i = users ? 0 : iz_blas_best(rate);
    *name = i || same ? iz_blas_kernels(i) : OWN_KERNELS;
}

static int choose_kernels(struct iz_arithmetic *a, struct iz_config *c,
                          const struct iz_model *m,
                          const struct iz_arithmetic_for *on,
                          struct iz_coll *coll)
{
    bool open = iz_config_is_open(c, "run.cpu_kernels");
    const char *name = c->run.cpu_kernels;
    char word[64];
    if (on->gpu || !on->here)
        return 0;
    if (open)
        measure_kernels(a, &name, m, samples_of_task(c, on->workers), coll);
    bool here = iz_blas_take(name);
    snprintf(word, sizeof(word), "cpu_kernels: %s", name);
    int r =
        refuse_word(coll, word, here ? NULL : "this machine does not have them",
                    kept_or(c, "run.cpu_kernels", OWN_KERNELS), "; use auto");
    if (!r && open)
        snprintf(c->run.cpu_kernels, sizeof(c->run.cpu_kernels), "%s", name);
    return r;
}

static void measure_bf16(struct iz_arithmetic *a, const struct iz_config *c,
                         const struct iz_model *m, int workers,
                         struct iz_coll *coll)
{
    const char *missing = iz_gemm16_missing();
    double gain = missing ? 0 : bf16_gain(m, samples_of_task(c, workers));
    a->bf16_products = iz_coll_all_ok(coll, gain >= IZ_GEMM16_LEAST_GAIN);
    if (missing)
        snprintf(a->why, sizeof(a->why), "%s", missing);
    else if (gain == 0)
        snprintf(a->why, sizeof(a->why), "no product could be timed");
    else if (gain < IZ_GEMM16_LEAST_GAIN)
        snprintf(a->why, sizeof(a->why),
                 "in bf16 one of the model takes %.2f of the time here",
                 1 / gain);
    else if (!a->bf16_products)
        snprintf(a->why, sizeof(a->why), "another rank gains nothing by bf16");
}

static int choose_products(struct iz_arithmetic *a, struct iz_config *c,
                           const struct iz_model *m,
                           const struct iz_arithmetic_for *on,
                           struct iz_coll *coll)
{
    enum iz_product_type *t = &c->run.cpu_products;
    int r = 0;
    if (c->dtype != IZ_BF16 || on->gpu)
        return 0;
    if (*t == IZ_PRODUCTS_BF16) {
        r = refuse_word(coll, "cpu_products: bf16", iz_gemm16_missing(),
                        kept_or(c, "run.cpu_products", "fp32"), "");
        a->bf16_products = !r;
    }
    if (*t == IZ_PRODUCTS_AUTO)
        measure_bf16(a, c, m, on->workers, coll);
    *t = a->bf16_products ? IZ_PRODUCTS_BF16 : IZ_PRODUCTS_F32;
    return r;
}

/* ---- attention on a GPU ---- */

static enum iz_attention_by *attention_by(struct iz_config *c, bool back)
{
    return back ? &c->run.gpu_attention_backward : &c->run.gpu_attention;
}

int iz_arithmetic_no_cudnn(struct iz_arithmetic *a, struct iz_config *c,
                           struct iz_coll *coll, bool back, const char *why)
{
    static const char *const word[] = {"gpu_attention: cudnn",
                                       "gpu_attention_backward: cudnn"};
    static const char *const key[] = {"run.gpu_attention",
                                      "run.gpu_attention_backward"};
    struct iz_refusal *own = &a->attention_why[back];
    if (!a->attention_open[back])
        return refuse_word(coll, word[back], why, kept_or(c, key[back], "own"),
                           "; use own");
    int q = iz_coll_refuser(coll, why != NULL);
    if (q < 0)
        return 0;
    if (q == coll->rank)
        snprintf(own->why, sizeof(own->why), "%s", why);
    iz_coll_broadcast(coll, own, sizeof(*own), q, "the reason");
    *attention_by(c, back) = IZ_ATTENTION_OWN;
    return 0;
}

static int choose_attention(struct iz_arithmetic *a, struct iz_config *c,
                            bool back, const struct iz_arithmetic_for *on,
                            struct iz_coll *coll)
{
    enum iz_attention_by *by = attention_by(c, back);
    const char *why = NULL;
    if (!on->gpu || *by == IZ_ATTENTION_OWN)
        return 0;
    a->attention_open[back] = *by == IZ_ATTENTION_AUTO;
    if (a->attention_open[back])
        why = iz_plan_not_cudnn(c, on->capability);
    return iz_arithmetic_no_cudnn(a, c, coll, back,
                                  why ? why : iz_cudnn_missing());
}

/* ---- the side of Muon's products ---- */

static int choose_muon(struct iz_config *c, const struct iz_arithmetic_for *on,
                       struct iz_coll *coll)
{
    enum iz_muon_by *by = &c->run.muon_products;
    if (!iz_optimizer(c->optimizer.type)->matrices)
        return 0;
    if (*by == IZ_MUON_GPU && !on->gpu &&
        !iz_config_is_kept(c, "run.muon_products"))
        return refuse_word(coll, "muon_products: gpu",
                           "units are computed on the CPU", NULL,
                           ": use auto or host");
    if (*by == IZ_MUON_AUTO && on->gpu)
        *by = IZ_MUON_GPU;
    return 0;
}

int iz_arithmetic_choose(struct iz_arithmetic *a, struct iz_config *c,
                         const struct iz_model *m,
                         const struct iz_arithmetic_for *on,
                         struct iz_coll *coll)
{
    *a = (struct iz_arithmetic){0};
    int r = choose_kernels(a, c, m, on, coll);
    if (!r)
        r = choose_products(a, c, m, on, coll);
    if (!r)
        r = choose_attention(a, c, false, on, coll);
    if (!r)
        r = choose_attention(a, c, true, on, coll);
    if (!r)
        r = choose_muon(c, on, coll);
    if (r)
        return r;
    if (!c->run.sum_group && on->here)
        c->run.sum_group = iz_coll_host_group(coll);
    return 0;
}
