/* SPDX-License-Identifier: Apache-2.0 */
/* The vision transformer against a double-precision one. */
#include "tests/models/twin.h"

#include <math.h>

#include "codelets/ops/gemm.h"
#include "models/vit.h"
#include "tests/models/vit_double.h"

static const struct iz_vit_config tiny = {.layers = 2,
                                          .heads = 2,
                                          .width = 8,
                                          .image = 4,
                                          .patch = 2,
                                          .channels = 1,
                                          .classes = 3};

/* Each size another odd one. */
static const struct iz_vit_config odd = {.layers = 1,
                                         .heads = 3,
                                         .width = 9,
                                         .hidden = 11,
                                         .image = 9,
                                         .patch = 3,
                                         .channels = 2,
                                         .classes = 5};

/* More patches than a tile of attention has rows. */
static const struct iz_vit_config many = {.layers = 1,
                                          .heads = 1,
                                          .width = 4,
                                          .hidden = 5,
                                          .image = 7,
                                          .patch = 1,
                                          .channels = 1,
                                          .classes = 2};

static int open_model(struct iz_model **out, const void *config)
{
    return iz_vit_open(out, config);
}

static struct iz_model *opened(const struct iz_vit_config *c)
{
    struct iz_model *m;

    assert_int_equal(iz_vit_open(&m, c), 0);
    return m;
}

static void fill(const struct iz_model *m, void *record)
{
    unsigned char *r = record;
    const struct iz_vit_config *c = m->self;

    r[0] = (unsigned char)fixture_below(c->classes);
    for (int64_t i = 1; i < m->record.bytes; i++)
        r[i] = (unsigned char)fixture_below(256);
}

static double loss(const struct twin *t)
{
    return vit_double_loss(t->config, t->param, t->records, t->samples);
}

static const struct twin_kind kind = {open_model, loss, fill};

static void gradients_agree_with_central_differences(void **state)
{
    fixture_seed();
    twin_check(&kind, &tiny, IZ_F32, 3, 1);
    twin_check(&kind, &odd, IZ_F32, 2, 1);
    twin_check(&kind, &many, IZ_F32, 2, 1);
}

static void gradients_of_16_bit_weights_agree(void **state)
{
    fixture_seed();
    twin_check(&kind, &odd, IZ_BF16, 2, 1);
    twin_check(&kind, &odd, IZ_F16, 2, 1);
}

static void ten_steps_agree_with_double(void **state)
{
    fixture_seed();
    twin_check_steps(&kind, &odd, 4);
}

static void recomputed_activations_give_the_same_bits(void **state)
{
    twin_check_recompute(&kind, &odd, 3);
}

static void nan_reaches_the_loss(void **state)
{
    fixture_seed();
    twin_check_nan(&kind, &odd, 5, 0, 3 + 12 + 3);
}

/* Of the paper's table 1: 86, 307 and 632 million; exactly those of the models
 * with a classifier of 1000 rows, less its biases, here with 10. */
static void sizes_are_those_of_the_published_models(void **state)
{
    struct iz_vit_config c = {.layers = 12,
                              .heads = 12,
                              .width = 768,
                              .image = 224,
                              .patch = 16,
                              .channels = 3,
                              .classes = 10};

    assert_int_equal(twin_parameters(&kind, &c), 86567656 - 1000 - 990 * 768);
    c.layers = 24;
    c.heads = 16;
    c.width = 1024;
    assert_int_equal(twin_parameters(&kind, &c), 304326632 - 1000 - 990 * 1024);
}

/* Patches in raster order, channel by channel; only the class token has a
 * target. */
static void a_record_becomes_patches(void **state)
{
    struct iz_vit_config c = tiny;
    struct iz_model *m;
    unsigned char record[1 + 16] = {2};
    struct {
        int32_t token[2][5];
        float patch[2][5][4];
    } in;
    int32_t target[2][5];

    m = opened(&c);
    assert_int_equal(m->record.bytes, sizeof(record));
    assert_int_equal(2 * m->input_bytes, sizeof(in));
    assert_int_equal(2 * m->target_bytes, sizeof(target));
    for (int i = 0; i < 16; i++)
        record[1 + i] = (unsigned char)(17 * i);
    m->record.unpack(m->self, record, 1, 2, &in, target);
    for (int t = 0; t < 5; t++) {
        assert_int_equal(in.token[1][t], t > 0);
        assert_int_equal(target[1][t], t ? -1 : 2);
        for (int k = 0; k < 4; k++) {
            int y = (t - 1) / 2 * 2 + k / 2, x = (t - 1) % 2 * 2 + k % 2;
            double want = t ? 17 * (4 * y + x) / 127.5 - 1 : 0;

            assert_true(fabs((double)in.patch[1][t][k] - want) < 1e-6);
        }
    }
    assert_null(m->record.check(m->self, record));
    record[0] = 3;
    assert_non_null(m->record.check(m->self, record));
    iz_model_close(&m);
}

static void impossible_models_are_refused(void **state)
{
    struct iz_vit_config c = tiny;

    c.layers = 0;
    twin_refuses(&kind, &c);
    c = tiny;
    c.heads = 3;
    twin_refuses(&kind, &c);
    c = tiny;
    c.patch = 3;
    twin_refuses(&kind, &c);
    c = tiny;
    c.classes = 257;
    twin_refuses(&kind, &c);
    c = tiny;
    c.hidden = -1;
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
        cmocka_unit_test(sizes_are_those_of_the_published_models),
        cmocka_unit_test(a_record_becomes_patches),
        cmocka_unit_test(impossible_models_are_refused),
    };

    iz_gemm_open();
    return cmocka_run_group_tests_name("vit", tests, NULL, NULL);
}
