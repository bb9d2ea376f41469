/* SPDX-License-Identifier: Apache-2.0 */
/* Matrix products against the reference: all sizes, layouts and types. */
#include "tests/codelets/ops/fixture.h"

#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "codelets/ops/gemm16.h"
#include "tests/codelets/ops/reference.h"

struct product {
    struct tensor y, r, a, w, b, da, dw, db;
    struct iz_linear l;
    struct ref_matmul ref;
    bool narrow; /* products of bf16, of operands that have no more bits */
};

static struct product product_new(enum iz_dtype t, int64_t m, int64_t in,
                                  int64_t out, bool out_in)
{
    struct product p = {
        .y = tensor_new(IZ_F32, m, out, 1),
        .r = tensor_new(IZ_F32, m, out, 1),
        .a = tensor_new(IZ_F32, m, in, 1),
        .w = tensor_new(t, out_in ? out : in, out_in ? in : out, 1),
        .b = tensor_new(t, 1, out, 1),
        .da = tensor_new(IZ_F32, m, in, 1),
        .dw = tensor_new(t, out_in ? out : in, out_in ? in : out, 1),
        .db = tensor_new(t, 1, out, 1),
    };

    p.l = (struct iz_linear){
        .w = p.w.v, .b = p.b.v, .dw = p.dw.v, .db = p.db.v, .out_in = out_in};
    p.ref = (struct ref_matmul){.r = p.r.d,
                                .a = p.a.d,
                                .w = p.w.d,
                                .b = p.b.d,
                                .m = m,
                                .in = in,
                                .out = out,
                                .out_in = out_in};
    p.ref.y = calloc((size_t)(m * out), sizeof(double));
    return p;
}

static void product_free(struct product *p)
{
    struct tensor *all[] = {&p->y, &p->r,  &p->a,  &p->w,
                            &p->b, &p->da, &p->dw, &p->db};

    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        tensor_free(all[i]);
    free(p->ref.y);
}

/* r absent when the product has no bias either, so both ways are seen. */
static void forward(struct iz_exec *x, void *arg)
{
    struct product *p = arg;

    x->narrow = p->narrow;
    iz_matmul_fwd(x, p->y.v, p->ref.r ? p->r.v : IZ_NONE, p->a.v, &p->l);
}

/* r plays the gradient of y. */
static void backward(struct iz_exec *x, void *arg)
{
    struct product *p = arg;

    x->narrow = p->narrow;
    iz_matmul_dw(x, p->r.v, p->a.v, &p->l);
    iz_matmul_da(x, p->da.v, p->r.v, &p->l);
}

static double objective(void *arg)
{
    struct product *p = arg;

    p->ref.r = NULL;
    ref_matmul(&p->ref);
    return fixture_dot(p->ref.y, p->r.d, iz_view_len(p->y.v));
}

static void check_gradient(const char *what, struct product *p,
                           struct tensor *got, double *in)
{
    int64_t n = iz_view_len(got->v);
    double *want = calloc((size_t)n, sizeof *want);

    ref_gradient(want, objective, p, in, n);
    fixture_close(what, got, want, 2e-6);
    free(want);
}

/* With and without r and b, and the gradients. */
static void check_all(struct product *p)
{
    double *r = p->ref.r;

    fixture_run(forward, p);
    ref_matmul(&p->ref);
    fixture_close("y = r + a w + b", &p->y, p->ref.y, 2e-6);
    p->ref.r = NULL;
    fixture_run(forward, p);
    ref_matmul(&p->ref);
    fixture_close("y = a w + b", &p->y, p->ref.y, 2e-6);
    p->ref.b = NULL;
    p->l.b = IZ_NONE;
    fixture_run(forward, p);
    ref_matmul(&p->ref);
    fixture_close("y = a w", &p->y, p->ref.y, 2e-6);
    p->ref.r = r;
    fixture_run(forward, p);
    ref_matmul(&p->ref);
    fixture_close("y = r + a w", &p->y, p->ref.y, 2e-6);
    p->ref.b = p->b.d;
    fixture_run(backward, p);
    check_gradient("da", p, &p->da, p->a.d);
    check_gradient("dw", p, &p->dw, p->w.d);
    check_gradient("db", p, &p->db, p->b.d);
}

static void check_product(enum iz_dtype t, const int64_t s[3], bool out_in)
{
    struct product p = product_new(t, s[0], s[1], s[2], out_in);

    check_all(&p);
    product_free(&p);
}

/* Rounds values of fp32 to what bf16 holds. */
static void round_16(struct tensor *t)
{
    int64_t n = iz_view_len(t->v);
    uint16_t *half = calloc((size_t)n, sizeof *half);

    iz_cast(half, IZ_BF16, t->v.p, IZ_F32, n);
    iz_cast(t->v.p, IZ_F32, half, IZ_BF16, n);
    tensor_load(t);
    free(half);
}

static struct product narrow_new(enum iz_dtype dw, const int64_t s[3],
                                 bool out_in)
{
    struct product p = product_new(IZ_BF16, s[0], s[1], s[2], out_in);

    p.narrow = true;
    round_16(&p.a);
    round_16(&p.r);
    tensor_free(&p.dw);
    p.dw = tensor_new(dw, p.w.v.rows, p.w.v.cols, 1);
    p.l.dw = p.dw.v;
    return p;
}

/* A product with an adapter of rank `rank`: that of w + scale b a. */
struct adapted {
    struct product p;
    struct tensor a, b, da, db;
    struct iz_adapter f;
    double *plain; /* w without */
};

/* What the reference computes with. */
static void adapted_merge(struct adapted *t)
{
    int64_t in = t->p.ref.in, out = t->p.ref.out, rank = t->a.v.rows;

    for (int64_t i = 0; i < in; i++)
        for (int64_t o = 0; o < out; o++) {
            int64_t at = t->p.ref.out_in ? o * in + i : i * out + o;
            double sum = 0;

            for (int64_t r = 0; r < rank; r++)
                sum += t->b.d[o * rank + r] * t->a.d[r * in + i];
            t->p.w.d[at] = t->plain[at] + (double)t->f.scale * sum;
        }
}

static double adapted_objective(void *arg)
{
    struct adapted *t = arg;

    adapted_merge(t);
    return objective(&t->p);
}

static void adapted_forward(struct iz_exec *x, void *arg)
{
    forward(x, &((struct adapted *)arg)->p);
}

static void adapted_backward(struct iz_exec *x, void *arg)
{
    backward(x, &((struct adapted *)arg)->p);
}

static void adapted_check(const char *what, struct adapted *t,
                          struct tensor *got, double *in)
{
    int64_t n = iz_view_len(got->v);
    double *want = calloc((size_t)n, sizeof *want);

    ref_gradient(want, adapted_objective, t, in, n);
    fixture_close(what, got, want, 4e-6);
    free(want);
}

static void check_adapted(enum iz_dtype type, const int64_t s[3], int64_t rank,
                          bool out_in)
{
    struct adapted t = {.p = product_new(type, s[0], s[1], s[2], out_in),
                        .a = tensor_new(type, rank, s[1], 1),
                        .b = tensor_new(type, s[2], rank, 1),
                        .da = tensor_new(type, rank, s[1], 1),
                        .db = tensor_new(type, s[2], rank, 1)};
    int64_t n = iz_view_len(t.p.w.v);

    t.plain = calloc((size_t)n, sizeof *t.plain);
    memcpy(t.plain, t.p.w.d, (size_t)n * sizeof *t.plain);
    t.f = (struct iz_adapter){
        .a = t.a.v, .b = t.b.v, .da = t.da.v, .db = t.db.v, .scale = 0.75F};
    t.p.l.w.adapter = &t.f;
    t.p.l.dw = (struct iz_view){.dtype = type, .cols = t.p.dw.v.cols};
    fixture_run(adapted_forward, &t);
    adapted_merge(&t);
    ref_matmul(&t.p.ref);
    fixture_close("y = r + a (w + s b a) + bias", &t.p.y, t.p.ref.y, 4e-6);
    fixture_run(adapted_backward, &t);
    assert_true(t.f.seen && t.f.out_in == out_in);
    adapted_check("da of the layer", &t, &t.p.da, t.p.a.d);
    adapted_check("da", &t, &t.da, t.a.d);
    adapted_check("db", &t, &t.db, t.b.d);
    free(t.plain);
    tensor_free(&t.a);
    tensor_free(&t.b);
    tensor_free(&t.da);
    tensor_free(&t.db);
    product_free(&t.p);
}

static void an_adapter_adds_its_product(void **state)
{
    static const int64_t size[][3] = {
        {1, 1, 1}, {5, 7, 3}, {17, 4, 33}, {4, 16, 16}};

    (void)state;
    fixture_seed();
    for (int t = 0; t < 3; t++)
        for (size_t i = 0; i < sizeof size / sizeof size[0]; i++)
            for (int64_t rank = 1; rank < 6; rank += 2) {
                check_adapted(fixture_types[t], size[i], rank, false);
                check_adapted(fixture_types[t], size[i], rank, true);
            }
}

static void matmul_agrees_with_reference(void **state)
{
    static const int64_t size[][3] = {{1, 1, 1},  {3, 7, 1},   {1, 17, 3},
                                      {7, 3, 17}, {17, 1, 33}, {33, 17, 7},
                                      {4, 16, 16}};

    (void)state;
    fixture_seed();
    for (int t = 0; t < 3; t++)
        for (size_t i = 0; i < sizeof size / sizeof size[0]; i++) {
            check_product(fixture_types[t], size[i], false);
            check_product(fixture_types[t], size[i], true);
        }
}

/* Operands that bf16 holds: only the sums differ from the reference. */
static void narrow_products_agree(void **state)
{
    static const int64_t size[][3] = {{1, 1, 1},    {3, 7, 1},    {1, 17, 3},
                                      {17, 1, 33},  {33, 17, 7},  {4, 16, 16},
                                      {65, 48, 80}, {7, 130, 31}, {130, 3, 18}};

    (void)state;
    if (iz_gemm16_missing())
        skip();
    fixture_seed();
    for (size_t i = 0; i < sizeof size / sizeof size[0]; i++)
        for (int how = 0; how < 4; how++) {
            struct product p =
                narrow_new(how & 1 ? IZ_F32 : IZ_BF16, size[i], how & 2);

            check_all(&p);
            product_free(&p);
        }
}

/* The other operand is rounded as a cast does it, and nothing else is. */
static void narrow_products_round_one_operand(void **state)
{
    static const int64_t size[3] = {130, 70, 90};
    struct product p[2];

    (void)state;
    if (iz_gemm16_missing())
        skip();
    for (int i = 0; i < 2; i++) {
        fixture_seed();
        p[i] = product_new(IZ_BF16, size[0], size[1], size[2], true);
        p[i].l.b = IZ_NONE;
        p[i].ref.r = NULL;
        p[i].narrow = true;
    }
    round_16(&p[1].a);
    round_16(&p[1].r);
    assert_memory_not_equal(p[0].a.v.p, p[1].a.v.p, 64);
    for (int i = 0; i < 2; i++) {
        fixture_run(forward, &p[i]);
        fixture_run(backward, &p[i]);
    }
    fixture_same_bits("y", p[0].y.v, p[1].y.v);
    fixture_same_bits("da", p[0].da.v, p[1].da.v);
    fixture_same_bits("dw", p[0].dw.v, p[1].dw.v);
    product_free(&p[0]);
    product_free(&p[1]);
}

static void narrow_is_for_bf16_weights_alone(void **state)
{
    static const int64_t size[3] = {33, 17, 7};

    (void)state;
    fixture_seed();
    for (int t = 0; t < 3; t += 2) {
        struct product p[2];

        for (int i = 0; i < 2; i++) {
            fixture_seed();
            p[i] =
                product_new(fixture_types[t], size[0], size[1], size[2], false);
            p[i].narrow = i;
            fixture_run(forward, &p[i]);
        }
        fixture_same_bits("y", p[0].y.v, p[1].y.v);
        product_free(&p[0]);
        product_free(&p[1]);
    }
}

/* dst [n,m] = transposed src [m,n]. */
static void transpose(double *dst, const double *src, int64_t m, int64_t n)
{
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++)
            dst[j * m + i] = src[i * n + j];
}

/* 1500 x 900 16-bit weights take two panels. */
static void check_panels(enum iz_dtype t, bool out_in)
{
    int64_t m = 3, in = out_in ? 900 : 1500, out = out_in ? 1500 : 900;
    struct product p = product_new(t, m, in, out, out_in);
    double *want = calloc((size_t)(in * out), sizeof *want);
    double *left = calloc((size_t)(m * 1500), sizeof *left);
    struct ref_matmul da = {.y = want,
                            .a = p.r.d,
                            .w = p.w.d,
                            .m = m,
                            .in = out,
                            .out = in,
                            .out_in = !out_in};
    struct ref_matmul dw = {.y = want,
                            .a = left,
                            .m = 1500,
                            .in = m,
                            .out = 900,
                            .w = out_in ? p.a.d : p.r.d};

    fixture_run(forward, &p);
    ref_matmul(&p.ref);
    fixture_close("y of panels", &p.y, p.ref.y, 2e-6);
    p.ref.b = p.ref.r = NULL;
    p.l.b = IZ_NONE;
    fixture_run(forward, &p);
    ref_matmul(&p.ref);
    fixture_close("y of panels alone", &p.y, p.ref.y, 2e-6);
    fixture_run(backward, &p);
    ref_matmul(&da);
    fixture_close("da of panels", &p.da, want, 2e-6);
    transpose(left, out_in ? p.r.d : p.a.d, m, 1500);
    ref_matmul(&dw);
    fixture_close("dw of panels", &p.dw, want, 2e-6);
    free(left);
    free(want);
    product_free(&p);
}

static void matmul_panels_agree(void **state)
{
    (void)state;
    fixture_seed();
    check_panels(IZ_BF16, false);
    check_panels(IZ_BF16, true);
    check_panels(IZ_F16, false);
}

static void check_adds(struct product *p)
{
    double *once = calloc(21, sizeof *once);

    fixture_run(backward, p);
    tensor_load(&p->dw);
    for (int i = 0; i < 21; i++)
        once[i] = 2 * p->dw.d[i];
    p->l.add = true;
    fixture_run(backward, p);
    fixture_close("dw added to itself", &p->dw, once, 1e-6);
    free(once);
}

static void matmul_dw_adds(void **state)
{
    static const int64_t size[3] = {5, 7, 3};
    struct product p;

    (void)state;
    fixture_seed();
    p = product_new(IZ_F32, size[0], size[1], size[2], true);
    check_adds(&p);
    product_free(&p);
    if (iz_gemm16_missing())
        return;
    p = narrow_new(IZ_F32, size, true);
    check_adds(&p);
    product_free(&p);
}

/* y may be r; a gradient with p = NULL is left alone. */
static void matmul_in_place_and_unwanted(void **state)
{
    struct product p;

    (void)state;
    fixture_seed();
    p = product_new(IZ_F32, 5, 7, 3, false);
    ref_matmul(&p.ref);
    struct tensor y = p.y;
    p.y = p.r;
    fixture_run(forward, &p);
    fixture_close("y = y + a w + b", &p.r, p.ref.y, 1e-6);
    p.y = y;
    p.l.db.p = p.l.dw.p = NULL;
    struct iz_exec x = {.backend = IZ_CPU};
    iz_matmul_dw(&x, p.r.v, p.a.v, &p.l);
    assert_true(x.flops == 0);
    product_free(&p);
}

static void matmul_shows_nan_and_overflow(void **state)
{
    struct product p;

    (void)state;
    fixture_seed();
    p = product_new(IZ_F32, 3, 5, 2, false);
    p.a.d[5] = NAN; /* row 1 */
    p.a.d[10] = 3e38;
    p.w.d[0] = 3e38;
    tensor_store(&p.a);
    tensor_store(&p.w);
    fixture_run(forward, &p);
    tensor_load(&p.y);
    assert_true(isfinite(p.y.d[1]));
    assert_true(isnan(p.y.d[2]) && isnan(p.y.d[3]));
    assert_true(isinf(p.y.d[4]));
    product_free(&p);
}

static void *backward_thread(void *arg)
{
    struct product *p = arg;
    struct iz_exec x = {
        .backend = IZ_CPU,
        .narrow = p->w.v.dtype == IZ_BF16,
        .work = {.base = fixture_take(1 << 20), .size = 1 << 20}};

    iz_matmul_da(&x, p->da.v, p->r.v, &p->l);
    free(x.work.base);
    return NULL;
}

static void check_threads(enum iz_dtype t)
{
    struct product p[2];
    pthread_t id[2];

    for (int i = 0; i < 2; i++) {
        fixture_seed();
        p[i] = product_new(t, 130, 70, 90, false);
    }
    for (int i = 0; i < 2; i++)
        pthread_create(&id[i], NULL, backward_thread, &p[i]);
    for (int i = 0; i < 2; i++)
        pthread_join(id[i], NULL);
    fixture_same_bits("da", p[0].da.v, p[1].da.v);
    product_free(&p[0]);
    product_free(&p[1]);
}

static void matmul_gives_equal_bits_on_every_thread(void **state)
{
    (void)state;
    check_threads(IZ_F32);
    if (!iz_gemm16_missing())
        check_threads(IZ_BF16);
}

int ops_matmul(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(matmul_agrees_with_reference),
        cmocka_unit_test(an_adapter_adds_its_product),
        cmocka_unit_test(matmul_panels_agree),
        cmocka_unit_test(narrow_products_agree),
        cmocka_unit_test(narrow_products_round_one_operand),
        cmocka_unit_test(narrow_is_for_bf16_weights_alone),
        cmocka_unit_test(matmul_dw_adds),
        cmocka_unit_test(matmul_in_place_and_unwanted),
        cmocka_unit_test(matmul_shows_nan_and_overflow),
        cmocka_unit_test(matmul_gives_equal_bits_on_every_thread),
    };

    return cmocka_run_group_tests_name("matmul", tests, NULL, NULL);
}
