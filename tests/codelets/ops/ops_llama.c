/* SPDX-License-Identifier: Apache-2.0 */
/* Normalisation of heads, and rotary positions. */
#include "tests/codelets/ops/scene.h"

#include <math.h>
#include <string.h>

#include "codelets/ops/ops.h"
#include "tests/codelets/ops/reference.h"

/* ---- heads of a row ----------------------------------------------------- */

enum { A, KEPT, W, DW, RSTD, HEAD_TENSORS };

/* m rows of ld columns: `heads` of c from column `first` on.  Back: A is the
 * gradient. */
struct heads {
    int64_t m, ld, first, heads, c;
    bool back;
};

static void heads_run(struct iz_exec *x, const struct iz_view *v,
                      const void *arg)
{
    const struct heads *h = arg;
    struct iz_norm_layer n = {
        .w = v[W], .dw = v[DW], .rstd = v[RSTD], .eps = 1e-5f};
    iz_norm_head(x, v[A], v[KEPT], &n, h->first, h->back);
}

/* Both passes in double: the result in place of a, its gradient in place of
 * that of the result, and dw. */
static void heads_double(const struct heads *h, const double *w, double *a,
                         double *da, double *dw)
{
    for (int64_t i = 0; i < h->m * h->heads; i++) {
        int64_t at = i / h->heads * h->ld + h->first + i % h->heads * h->c;
        double dy[1024];
        memcpy(dy, da + at, (size_t)h->c * 8);
        ref_norm_gradient(da + at, dw, NULL, a + at, dy, w, h->c);
        ref_norm(a + at, a + at, w, NULL, 1, h->c, 1e-5);
    }
}

static void check_heads(enum iz_dtype param, struct heads *h)
{
    enum iz_dtype act = backend.act(param);
    struct scene s = {.n = HEAD_TENSORS,
                      .t = {[A] = tensor_new(act, h->m, h->ld, 2),
                            [KEPT] = tensor_new(act, h->m, h->heads * h->c, 1),
                            [W] = tensor_new(param, 1, h->c, 1),
                            [DW] = tensor_new(param, 1, h->c, 1),
                            [RSTD] = tensor_new(IZ_F32, h->m, h->heads, 1)}};
    struct tensor dy = tensor_new(act, h->m, h->ld, 1), *t = s.t;
    struct tensor a = tensor_copy(&t[A]);
    size_t bytes = (size_t)iz_view_len(a.v) * 8;
    bool far = h->c < 64;
    memcpy(tensor_want(&t[A]), a.d, bytes);
    memcpy(tensor_want(&dy), dy.d, bytes);
    heads_double(h, t[W].d, t[A].want, dy.want, tensor_want(&t[DW]));
    scene_run(&s,
              &(struct pass){heads_run, BIT(A) | BIT(W),
                             BIT(A) | BIT(KEPT) | BIT(RSTD)},
              h);
    fixture_close("a", &t[A], 2e-6);
    for (int64_t i = 0; i < h->m; i++)
        assert_memory_equal(iz_view_rows(t[KEPT].v, i, 1).p,
                            (char *)iz_view_rows(a.v, i, 1).p +
                                h->first * iz_dtype_bytes(act),
                            (size_t)(h->heads * h->c * iz_dtype_bytes(act)));
    tensor_free(&t[A]);
    t[A] = dy;
    h->back = true;
    scene_run(&s,
              &(struct pass){heads_run, BIT(A) | BIT(KEPT) | BIT(W) | BIT(RSTD),
                             BIT(A) | BIT(DW)},
              h);
    fixture_close("da", &t[A], far ? 2e-5 : 2e-6);
    /* a sum of thousands of rows, on a CPU one after the other */
    far |= h->m * h->heads > 1000;
    fixture_close("dw", &t[DW], far ? 2e-5 : 2e-6);
    scene_free(&s);
    tensor_free(&a);
}

/* The heads of Qwen 3, and pieces that begin between 16 bytes. */
static void headnorm_agrees_with_reference(void **state)
{
    static const int64_t size[][5] = {
        {1, 2, 0, 1, 2},         {3, 30, 0, 3, 7},
        {5, 60, 17, 2, 17},      {2, 64, 32, 1, 32},
        {1, 64, 0, 1, 64},       {5, 1024, 512, 2, 128},
        {19, 1024, 0, 4, 128},   {3, 303, 101, 2, 100},
        {300, 48, 16, 1, 32},    {2, 2001, 3, 2, 999},
        {300, 4096, 0, 16, 128}, {300, 4096, 2048, 8, 128}};
    int n = COUNT(size) - (backend.large ? 0 : 2);
    for (int k = 0; k < 2 * n; k += scene_step()) {
        const int64_t *z = size[k / 2];
        check_heads(scene_type(k),
                    &(struct heads){z[0], z[1], z[2], z[3], z[4], false});
    }
}

/* ---- rope --------------------------------------------------------------- */

struct turn {
    struct iz_rope r;
    bool back, apart;
    int64_t cut; /* these rows first, then the others; 0: all at once */
};

static void rope_run(struct iz_exec *x, const struct iz_view *v,
                     const void *arg)
{
    const struct turn *t = arg;
    struct iz_view begins = {.dtype = IZ_I32, .cols = t->r.seq};
    if (t->apart) {
        begins.p = v[1].p;
        begins.rows = v[0].rows / t->r.seq;
    }
    struct iz_rope r = t->r;
    if (t->cut)
        iz_rope(x, iz_view_rows(v[0], 0, t->cut), begins, &r, t->back);
    r.first += t->cut;
    iz_rope(x, iz_view_rows(v[0], t->cut, v[0].rows - t->cut), begins, &r,
            t->back);
}

/* A cosine errs by the rounding of its angle and its own, 3e-7 together, 4e-7
 * on a GPU, wherever it is.  Turned back are numbers that have been rounded. */
static void check_rope(enum iz_dtype act, struct iz_rope r, int64_t m,
                       int64_t more)
{
    int64_t ld = (int64_t)r.heads * r.d + more;
    struct scene s = {.n = 1, .t = {tensor_new(act, m, ld, 1)}};
    for (int back = 0; back < 2; back++) {
        struct turn t = {.r = r, .back = back, .cut = m <= r.seq ? m / 3 : 0};
        double *want = tensor_want(&s.t[0]);
        tensor_load(&s.t[0]);
        memcpy(want, s.t[0].d, (size_t)(m * ld) * 8);
        ref_rope(want, m, ld, &r, back);
        scene_run(&s, &(struct pass){rope_run, 1, 1}, &t);
        fixture_close("turned", &s.t[0], backend.device ? 8e-7 : 6e-7);
    }
    scene_free(&s);
}

/* With every scaling, heads that turn in part, and neighbours that do. */
static const struct iz_rope ropes[] = {
    {5, 1, 2, 1e4, 1, .scaling = IZ_ROPE_LLAMA3},
    {19, 3, 6, 10, 1, .scaling = IZ_ROPE_LLAMA3},
    {1, 2, 256, 1e6, 1, .scaling = IZ_ROPE_LLAMA3},
    {37, 5, 64, 5e5, 32, 1, 4, 8192, .scaling = IZ_ROPE_LLAMA3},
    {11, 2, 80, 1e4, 1, .scaling = IZ_ROPE_LLAMA3},
    {300, 1, 128, 1e4, 8, 1, 4, 64, .scaling = IZ_ROPE_LLAMA3},
    {37, 3, 64, 5e5, 32, 1, 4, 8192, .scaling = IZ_ROPE_LLAMA3},
    {9, 3, 64, 1e4, 1, .turned = 16},
    {9, 3, 24, 1e4, 1, .pairs = true},
    {37, 2, 80, 5e5, 32, 1, 4, 8192, .turned = 20, .pairs = true},
    {13, 2, 64, 1e4, 8, 1, 32, 512, .scaling = IZ_ROPE_LINEAR},
    {37, 3, 64, 1e4, 4, 1, 32, 64, .scaling = IZ_ROPE_YARN, .amplitude = 1.25f},
    {37, 2, 80, 5e5, 16, 1, 8, 4096, .turned = 20, .pairs = true,
     .scaling = IZ_ROPE_YARN, .fractions = true, .amplitude = 0.8f},
    {37, 3, 64, 1e4, 4, 1, 32, 8, .scaling = IZ_ROPE_YARN, .amplitude = 1,
     .queries = 2, .query_beta = 0.3}};

static void rope_agrees_with_reference(void **state)
{
    for (int k = 0; k < 2 * COUNT(ropes); k += scene_step()) {
        enum iz_dtype act = scene_type(k);
        int i = k / 2;
        if (!backend_acts(act))
            continue;
        int64_t seq = ropes[i].seq;
        check_rope(act, ropes[i], (1 + i % 3) * seq, 0);
        check_rope(act, ropes[i], 2 * seq, i % 2 ? 7 : 8);
        check_rope(act, ropes[i], seq, i % 2 ? 64 : 1);
    }
    if (backend.large)
        check_rope(backend.act(IZ_BF16),
                   (struct iz_rope){300, 40, 128, 5e5, 32, 1, 4, 8192,
                                    .scaling = IZ_ROPE_LLAMA3},
                   600, 8);
}

/* The last positions of 2^24 are as exact as the first; in fp32 their angles
 * would be off by up to 1. */
static void rope_is_exact_far_away(void **state)
{
    for (int i = 0; i < COUNT(ropes); i++) {
        struct iz_rope far = ropes[i];
        far.seq = 1 << 24;
        far.first = far.seq - 19;
        check_rope(IZ_F32, far, 19, i % 2);
    }
}

/* The same bits as documents of one length have as samples. */
static void rope_begins_again_with_a_document(void **state)
{
    struct iz_rope all = {
        .seq = 76, .heads = 2, .d = 32, .theta = 1e3, .factor = 1};
    enum iz_dtype act = backend.act(IZ_BF16);
    struct scene s = {
        .n = 2,
        .pinned = BIT(1),
        .t = {tensor_new(act, 2 * all.seq, 64, 1), bytes_new(2 * all.seq * 4)}};
    struct scene of = {
        .n = 2, .pinned = BIT(1), .t = {tensor_copy(&s.t[0]), s.t[1]}};
    int32_t *begins = s.t[1].v.p;
    for (int32_t i = 0; i < 2 * all.seq; i++)
        begins[i] = i % (int32_t)all.seq / 19 * 19;
    for (int back = 0; back < 2; back++) {
        struct turn whole = {.r = all, .back = back, .apart = true};
        struct turn part = {.r = all, .back = back};
        part.r.seq = 19;
        scene_run(&s, &(struct pass){rope_run, 3, 1}, &whole);
        scene_run(&of, &(struct pass){rope_run, 3, 1}, &part);
        fixture_same_bits("turned", s.t[0].v, of.t[0].v);
    }
    tensor_free(&of.t[0]);
    scene_free(&s);
}

int ops_llama(void)
{
    const struct CMUnitTest tests[] = {
        SEEDED(headnorm_agrees_with_reference),
        SEEDED(rope_agrees_with_reference),
        SEEDED(rope_is_exact_far_away),
        SEEDED(rope_begins_again_with_a_document),
    };
    return cmocka_run_group_tests_name("llama", tests, NULL, NULL);
}
