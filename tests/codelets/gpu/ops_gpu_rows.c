/* SPDX-License-Identifier: Apache-2.0 */
/* Layer normalisation and GELU on a GPU against formulas in double. */
#include "tests/codelets/gpu/ops_gpu.h"

#include <math.h>
#include <stdlib.h>

#include "tests/codelets/ops/reference.h"

enum { A, W, B, Y, RES, DY, DX, DW, DB, MEAN, RSTD, TENSORS };

/* Where dx goes. */
enum place { FRESH, IN_R, IN_DY, NO_R };

struct norm {
    struct tensor t[TENSORS];
    enum iz_dtype act;
    enum place place;
};

static struct norm norm_new(enum iz_dtype param, int64_t m, int64_t c)
{
    enum iz_dtype act = iz_cuda_ops->act(param);

    return (struct norm){.t = {[A] = tensor_new(act, m, c, 3),
                               [W] = tensor_new(param, 1, c, 1),
                               [B] = tensor_new(param, 1, c, 1),
                               [Y] = tensor_new(act, m, c, 1),
                               [RES] = tensor_new(act, m, c, 1),
                               [DY] = tensor_new(act, m, c, 1),
                               [DX] = tensor_new(act, m, c, 1),
                               [DW] = tensor_new(param, 1, c, 1),
                               [DB] = tensor_new(param, 1, c, 1),
                               [MEAN] = tensor_new(IZ_F32, m, 1, 1),
                               [RSTD] = tensor_new(IZ_F32, m, 1, 1)},
                         .act = act};
}

static void norm_free(struct norm *n)
{
    for (int i = 0; i < TENSORS; i++)
        tensor_free(&n->t[i]);
}

static struct iz_norm norm_of(const struct iz_view *v)
{
    return (struct iz_norm){v[W], v[B], v[DW], v[DB], v[MEAN], v[RSTD]};
}

static void forward(struct iz_exec *x, const struct iz_view *v, const void *arg)
{
    struct iz_norm n = norm_of(v);

    (void)arg;
    iz_layernorm_fwd(x, v[Y], v[A], &n);
}

/* Into the memory of DX. */
static void again(struct iz_exec *x, const struct iz_view *v, const void *arg)
{
    struct iz_norm n = norm_of(v);

    (void)arg;
    iz_layernorm_again(x, v[DX], v[A], &n);
}

static int place_of(enum place p)
{
    return p == IN_R ? RES : p == IN_DY ? DY : DX;
}

static void backward(struct iz_exec *x, const struct iz_view *v,
                     const void *arg)
{
    const struct norm *n = arg;
    struct iz_norm w = norm_of(v);

    iz_layernorm_bwd(x, v[place_of(n->place)],
                     n->place == NO_R ? IZ_NONE : v[RES], v[DY], v[A], &w);
}

static void run(struct norm *n,
                void (*op)(struct iz_exec *, const struct iz_view *,
                           const void *),
                unsigned reads, unsigned writes)
{
    gpu_run(&(struct gpu_op){.run = op,
                             .arg = n,
                             .t = n->t,
                             .n = TENSORS,
                             .reads = reads,
                             .writes = writes,
                             .act = n->act});
}

/* Gradients in double: sums of the columns into dw and db, rows into dx. */
struct gradients {
    double *dx, *dw, *db;
};

static double mean_of(const double *a, int64_t c)
{
    double sum = 0;

    for (int64_t j = 0; j < c; j++)
        sum += a[j];
    return sum / (double)c;
}

static double rstd_of(const double *a, double mean, int64_t c)
{
    double var = 0;

    for (int64_t j = 0; j < c; j++)
        var += (a[j] - mean) * (a[j] - mean) / (double)c;
    return 1 / sqrt(var + 1e-5);
}

static void row_gradient(struct gradients *g, const struct norm *n, int64_t i)
{
    int64_t c = n->t[A].v.cols;
    const double *a = n->t[A].d + i * c, *dy = n->t[DY].d + i * c;
    const double *w = n->t[W].d, *r = n->t[RES].d + i * c;
    double mean = mean_of(a, c), s = rstd_of(a, mean, c);
    double sum = 0, sum_hat = 0;

    for (int64_t j = 0; j < c; j++) {
        double hat = (a[j] - mean) * s;

        sum += dy[j] * w[j] / (double)c;
        sum_hat += dy[j] * w[j] * hat / (double)c;
        g->dw[j] += dy[j] * hat;
        g->db[j] += dy[j];
    }
    for (int64_t j = 0; j < c; j++)
        g->dx[i * c + j] =
            (n->place == NO_R ? 0 : r[j]) +
            s * (dy[j] * w[j] - sum - (a[j] - mean) * s * sum_hat);
}

static void run_backward(struct norm *n, enum place place)
{
    n->place = place;
    run(n, backward,
        1u << A | 1u << W | 1u << RES | 1u << DY | 1u << MEAN | 1u << RSTD,
        1u << place_of(place) | 1u << DW | 1u << DB);
}

/* A short row may have elements that nearly agree, which loses digits. */
static void check_backward(struct norm *n, enum place place)
{
    size_t m = (size_t)n->t[A].v.rows, c = (size_t)n->t[A].v.cols;
    struct gradients g = {calloc(m * c, 8), calloc(c, 8), calloc(c, 8)};
    double tol = c < 64 ? 2e-5 : 2e-6;

    run_backward(n, place);
    for (size_t i = 0; i < m; i++)
        row_gradient(&g, n, (int64_t)i);
    fixture_close("dx", &n->t[DX], g.dx, tol);
    fixture_close("dw", &n->t[DW], g.dw, tol);
    fixture_close("db", &n->t[DB], g.db, tol);
    free(g.dx);
    free(g.dw);
    free(g.db);
}

/* After a run with dx in memory of its own: the same bits elsewhere. */
static void check_in_place(struct norm *n)
{
    run_backward(n, IN_R);
    fixture_same_bits("dx in r", n->t[RES].v, n->t[DX].v);
    tensor_store(&n->t[RES]);
    run_backward(n, IN_DY);
    fixture_same_bits("dx in dy", n->t[DY].v, n->t[DX].v);
}

static void check_norm(enum iz_dtype param, int64_t m, int64_t c)
{
    struct norm n = norm_new(param, m, c);
    double *y = calloc((size_t)(m * c), sizeof *y);

    ref_layernorm(y, n.t[A].d, n.t[W].d, n.t[B].d, m, c);
    run(&n, forward, 1u << A | 1u << W | 1u << B,
        1u << Y | 1u << MEAN | 1u << RSTD);
    fixture_close("y", &n.t[Y], y, 4e-6);
    run(&n, again, 1u << A | 1u << W | 1u << B | 1u << MEAN | 1u << RSTD,
        1u << DX);
    fixture_same_bits("y again", n.t[DX].v, n.t[Y].v);
    check_backward(&n, NO_R);
    check_backward(&n, FRESH);
    check_in_place(&n);
    norm_free(&n);
    free(y);
}

/* Rows of a warp and of a block, and rows too long for that; the width of a
 * block of a 1.5B, a 7B and a 14B model. */
static void layernorm_agrees(void **state)
{
    static const int64_t size[][2] = {{1, 1},      {2, 3},      {33, 8},
                                      {300, 90},   {1, 1001},   {3, 1537},
                                      {2500, 5},   {33, 4104},  {2, 8200},
                                      {700, 1600}, {300, 4096}, {129, 5120}};

    (void)state;
    fixture_seed();
    for (int t = 0; t < 3; t++)
        for (size_t i = 0; i < sizeof size / sizeof size[0]; i++)
            check_norm(fixture_types[t], size[i][0], size[i][1]);
}

/* ---- GELU --------------------------------------------------------------- */

enum { G_A, G_DY, G_Y, G_DU, GELU_TENSORS };

static void gelu_forward(struct iz_exec *x, const struct iz_view *v,
                         const void *arg)
{
    (void)arg;
    iz_gelu_fwd(x, v[G_Y], v[G_A]);
}

static void gelu_backward(struct iz_exec *x, const struct iz_view *v,
                          const void *arg)
{
    (void)arg;
    iz_gelu_bwd(x, v[G_DU], v[G_Y], v[G_DY], v[G_A]);
}

static void gelu_in_place(struct iz_exec *x, const struct iz_view *v,
                          const void *arg)
{
    (void)arg;
    iz_gelu_bwd(x, v[G_DY], v[G_A], v[G_DY], v[G_A]);
}

/* tanh' = 1 - tanh^2. */
static double gelu_slope(double a)
{
    double k = sqrt(2 / acos(-1.0)), u = k * (a + 0.044715 * a * a * a);
    double t = tanh(u);

    return (1 + t) / 2 + a / 2 * (1 - t * t) * k * (1 + 3 * 0.044715 * a * a);
}

static void run_gelu(struct tensor *t,
                     void (*op)(struct iz_exec *, const struct iz_view *,
                                const void *),
                     unsigned reads, unsigned writes)
{
    gpu_run(&(struct gpu_op){.run = op,
                             .t = t,
                             .n = GELU_TENSORS,
                             .reads = reads,
                             .writes = writes,
                             .act = t[G_A].v.dtype});
}

static void check_gelu(enum iz_dtype act, int64_t m, int64_t c)
{
    struct tensor t[GELU_TENSORS] = {
        tensor_new(act, m, c, 6), tensor_new(act, m, c, 1),
        tensor_new(act, m, c, 1), tensor_new(act, m, c, 1)};
    unsigned in = 1u << G_A | 1u << G_DY;
    double *y = calloc((size_t)(m * c), 8), *du = calloc((size_t)(m * c), 8);

    for (int64_t i = 0; i < m * c; i++) {
        y[i] = ref_gelu(t[G_A].d[i]);
        du[i] = t[G_DY].d[i] * gelu_slope(t[G_A].d[i]);
    }
    run_gelu(t, gelu_forward, 1u << G_A, 1u << G_Y);
    fixture_close("gelu", &t[G_Y], y, 1e-6);
    run_gelu(t, gelu_backward, in, 1u << G_Y | 1u << G_DU);
    fixture_close("gelu again", &t[G_Y], y, 1e-6);
    fixture_close("du", &t[G_DU], du, 2e-6);
    run_gelu(t, gelu_in_place, in, in);
    fixture_same_bits("gelu in place", t[G_A].v, t[G_Y].v);
    fixture_same_bits("du in place", t[G_DY].v, t[G_DU].v);
    for (int i = 0; i < GELU_TENSORS; i++)
        tensor_free(&t[i]);
    free(y);
    free(du);
}

static void gelu_agrees(void **state)
{
    static const int64_t size[][2] = {{1, 1},    {3, 3},     {5, 9},
                                      {2, 1024}, {33, 1001}, {301, 6400}};

    (void)state;
    fixture_seed();
    for (int t = 0; t < 3; t++)
        for (size_t i = 0; i < sizeof size / sizeof size[0]; i++)
            check_gelu(iz_cuda_ops->act(fixture_types[t]), size[i][0],
                       size[i][1]);
}

int ops_gpu_rows(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(layernorm_agrees),
        cmocka_unit_test(gelu_agrees),
    };

    return cmocka_run_group_tests_name("gpu rows", tests, NULL, NULL);
}
