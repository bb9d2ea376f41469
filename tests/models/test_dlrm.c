/* SPDX-License-Identifier: Apache-2.0 */
/* The recommendation model against a double-precision one. */
#include "tests/models/twin.h"

#include <math.h>
#include <string.h>

#include "codelets/ops/gemm.h"
#include "models/dlrm.h"
#include "tests/models/dlrm_double.h"

/* One unit of tables. */
static const struct iz_dlrm_config tiny = {.dense = 2,
                                           .tables = 1,
                                           .rows = 3,
                                           .dim = 2,
                                           .unit_rows = 100,
                                           .bottom_layers = 1,
                                           .bottom_width = 3,
                                           .top_layers = 1,
                                           .top_width = 4};

/* Units that end within a table, the last of them short; two layers each. */
static const struct iz_dlrm_config odd = {.dense = 3,
                                          .tables = 4,
                                          .rows = 5,
                                          .dim = 3,
                                          .unit_rows = 6,
                                          .bottom_layers = 2,
                                          .bottom_width = 5,
                                          .top_layers = 3,
                                          .top_width = 7};

/* Units that are parts of a table. */
static const struct iz_dlrm_config cut = {.dense = 1,
                                          .tables = 2,
                                          .rows = 10,
                                          .dim = 4,
                                          .unit_rows = 5,
                                          .bottom_layers = 3,
                                          .bottom_width = 2,
                                          .top_layers = 2,
                                          .top_width = 3};

static int open_model(struct iz_model **out, const void *config)
{
    return iz_dlrm_open(out, config);
}

static struct iz_model *opened(const struct iz_dlrm_config *c)
{
    struct iz_model *m;

    assert_int_equal(iz_dlrm_open(&m, c), 0);
    return m;
}

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

static double loss(const struct twin *t)
{
    return dlrm_double_loss(t->config, t->param, t->records, t->samples);
}

static const struct twin_kind kind = {open_model, loss, fill};

/* Of samples that share rows, and with rows that no sample reads. */
static void gradients_agree_with_central_differences(void **state)
{
    fixture_seed();
    twin_check(&kind, &tiny, IZ_F32, 1, 1);
    twin_check(&kind, &tiny, IZ_F32, 9, 1);
    twin_check(&kind, &odd, IZ_F32, 2, 1);
    twin_check(&kind, &odd, IZ_F32, 12, 1);
    twin_check(&kind, &cut, IZ_F32, 5, 1);
}

static void gradients_of_16_bit_weights_agree(void **state)
{
    fixture_seed();
    twin_check(&kind, &odd, IZ_BF16, 7, 1);
    twin_check(&kind, &odd, IZ_F16, 7, 1);
}

static void ten_steps_agree_with_double(void **state)
{
    fixture_seed();
    twin_check_steps(&kind, &odd, 8);
}

static void recomputed_activations_give_the_same_bits(void **state)
{
    twin_check_recompute(&kind, &odd, 5);
}

static void nan_reaches_the_loss(void **state)
{
    fixture_seed();
    twin_check_nan(&kind, &odd, 30, 0, 4 + 2 * 6 + 1);
}

/* Every unit has unit_rows rows but the last; the head has the rest. */
static void tables_are_cut_into_equal_units(void **state)
{
    struct iz_model *m = opened(&odd);

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
    struct iz_dlrm_config c = odd;
    struct iz_model *m = opened(&c);
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

static void impossible_models_are_refused(void **state)
{
    struct iz_dlrm_config c = tiny;

    c.rows = 0;
    twin_refuses(&kind, &c);
    c = tiny;
    c.unit_rows = 0;
    twin_refuses(&kind, &c);
    c = tiny;
    c.tables = 1000;
    c.rows = 3000000; /* rows are numbered by 31 bits */
    c.unit_rows = 1 << 30;
    twin_refuses(&kind, &c);
    c = tiny;
    c.rows = 1 << 22;
    c.unit_rows = 1;
    twin_refuses(&kind, &c);
    c = tiny;
    c.top_layers = IZ_DLRM_LAYERS + 1;
    twin_refuses(&kind, &c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gradients_agree_with_central_differences),
        cmocka_unit_test(gradients_of_16_bit_weights_agree),
        cmocka_unit_test(ten_steps_agree_with_double),
        cmocka_unit_test(recomputed_activations_give_the_same_bits),
        cmocka_unit_test(nan_reaches_the_loss),
        cmocka_unit_test(tables_are_cut_into_equal_units),
        cmocka_unit_test(a_record_becomes_rows_and_numbers),
        cmocka_unit_test(impossible_models_are_refused),
    };

    iz_gemm_open();
    return cmocka_run_group_tests_name("dlrm", tests, NULL, NULL);
}
