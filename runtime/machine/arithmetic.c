/* SPDX-License-Identifier: Apache-2.0 */
/* The choice of arithmetic; see arithmetic.h. */
#include "runtime/machine/arithmetic.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "codelets/base/int64.h"
#include "codelets/ops/blas.h"
#include "codelets/ops/gemm16.h"
#include "codelets/ops/gemm_rate.h"
#include "codelets/ops/gpu_ops.h"
#include "runtime/base/hash.h"
#include "runtime/base/json.h"
#include "runtime/base/text.h"
#include "runtime/plan/plan.h"

/* A product that is timed: at most so many rows, and a matrix of at most so
 * many elements, with which it takes some milliseconds and MiB.  A larger
 * product has the rates of this one. */
#define ROWS_MOST 512
#define MATRIX_MOST (INT64_C(1) << 20)
#define LAYER_MOST (INT64_C(1) << 18) /* where several kernels are timed */

#define LEAST_GAIN 1.2 /* less is no reason to tell a user */

#define OWN_KERNELS "BLAS" /* the library's, whatever they are called */

/* Config of the run in the output folder; NULL: it cannot be read. */
static json_t *kept_config(const struct iz_config *c)
{
    char path[IZ_PATH_MAX + 32];
    snprintf(path, sizeof(path), "%s/config.json", c->run.output);
    return iz_json_read(path, NULL);
}

/* What the run in the output folder started with for run.KEY, as read by rank
 * 0; "" if its config has no such key, or if nothing can be resumed there,
 * which is said elsewhere.  Collective.  False: its config cannot be read. */
static bool kept_string(const struct iz_config *c, struct iz_coll *coll,
                        const char *key, char *text, size_t size)
{
    char saved[IZ_PATH_MAX + 32];
    bool readable = false;
    snprintf(saved, sizeof(saved), "%s/checkpoints", c->run.output);
    memset(text, 0, size);
    if (coll->rank == 0) {
        json_t *j = kept_config(c);
        const json_t *run = json_object_get(j, "run");
        const json_t *had = json_object_get(run, key);
        readable = run || access(saved, F_OK);
        if (json_is_string(had))
            snprintf(text, size, "%s", json_string_value(had));
        json_decref(j);
    }
    iz_coll_broadcast(coll, &readable, sizeof(readable), 0, key);
    iz_coll_broadcast(coll, text, (int64_t)size, 0, key);
    return readable;
}

/* The same; negative errno with the reason and `advice` printed: its config
 * cannot be read. */
static int kept_text(const struct iz_config *c, struct iz_coll *coll,
                     const char *key, const char *advice, char text[32])
{
    char path[IZ_PATH_MAX + 32];
    snprintf(path, sizeof(path), "%s/config.json", c->run.output);
    if (kept_string(c, coll, key, text, 32))
        return 0;
    return iz_text_refuse(
        coll->rank ? NULL : stderr,
        "run.%s: auto: %s does not tell what the run began with: "
        "set %s",
        key, path, advice);
}

/* Which of auto, a, b (0, 1, 2) the run in the output folder started with.  A
 * config without the key was written before there was a choice, and means a. */
static int kept_choice(const struct iz_config *c, struct iz_coll *coll,
                       const char *key, const char *a, const char *b)
{
    char text[32], advice[64];
    snprintf(advice, sizeof(advice), "%s or %s", a, b);
    int r = kept_text(c, coll, key, advice, text);
    if (r)
        return r;
    return !*text || strcmp(text, a) == 0 ? 1 : strcmp(text, b) == 0 ? 2 : 0;
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
    bool asked = strcmp(c->run.cpu_kernels, "auto") != 0;
    const char *name = c->run.cpu_kernels;
    char kept[32] = "auto", word[64];
    if (on->gpu || !on->here)
        return 0;
    if (!asked && on->resume) {
        int r = kept_text(c, coll, "cpu_kernels", OWN_KERNELS, kept);
        if (r)
            return r;
        name = *kept ? kept : OWN_KERNELS; /* before there was a choice */
    }
    bool measured = strcmp(name, "auto") == 0;
    if (measured)
        measure_kernels(a, &name, m, samples_of_task(c, on->workers), coll);
    bool here = iz_blas_take(name);
    snprintf(word, sizeof(word), "cpu_kernels: %s", name);
    int r =
        refuse_word(coll, word, here ? NULL : "this machine does not have them",
                    asked || measured ? NULL : OWN_KERNELS, "; use auto");
    if (!r && !asked)
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

/* ---- the cut into micro-batches ---- */

/* Micro-batches of a rank and step of the run with config j, if it had such a
 * batch and as many ranks; else 0. */
static int64_t kept_cut(const json_t *j, int64_t batch, int ranks)
{
    int64_t micro = json_integer_value(
        json_object_get(j, "train_micro_batch_size_per_gpu"));
    int64_t accum =
        json_integer_value(json_object_get(j, "gradient_accumulation_steps"));
    bool same =
        batch > 0 && batch == micro * accum * ranks &&
        batch == json_integer_value(json_object_get(j, "train_batch_size"));
    return same ? accum : 0;
}

/* Without one that is kept, the plan chooses (iz_plan_choose). */
static void choose_cut(struct iz_config *c, const struct iz_arithmetic_for *on,
                       struct iz_coll *coll)
{
    int64_t n = 0;
    if (!c->cut_auto || !on->resume)
        return;
    if (coll->rank == 0) {
        json_t *j = kept_config(c);
        n = kept_cut(j, c->train_batch_size, coll->size);
        json_decref(j);
    }
    int64_t *all = iz_agree_numbers(coll, &n, 1, "micro-batches");
    if (all[0]) {
        iz_config_cut(c, (int)all[0]);
        c->cut_auto = false;
    }
    free(all);
}

/* ---- slices ---- */

/* What the run in the output folder cuts this micro-batch into; 0: not known.
 */
static int64_t kept_slices(const struct iz_config *c)
{
    json_t *j = kept_config(c);
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

/* ---- the order of sums ---- */

/* Without one that is kept, the plan chooses (iz_plan_choose). */
static int choose_sums(struct iz_config *c, const struct iz_arithmetic_for *on,
                       struct iz_coll *coll)
{
    enum iz_sum_first *first = &c->run.sum_order;
    int w = 0;
    if (*first == IZ_SUM_AUTO && on->resume)
        w = kept_choice(c, coll, "sum_order", "ranks_first", "local_first");
    if (w > 0)
        *first = (enum iz_sum_first)w;
    return w < 0 ? w : 0;
}

/* Groups of the run in the output folder, if it had as many ranks; 0: not
 * known.  A config without the key was written before there were groups. */
static int64_t kept_group(const struct iz_config *c, int ranks)
{
    json_t *j = kept_config(c);
    const json_t *run = json_object_get(j, "run");
    int64_t g = json_integer_value(json_object_get(run, "sum_group"));
    int64_t micros = kept_cut(
        j, json_integer_value(json_object_get(j, "train_batch_size")), ranks);
    json_decref(j);
    if (!run || !micros)
        return 0;
    return g ? g : ranks;
}

static int choose_groups(struct iz_config *c,
                         const struct iz_arithmetic_for *on,
                         struct iz_coll *coll)
{
    char text[32];
    int r = 0;
    if (c->run.sum_group || !on->here)
        return 0;
    int64_t g = on->resume && coll->rank == 0 ? kept_group(c, coll->size) : 0;
    if (on->resume && coll->size > 1)
        r = kept_text(c, coll, "sum_group", "the ranks of a group", text);
    if (!g)
        g = iz_coll_host_group(coll);
    int64_t *all = iz_agree_numbers(coll, &g, 1, "groups");
    c->run.sum_group = (int)all[0];
    free(all);
    return r;
}

/* ---- products on a GPU ---- */

/* Products had the algorithms that a measurement chose, as a list in the
 * config: "cublasLt VERSION PRODUCT:ALGORITHM ...". */
static int refuse_algorithms(const struct iz_config *c,
                             const struct iz_arithmetic_for *on,
                             struct iz_coll *coll)
{
    char had[64] = "";
    if (on->resume && on->gpu)
        kept_string(c, coll, "gpu_products", had, sizeof(had));
    return refuse_word(coll, "gpu_products",
                       strchr(had, ':') ? "the run began with chosen algorithms"
                                        : NULL,
                       NULL, ", which were removed");
}

/* ---- logits on a GPU ---- */

/* Bytes at a time of the run in the output folder, 0: not known.  A config
 * without the key was written when there was one size. */
static int64_t kept_logits(const struct iz_config *c)
{
    json_t *j = kept_config(c);
    const json_t *run = json_object_get(j, "run");
    const json_t *had = json_object_get(run, "gpu_logits_bytes");
    int64_t n = had ? json_integer_value(had) : run ? IZ_LOGITS_BYTES : 0;
    json_decref(j);
    return n;
}

/* Without one that is kept, the plan chooses (iz_plan_choose). */
static int keep_logits(struct iz_config *c, const struct iz_arithmetic_for *on,
                       struct iz_coll *coll)
{
    int64_t n = coll->rank == 0 ? kept_logits(c) : 0;
    char text[32];
    int r = 0;
    if (c->run.gpu_logits_bytes || !on->resume)
        return 0;
    if (on->gpu)
        r = kept_text(c, coll, "gpu_logits_bytes", "the bytes of a chunk",
                      text);
    int64_t *all = iz_agree_numbers(coll, &n, 1, "logits");
    c->run.gpu_logits_bytes = all[0];
    free(all);
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
    struct iz_refusal *own = &a->attention_why[back];
    if (!a->attention_open[back])
        return refuse_word(
            coll,
            back ? "gpu_attention_backward: cudnn" : "gpu_attention: cudnn",
            why, a->attention_kept[back] ? "own" : NULL, "; use own");
    int q = iz_coll_refuser(coll, why != NULL);
    if (q < 0)
        return 0;
    if (q == coll->rank)
        snprintf(own->why, sizeof(own->why), "%s", why);
    iz_coll_broadcast(coll, own, sizeof(*own), q, "the reason");
    *attention_by(c, back) = IZ_ATTENTION_OWN;
    return 0;
}

/* What the run in the output folder had. */
static int keep_attention(enum iz_attention_by *by, const char *key,
                          const struct iz_config *c, struct iz_coll *coll)
{
    static const char *const word[] = {"auto", "own", "cudnn"};
    char text[32];
    int r = kept_text(c, coll, key, "own or cudnn", text);
    if (!*text && !r)
        *by = IZ_ATTENTION_OWN; /* before there was a choice */
    for (int i = IZ_ATTENTION_OWN; i <= IZ_ATTENTION_CUDNN; i++)
        if (strcmp(text, word[i]) == 0)
            *by = (enum iz_attention_by)i;
    return r;
}

static int choose_attention(struct iz_arithmetic *a, struct iz_config *c,
                            bool back, const struct iz_arithmetic_for *on,
                            struct iz_coll *coll)
{
    enum iz_attention_by *by = attention_by(c, back);
    const char *why = NULL;
    if (*by == IZ_ATTENTION_AUTO && on->resume && c->dtype != IZ_F32) {
        int r = keep_attention(
            by, back ? "gpu_attention_backward" : "gpu_attention", c, coll);
        if (r)
            return r;
        a->attention_kept[back] = *by == IZ_ATTENTION_CUDNN;
    }
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
    if (*by == IZ_MUON_GPU && !on->gpu)
        return refuse_word(coll, "muon_products: gpu",
                           "units are computed on the CPU", NULL,
                           ": use auto or host");
    if (*by == IZ_MUON_AUTO && on->resume) {
        int w = kept_choice(c, coll, "muon_products", "host", "gpu");
        if (w < 0)
            return w;
        *by = (enum iz_muon_by)w;
    }
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
    choose_cut(c, on, coll);
    choose_slices(c, on, coll);
    if (!r)
        r = choose_sums(c, on, coll);
    if (!r)
        r = choose_groups(c, on, coll);
    if (!r)
        r = choose_attention(a, c, false, on, coll);
    if (!r)
        r = choose_attention(a, c, true, on, coll);
    if (!r)
        r = choose_muon(c, on, coll);
    if (!r)
        r = keep_logits(c, on, coll);
    if (!r)
        r = refuse_algorithms(c, on, coll);
    return r;
}
