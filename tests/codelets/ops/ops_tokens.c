/* SPDX-License-Identifier: Apache-2.0 */
/* Embedding and classifier: the ops that read token numbers. */
#include "tests/codelets/ops/fixture.h"

#include <math.h>
#include <stdlib.h>

#include "tests/codelets/ops/reference.h"

struct embedding {
    struct tensor y, wte, wpe, dy, dwte, dwpe;
    int32_t *token;
    double *out;
    bool positions;
};

static void embed_forward(struct iz_exec *x, void *arg)
{
    struct embedding *e = arg;

    iz_embedding_fwd(x, e->y.v, e->token, e->wte.v,
                     e->positions ? e->wpe.v : IZ_NONE);
}

static void embed_backward(struct iz_exec *x, void *arg)
{
    struct embedding *e = arg;

    iz_embedding_bwd(x, e->dwte.v, e->positions ? e->dwpe.v : IZ_NONE, e->dy.v,
                     e->token);
}

static double embed_objective(void *arg)
{
    struct embedding *e = arg;

    ref_embedding(e->out, e->token, e->wte.d, e->positions ? e->wpe.d : NULL,
                  e->y.v.rows, e->y.v.cols, e->wpe.v.rows);
    return fixture_dot(e->out, e->dy.d, iz_view_len(e->y.v));
}

static void check_embed_gradient(struct embedding *e, struct tensor *got,
                                 double *in)
{
    int64_t n = iz_view_len(got->v);
    double *want = calloc((size_t)n, sizeof *want);

    ref_gradient(want, embed_objective, e, in, n);
    fixture_close("gradient of the embedding", got, want, 2e-6);
    free(want);
}

static void check_embedding(enum iz_dtype t, const int64_t s[4], bool positions)
{
    int64_t m = s[0] * s[1], c = s[2], v = s[3];
    struct embedding e = {tensor_new(IZ_F32, m, c, 1),
                          tensor_new(t, v, c, 1),
                          tensor_new(t, s[1], c, 1),
                          tensor_new(IZ_F32, m, c, 1),
                          tensor_new(t, v, c, 1),
                          tensor_new(t, s[1], c, 1),
                          calloc((size_t)m, 4),
                          calloc((size_t)(m * c), sizeof(double)),
                          positions};

    for (int64_t i = 0; i < m; i++)
        e.token[i] = fixture_below(v);
    embed_objective(&e);
    fixture_run(embed_forward, &e);
    fixture_close("embedding", &e.y, e.out, 1e-7);
    fixture_run(embed_backward, &e);
    check_embed_gradient(&e, &e.dwte, e.wte.d);
    if (positions)
        check_embed_gradient(&e, &e.dwpe, e.wpe.d);
    struct tensor *all[] = {&e.y, &e.wte, &e.wpe, &e.dy, &e.dwte, &e.dwpe};
    for (int i = 0; i < 6; i++)
        tensor_free(all[i]);
    free(e.token);
    free(e.out);
}

static void embedding_agrees_with_reference(void **state)
{
    /* samples, seq, width, vocab: some tokens repeat, some never occur */
    static const int64_t size[][4] = {
        {1, 1, 1, 1}, {2, 3, 7, 3}, {3, 7, 17, 5}, {1, 17, 3, 33}};

    (void)state;
    fixture_seed();
    for (int t = 0; t < 3; t++)
        for (int i = 0; i < 8; i++)
            check_embedding(fixture_types[t], size[i / 2], i % 2);
}

struct classifier {
    struct tensor a, w, da, dw;
    int32_t *target;
    struct iz_classifier c;
    double loss;
};

static struct classifier classifier_new(enum iz_dtype t, int64_t m, int64_t c,
                                        int64_t v)
{
    struct classifier k = {
        .a = tensor_new(IZ_F32, m, c, 2),
        .w = tensor_new(t, v, c, 2),
        .da = tensor_new(IZ_F32, m, c, 1),
        .dw = tensor_new(t, v, c, 1),
        .target = calloc((size_t)m, sizeof(int32_t)),
        .loss = -1,
    };

    for (int64_t i = 0; i < m; i++)
        k.target[i] = i % 5 == 3 ? -1 : fixture_below(v);
    k.c = (struct iz_classifier){.a = k.a.v,
                                 .w = k.w.v,
                                 .target = k.target,
                                 .da = k.da.v,
                                 .dw = k.dw.v,
                                 .loss_scale = 4};
    return k;
}

static void classifier_free(struct classifier *k)
{
    tensor_free(&k->a);
    tensor_free(&k->w);
    tensor_free(&k->da);
    tensor_free(&k->dw);
    free(k->target);
}

static void classify(struct iz_exec *x, void *arg)
{
    struct classifier *k = arg;

    k->c.loss = &k->loss;
    iz_classifier_fwd(x, &k->c);
}

static void classify_backward(struct iz_exec *x, void *arg)
{
    struct classifier *k = arg;

    k->c.loss = &k->loss;
    iz_classifier_bwd(x, &k->c);
}

static double classifier_objective(void *arg)
{
    struct classifier *k = arg;

    return (double)k->c.loss_scale * ref_classifier(k->a.d, k->w.d, k->target,
                                                    k->a.v.rows, k->a.v.cols,
                                                    k->w.v.rows);
}

static void check_classifier_gradient(struct classifier *k, struct tensor *got,
                                      double *in)
{
    int64_t n = iz_view_len(got->v);
    double *want = calloc((size_t)n, sizeof *want);

    ref_gradient(want, classifier_objective, k, in, n);
    fixture_close("gradient of the classifier", got, want, 4e-6);
    free(want);
}

static void check_classifier(enum iz_dtype t, const int64_t s[3])
{
    struct classifier k = classifier_new(t, s[0], s[1], s[2]);
    double want = classifier_objective(&k) / (double)k.c.loss_scale;

    fixture_run(classify, &k);
    assert_true(fabs(k.loss - want) <= 2e-6 * fmax(1, want));
    double forward = k.loss;
    fixture_run(classify_backward, &k);
    assert_true(k.loss == forward);
    check_classifier_gradient(&k, &k.da, k.a.d);
    check_classifier_gradient(&k, &k.dw, k.w.d);
    /* da in the memory of a */
    struct tensor own = k.da;
    k.c.da = k.a.v;
    fixture_run(classify_backward, &k);
    fixture_same_bits("da in a", k.a.v, own.v);
    classifier_free(&k);
}

static void classifier_agrees_with_reference(void **state)
{
    static const int64_t size[][3] = {{1, 1, 1},   {3, 7, 2},  {7, 3, 17},
                                      {17, 5, 33}, {1, 17, 3}, {6, 2, 257}};

    (void)state;
    fixture_seed();
    for (int t = 0; t < 3; t++)
        for (size_t i = 0; i < sizeof size / sizeof size[0]; i++)
            check_classifier(fixture_types[t], size[i]);
}

/* A vocabulary so large that the rows fall into two chunks.  The gradient is
 * the sum over the rows of (softmax - target) a, written out. */
static void check_chunks(enum iz_dtype t)
{
    enum { M = 20, V = 1 << 20 };
    struct classifier k = classifier_new(t, M, 1, V);
    double *dw = calloc(V, sizeof *dw), da[M] = {0}, loss = 0;
    double scale = (double)k.c.loss_scale / 16; /* 4 of 20 are ignored */

    for (int i = 0; i < M; i++) {
        double sum = 0, a = k.a.d[i];
        if (k.target[i] < 0)
            continue;
        for (int v = 0; v < V; v++)
            sum += exp(a * k.w.d[v]);
        for (int v = 0; v < V; v++) {
            double p = exp(a * k.w.d[v]) / sum - (v == k.target[i]);
            dw[v] += scale * p * a;
            da[i] += scale * p * k.w.d[v];
        }
        loss += (log(sum) - a * k.w.d[k.target[i]]) / 16;
    }
    fixture_run(classify_backward, &k);
    assert_true(fabs(k.loss - loss) < 1e-5);
    fixture_close("da of chunks", &k.da, da, 5e-5);
    fixture_close("dw of chunks", &k.dw, dw, 1e-5);
    /* frozen: its type is all that is left of the gradient */
    k.c.dw = (struct iz_view){.dtype = t, .cols = k.dw.v.cols};
    fixture_run(classify_backward, &k);
    fixture_close("da of chunks, frozen", &k.da, da, 5e-5);
    free(dw);
    classifier_free(&k);
}

static void classifier_chunks_agree(void **state)
{
    (void)state;
    fixture_seed();
    check_chunks(IZ_F32);
    check_chunks(IZ_BF16);
}

static void classifier_without_targets_is_zero(void **state)
{
    struct classifier k;

    (void)state;
    fixture_seed();
    k = classifier_new(IZ_F32, 3, 2, 4);
    for (int i = 0; i < 3; i++)
        k.target[i] = -1;
    fixture_run(classify_backward, &k);
    assert_true(k.loss == 0);
    tensor_load(&k.dw);
    for (int i = 0; i < 8; i++)
        assert_true(k.dw.d[i] == 0);
    classifier_free(&k);
}

/* What comes of a[0,0] = value in the loss. */
static double loss_with(double value)
{
    struct classifier k = classifier_new(IZ_F32, 6, 3, 33);
    double loss;

    k.a.d[0] = value;
    k.w.d[0] = 1;
    tensor_store(&k.a);
    tensor_store(&k.w);
    fixture_run(classify_backward, &k);
    loss = k.loss;
    classifier_free(&k);
    return loss;
}

static void classifier_shows_nan_and_overflow(void **state)
{
    (void)state;
    fixture_seed();
    assert_true(isnan(loss_with(NAN)));
    assert_false(isfinite(loss_with(INFINITY)));
    assert_false(isfinite(loss_with(-INFINITY)));
    assert_true(isfinite(loss_with(1e4)));
    assert_true(isfinite(loss_with(1e30)));
    assert_true(isfinite(loss_with(1e-42)));
}

int ops_tokens(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(embedding_agrees_with_reference),
        cmocka_unit_test(classifier_agrees_with_reference),
        cmocka_unit_test(classifier_chunks_agree),
        cmocka_unit_test(classifier_without_targets_is_zero),
        cmocka_unit_test(classifier_shows_nan_and_overflow),
    };

    return cmocka_run_group_tests_name("tokens", tests, NULL, NULL);
}
