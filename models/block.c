/* SPDX-License-Identifier: Apache-2.0 */
/* The layers of a transformer; see block.h.  M = samples * T rows, C = width,
 * H = heads, K = kv_heads, D = head_dim, F = hidden. */
#include "models/block_parts.h"

#include <math.h>
#include <stdio.h>

#include "models/parts.h"
#include "models/passed.h"

/* Whether the unit ends with the router of its block. */
static bool routes_only(const struct iz_layer *a)
{
    return a->kind == KIND_ROUTER;
}

/* The first behind all parts of a unit with llama. */
static int parts_of(const struct iz_layer *a)
{
    return routes_only(a) ? FC : PARTS;
}

/* The part with this number. */
static struct iz_linear linear(const struct iz_layer *a, int part)
{
    const struct iz_block *c = a->self;
    struct iz_linear l = {.out_in = true};
    if (!c->llama)
        return affine(a, 2 * part);
    l.w = a->w[part];
    l.dw = gradient(a, part);
    if (part == QKV && c->qkv_bias) {
        l.b = a->w[parts_of(a)];
        l.db = gradient(a, parts_of(a));
    }
    return l;
}

/* ---- norms ---- */

typedef struct iz_view take_fn(struct iz_exec *x, enum iz_dtype t, int64_t rows,
                               int64_t cols);

/* The part with this number; its statistics, of m rows and of each of `heads`,
 * are taken by iz_exec_save or iz_exec_work. */
static struct iz_norm_layer norm(struct iz_exec *x, const struct iz_layer *a,
                                 int part, take_fn *take, int64_t m, int heads)
{
    const struct iz_block *c = a->self;
    struct iz_linear l = linear(a, part);
    struct iz_norm_layer n = {
        .w = l.w, .b = l.b, .dw = l.dw, .db = l.db, .eps = c->norm_eps};
    if (!c->llama)
        n.mean = take(x, IZ_F32, m, 1);
    n.rstd = take(x, IZ_F32, m, heads);
    return n;
}

/* ---- the block ---- */

/* What a block keeps for its backward; outputs of the norms and of the MLP's
 * nonlinearity are computed again.  Backward overwrites u. */
struct kept {
    struct iz_attention attn; /* with normalised and turned queries and keys */
    struct iz_norm_layer norm_1, norm_2, norm_q, norm_k; /* q, k: of heads */
    struct iz_view q, k; /* [M,HD], [M,KD] before their norms */
    struct iz_view x2;   /* [M,C] after attention */
    /* Widened, before the nonlinearity: [M,F], or gate, up [M,2F]. */
    struct iz_view u;
    struct iz_routes routes; /* with experts, whose u is by expert [kM,2F] */
};

static bool has_experts(const struct iz_layer *a)
{
    return a->kind == KIND_EXPERTS;
}

static struct iz_linear router_of(const struct iz_layer *a)
{
    const struct iz_block *c = a->self;
    return linear(a, parts_of(a) + c->qkv_bias + 2 * c->qk_norm);
}

static void head_norm_saves(struct iz_exec *x, const struct iz_layer *a,
                            struct kept *b, int64_t m)
{
    const struct iz_block *c = a->self;
    int first = parts_of(a) + c->qkv_bias;
    b->norm_q = norm(x, a, first, iz_exec_save, m, c->heads);
    b->norm_k = norm(x, a, first + 1, iz_exec_save, m, c->kv_heads);
    b->q = iz_exec_save(x, x->act, m, (int64_t)c->heads * c->head_dim);
    b->k = iz_exec_save(x, x->act, m, (int64_t)c->kv_heads * c->head_dim);
}

static struct kept block_saves(struct iz_exec *x, const struct iz_layer *a)
{
    const struct iz_block *c = a->self;
    int64_t m = (int64_t)a->samples * c->seq, d = c->head_dim;
    int64_t heads = (int64_t)a->samples * c->heads;
    struct kept b = {.attn = {.seq = c->seq,
                              .heads = c->heads,
                              .kv_heads = c->kv_heads,
                              .full = c->full}};
    b.attn.begins = a->begins;
    b.norm_1 = norm(x, a, NORM_1, iz_exec_save, m, 1);
    b.attn.qkv = iz_exec_save(x, x->act, m, (c->heads + 2 * c->kv_heads) * d);
    b.attn.o = iz_exec_save(x, x->act, m, c->heads * d);
    b.attn.lse = iz_exec_save(x, IZ_F32, heads, c->seq);
    if (c->qk_norm)
        head_norm_saves(x, a, &b, m);
    b.x2 = iz_exec_save(x, x->act, m, c->width);
    b.norm_2 = norm(x, a, NORM_2, iz_exec_save, m, 1);
    if (has_experts(a) || routes_only(a))
        b.routes = iz_routes_saves(x, &c->experts, m);
    if (has_experts(a))
        b.u = iz_exec_save_widened(x, x->act, m * c->experts.per_token,
                                   2 * (int64_t)c->experts.hidden);
    else if (!routes_only(a))
        b.u = iz_exec_save_widened(x, x->act, m,
                                   (c->llama ? 2 : 1) * (int64_t)c->hidden);
    return b;
}

/* Chooses experts for the rows of h. */
static void route_forward(struct iz_exec *x, const struct iz_layer *a,
                          const struct kept *b, struct iz_view h)
{
    const struct iz_block *c = a->self;
    struct iz_linear router = router_of(a);
    iz_experts_route(x, &c->experts, &b->routes, h, &router,
                     a->again ? NULL : a->aux);
}

/* u from x2; again: with norm_2's saved statistics, and experts have been
 * chosen. */
static void widen_forward(struct iz_exec *x, const struct iz_layer *a,
                          const struct kept *b, bool again)
{
    struct iz_linear fc = linear(a, FC);
    int64_t mark = iz_exec_mark(x);
    struct iz_view h =
        iz_exec_work(x, x->act, b->x2.rows, b->x2.cols); /* [M,C] */
    iz_norm_layer_fwd(x, h, b->x2, &b->norm_2, again);
    if (has_experts(a) && !again)
        route_forward(x, a, b, h);
    if (has_experts(a))
        iz_experts_widen(x, &b->routes, b->u, h, &fc);
    else
        iz_matmul_fwd(x, b->u, IZ_NONE, h, &fc); /* [M,F] or [M,2F] */
    iz_exec_release(x, mark);
}

/* Queries and keys as attention takes them. */
static void positions_forward(struct iz_exec *x, const struct iz_block *c,
                              const struct kept *b)
{
    if (c->qk_norm) {
        iz_norm_head_fwd(x, b->attn.qkv, b->q, &b->norm_q, 0);
        iz_norm_head_fwd(x, b->attn.qkv, b->k, &b->norm_k, b->q.cols);
    }
    if (c->llama)
        iz_rope(x, b->attn.qkv, b->attn.begins, &c->rope, false);
}

static void positions_backward(struct iz_exec *x, const struct iz_block *c,
                               const struct kept *b, struct iz_view dqkv)
{
    if (c->llama)
        iz_rope(x, dqkv, b->attn.begins, &c->rope, true);
    if (c->qk_norm) {
        iz_norm_head_bwd(x, dqkv, b->q, &b->norm_q, 0);
        iz_norm_head_bwd(x, dqkv, b->k, &b->norm_k, b->q.cols);
    }
}

/* x2 = in + what attention makes of it. */
static void attention_forward(struct iz_exec *x, const struct iz_layer *a,
                              const struct kept *b, struct iz_view in)
{
    const struct iz_block *c = a->self;
    struct iz_linear qkv = linear(a, QKV), proj = linear(a, ATTN_PROJ);
    int64_t mark = iz_exec_mark(x);
    struct iz_view h = iz_exec_work(x, x->act, in.rows, c->width); /* [M,C] */
    iz_norm_layer_fwd(x, h, in, &b->norm_1, false);
    iz_matmul_fwd(x, b->attn.qkv, IZ_NONE, h, &qkv); /* [M,(H+2K)D] */
    positions_forward(x, c, b);
    iz_attention_fwd(x, &b->attn);                 /* [M,HD] */
    iz_matmul_fwd(x, b->x2, in, b->attn.o, &proj); /* [M,C] */
    iz_exec_release(x, mark);
}

void iz_block_forward(struct iz_exec *x, const struct iz_layer *a)
{
    const struct iz_block *c = a->self;
    struct kept b = block_saves(x, a);
    struct iz_linear mlp = linear(a, MLP_PROJ);
    struct iz_view in = tokens(a->x, c->width), out = tokens(a->y, c->width);
    attention_forward(x, a, &b, in);
    widen_forward(x, a, &b, false);
    if (a->again)
        return;
    if (has_experts(a)) {
        iz_experts_narrow(x, &b.routes, b.u, out, b.x2, &mlp);
        return;
    }
    int64_t mark = iz_exec_mark(x);
    struct iz_view g = iz_exec_work(x, x->act, in.rows, c->hidden);
    if (c->llama)
        iz_activation_fwd(x, g, b.u, IZ_SILU);
    else
        iz_activation_fwd(x, g, b.u, IZ_GELU_TANH);
    iz_matmul_fwd(x, out, b.x2, g, &mlp); /* [M,C] */
    iz_exec_release(x, mark);
}

/* dx2 = dy + the gradient through norm_2 and the MLP, into `dx`. */
static void block_mlp_backward(struct iz_exec *x, const struct iz_layer *a,
                               const struct kept *b, struct iz_view dx,
                               struct iz_view dy)
{
    const struct iz_block *c = a->self;
    struct iz_linear fc = linear(a, FC), proj = linear(a, MLP_PROJ);
    int64_t mark = iz_exec_mark(x);
    struct iz_view g =
        iz_exec_work(x, x->act, b->u.rows, c->hidden); /* [M,F] */
    struct iz_view in = c->llama ? g : b->u; /* becomes proj's input again */
    struct iz_view du = c->llama ? b->u : g; /* becomes the gradient of u */
    iz_matmul_da(x, g, dy, &proj);
    if (c->llama)
        iz_activation_bwd(x, du, in, g, b->u, IZ_SILU);
    else
        iz_activation_bwd(x, du, in, g, b->u, IZ_GELU_TANH);
    iz_matmul_dw(x, dy, in, &proj);
    if (c->llama)
        iz_exec_release(x, mark);
    struct iz_view h = iz_exec_work(x, x->act, dx.rows, dx.cols); /* [M,C] */
    iz_norm_layer_fwd(x, h, b->x2, &b->norm_2, true);
    iz_matmul_dw(x, du, h, &fc);
    iz_matmul_da(x, h, du, &fc); /* h becomes its own gradient */
    iz_norm_layer_bwd(x, dx, dy, h, b->x2, &b->norm_2);
    iz_exec_release(x, mark);
}

/* From the gradients of the chosen weights and of what the experts did with h:
 * that of h in its place, and the router's. */
static void route_backward(struct iz_exec *x, const struct iz_layer *a,
                           const struct kept *b, struct iz_view dweight,
                           struct iz_view h, struct iz_view dh)
{
    const struct iz_block *c = a->self;
    struct iz_linear router = router_of(a);
    iz_experts_route_bwd(x, &c->experts, &b->routes, dweight, h, dh, &router,
                         a->loss_scale);
}

/* The same with experts. */
static void block_experts_backward(struct iz_exec *x, const struct iz_layer *a,
                                   const struct kept *b, struct iz_view dx,
                                   struct iz_view dy)
{
    const struct iz_routes *r = &b->routes;
    struct iz_linear fc = linear(a, FC), proj = linear(a, MLP_PROJ);
    int64_t mark = iz_exec_mark(x);
    struct iz_view dweight = iz_exec_work(x, IZ_F32, dx.rows, r->weight.cols);
    struct iz_view h = iz_exec_work(x, x->act, dx.rows, dx.cols);  /* [M,C] */
    struct iz_view dh = iz_exec_work(x, x->act, dx.rows, dx.cols); /* [M,C] */
    int64_t inner = iz_exec_mark(x);
    struct iz_view by =
        iz_exec_work(x, x->act, b->u.rows, dx.cols); /* [kM,C] */
    iz_experts_narrow_bwd(x, r, b->u, dweight, by, dy, &proj);
    iz_norm_layer_fwd(x, h, b->x2, &b->norm_2, true);
    iz_experts_widen_bwd(x, r, b->u, dh, by, IZ_NONE, h, &fc);
    iz_exec_release(x, inner);
    route_backward(x, a, b, dweight, h, dh);
    iz_norm_layer_bwd(x, dx, dy, h, b->x2, &b->norm_2);
    iz_exec_release(x, mark);
}

/* dqkv, behind norms and positions, from the gradient of x2. */
static void scores_backward(struct iz_exec *x, const struct iz_layer *a,
                            const struct kept *b, struct iz_view dqkv,
                            struct iz_view dx2)
{
    struct iz_linear proj = linear(a, ATTN_PROJ);
    int64_t mark = iz_exec_mark(x);
    struct iz_view d = iz_exec_work(x, x->act, dx2.rows, b->attn.o.cols);
    iz_matmul_dw(x, dx2, b->attn.o, &proj);
    iz_matmul_da(x, d, dx2, &proj);
    iz_attention_bwd(x, dqkv, d, &b->attn);
    positions_backward(x, a->self, b, dqkv);
    iz_exec_release(x, mark);
}

/* dx = dx2 + the gradient through norm_1 and attention, dx2 being in `dx`. */
static void attention_backward(struct iz_exec *x, const struct iz_layer *a,
                               const struct kept *b, struct iz_view dx,
                               struct iz_view in)
{
    struct iz_linear qkv = linear(a, QKV);
    int64_t mark = iz_exec_mark(x);
    struct iz_view dqkv = iz_exec_work(x, x->act, dx.rows, b->attn.qkv.cols);
    scores_backward(x, a, b, dqkv, dx);
    struct iz_view h = iz_exec_work(x, x->act, dx.rows, dx.cols); /* [M,C] */
    iz_norm_layer_fwd(x, h, in, &b->norm_1, true);
    iz_matmul_dw(x, dqkv, h, &qkv);
    iz_matmul_da(x, h, dqkv, &qkv);
    iz_norm_layer_bwd(x, dx, dx, h, in, &b->norm_1);
    iz_exec_release(x, mark);
}

void iz_block_backward(struct iz_exec *x, const struct iz_layer *a)
{
    const struct iz_block *c = a->self;
    struct kept b = block_saves(x, a);
    struct iz_view dx = tokens(a->dx, c->width);
    if (x->widens)
        widen_forward(x, a, &b, true);
    if (has_experts(a))
        block_experts_backward(x, a, &b, dx, tokens(a->dy, c->width));
    else
        block_mlp_backward(x, a, &b, dx, tokens(a->dy, c->width));
    attention_backward(x, a, &b, dx, tokens(a->x, c->width));
}

/* ---- a block up to its router ---- */

void iz_block_router_forward(struct iz_exec *x, const struct iz_layer *a)
{
    const struct iz_block *c = a->self;
    struct kept b = block_saves(x, a);
    struct iz_passed to = iz_passed_of(c, a->y, true);
    attention_forward(x, a, &b, tokens(a->x, c->width));
    iz_norm_layer_fwd(x, to.h, b.x2, &b.norm_2, false);
    route_forward(x, a, &b, to.h);
    if (a->again)
        return;
    iz_op_copy(x, to.c, b.x2);
    iz_routes_copy(x, &to.r, &b.routes);
}

void iz_block_router_backward(struct iz_exec *x, const struct iz_layer *a)
{
    const struct iz_block *c = a->self;
    struct kept b = block_saves(x, a);
    struct iz_passed d = iz_passed_of(c, a->dy, true);
    struct iz_view dx = tokens(a->dx, c->width);
    int64_t mark = iz_exec_mark(x);
    struct iz_view h = iz_exec_work(x, x->act, dx.rows, dx.cols); /* [M,C] */
    iz_norm_layer_fwd(x, h, b.x2, &b.norm_2, true);
    route_backward(x, a, &b, d.r.weight, h, d.h);
    iz_norm_layer_bwd(x, dx, d.c, h, b.x2, &b.norm_2);
    iz_exec_release(x, mark);
    attention_backward(x, a, &b, dx, tokens(a->x, c->width));
}

/* ---- the ends ---- */

/* Of tokens and, but with llama, of their positions. */
static struct iz_table embedding(const struct iz_layer *a)
{
    const struct iz_block *c = a->self;
    struct iz_table t = {.w = a->w[0],
                         .dw = gradient(a, 0),
                         .row = a->input,
                         .vocabulary = true,
                         .begins = a->begins};
    if (c->llama)
        return t;
    t.wpe = a->w[1];
    t.dwpe = gradient(a, 1);
    return t;
}

void iz_block_tokens_forward(struct iz_exec *x, const struct iz_layer *a)
{
    const struct iz_block *c = a->self;
    struct iz_table t = embedding(a);
    iz_table_fwd(x, tokens(a->y, c->width), IZ_NONE, &t);
}

void iz_block_tokens_backward(struct iz_exec *x, const struct iz_layer *a)
{
    const struct iz_block *c = a->self;
    struct iz_table t = embedding(a);
    iz_table_bwd(x, tokens(a->dy, c->width), &t);
}

/* Which parameter of the head is the matrix. */
int iz_block_head_matrix(const struct iz_block *b)
{
    return b->llama ? 1 : 2;
}

/* h = norm(in) in scratch; n gets the statistics. */
static struct iz_view head_norm(struct iz_exec *x, const struct iz_layer *a,
                                struct iz_norm_layer *n, struct iz_view in)
{
    struct iz_view h = iz_exec_work(x, x->act, in.rows, in.cols);
    *n = norm(x, a, 0, iz_exec_work, in.rows, 1);
    iz_norm_layer_fwd(x, h, in, n, false);
    return h;
}

/* The loss of the head's rows: of the targets, or of pairs of samples. */
static void head_loss(struct iz_exec *x, const struct iz_layer *a,
                      struct iz_classifier k)
{
    const struct iz_block *c = a->self;
    if (!a->preference) {
        iz_classifier(x, &k);
        return;
    }
    struct iz_norm_layer n;
    struct iz_layer reference = *a;
    reference.w = a->reference_w;
    k.samples = a->samples;
    iz_preference(
        x, &k,
        &(struct iz_pairs){
            .loss = a->preference,
            .a = head_norm(x, &reference, &n, tokens(a->reference_x, c->width)),
            .w = a->reference_w[iz_block_head_matrix(c)],
            .weight = a->weight,
            .aux = a->aux});
}

void iz_block_head_backward(struct iz_exec *x, const struct iz_layer *a)
{
    const struct iz_block *c = a->self;
    int64_t mark = iz_exec_mark(x);
    struct iz_view in = tokens(a->x, c->width);
    struct iz_norm_layer n;
    struct iz_view h = head_norm(x, a, &n, in); /* [M,C] */
    struct iz_classifier k = {.a = h,
                              .w = a->w[iz_block_head_matrix(c)],
                              .target = a->target,
                              .da = h,
                              .dw = a->dw[iz_block_head_matrix(c)],
                              .loss_scale = a->loss_scale,
                              .loss = a->loss};
    head_loss(x, a, k);
    iz_norm_layer_bwd(x, tokens(a->dx, c->width), IZ_NONE, h, in, &n);
    iz_exec_release(x, mark);
}

void iz_block_head_evaluate(struct iz_exec *x, const struct iz_layer *a)
{
    const struct iz_block *c = a->self;
    int64_t mark = iz_exec_mark(x);
    struct iz_norm_layer n;
    struct iz_classifier k = {.a = head_norm(x, a, &n, tokens(a->x, c->width)),
                              .w = a->w[iz_block_head_matrix(c)],
                              .target = a->target,
                              .loss = a->loss};
    head_loss(x, a, k);
    iz_exec_release(x, mark);
}

void iz_block_head_generate(struct iz_exec *x, const struct iz_layer *a)
{
    const struct iz_block *c = a->self;
    int64_t mark = iz_exec_mark(x);
    struct iz_view in = iz_view_rows(tokens(a->x, c->width), a->row, 1);
    struct iz_linear l = {.w = a->w[iz_block_head_matrix(c)], .out_in = true};
    struct iz_view logits = {
        .p = a->logits, .dtype = IZ_F32, .rows = 1, .cols = l.w.rows};
    struct iz_norm_layer n;
    iz_matmul_fwd(x, logits, IZ_NONE, head_norm(x, a, &n, in), &l);
    iz_exec_release(x, mark);
}
