/* SPDX-License-Identifier: Apache-2.0 */
/* The recommendation model against a double-precision one. */
#include "tests/models/twin.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "models/dlrm.h"

/* dense, tables, rows, dim; unit_rows; layers and width, bottom and top */
/* One unit of tables. */
static const struct iz_dlrm_config tiny = {2, 1, 3, 2, 100, 1, 3, 1, 4};
/* Units that end within a table, the last of them short; two layers each. */
static const struct iz_dlrm_config odd = {3, 4, 5, 3, 6, 2, 5, 3, 7};
/* Units that are parts of a table. */
static const struct iz_dlrm_config cut = {1, 2, 10, 4, 5, 3, 2, 2, 3};

static void fill(const struct iz_model *m, void *record)
{
    const struct iz_dlrm_config *c = m->self;
    int32_t r[64];
    r[0] = fixture_below(2);
    for (int i = 0; i < c->dense; i++)
        r[1 + i] = fixture_below(20) - 3;
    for (int i = 0; i < c->tables; i++)
        r[1 + c->dense + i] = (int32_t)(fixture_uniform() * INT32_MAX);
    memcpy(record, r, (size_t)m->record.bytes);
}

/* ---- in double ---- */

enum { MOST = 64 }; /* numbers of a vector */

/* The vector of a category: the units hold the tables one behind the other. */
static const double *row_of(const struct iz_dlrm_config *c,
                            double *const *param, int table, uint32_t category)
{
    int64_t at = (int64_t)table * c->rows + category % (uint32_t)c->rows;
    return param[at / c->unit_rows] + at % c->unit_rows * c->dim;
}

/* y [out] of x [n] by a layer's weight and bias. */
static void layer(double *y, double *x, double *const *p, int64_t n,
                  int64_t out)
{
    ref_matmul(&(struct ref_matmul){y, NULL, x, p[0], p[1], 1, n, out, false});
}

/* x [n] through hidden layers of some width, in place; returns the parameters
 * behind theirs. */
static double *const *layers(double *x, double *const *p, int64_t n, int count,
                             int64_t width)
{
    double y[MOST];
    for (int i = 0; i < count; i++, p += 2, n = width) {
        layer(y, x, p, n, width);
        for (int64_t j = 0; j < width; j++)
            x[j] = ref_gelu(y[j]);
    }
    return p;
}

static double sample_loss(const struct iz_dlrm_config *c, double *const *param,
                          const int32_t *r)
{
    int64_t rows = (int64_t)c->tables * c->rows, d = c->dim;
    double *const *p = param + (rows + c->unit_rows - 1) / c->unit_rows;
    double x[MOST], z[MOST], e[MOST];
    for (int i = 0; i < c->dense; i++)
        x[i] = log(1 + fmax(r[1 + i], 0));
    p = layers(x, p, c->dense, c->bottom_layers, c->bottom_width);
    layer(z, x, p, c->bottom_width, d);
    for (int i = 0; i < c->tables; i++)
        memcpy(e + i * d, row_of(c, param, i, (uint32_t)r[1 + c->dense + i]),
               (size_t)d * sizeof(*e));
    ref_interact(x, z, e, 1, c->tables, d);
    p = layers(x, p + 2, d + c->tables * (c->tables + 1) / 2, c->top_layers,
               c->top_width);
    return ref_classifier(x, p[0], r, 1, c->top_width, 2);
}

/* Parameters: the rows of each unit of tables; weight and bias of each layer of
 * the bottom MLP and of the top one; the answers. */
static double loss(const struct twin *t)
{
    const struct iz_dlrm_config *c = t->config;
    const int32_t *r = (const void *)t->records;
    double sum = 0;
    for (int i = 0; i < t->samples; i++, r += 1 + c->dense + c->tables)
        sum += sample_loss(c, t->param, r);
    return sum / t->samples;
}

/* Of samples that share rows, and with rows that no sample reads. */
static const struct twin_kind kind = {.name = "dlrm",
                                      .open = iz_dlrm_open,
                                      .loss = loss,
                                      .fill = fill,
                                      .gradients = {{&tiny, 1, 1},
                                                    {&tiny, 9, 1},
                                                    {&odd, 2, 1},
                                                    {&odd, 12, 1},
                                                    {&cut, 5, 1}},
                                      .usual = {&odd, 12, 3},
                                      .recomputed = {&odd, 5}};

int main(void)
{
    return twin_main(&kind, NULL, 0);
}
