/* SPDX-License-Identifier: Apache-2.0 */
/* Products of fp32 or bf16; see products.h. */
#include "runtime/machine/products.h"

#include <errno.h>
#include <stdio.h>

#include "codelets/base/int64.h"
#include "codelets/ops/gemm16.h"
#include "codelets/ops/gemm_rate.h"
#include "runtime/machine/choice.h"

/* The product that is timed: at most so many rows, and a matrix of at most so
 * many elements, with which it takes some milliseconds and MiB.  What is larger
 * has the rates of this one. */
#define ROWS_MOST 512
#define MATRIX_MOST (INT64_C(1) << 20)

/* The unit that most time goes into, or one like it: the middle one, but for
 * tables, from which rows are only read. */
static const struct iz_unit *middle(const struct iz_model *m)
{
    int u = m->n_units / 2;
    while (u < m->n_units - 1 && m->unit[u].table_reads)
        u++;
    return &m->unit[u];
}

static const struct iz_param *largest(const struct iz_unit *u)
{
    const struct iz_param *w = &u->param[0];
    for (int i = 1; i < u->n_params; i++)
        if (u->param[i].rows * u->param[i].cols > w->rows * w->cols)
            w = &u->param[i];
    return w;
}

/* Of the unit's largest matrix with what one task has of it; 0: not known. */
static double gain_of(const struct iz_model *m, int samples)
{
    const struct iz_unit *u = middle(m);
    if (!u->n_params)
        return 0;
    const struct iz_param *w = largest(u);
    int64_t in = w->rows, out = w->cols, least = min64(in, out);
    int64_t rows = u->out_elems ? samples * u->out_elems / least : samples;
    while (in * out > MATRIX_MOST)
        *(in > out ? &in : &out) /= 2;
    rows = min64(rows < 1 ? 1 : rows, ROWS_MOST);
    return iz_gemm16_gain((int)rows, (int)out, (int)in);
}

/* ---- the choice ---- */

/* `asked`: what the config says, before a resumed run's own word. */
static int take_narrow(struct iz_products *p, enum iz_product_type asked,
                       struct iz_coll *coll)
{
    const char *missing = iz_gemm16_missing();
    int q = iz_coll_refuser(coll, missing != NULL);
    p->narrow = q < 0;
    if (q == coll->rank)
        fprintf(stderr, "izar: run.cpu_products: bf16: rank %d: %s%s\n", q,
                missing,
                asked == IZ_PRODUCTS_AUTO ? "; this run began with it: fp32 "
                                            "goes on with other bits"
                                          : "");
    return p->narrow ? 0 : -ENOTSUP;
}

static void measure(struct iz_products *p, const struct iz_config *c,
                    const struct iz_model *m, int workers, struct iz_coll *coll)
{
    const char *missing = iz_gemm16_missing();
    int samples = c->micro_batch / (workers > 0 ? workers : 1);
    double gain = missing ? 0 : gain_of(m, samples > 0 ? samples : 1);
    p->narrow = iz_coll_all_ok(coll, gain >= IZ_GEMM16_LEAST_GAIN);
    if (missing)
        snprintf(p->why, sizeof(p->why), "%s", missing);
    else if (gain == 0)
        snprintf(p->why, sizeof(p->why), "no product could be timed");
    else if (gain < IZ_GEMM16_LEAST_GAIN)
        snprintf(p->why, sizeof(p->why),
                 "in bf16 one of the model takes %.2f of the time here",
                 1 / gain);
    else if (!p->narrow)
        snprintf(p->why, sizeof(p->why), "another rank gains nothing by bf16");
}

int iz_products_choose(struct iz_products *p, struct iz_config *c,
                       const struct iz_model *m,
                       const struct iz_products_for *on, struct iz_coll *coll)
{
    enum iz_product_type *t = &c->run.cpu_products, asked = *t;
    int r = 0;
    *p = (struct iz_products){0};
    if (c->dtype != IZ_BF16)
        return 0;
    if (asked == IZ_PRODUCTS_AUTO && on->resume) {
        int w = iz_choice_begun(c, coll, "cpu_products", "fp32", "bf16");
        if (w < 0)
            return w;
        *t = (enum iz_product_type)w;
    }
    if (on->gpu)
        return 0;
    if (*t == IZ_PRODUCTS_BF16)
        r = take_narrow(p, asked, coll);
    if (*t == IZ_PRODUCTS_AUTO)
        measure(p, c, m, on->workers, coll);
    *t = p->narrow ? IZ_PRODUCTS_BF16 : IZ_PRODUCTS_F32;
    return r;
}
