/* SPDX-License-Identifier: Apache-2.0 */
/* Matrix products on a GPU: all types, both layouts, odd sizes and those of a
 * block of a 1.5B model. */
#include "tests/codelets/gpu/ops_gpu.h"

#include <math.h>

enum { Y, R, A, W, B, DY, DA, DW, DB, TENSORS };

struct product {
    struct tensor t[TENSORS];
    int64_t m, in, out;
    enum iz_dtype act;
    bool out_in, add, with_r, with_b, in_place;
    unsigned unwanted;
};

static struct product product_new(enum iz_dtype param, enum iz_dtype dw,
                                  const int64_t s[3], bool out_in)
{
    int64_t m = s[0], in = s[1], out = s[2];
    int64_t rows = out_in ? out : in, cols = out_in ? in : out;
    enum iz_dtype act = iz_cuda_ops->act(param);

    return (struct product){.t = {[Y] = tensor_new(act, m, out, 1),
                                  [R] = tensor_new(act, m, out, 1),
                                  [A] = tensor_new(act, m, in, 1),
                                  [W] = tensor_new(param, rows, cols, 1),
                                  [B] = tensor_new(param, 1, out, 1),
                                  [DY] = tensor_new(act, m, out, 1),
                                  [DA] = tensor_new(act, m, in, 1),
                                  [DW] = tensor_new(dw, rows, cols, 1),
                                  [DB] = tensor_new(param, 1, out, 1)},
                            .m = m,
                            .in = in,
                            .out = out,
                            .act = act,
                            .out_in = out_in};
}

static void product_free(struct product *p)
{
    for (int i = 0; i < TENSORS; i++)
        tensor_free(&p->t[i]);
}

static struct iz_linear linear(const struct product *p, const struct iz_view *v)
{
    return (struct iz_linear){.w = v[W],
                              .b = p->with_b ? v[B] : IZ_NONE,
                              .dw = v[DW],
                              .db = v[DB],
                              .out_in = p->out_in,
                              .add = p->add};
}

static void forward(struct iz_exec *x, const struct iz_view *v, const void *arg)
{
    const struct product *p = arg;
    struct iz_linear l = linear(p, v);
    struct iz_view y = p->in_place ? v[R] : v[Y];

    iz_matmul_fwd(x, y, p->with_r ? v[R] : IZ_NONE, v[A], &l);
}

static void gradient_a(struct iz_exec *x, const struct iz_view *v,
                       const void *arg)
{
    struct iz_linear l = linear(arg, v);

    iz_matmul_da(x, v[DA], v[DY], &l);
}

static void gradient_w(struct iz_exec *x, const struct iz_view *v,
                       const void *arg)
{
    struct iz_linear l = linear(arg, v);

    iz_matmul_dw(x, v[DY], v[A], &l);
}

static void run(struct product *p,
                void (*op)(struct iz_exec *, const struct iz_view *,
                           const void *),
                unsigned reads, unsigned writes)
{
    gpu_run(&(struct gpu_op){.run = op,
                             .arg = p,
                             .t = p->t,
                             .n = TENSORS,
                             .reads = reads,
                             .writes = writes,
                             .unwanted = p->unwanted,
                             .act = p->act});
}

/* ---- references --------------------------------------------------------- */

static void add(struct want *w, double x)
{
    w->is += x;
    w->size += fabs(x);
}

static double weight(const struct product *p, int64_t in, int64_t out)
{
    return p->t[W].d[p->out_in ? out * p->in + in : in * p->out + out];
}

static struct want want_y(const void *arg, int64_t i, int64_t j)
{
    const struct product *p = arg;
    struct want w = {0, 0};

    for (int64_t k = 0; k < p->in; k++)
        add(&w, p->t[A].d[i * p->in + k] * weight(p, k, j));
    if (p->with_r)
        add(&w, p->t[R].d[i * p->out + j]);
    if (p->with_b)
        add(&w, p->t[B].d[j]);
    return w;
}

static struct want want_da(const void *arg, int64_t i, int64_t j)
{
    const struct product *p = arg;
    struct want w = {0, 0};

    for (int64_t k = 0; k < p->out; k++)
        add(&w, p->t[DY].d[i * p->out + k] * weight(p, j, k));
    return w;
}

/* Row and column of dw as it lies in memory. */
static struct want want_dw(const void *arg, int64_t i, int64_t j)
{
    const struct product *p = arg;
    int64_t in = p->out_in ? j : i, out = p->out_in ? i : j;
    struct want w = {0, 0};

    for (int64_t k = 0; k < p->m; k++)
        add(&w, p->t[A].d[k * p->in + in] * p->t[DY].d[k * p->out + out]);
    if (p->add)
        add(&w, p->t[DW].d[i * p->t[DW].v.cols + j]);
    return w;
}

static struct want want_db(const void *arg, int64_t i, int64_t j)
{
    const struct product *p = arg;
    struct want w = {0, 0};

    (void)i;
    for (int64_t k = 0; k < p->m; k++)
        add(&w, p->t[DY].d[k * p->out + j]);
    return w;
}

/* ---- tests -------------------------------------------------------------- */

static void check_forward(struct product *p, bool with_r, bool with_b)
{
    p->with_r = with_r;
    p->with_b = with_b;
    run(p, forward, 1u << R | 1u << A | 1u << W | 1u << B, 1u << Y);
    gpu_check("y", &p->t[Y], want_y, p);
}

/* r is y. */
static void check_in_place(struct product *p)
{
    p->with_r = p->with_b = p->in_place = true;
    run(p, forward, 1u << R | 1u << A | 1u << W | 1u << B, 1u << R);
    gpu_check("y in r", &p->t[R], want_y, p);
    p->in_place = false;
}

static void check_gradients(struct product *p)
{
    unsigned old = p->add ? 1u << DW : 0;

    run(p, gradient_a, 1u << DY | 1u << W, 1u << DA);
    gpu_check("da", &p->t[DA], want_da, p);
    run(p, gradient_w, 1u << DY | 1u << A | old, 1u << DW | 1u << DB);
    gpu_check("dw", &p->t[DW], want_dw, p);
    gpu_check("db", &p->t[DB], want_db, p);
}

static void check_all(struct product *p)
{
    check_forward(p, false, false);
    check_forward(p, true, true);
    check_gradients(p);
    check_in_place(p);
}

static void for_each(void (*check)(struct product *p), const int64_t (*size)[3],
                     int sizes, bool wide_dw, bool accumulates)
{
    fixture_seed();
    for (int k = 0; k < 3 * 2 * sizes; k++) {
        enum iz_dtype param = fixture_types[k % 3];
        struct product p;

        if (!gpu_computes(param))
            continue;
        p = product_new(param, wide_dw ? IZ_F32 : param, size[k / 6],
                        k / 3 % 2);
        p.add = accumulates;
        check(&p);
        product_free(&p);
    }
}

static const int64_t odd[][3] = {{1, 1, 1},   {3, 7, 1},    {1, 17, 3},
                                 {7, 3, 17},  {33, 17, 7},  {4, 16, 16},
                                 {8, 64, 24}, {65, 100, 72}};
enum { ODD = sizeof odd / sizeof odd[0] };

static void odd_sizes_agree(void **state)
{
    (void)state;
    for_each(check_all, odd, ODD, false, false);
}

static void gradients_are_added_in_fp32(void **state)
{
    (void)state;
    for_each(check_gradients, odd, ODD, true, false);
    for_each(check_gradients, odd, ODD, true, true);
}

static void large_sizes_agree(void **state)
{
    static const int64_t size[][3] = {{1000, 1600, 4800}, {999, 2048, 257}};

    (void)state;
    for_each(check_all, size, 2, false, false);
}

static void check_only_db(struct product *p)
{
    p->unwanted = 1u << DW;
    run(p, gradient_w, 1u << DY | 1u << A, 1u << DB);
    gpu_check("db alone", &p->t[DB], want_db, p);
}

static void check_only_dw(struct product *p)
{
    p->unwanted = 1u << DB;
    run(p, gradient_w, 1u << DY | 1u << A, 1u << DW);
    gpu_check("dw alone", &p->t[DW], want_dw, p);
}

static void unwanted_gradients_are_left_out(void **state)
{
    (void)state;
    for_each(check_only_db, odd, ODD, false, false);
    for_each(check_only_dw, odd, ODD, false, false);
}

int ops_gpu_matmul(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(odd_sizes_agree),
        cmocka_unit_test(gradients_are_added_in_fp32),
        cmocka_unit_test(large_sizes_agree),
        cmocka_unit_test(unwanted_gradients_are_left_out),
    };

    return cmocka_run_group_tests_name("gpu matmul", tests, NULL, NULL);
}
