/* SPDX-License-Identifier: Apache-2.0 */
/* See args.h. */
#include "tests/codelets/ops/args.h"

#include <stdlib.h>

#include "tests/codelets/ops/reference.h"

/* ---- normalisation ---- */

struct norm norm_new(enum iz_dtype act, enum iz_dtype weights, int64_t m,
                     int64_t c, double scale)
{
    struct norm n = {
        .a = tensor_new(act, m, c, scale),
        .w = tensor_new(weights, 1, c, 1),
        .b = tensor_new(weights, 1, c, 1),
        .y = tensor_new(act, m, c, 1),
        .r = tensor_new(act, m, c, 1),
        .dy = tensor_new(act, m, c, 1),
        .dx = tensor_new(act, m, c, 1),
        .dw = tensor_new(weights, 1, c, 1),
        .db = tensor_new(weights, 1, c, 1),
        .mean = tensor_new(IZ_F32, m, 1, 1),
        .rstd = tensor_new(IZ_F32, m, 1, 1),
        .out = calloc((size_t)(m * c), sizeof *n.out),
    };

    n.n = (struct iz_norm){n.w.v, n.b.v, n.dw.v, n.db.v, n.mean.v, n.rstd.v};
    n.rms = (struct iz_rmsnorm){n.w.v, n.dw.v, n.rstd.v, NORM_EPS};
    norm_place(&n, DX_FRESH);
    return n;
}

void norm_free(struct norm *n)
{
    struct tensor *all[] = {&n->a,  &n->w,  &n->b,  &n->y,    &n->r,   &n->dy,
                            &n->dx, &n->dw, &n->db, &n->mean, &n->rstd};

    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        tensor_free(all[i]);
    free(n->out);
}

void norm_place(struct norm *n, enum norm_place place)
{
    n->residual = place == DX_NO_R ? IZ_NONE : n->r.v;
    n->into = place == DX_IN_R ? n->r.v : place == DX_IN_DY ? n->dy.v : n->dx.v;
}

void layernorm_forward(struct iz_exec *x, void *arg)
{
    struct norm *n = arg;

    iz_layernorm_fwd(x, n->y.v, n->a.v, &n->n);
}

void layernorm_again(struct iz_exec *x, void *arg)
{
    struct norm *n = arg;

    iz_layernorm_again(x, n->dx.v, n->a.v, &n->n);
}

void layernorm_backward(struct iz_exec *x, void *arg)
{
    struct norm *n = arg;

    iz_layernorm_bwd(x, n->into, n->residual, n->dy.v, n->a.v, &n->n);
}

void rmsnorm_forward(struct iz_exec *x, void *arg)
{
    struct norm *n = arg;

    iz_rmsnorm_fwd(x, n->y.v, n->a.v, &n->rms);
}

void rmsnorm_again(struct iz_exec *x, void *arg)
{
    struct norm *n = arg;

    iz_rmsnorm_again(x, n->dx.v, n->a.v, &n->rms);
}

void rmsnorm_backward(struct iz_exec *x, void *arg)
{
    struct norm *n = arg;

    iz_rmsnorm_bwd(x, n->into, n->residual, n->dy.v, n->a.v, &n->rms);
}

/* ---- gated unit ---- */

struct swiglu swiglu_new(enum iz_dtype act, int64_t m, int64_t f, double scale)
{
    return (struct swiglu){tensor_new(act, m, 2 * f, scale),
                           tensor_new(act, m, f, 1), tensor_new(act, m, f, 1),
                           tensor_new(act, m, 2 * f, 1)};
}

void swiglu_free(struct swiglu *s)
{
    tensor_free(&s->a);
    tensor_free(&s->y);
    tensor_free(&s->dy);
    tensor_free(&s->da);
}

void swiglu_forward(struct iz_exec *x, void *arg)
{
    struct swiglu *s = arg;

    iz_swiglu_fwd(x, s->y.v, s->a.v);
}

void swiglu_backward(struct iz_exec *x, void *arg)
{
    struct swiglu *s = arg;

    iz_swiglu_bwd(x, s->da.v, s->y.v, s->dy.v, s->a.v);
}

/* ---- products of pairs ---- */

struct interact interact_new(enum iz_dtype act, int64_t m, int64_t n, int64_t d)
{
    int64_t cols = d + n * (n + 1) / 2;

    return (struct interact){
        tensor_new(act, m, cols, 1),   tensor_new(act, m, d, 1),
        tensor_new(act, m * n, d, 1),  tensor_new(act, m, cols, 1),
        tensor_new(act, m, d, 1),      tensor_new(act, m * n, d, 1),
        calloc((size_t)(m * cols), 8), n};
}

void interact_free(struct interact *t)
{
    struct tensor *all[] = {&t->y, &t->z, &t->e, &t->dy, &t->dz, &t->de};

    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        tensor_free(all[i]);
    free(t->out);
}

void interact_forward(struct iz_exec *x, void *arg)
{
    struct interact *t = arg;

    iz_interact_fwd(x, t->y.v, t->z.v, t->e.v);
}

void interact_backward(struct iz_exec *x, void *arg)
{
    struct interact *t = arg;

    iz_interact_bwd(x, t->dz.v, t->de.v, t->dy.v, t->z.v, t->e.v);
}

double interact_objective(void *arg)
{
    struct interact *t = arg;

    ref_interact(t->out, t->z.d, t->e.d, t->z.v.rows, t->n, t->z.v.cols);
    return fixture_dot(t->out, t->dy.d, iz_view_len(t->y.v));
}

static void check_gradient(struct interact *t, const char *what,
                           struct tensor *got, double *in, double tol)
{
    int64_t n = iz_view_len(got->v);
    double *want = calloc((size_t)n, sizeof *want);

    ref_gradient(want, interact_objective, t, in, n);
    fixture_close(what, got, want, tol);
    free(want);
}

void interact_check_gradients(struct interact *t, double tol)
{
    check_gradient(t, "dz", &t->dz, t->z.d, tol);
    check_gradient(t, "de", &t->de, t->e.d, tol);
}
