/* SPDX-License-Identifier: Apache-2.0 */
/* See product.h. */
#include "tests/codelets/ops/product.h"

#include <math.h>
#include <string.h>

struct product product_new(enum iz_dtype param, enum iz_dtype dw,
                           const int64_t s[3], bool out_in)
{
    int64_t m = s[0], in = s[1], out = s[2];
    int64_t rows = out_in ? out : in, cols = out_in ? in : out;
    enum iz_dtype act = backend.act(param);

    return (struct product){.s = {.n = LA,
                                  .t = {[Y] = tensor_new(act, m, out, 1),
                                        [R] = tensor_new(act, m, out, 1),
                                        [A] = tensor_new(act, m, in, 1),
                                        [W] = tensor_new(param, rows, cols, 1),
                                        [B] = tensor_new(param, 1, out, 1),
                                        [DY] = tensor_new(act, m, out, 1),
                                        [DA] = tensor_new(act, m, in, 1),
                                        [DW] = tensor_new(dw, rows, cols, 1),
                                        [DB] = tensor_new(param, 1, out, 1)}},
                            .m = m,
                            .in = in,
                            .out = out,
                            .out_in = out_in};
}

void product_free(struct product *p)
{
    scene_free(&p->s);
}

/* ---- the op ------------------------------------------------------------- */

/* f: of the weight, where it has one. */
static struct iz_linear linear(struct iz_exec *x, const struct product *p,
                               const struct iz_view *v, struct iz_adapter *f)
{
    struct iz_linear l = {.w = v[W],
                          .b = p->with_b ? v[B] : IZ_NONE,
                          .dw = p->absent & bit(DW) ? IZ_NONE : v[DW],
                          .db = p->absent & bit(DB) ? IZ_NONE : v[DB],
                          .out_in = p->out_in,
                          .add = p->add,
                          .scale = p->rank ? 0 : p->scale};

    x->bf16_products = p->narrow;
    x->tf32 = p->tf32;
    x->fused_db = p->fused_db;
    if (p->rank) {
        *f = (struct iz_adapter){.a = v[LA],
                                 .b = v[LB],
                                 .da = v[DLA],
                                 .db = v[DLB],
                                 .scale = p->scale};
        l.w.adapter = f;
        l.dw = (struct iz_view){.dtype = v[DW].dtype, .cols = v[DW].cols};
    }
    return l;
}

void product_forward(struct iz_exec *x, const struct iz_view *v,
                     const void *arg)
{
    const struct product *p = arg;
    struct iz_adapter f;
    struct iz_linear l = linear(x, p, v, &f);

    iz_matmul_fwd(x, v[p->in_place ? R : Y], p->with_r ? v[R] : IZ_NONE, v[A],
                  &l);
}

void product_gradient_a(struct iz_exec *x, const struct iz_view *v,
                        const void *arg)
{
    struct iz_adapter f;
    struct iz_linear l = linear(x, arg, v, &f);

    iz_matmul_da(x, v[DA], v[DY], &l);
}

void product_gradient_w(struct iz_exec *x, const struct iz_view *v,
                        const void *arg)
{
    const struct product *p = arg;
    struct iz_adapter f;
    struct iz_linear l = linear(x, p, v, &f);

    iz_matmul_dw(x, v[DY], v[A], &l);
    if (p->rank)
        assert_true(f.seen && f.out_in == p->out_in);
}

/* ---- references --------------------------------------------------------- */

static struct want loosened(const struct product *p, struct want w)
{
    w.size *= 1 + 0x1p21 * p->slack;
    return w;
}

static double factor(const struct product *p)
{
    return p->scale == 0 ? 1 : (double)p->scale;
}

/* Adds x times a weight, and times what an adapter adds to it. */
static void add_weighed(struct want *to, const struct product *p, double x,
                        int64_t in, int64_t out)
{
    const struct tensor *t = p->s.t;
    double w = t[W].d[p->out_in ? out * p->in + in : in * p->out + out];

    want_add(to, x * w);
    for (int64_t r = 0; r < p->rank; r++)
        want_add(to, x * factor(p) * t[LB].d[out * p->rank + r] *
                         t[LA].d[r * p->in + in]);
}

static struct want want_y(const void *arg, int64_t i, int64_t j)
{
    const struct product *p = arg;
    const struct tensor *t = p->s.t;
    double by = p->rank ? 1 : factor(p);
    struct want w = {0, 0};

    for (int64_t k = 0; k < p->in; k++)
        add_weighed(&w, p, by * t[A].d[i * p->in + k], k, j);
    if (p->with_r)
        want_add(&w, t[R].d[i * p->out + j]);
    if (p->with_b)
        want_add(&w, t[B].d[j]);
    return loosened(p, w);
}

static struct want want_da(const void *arg, int64_t i, int64_t j)
{
    const struct product *p = arg;
    struct want w = {0, 0};

    for (int64_t k = 0; k < p->out; k++)
        add_weighed(&w, p, p->s.t[DY].d[i * p->out + k], j, k);
    return loosened(p, w);
}

/* Row and column of dw as it lies in memory. */
static struct want want_dw(const void *arg, int64_t i, int64_t j)
{
    const struct product *p = arg;
    const struct tensor *t = p->s.t;
    int64_t in = p->out_in ? j : i, out = p->out_in ? i : j;
    struct want w = {0, 0};

    for (int64_t k = 0; k < p->m; k++)
        want_add(&w, t[A].d[k * p->in + in] * t[DY].d[k * p->out + out]);
    if (p->add)
        want_add(&w, t[DW].d[i * t[DW].v.cols + j]);
    return w;
}

static struct want want_db(const void *arg, int64_t i, int64_t j)
{
    const struct product *p = arg;
    struct want w = {0, 0};

    for (int64_t k = 0; k < p->m; k++)
        want_add(&w, p->s.t[DY].d[k * p->out + j]);
    return w;
}

/* Row r and column j of the gradient of an adapter's a [rank,in]. */
static struct want want_dla(const void *arg, int64_t r, int64_t j)
{
    const struct product *p = arg;
    const struct tensor *t = p->s.t;
    struct want w = {0, 0};

    for (int64_t k = 0; k < p->m * p->out; k++)
        want_add(&w, factor(p) * t[DY].d[k] *
                         t[LB].d[k % p->out * p->rank + r] *
                         t[A].d[k / p->out * p->in + j]);
    return loosened(p, w);
}

/* Of its b [out,rank]. */
static struct want want_dlb(const void *arg, int64_t o, int64_t r)
{
    const struct product *p = arg;
    const struct tensor *t = p->s.t;
    struct want w = {0, 0};

    for (int64_t k = 0; k < p->m * p->in; k++)
        want_add(&w, factor(p) * t[A].d[k] * t[LA].d[r * p->in + k % p->in] *
                         t[DY].d[k / p->in * p->out + o]);
    return loosened(p, w);
}

/* ---- checks ------------------------------------------------------------- */

void product_run_forward(struct product *p)
{
    scene_run(&p->s, product_forward, p,
              bit(A) | bit(W) | bit(LA) | bit(LB) | (p->with_r ? bit(R) : 0) |
                  (p->with_b ? bit(B) : 0),
              bit(p->in_place ? R : Y));
}

void product_check_y(struct product *p)
{
    scene_check("y", &p->s.t[Y], want_y, p);
}

void product_check_forward(struct product *p, bool with_r, bool with_b)
{
    p->with_r = with_r;
    p->with_b = with_b;
    product_run_forward(p);
    product_check_y(p);
}

void product_check_in_place(struct product *p)
{
    p->with_r = p->with_b = p->in_place = true;
    product_run_forward(p);
    scene_check("y in r", &p->s.t[R], want_y, p);
    tensor_store(&p->s.t[R]);
    p->in_place = false;
}

void product_check_forwards(struct product *p)
{
    product_check_forward(p, false, false);
    product_check_forward(p, false, true);
    product_check_forward(p, true, false);
    product_check_forward(p, true, true);
    product_check_in_place(p);
    p->scale = 0.375F; /* what adapters take */
    product_check_forward(p, false, false);
    p->scale = 0;
}

void product_check_da(struct product *p)
{
    scene_run(&p->s, product_gradient_a, p,
              bit(DY) | bit(W) | bit(LA) | bit(LB), bit(DA));
    scene_check("da", &p->s.t[DA], want_da, p);
}

void product_check_dw(struct product *p)
{
    unsigned out = (bit(DW) | bit(DB)) & ~p->absent & ~p->s.unwanted;

    if (p->add)
        tensor_store(&p->s.t[DW]);
    scene_run(&p->s, product_gradient_w, p,
              bit(DY) | bit(A) | (p->add ? bit(DW) : 0), out);
    if (out & bit(DW))
        scene_check("dw", &p->s.t[DW], want_dw, p);
    if (out & bit(DB))
        scene_check("db", &p->s.t[DB], want_db, p);
}

void product_check_adapter(struct product *p)
{
    scene_run(&p->s, product_gradient_w, p,
              bit(DY) | bit(A) | bit(LA) | bit(LB),
              bit(DB) | bit(DLA) | bit(DLB));
    scene_check("da of the adapter", &p->s.t[DLA], want_dla, p);
    scene_check("db of the adapter", &p->s.t[DLB], want_dlb, p);
    scene_check("db", &p->s.t[DB], want_db, p);
}

void product_check_all(struct product *p)
{
    product_check_forwards(p);
    product_check_da(p);
    product_check_dw(p);
}
