/* SPDX-License-Identifier: Apache-2.0 */
/* The vision transformer against a double-precision one. */
#include "tests/models/twin.h"

#include <math.h>
#include <stdlib.h>

#include "models/vit.h"

/* layers, heads, width; hidden; image; patch, channels, classes */
static const struct iz_vit_config tiny = {2, 2, 8, 0, 4, 2, 1, 3};
/* Each size another odd one. */
static const struct iz_vit_config odd = {1, 3, 9, 11, 9, 3, 2, 5};
/* More patches than a tile of attention has rows. */
static const struct iz_vit_config many = {1, 1, 4, 5, 7, 1, 1, 2};

static void fill(const struct iz_model *m, void *record)
{
    unsigned char *r = record;
    const struct iz_vit_config *c = m->self;
    r[0] = (unsigned char)fixture_below(c->classes);
    for (int64_t i = 1; i < m->record.bytes; i++)
        r[i] = (unsigned char)fixture_below(256);
}

/* Row t of the first block: the class token, or a patch in raster order. */
static void embed(const struct iz_vit_config *c, double *const *p, double *z,
                  const unsigned char *image, int t)
{
    int side = c->image / c->patch, area = c->patch * c->patch;
    for (int j = 0; j < c->width; j++)
        z[j] = p[0][(t > 0) * c->width + j] + p[1][t * c->width + j];
    for (int i = 0; t > 0 && i < c->channels * area; i++) {
        int y = (t - 1) / side * c->patch + i % area / c->patch;
        int x = (t - 1) % side * c->patch + i % c->patch;
        int at = (i / area * c->image + y) * c->image + x;
        for (int j = 0; j < c->width; j++)
            z[j] += (image[at] / 127.5 - 1) * p[2][i * c->width + j];
    }
}

static void product(double *y, double *r, double *a, double *const *wb,
                    int64_t m, int64_t in, int64_t out)
{
    ref_matmul(&(struct ref_matmul){y, r, a, wb[0], wb[1], m, in, out, false});
}

/* x [m,c] through a block in place; p: norm1, qkv, proj, norm2, fc1, fc2,
 * weight and bias each; of `a` the tensors are filled in. */
static void block(double *x, double *const *p, int64_t hidden,
                  struct ref_attention a)
{
    int64_t m = a.samples * a.seq, c = a.c;
    double *qkv = calloc((size_t)(m * (5 * c + hidden)), sizeof(*qkv));
    double *o = qkv + m * 3 * c, *h = o + m * c, *u = h + m * c;
    a.qkv = qkv;
    a.o = o;
    ref_norm(h, x, p[0], p[1], m, c, 1e-5);
    product(qkv, NULL, h, p + 2, m, c, 3 * c);
    ref_attention(&a);
    product(x, x, o, p + 4, m, c, c);
    ref_norm(h, x, p[6], p[7], m, c, 1e-5);
    product(u, NULL, h, p + 8, m, c, hidden);
    for (int64_t i = 0; i < m * hidden; i++)
        u[i] = ref_gelu(u[i]);
    product(x, x, u, p + 10, m, hidden, c);
    free(qkv);
}

/* Parameters: token, position, patch; of each block norm1, qkv, proj, norm2,
 * fc1, fc2, weight and bias each; norm's weight and bias, the classifier. */
static double loss(const struct twin *t)
{
    const struct iz_vit_config *c = t->config;
    double *const *p = t->param, *const *end = p + 3 + 12 * c->layers;
    int side = c->image / c->patch, n = 1 + side * side, w = c->width;
    size_t bytes = 1 + (size_t)(c->channels * c->image * c->image);
    double *x = calloc((size_t)(t->samples * n * w), sizeof(*x)), sum = 0;
    for (int i = 0; i < t->samples * n; i++)
        embed(c, p, x + i * w, t->records + (size_t)(i / n) * bytes + 1, i % n);
    for (int l = 0; l < c->layers; l++)
        block(x, p + 3 + 12 * l, c->hidden ? c->hidden : 4 * w,
              (struct ref_attention){
                  .samples = t->samples, .seq = n, .heads = c->heads, .c = w});
    ref_norm(x, x, end[0], end[1], t->samples * n, w, 1e-5);
    for (int i = 0; i < t->samples; i++) {
        int32_t label = t->records[(size_t)i * bytes];
        sum += ref_classifier(x + i * n * w, end[2], &label, 1, w, c->classes);
    }
    free(x);
    return sum / t->samples;
}

static const struct twin_kind kind = {
    .name = "vit",
    .open = iz_vit_open,
    .loss = loss,
    .fill = fill,
    .gradients = {{&tiny, 3, 1}, {&odd, 2, 1}, {&many, 2, 1}},
    .usual = {&odd, 4},
    .recomputed = {&odd, 3},
    .config_bytes = sizeof(odd),
    .bad = {{TWIN_AT(iz_vit_config, layers), 0},
            {TWIN_AT(iz_vit_config, heads), 2},
            {TWIN_AT(iz_vit_config, patch), 2},
            {TWIN_AT(iz_vit_config, classes), 257},
            {TWIN_AT(iz_vit_config, hidden), -1}}};

/* Of the paper's table 1: 86, 307 and 632 million; exactly those of the models
 * with a classifier of 1000 rows, less its biases, here with 10. */
static void sizes_are_those_of_the_published_models(void **state)
{
    static const struct iz_vit_config base = {12, 12, 768, 0, 224, 16, 3, 10};
    static const struct iz_vit_config large = {24, 16, 1024, 0, 224, 16, 3, 10};
    assert_int_equal(twin_parameters(&kind, &base),
                     86567656 - 1000 - 990 * 768);
    assert_int_equal(twin_parameters(&kind, &large),
                     304326632 - 1000 - 990 * 1024);
}

/* Four times the width are too many hidden channels, and never none. */
static void a_width_with_too_wide_an_mlp_is_refused(void **state)
{
    struct iz_vit_config c = tiny;
    struct iz_model *m;
    c.width = 3 << 17;
    assert_true(iz_vit_open(&m, &c) < 0);
    assert_null(m);
}

/* Patches in raster order, channel by channel; only the class token has a
 * target. */
static void a_record_becomes_patches(void **state)
{
    struct iz_model *m = twin_open(&kind, &tiny);
    unsigned char record[1 + 16] = {2};
    struct {
        int32_t token[2][5];
        float patch[2][5][4];
    } in;
    int32_t target[2][5];
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

int main(void)
{
    const struct CMUnitTest own[] = {
        cmocka_unit_test(sizes_are_those_of_the_published_models),
        cmocka_unit_test(a_width_with_too_wide_an_mlp_is_refused),
        cmocka_unit_test(a_record_becomes_patches),
    };
    return twin_main(&kind, own, sizeof(own) / sizeof(own[0]));
}
