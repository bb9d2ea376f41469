/* SPDX-License-Identifier: Apache-2.0 */
/* The recommendation model in double precision, a sample at a time. */
#include "tests/models/dlrm_double.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static double gelu(double a)
{
    return a / 2 * (1 + tanh(sqrt(2 / acos(-1)) * (a + 0.044715 * a * a * a)));
}

/* The vector of a category: the units hold the tables one behind the other. */
static const double *row_of(const struct iz_dlrm_config *c,
                            double *const *param, int table, uint32_t category)
{
    int64_t at = (int64_t)table * c->rows + category % (uint32_t)c->rows;

    return param[at / c->unit_rows] + at % c->unit_rows * c->dim;
}

/* Replaces the n numbers in x by `out` of the next layer. */
static void layer(double *x, double *const *wb, int64_t n, int64_t out,
                  int hidden)
{
    double *y = calloc((size_t)out, sizeof(*y));

    for (int64_t j = 0; j < out; j++) {
        y[j] = wb[1][j];
        for (int64_t i = 0; i < n; i++)
            y[j] += x[i] * wb[0][i * out + j];
        y[j] = hidden ? gelu(y[j]) : y[j];
    }
    memcpy(x, y, (size_t)out * sizeof(*y));
    free(y);
}

/* All pairs, the first vector being z. */
static int64_t products(const struct iz_dlrm_config *c, double *x,
                        const double **v)
{
    int64_t n = c->dim;

    for (int i = 1; i <= c->tables; i++)
        for (int j = 0; j < i; j++, n++) {
            x[n] = 0;
            for (int k = 0; k < c->dim; k++)
                x[n] += v[i][k] * v[j][k];
        }
    return n;
}

static double sample_loss(const struct iz_dlrm_config *c, double *const *param,
                          const int32_t *r)
{
    int64_t rows = (int64_t)c->tables * c->rows, n = c->dense;
    double *const *p = param + (rows + c->unit_rows - 1) / c->unit_rows;
    int64_t room = c->dense + c->bottom_width + c->top_width + c->dim +
                   (int64_t)c->tables * (c->tables + 1) / 2;
    double *x = calloc((size_t)(room + c->dim), sizeof(*x)), *z = x + room;
    const double **v = calloc((size_t)c->tables + 1, sizeof(*v));
    double logit = 0;

    for (int i = 0; i < c->dense; i++)
        x[i] = log(1 + fmax(r[1 + i], 0));
    for (int i = 0; i < c->bottom_layers; i++, p += 2, n = c->bottom_width)
        layer(x, p, n, c->bottom_width, 1);
    layer(x, p, n, c->dim, 0);
    p += 2;
    memcpy(z, x, (size_t)c->dim * sizeof(*z));
    v[0] = z;
    for (int i = 0; i < c->tables; i++)
        v[1 + i] = row_of(c, param, i, (uint32_t)r[1 + c->dense + i]);
    n = products(c, x, v);
    for (int i = 0; i < c->top_layers; i++, p += 2, n = c->top_width)
        layer(x, p, n, c->top_width, 1);
    for (int i = 0; i < n; i++)
        logit += x[i] * (p[0][n + i] - p[0][i]);
    free(x);
    free(v);
    return log(1 + exp(r[0] ? -logit : logit));
}

double dlrm_double_loss(const struct iz_dlrm_config *c, double *const *param,
                        const unsigned char *records, int samples)
{
    int words = 1 + c->dense + c->tables;
    double sum = 0;

    for (int i = 0; i < samples; i++) {
        int32_t r[64];

        memcpy(r, records + (size_t)(i * words) * sizeof(*r),
               (size_t)words * sizeof(*r));
        sum += sample_loss(c, param, r);
    }
    return sum / samples;
}
