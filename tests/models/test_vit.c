/* SPDX-License-Identifier: Apache-2.0 */
/* The vision transformer against a double-precision one. */
#include "tests/models/twin.h"

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
    .usual = {&odd, 4, 3},
    .recomputed = {&odd, 3}};

int main(void)
{
    return twin_main(&kind, NULL, 0);
}
