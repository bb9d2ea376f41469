/* SPDX-License-Identifier: Apache-2.0 */
/* Matrix products: all types, both layouts, odd sizes and those of a block of a
 * 1.5B model. */
#include <math.h>

#include "tests/codelets/ops/product.h"

enum { SIZES = COUNT(product_sizes) };

static void matmul_agrees_with_reference(void **state)
{
    product_each(product_check_all, product_sizes, SIZES, false);
}

static void check_dw(struct product *p)
{
    for (int add = 0; add < 2; add++) {
        p->add = add;
        product_check(p, GRADIENT_W);
    }
}

static void gradients_are_added_in_fp32(void **state)
{
    product_each(check_dw, product_sizes, SIZES, true);
}

static void check_large(struct product *p)
{
    product_check_forward(p, true, true);
    product_check(p, GRADIENT_A);
    product_check(p, GRADIENT_W);
}

/* On a CPU 1500 x 900 16-bit weights take two panels. */
static void large_sizes_agree(void **state)
{
    static const int64_t large[][3] = {{1000, 1600, 4800}, {999, 2048, 257}};
    static const int64_t panels[2][3] = {{3, 1500, 900}, {3, 900, 1500}};
    product_each(check_large, large, backend.large ? 2 : 0, false);
    for (int k = 0; k < 2; k++) {
        enum iz_dtype t = scene_type(2 * k + 1);
        struct product p = product_new(t, t, panels[k], k);
        check_large(&p);
        product_free(&p);
    }
}

static void check_only_one(struct product *p)
{
    double flops;
    for (int i = 0; i < 2; i++) {
        p->s.unwanted = BIT(i ? DW : DB);
        product_check(p, GRADIENT_W);
        flops = p->s.flops;
        p->s.unwanted = 0;
        p->absent = BIT(i ? DW : DB);
        product_check(p, GRADIENT_W);
        assert_true(p->s.flops == flops);
        p->absent = 0;
    }
    assert_true(flops == 0);
    p->s.unwanted = BIT(DW) | BIT(DB);
    product_check(p, GRADIENT_W);
    assert_true(p->s.flops == 0 && p->s.scratch == 0);
}

static void unwanted_gradients_are_left_out(void **state)
{
    product_each(check_only_one, product_sizes, SIZES, false);
}

/* Adapters of all outputs, of the middle third, and of all but the first ones.
 */
enum { ALL, MIDDLE, END };

static const struct adapter {
    int64_t rank;
    int outputs;
    double drop;
    bool magnitudes;
} adapters[] = {{1, ALL, 0, false},    {3, ALL, 0, false},
                {3, MIDDLE, 0, false}, {2, END, 0, false},
                {3, END, 0.25, false}, {3, ALL, 0, true},
                {2, MIDDLE, 0, true}};

static const struct adapter *adapter; /* under test */

/* An adapter's first product is rounded to the type of activations. */
static void check_adapter(struct product *p)
{
    struct tensor *t = p->s.t;
    enum iz_dtype act = t[A].v.dtype, param = t[W].v.dtype;
    p->s.n = PRODUCT_TENSORS;
    p->rank = adapter->rank;
    p->first = adapter->outputs == ALL ? 0 : p->out / 3;
    p->part = p->out - p->first * (adapter->outputs == MIDDLE ? 2 : 1);
    p->drop = adapter->drop;
    p->with_m = adapter->magnitudes;
    p->scale = 0.75F;
    p->slack = act == IZ_F32 ? 0 : 2 * fixture_rounding(act, 1);
    if (p->with_m) /* a norm may be a difference */
        p->slack += 64 * fixture_rounding(IZ_F32, 1);
    for (int i = 0; i < 2; i++) { /* the adapter, its gradient */
        t[i ? DLA : LA] = tensor_new(param, p->rank, p->in, 1);
        t[i ? DLB : LB] = tensor_new(param, p->part, p->rank, 1);
        t[i ? DLM : LM] = tensor_new(param, 1, p->part, 1);
    }
    check_large(p);
    tensor_free(&t[Y]); /* as a router's logits are */
    t[Y] = tensor_new(IZ_F32, p->m, p->out, 1);
    p->s.act = A;
    product_check_forward(p, false, true);
}

static void an_adapter_adds_its_product(void **state)
{
    static const int64_t size[][3] = {
        {1, 1, 1}, {5, 7, 3}, {17, 4, 33}, {4, 16, 16}};
    for (int i = 0; i < COUNT(adapters); i++) {
        adapter = &adapters[i];
        product_each(check_adapter, size, COUNT(size), false);
    }
}

/* Of 2^18 elements of eight samples, in one piece or cut between samples. */
static void dropout_knows_elements_by_their_place(void **state)
{
    enum { SAMPLES = 8, ROWS = 16, COLS = 2048, N = SAMPLES * ROWS * COLS };
    static float a[N], y[N], cut[N];
    struct iz_exec x = {.backend = IZ_CPU};
    struct iz_view v = {
        .p = a, .dtype = IZ_F32, .rows = SAMPLES * ROWS, .cols = COLS};
    struct iz_view to = v, part = v;
    struct iz_drop d = {0.1, 3, 100, SAMPLES};
    int64_t zeros = 0, same = 0;
    for (int i = 0; i < N; i++)
        a[i] = 9;
    to.p = y;
    iz_dropout(&x, to, IZ_NONE, v, &d);
    for (int i = 0; i < N; i++) {
        assert_true(y[i] == 0 || y[i] == 10);
        zeros += y[i] == 0;
        same += i >= COLS && (y[i] == 0) == (y[i - COLS] == 0);
    }
    /* Five standard deviations of what is expected. */
    assert_true(fabs((double)zeros - 0.1 * N) < 5 * sqrt(0.09 * N));
    assert_true(fabs((double)same - 0.82 * (N - COLS)) < 5 * sqrt(0.1476 * N));
    for (int s = 0; s < SAMPLES; s++) {
        d.sample = 100 + s;
        d.samples = 1;
        part.p = a + s * ROWS * COLS;
        part.rows = ROWS;
        to = part;
        to.p = cut + s * ROWS * COLS;
        iz_dropout(&x, to, part, part, &d);
    }
    for (int i = 0; i < N; i++)
        assert_true(cut[i] == 9 + y[i]);
    d.key++;
    d.samples = SAMPLES;
    to = v;
    to.p = cut;
    iz_dropout(&x, to, IZ_NONE, v, &d);
    assert_memory_not_equal(cut, y, sizeof(y));
}

static void matmul_shows_nan_and_overflow(void **state)
{
    static const int64_t size[3] = {3, 5, 2};
    for (int t = 0; t < 3; t += 2) {
        struct product p =
            product_new(fixture_types[t], fixture_types[t], size, false);
        double *a = p.s.t[A].d, *w = p.s.t[W].d, *y = p.s.t[Y].d;
        double large = p.s.t[W].v.dtype == IZ_F16 ? 60000 : 3e38;
        a[5] = NAN; /* row 1 */
        a[10] = p.s.t[A].v.dtype == IZ_F16 ? 60000 : 3e38;
        w[0] = large;
        tensor_store(&p.s.t[A]);
        tensor_store(&p.s.t[W]);
        product_run(&p, FORWARD);
        tensor_load(&p.s.t[Y]);
        assert_true(isfinite(y[1]) && isnan(y[2]) && isnan(y[3]));
        assert_true(isinf(y[4]));
        product_free(&p);
    }
}

int ops_matmul_called(const char *name)
{
    const struct CMUnitTest tests[] = {
        SEEDED(matmul_agrees_with_reference),
        SEEDED(gradients_are_added_in_fp32),
        SEEDED(large_sizes_agree),
        SEEDED(unwanted_gradients_are_left_out),
        SEEDED(an_adapter_adds_its_product),
        cmocka_unit_test(dropout_knows_elements_by_their_place),
        SEEDED(matmul_shows_nan_and_overflow),
    };
    if (!backend_multiplies())
        return 0;
    return cmocka_run_group_tests_name(name, tests, backend_renew, NULL);
}

int ops_matmul(void)
{
    return ops_matmul_called("matmul");
}
