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
static const struct twin_kind kind = {
    .name = "dlrm",
    .open = iz_dlrm_open,
    .loss = loss,
    .fill = fill,
    .gradients = {{&tiny, 1, 1},
                  {&tiny, 9, 1},
                  {&odd, 2, 1},
                  {&odd, 12, 1},
                  {&cut, 5, 1}},
    .usual = {&odd, 12},
    .recomputed = {&odd, 5},
    .config_bytes = sizeof(odd),
    /* rows are numbered by 31 bits, and units are not too many */
    .bad = {{TWIN_AT(iz_dlrm_config, rows), 0},
            {TWIN_AT(iz_dlrm_config, rows), 1 << 30},
            {TWIN_AT(iz_dlrm_config, rows), 1 << 22},
            {TWIN_AT(iz_dlrm_config, unit_rows), 0},
            {TWIN_AT(iz_dlrm_config, top_layers), IZ_DLRM_LAYERS + 1}}};

/* Every unit has unit_rows rows but the last; the head has the rest. */
static void tables_are_cut_into_equal_units(void **state)
{
    struct iz_model *m = twin_open(&kind, &odd);
    assert_int_equal(m->n_units, 5);
    for (int u = 0; u < 4; u++) {
        assert_int_equal(m->unit[u].param[0].rows, u < 3 ? 6 : 2);
        assert_int_equal(m->unit[u].param[0].cols, 3);
        assert_true(m->unit[u].reads_input);
    }
    assert_int_equal(m->unit[4].n_params, 13);
    assert_int_equal(m->unit[1].kind, m->unit[2].kind);
    assert_int_equal(m->table_rows, 20);
    assert_int_equal(m->table_reads, 4);
    iz_model_close(&m);
}

/* Rows of all samples first, then numbers; a negative number is 0, and the
 * bits of a category are those of an unsigned one. */
static void a_record_becomes_rows_and_numbers(void **state)
{
    struct iz_model *m = twin_open(&kind, &odd);
    int32_t record[8] = {1, 0, 7, -5, 3, 6, -1, 1000002}, target[2];
    struct {
        int32_t row[2][4];
        float x[2][3];
    } in;
    assert_int_equal(m->record.bytes, sizeof(record));
    assert_int_equal(2 * m->input_bytes, sizeof(in));
    assert_null(m->record.check(m->self, record));
    m->record.unpack(m->self, record, 1, 2, &in, target);
    assert_int_equal(target[1], 1);
    assert_int_equal(in.row[1][0], 3);
    assert_int_equal(in.row[1][1], 5 + 1);
    assert_int_equal(in.row[1][2], 10 + 4294967295u % 5);
    assert_int_equal(in.row[1][3], 15 + 2);
    assert_true(in.x[1][0] == 0 && in.x[1][2] == 0);
    assert_true(fabs((double)in.x[1][1] - log(8)) < 1e-6);
    record[0] = 2;
    assert_non_null(m->record.check(m->self, record));
    iz_model_close(&m);
}

int main(void)
{
    const struct CMUnitTest own[] = {
        cmocka_unit_test(tables_are_cut_into_equal_units),
        cmocka_unit_test(a_record_becomes_rows_and_numbers),
    };
    return twin_main(&kind, own, sizeof(own) / sizeof(own[0]));
}
