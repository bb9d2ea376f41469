/* SPDX-License-Identifier: Apache-2.0 */
/* The choice of arithmetic; see arithmetic.h. */
#include "runtime/machine/arithmetic.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "codelets/base/int64.h"
#include "codelets/ops/gemm16.h"
#include "codelets/ops/gemm_rate.h"
#include "codelets/ops/gpu_ops.h"
#include "runtime/base/json.h"
#include "runtime/base/text.h"
#include "runtime/plan/plan.h"

/* The product that is timed: at most so many rows, and a matrix of at most so
 * many elements, with which it takes some milliseconds and MiB.  A larger
 * product has the rates of this one. */
#define ROWS_MOST 512
#define MATRIX_MOST (INT64_C(1) << 20)

enum { UNREADABLE = -1 };

/* Which of auto, a, b (0, 1, 2) the config at `path` has for run.KEY.  A config
 * without the key was written before there was a choice, and means a. */
static int64_t kept_word(const char *path, const char *key, const char *a,
                         const char *b)
{
    json_t *j = iz_json_read(path, NULL);
    const json_t *run = json_object_get(j, "run");
    const char *text = json_string_value(json_object_get(run, key));
    int64_t w = !run                            ? UNREADABLE
                : !text || strcmp(text, a) == 0 ? 1
                : strcmp(text, b) == 0          ? 2
                                                : 0;
    json_decref(j);
    return w;
}

/* Returns which of auto, a, b (0, 1, 2) the run in the output folder started
 * with, as read by rank 0.  Collective.  Negative errno with the reason
 * printed: its config cannot be read. */
static int kept_choice(const struct iz_config *c, struct iz_coll *coll,
                       const char *key, const char *a, const char *b)
{
    char path[IZ_PATH_MAX + 32];
    snprintf(path, sizeof(path), "%s/config.json", c->run.output);
    int64_t mine = coll->rank ? 0 : kept_word(path, key, a, b);
    int64_t *all = iz_agree_numbers(coll, &mine, 1, key);
    int64_t first = all[0];
    free(all);
    if (first != UNREADABLE)
        return (int)first;
    return iz_refuse(coll->rank ? NULL : stderr,
                     "run.%s: auto: %s does not tell what the run began with: "
                     "set %s or %s",
                     key, path, a, b);
}

/* Refuses run.WORD if any rank has a reason against it.  kept: what goes on in
 * its place if a resumed run began with it; else NULL, and `advice` follows. */
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

/* How many times faster bf16 is than fp32, for the largest matrix of the middle
 * unit and what one task multiplies with it; 0: not known. */
static double bf16_gain(const struct iz_model *m, int samples)
{
    const struct iz_unit *u = middle_unit(m);
    if (!u->n_params)
        return 0;
    const struct iz_param *w = &u->param[0];
    for (int i = 1; i < u->n_params; i++)
        if (u->param[i].rows * u->param[i].cols > w->rows * w->cols)
            w = &u->param[i];
    int64_t in = w->rows, out = w->cols, least = min64(in, out);
    int64_t rows = u->out_elems ? samples * u->out_elems / least : samples;
    while (in * out > MATRIX_MOST)
        *(in > out ? &in : &out) /= 2;
    rows = min64(max64(rows, 1), ROWS_MOST);
    return iz_gemm16_gain((int)rows, (int)out, (int)in);
}

static void measure_bf16(struct iz_arithmetic *a, const struct iz_config *c,
                         const struct iz_model *m, int workers,
                         struct iz_coll *coll)
{
    const char *missing = iz_gemm16_missing();
    int samples = c->micro_batch / (workers > 0 ? workers : 1);
    double gain = missing ? 0 : bf16_gain(m, samples > 0 ? samples : 1);
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
    enum iz_product_type *t = &c->run.cpu_products, asked = *t;
    int r = 0;
    if (c->dtype != IZ_BF16)
        return 0;
    if (asked == IZ_PRODUCTS_AUTO && on->resume) {
        int w = kept_choice(c, coll, "cpu_products", "fp32", "bf16");
        if (w < 0)
            return w;
        *t = (enum iz_product_type)w;
    }
    if (on->gpu)
        return 0;
    if (*t == IZ_PRODUCTS_BF16) {
        r = refuse_word(coll, "cpu_products: bf16", iz_gemm16_missing(),
                        asked == IZ_PRODUCTS_AUTO ? "fp32" : NULL, "");
        a->bf16_products = !r;
    }
    if (*t == IZ_PRODUCTS_AUTO)
        measure_bf16(a, c, m, on->workers, coll);
    *t = a->bf16_products ? IZ_PRODUCTS_BF16 : IZ_PRODUCTS_F32;
    return r;
}

/* ---- slices ---- */

/* What the run in the output folder cuts this micro-batch into; 0: not known.
 */
static int64_t kept_slices(const struct iz_config *c)
{
    char path[IZ_PATH_MAX + 32];
    snprintf(path, sizeof(path), "%s/config.json", c->run.output);
    json_t *j = iz_json_read(path, NULL);
    int64_t micro = json_integer_value(
        json_object_get(j, "train_micro_batch_size_per_gpu"));
    int64_t n = json_integer_value(
        json_object_get(json_object_get(j, "run"), "slices"));
    json_decref(j);
    return micro == c->micro_batch ? n : 0;
}

static void choose_slices(struct iz_config *c,
                          const struct iz_arithmetic_for *on,
                          struct iz_coll *coll)
{
    int64_t n = on->resume && coll->rank == 0 ? kept_slices(c) : 0;
    if (c->run.slices || !on->here)
        return;
    if (n < 1 || c->micro_batch % n)
        n = iz_plan_slices(c, on->gpu ? 1 : on->workers);
    int64_t *all = iz_agree_numbers(coll, &n, 1, "slices");
    c->run.slices = (int)all[0];
    free(all);
}

/* ---- attention on a GPU ---- */

int iz_arithmetic_refuse_cudnn(struct iz_coll *coll, const char *why, bool kept)
{
    return refuse_word(coll, "gpu_attention: cudnn", why, kept ? "own" : NULL,
                       "; use own");
}

static int choose_attention(struct iz_arithmetic *a, struct iz_config *c,
                            const struct iz_arithmetic_for *on,
                            struct iz_coll *coll)
{
    enum iz_attention_by *by = &c->run.gpu_attention;
    if (*by == IZ_ATTENTION_AUTO && on->resume && c->dtype != IZ_F32) {
        int w = kept_choice(c, coll, "gpu_attention", "own", "cudnn");
        if (w < 0)
            return w;
        *by = (enum iz_attention_by)w;
        a->attention_kept = *by != IZ_ATTENTION_AUTO;
    }
    if (!on->gpu)
        return 0;
    if (*by == IZ_ATTENTION_AUTO)
        *by = IZ_ATTENTION_OWN;
    return *by == IZ_ATTENTION_CUDNN
               ? iz_arithmetic_refuse_cudnn(coll, iz_cudnn_missing(),
                                            a->attention_kept)
               : 0;
}

int iz_arithmetic_choose(struct iz_arithmetic *a, struct iz_config *c,
                         const struct iz_model *m,
                         const struct iz_arithmetic_for *on,
                         struct iz_coll *coll)
{
    *a = (struct iz_arithmetic){0};
    int r = choose_products(a, c, m, on, coll);
    choose_slices(c, on, coll);
    return r ? r : choose_attention(a, c, on, coll);
}
