/* SPDX-License-Identifier: Apache-2.0 */
/* The ops of the Llama family on a GPU against formulas in double. */
#include "tests/codelets/gpu/ops_gpu.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/codelets/gpu/llama_gradients.h"
#include "tests/codelets/ops/reference.h"

#define EPS 1e-5f

typedef void op_fn(struct iz_exec *x, const struct iz_view *v, const void *arg);

/* ---- rmsnorm ------------------------------------------------------------ */

enum { A, W, Y, RES, DY, DX, DW, RSTD, TENSORS };

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
                               [Y] = tensor_new(act, m, c, 1),
                               [RES] = tensor_new(act, m, c, 1),
                               [DY] = tensor_new(act, m, c, 1),
                               [DX] = tensor_new(act, m, c, 1),
                               [DW] = tensor_new(param, 1, c, 1),
                               [RSTD] = tensor_new(IZ_F32, m, 1, 1)},
                         .act = act};
}

static struct iz_rmsnorm norm_of(const struct iz_view *v)
{
    return (struct iz_rmsnorm){v[W], v[DW], v[RSTD], EPS};
}

static void forward(struct iz_exec *x, const struct iz_view *v, const void *arg)
{
    struct iz_rmsnorm n = norm_of(v);

    (void)arg;
    iz_rmsnorm_fwd(x, v[Y], v[A], &n);
}

/* Into the memory of DX. */
static void again(struct iz_exec *x, const struct iz_view *v, const void *arg)
{
    struct iz_rmsnorm n = norm_of(v);

    (void)arg;
    iz_rmsnorm_again(x, v[DX], v[A], &n);
}

static int place_of(enum place p)
{
    return p == IN_R ? RES : p == IN_DY ? DY : DX;
}

static void backward(struct iz_exec *x, const struct iz_view *v,
                     const void *arg)
{
    const struct norm *n = arg;
    struct iz_rmsnorm w = norm_of(v);

    iz_rmsnorm_bwd(x, v[place_of(n->place)],
                   n->place == NO_R ? IZ_NONE : v[RES], v[DY], v[A], &w);
}

static void run(struct norm *n, op_fn *op, unsigned reads, unsigned writes)
{
    gpu_run(&(struct gpu_op){.run = op,
                             .arg = n,
                             .t = n->t,
                             .n = TENSORS,
                             .reads = reads,
                             .writes = writes,
                             .act = n->act});
}

static void run_backward(struct norm *n, enum place place)
{
    n->place = place;
    run(n, backward, 1u << A | 1u << W | 1u << RES | 1u << DY | 1u << RSTD,
        1u << place_of(place) | 1u << DW);
}

/* A short row may have elements that nearly agree, which loses digits. */
static void check_backward(struct norm *n, enum place place)
{
    int64_t m = n->t[A].v.rows, c = n->t[A].v.cols;
    double *dx = calloc((size_t)(m * c), 8), *dw = calloc((size_t)c, 8);
    double tol = c < 64 ? 2e-5 : 2e-6;

    run_backward(n, place);
    for (int64_t i = 0; i < m; i++) {
        rmsnorm_gradient(dx + i * c, dw, n->t[A].d + i * c, n->t[DY].d + i * c,
                         n->t[W].d, c, (double)EPS);
        for (int64_t j = 0; place != NO_R && j < c; j++)
            dx[i * c + j] += n->t[RES].d[i * c + j];
    }
    fixture_close("dx", &n->t[DX], dx, tol);
    fixture_close("dw", &n->t[DW], dw, tol);
    free(dx);
    free(dw);
}

static void check_norm(enum iz_dtype param, int64_t m, int64_t c)
{
    struct norm n = norm_new(param, m, c);
    double *y = calloc((size_t)(m * c), sizeof *y);

    ref_rmsnorm(y, n.t[A].d, n.t[W].d, m, c, (double)EPS);
    run(&n, forward, 1u << A | 1u << W, 1u << Y | 1u << RSTD);
    fixture_close("y", &n.t[Y], y, 2e-6);
    run(&n, again, 1u << A | 1u << W | 1u << RSTD, 1u << DX);
    fixture_same_bits("y again", n.t[DX].v, n.t[Y].v);
    check_backward(&n, NO_R);
    check_backward(&n, FRESH);
    run_backward(&n, IN_R);
    fixture_same_bits("dx in r", n.t[RES].v, n.t[DX].v);
    tensor_store(&n.t[RES]);
    run_backward(&n, IN_DY);
    fixture_same_bits("dx in dy", n.t[DY].v, n.t[DX].v);
    for (int i = 0; i < TENSORS; i++)
        tensor_free(&n.t[i]);
    free(y);
}

/* Teams of half a warp, a warp and a block, and rows too long for these; the
 * widths of Qwen 2.5 0.5B, Llama 3.2 1B and Llama 3 8B. */
static void rmsnorm_agrees(void **state)
{
    static const int64_t size[][2] = {
        {1, 1},     {2, 3},      {33, 8},    {300, 90}, {1, 1001},
        {3, 1537},  {2500, 5},   {33, 4104}, {2, 8200}, {1000, 128},
        {700, 896}, {129, 2048}, {300, 4096}};

    (void)state;
    fixture_seed();
    for (int t = 0; t < 3; t++)
        for (size_t i = 0; i < sizeof size / sizeof size[0]; i++)
            check_norm(fixture_types[t], size[i][0], size[i][1]);
}

/* ---- heads of a row ----------------------------------------------------- */

enum { H_A, H_KEPT, H_W, H_DW, H_RSTD, H_TENSORS };

/* m rows of ld columns: `heads` of c from column `first` on. */
struct heads {
    int64_t m, ld, first, heads, c;
};

static void heads_forward(struct iz_exec *x, const struct iz_view *v,
                          const void *arg)
{
    const struct heads *h = arg;
    struct iz_rmsnorm n = {v[H_W], v[H_DW], v[H_RSTD], EPS};

    iz_headnorm_fwd(x, v[H_A], v[H_KEPT], &n, h->first);
}

/* H_A: the gradient. */
static void heads_backward(struct iz_exec *x, const struct iz_view *v,
                           const void *arg)
{
    const struct heads *h = arg;
    struct iz_rmsnorm n = {v[H_W], v[H_DW], v[H_RSTD], EPS};

    iz_headnorm_bwd(x, v[H_A], v[H_KEPT], &n, h->first);
}

static void run_heads(const struct heads *h, struct tensor *t, op_fn *op,
                      unsigned reads, unsigned writes)
{
    gpu_run(&(struct gpu_op){.run = op,
                             .arg = h,
                             .t = t,
                             .n = H_TENSORS,
                             .reads = reads,
                             .writes = writes,
                             .act = t[H_A].v.dtype});
}

static void check_heads(enum iz_dtype param, const struct heads *h)
{
    enum iz_dtype act = iz_cuda_ops->act(param);
    int64_t len = h->m * h->ld;
    struct tensor t[H_TENSORS] = {tensor_new(act, h->m, h->ld, 2),
                                  tensor_new(act, h->m, h->heads * h->c, 1),
                                  tensor_new(param, 1, h->c, 1),
                                  tensor_new(param, 1, h->c, 1),
                                  tensor_new(IZ_F32, h->m, h->heads, 1)};
    struct tensor dy = tensor_new(act, h->m, h->ld, 1), a = t[H_A];
    double *y = calloc((size_t)len, 8), *da = calloc((size_t)len, 8);
    double *dw = calloc((size_t)h->c, 8);

    memcpy(y, a.d, (size_t)len * 8);
    memcpy(da, dy.d, (size_t)len * 8);
    for (int64_t i = 0; i < h->m * h->heads; i++) {
        int64_t at = i / h->heads * h->ld + h->first + i % h->heads * h->c;

        ref_rmsnorm(y + at, a.d + at, t[H_W].d, 1, h->c, (double)EPS);
        rmsnorm_gradient(da + at, dw, a.d + at, dy.d + at, t[H_W].d, h->c,
                         (double)EPS);
    }
    run_heads(h, t, heads_forward, 1u << H_A | 1u << H_W,
              1u << H_A | 1u << H_KEPT | 1u << H_RSTD);
    fixture_close("a", &t[H_A], y, 2e-6);
    t[H_A] = dy;
    run_heads(h, t, heads_backward,
              1u << H_A | 1u << H_KEPT | 1u << H_W | 1u << H_RSTD,
              1u << H_A | 1u << H_DW);
    fixture_close("da", &t[H_A], da, 2e-6);
    fixture_close("dw", &t[H_DW], dw, 2e-6);
    for (int i = 0; i < H_TENSORS; i++)
        tensor_free(&t[i]);
    tensor_free(&a);
    free(y);
    free(da);
    free(dw);
}

/* The heads of Qwen 3 0.6B, and pieces that begin between 16 bytes. */
static void headnorm_agrees(void **state)
{
    static const struct heads size[] = {{1, 64, 0, 1, 64},
                                        {300, 4096, 0, 16, 128},
                                        {300, 4096, 2048, 8, 128},
                                        {3, 303, 101, 2, 100},
                                        {2, 2001, 3, 2, 999}};

    (void)state;
    fixture_seed();
    for (int t = 0; t < 3; t++)
        for (size_t i = 0; i < sizeof size / sizeof size[0]; i++)
            check_heads(fixture_types[t], &size[i]);
}

/* ---- rope --------------------------------------------------------------- */

struct rope {
    struct iz_rope r;
    bool back;
};

static void turn(struct iz_exec *x, const struct iz_view *v, const void *arg)
{
    const struct rope *r = arg;

    iz_rope(x, v[0], &r->r, r->back);
}

/* A cosine errs by the rounding of its angle and its own, 4e-7 together. */
static void check_rope(enum iz_dtype act, struct rope r, int64_t samples,
                       int64_t more)
{
    int64_t m = samples * r.r.seq, ld = (int64_t)r.r.heads * r.r.d + more;
    struct tensor t = tensor_new(act, m, ld, 1);

    gpu_run(&(struct gpu_op){.run = turn,
                             .arg = &r,
                             .t = &t,
                             .n = 1,
                             .reads = 1,
                             .writes = 1,
                             .act = act});
    ref_rope(t.d, m, ld, &r.r, r.back);
    double *want = t.d;
    t.d = calloc((size_t)(m * ld), sizeof *want);
    fixture_close("turned", &t, want, 8e-7);
    free(want);
    tensor_free(&t);
}

/* Llama 3's scaling in the last but one, and positions far away. */
static void rope_agrees(void **state)
{
    static const struct iz_rope r[] = {
        {5, 1, 2, 1e4, 1, 0, 0, 0},          {19, 3, 6, 10, 1, 0, 0, 0},
        {1, 2, 256, 1e6, 1, 0, 0, 0},        {11, 2, 80, 1e4, 1, 0, 0, 0},
        {300, 40, 128, 5e5, 32, 1, 4, 8192}, {131072, 1, 4, 5e5, 1, 0, 0, 0}};

    (void)state;
    fixture_seed();
    for (int t = 0; t < 3; t++)
        for (size_t i = 0; i < sizeof r / sizeof r[0]; i++) {
            enum iz_dtype act = iz_cuda_ops->act(fixture_types[t]);

            check_rope(act, (struct rope){r[i], false}, 1, 8);
            check_rope(act, (struct rope){r[i], true}, 2, 1);
        }
}

/* ---- swiglu ------------------------------------------------------------- */

enum { S_A, S_DY, S_Y, S_DA, S_TENSORS };

static void swiglu_forward(struct iz_exec *x, const struct iz_view *v,
                           const void *arg)
{
    (void)arg;
    iz_swiglu_fwd(x, v[S_Y], v[S_A]);
}

static void swiglu_backward(struct iz_exec *x, const struct iz_view *v,
                            const void *arg)
{
    (void)arg;
    iz_swiglu_bwd(x, v[S_DA], v[S_Y], v[S_DY], v[S_A]);
}

static void swiglu_in_place(struct iz_exec *x, const struct iz_view *v,
                            const void *arg)
{
    (void)arg;
    iz_swiglu_bwd(x, v[S_A], v[S_DY], v[S_DY], v[S_A]);
}

static void run_swiglu(struct tensor *t, op_fn *op, unsigned reads,
                       unsigned writes)
{
    gpu_run(&(struct gpu_op){.run = op,
                             .t = t,
                             .n = S_TENSORS,
                             .reads = reads,
                             .writes = writes,
                             .act = t[S_A].v.dtype});
}

static void check_swiglu(enum iz_dtype act, int64_t m, int64_t f)
{
    struct tensor t[S_TENSORS] = {
        tensor_new(act, m, 2 * f, 6), tensor_new(act, m, f, 1),
        tensor_new(act, m, f, 1), tensor_new(act, m, 2 * f, 1)};
    unsigned in = 1u << S_A | 1u << S_DY;
    double *y = calloc((size_t)(m * f), 8),
           *da = calloc((size_t)(2 * m * f), 8);

    for (int64_t i = 0; i < m * f; i++) {
        int64_t at = i / f * 2 * f + i % f;

        y[i] = ref_swiglu(t[S_A].d[at], t[S_A].d[at + f]);
        swiglu_gradient(&da[at], &da[at + f], t[S_A].d[at], t[S_A].d[at + f],
                        t[S_DY].d[i]);
    }
    run_swiglu(t, swiglu_forward, 1u << S_A, 1u << S_Y);
    fixture_close("swiglu", &t[S_Y], y, 1e-6);
    run_swiglu(t, swiglu_backward, in, 1u << S_Y | 1u << S_DA);
    fixture_close("swiglu again", &t[S_Y], y, 1e-6);
    fixture_close("da", &t[S_DA], da, 2e-6);
    run_swiglu(t, swiglu_in_place, in, in);
    fixture_same_bits("y in place", t[S_DY].v, t[S_Y].v);
    fixture_same_bits("da in place", t[S_A].v, t[S_DA].v);
    for (int i = 0; i < S_TENSORS; i++)
        tensor_free(&t[i]);
    free(y);
    free(da);
}

static void swiglu_agrees(void **state)
{
    static const int64_t size[][2] = {{1, 1},    {3, 3},     {5, 9},
                                      {2, 4864}, {33, 1001}, {101, 14336}};

    (void)state;
    fixture_seed();
    for (int t = 0; t < 3; t++)
        for (size_t i = 0; i < sizeof size / sizeof size[0]; i++)
            check_swiglu(iz_cuda_ops->act(fixture_types[t]), size[i][0],
                         size[i][1]);
}

int ops_gpu_llama(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rmsnorm_agrees),
        cmocka_unit_test(headnorm_agrees),
        cmocka_unit_test(rope_agrees),
        cmocka_unit_test(swiglu_agrees),
    };

    return cmocka_run_group_tests_name("gpu llama", tests, NULL, NULL);
}
