/* SPDX-License-Identifier: Apache-2.0 */
/* The layers of a transformer; see block.h.  M = samples * T rows, C = width,
 * H = heads, K = kv_heads, D = head_dim, F = hidden. */
#include "models/block_modules.h"

#include "models/parts.h"
#include "models/passed.h"

/* ---- norms ---- */

/* What is behind a norm, in scratch; where there is none, what is before it.
 * again: by saved statistics. */
static struct iz_view normed(struct iz_exec *x, struct iz_view in,
                             const struct iz_norm_layer *n, bool again)
{
    if (!n->rstd.rows)
        return in;
    struct iz_view h = iz_exec_work(x, x->act, in.rows, in.cols);
    iz_norm_layer_fwd(x, h, in, n, again);
    return h;
}

/* Where the gradient of h = normed(in) may go. */
static struct iz_view gradient_of(struct iz_exec *x, struct iz_view h,
                                  const struct iz_norm_layer *n)
{
    return n->rstd.rows ? h : iz_exec_work(x, x->act, h.rows, h.cols);
}

/* dx = r + the gradient of `in`, from that of normed(in), dh, which may be
 * lost. dx may be r; r may be absent. */
static void norm_backward(struct iz_exec *x, struct iz_view dx,
                          struct iz_view r, struct iz_view dh,
                          struct iz_view in, const struct iz_norm_layer *n)
{
    if (n->rstd.rows) {
        iz_norm_layer_bwd(x, dx, r, dh, in, n);
        return;
    }
    if (r.rows)
        iz_op_add(x, dh, r);
    iz_op_copy(x, dx, dh);
}

/* ---- the block ---- */

/* What a block keeps for its backward; outputs of the norms before its parts
 * and of the MLP's nonlinearity are computed again.  Backward overwrites u.  A
 * norm that it has not has no statistics. */
struct kept {
    struct iz_attention attn; /* with normalised and turned queries and keys */
    struct iz_norm_layer norm_1, norm_2, norm_q, norm_k; /* q, k: of heads */
    struct iz_norm_layer behind[2];                      /* attention and MLP */
    struct iz_view made[2]; /* [M,C] what these normalise */
    struct iz_view q, k;    /* [M,HD], [M,KD] before their norms */
    struct iz_view x2;      /* [M,C] after attention */
    /* Widened, before the nonlinearity: [M,F], or gate, up [M,2F]. */
    struct iz_view u;
    struct iz_block_routed routed; /* with experts, whose u is by expert
                                    * [kM,2F] */
};

static bool has_experts(const struct iz_layer *a)
{
    return kind_of(a) == KIND_EXPERTS;
}

/* Whether the unit ends with the router of its block. */
static bool routes_only(const struct iz_layer *a)
{
    return kind_of(a) == KIND_ROUTER;
}

static void head_norm_saves(struct iz_exec *x, const struct iz_layer *a,
                            struct kept *b, int64_t m)
{
    const struct iz_block *c = a->self;
    bool whole = has(a, IZ_HAS_QK_WHOLE);
    b->norm_q = norm(x, a, Q_NORM, iz_exec_save, m, whole ? 1 : c->heads);
    b->norm_k = norm(x, a, K_NORM, iz_exec_save, m, whole ? 1 : c->kv_heads);
    b->q = iz_exec_save(x, x->act, m, (int64_t)c->heads * c->head_dim);
    b->k = iz_exec_save(x, x->act, m, (int64_t)c->kv_heads * c->head_dim);
}

static struct iz_attention attention_of(const struct iz_layer *a)
{
    const struct iz_block *c = a->self;
    const struct iz_sequence_chunk *k = c->chunk;
    return (struct iz_attention){
        .seq = k ? k->seq : c->seq,
        .first = k ? k->first : 0,
        .kv = k ? k->kv : IZ_NONE,
        .dkv = k ? k->dkv : IZ_NONE,
        .heads = c->heads,
        .kv_heads = c->kv_heads,
        .full = c->full,
        .begins = a->begins,
        .window = sort_of(a) & IZ_SORT_WINDOW ? c->window : 0,
        .scale = c->score_scale,
        .cap = c->score_cap,
        .sinks = linear(a, SINKS).w,
        .dsinks = linear(a, SINKS).dw};
}

static struct kept block_saves(struct iz_exec *x, const struct iz_layer *a)
{
    const struct iz_block *c = a->self;
    int64_t m = (int64_t)a->samples * c->seq, d = c->head_dim;
    int64_t heads = (int64_t)a->samples * c->heads;
    bool before = has(a, IZ_HAS_BEFORE);
    struct kept b = {.attn = attention_of(a)};
    if (before)
        b.norm_1 = norm(x, a, NORM_1, iz_exec_save, m, 1);
    b.attn.qkv = iz_exec_save(x, x->act, m, (c->heads + 2 * c->kv_heads) * d);
    b.attn.o = iz_exec_save(x, x->act, m, c->heads * d);
    b.attn.lse = iz_exec_save(x, IZ_F32, heads, c->seq);
    if (has(a, IZ_HAS_QK_NORM))
        head_norm_saves(x, a, &b, m);
    for (int i = 0; has(a, IZ_HAS_BEHIND) && i < 2; i++) {
        b.behind[i] = norm(x, a, BEHIND_1 + i, iz_exec_save, m, 1);
        b.made[i] = iz_exec_save(x, x->act, m, c->width);
    }
    if (!has(a, IZ_HAS_PARALLEL))
        b.x2 = iz_exec_save(x, x->act, m, c->width);
    if (has(a, IZ_HAS_ONE_NORM))
        b.norm_2 = b.norm_1;
    else if (before)
        b.norm_2 = norm(x, a, NORM_2, iz_exec_save, m, 1);
    if (has_experts(a) || routes_only(a))
        b.routed = iz_block_routed_saves(x, a, m);
    if (has_experts(a))
        b.u = iz_exec_save_widened(x, x->act, m * c->experts.per_token,
                                   2 * (int64_t)c->experts.hidden);
    else if (!routes_only(a))
        b.u = iz_exec_save_widened(
            x, x->act, m, (has(a, IZ_HAS_GATE) ? 2 : 1) * (int64_t)c->hidden);
    return b;
}

/* What the MLP's norm reads. */
static struct iz_view mlp_input(const struct iz_layer *a, const struct kept *b)
{
    const struct iz_block *c = a->self;
    return has(a, IZ_HAS_PARALLEL) ? tokens(a->x, c->width) : b->x2;
}

/* u from what the MLP reads; again: with norm_2's saved statistics, and experts
 * have been chosen. */
static void widen_forward(struct iz_exec *x, const struct iz_layer *a,
                          const struct kept *b, bool again)
{
    struct iz_linear fc = linear(a, FC);
    int64_t mark = iz_exec_mark(x);
    bool known = again || has(a, IZ_HAS_ONE_NORM);
    struct iz_view h =
        normed(x, mlp_input(a, b), &b->norm_2, known); /* [M,C] */
    if (has_experts(a) && !again)
        iz_block_route(x, a, &b->routed, h);
    if (has_experts(a))
        iz_experts_widen(x, &b->routed.routes, b->u, h, &fc);
    else
        iz_matmul_fwd(x, b->u, IZ_NONE, h, &fc); /* [M,F] or [M,2F] */
    iz_block_shared_widen(x, a, &b->routed, h);
    iz_exec_release(x, mark);
}

/* Where a block's queries and keys turn. */
static const struct iz_rope *rope_of(const struct iz_layer *a)
{
    const struct iz_block *c = a->self;
    bool window = sort_of(a) & IZ_SORT_WINDOW;
    bool turned = has(a, IZ_HAS_ROPE) && !(sort_of(a) & IZ_SORT_UNTURNED);
    return turned ? &c->rope[window] : NULL;
}

static void head_norms(struct iz_exec *x, const struct kept *b,
                       struct iz_view v, bool back)
{
    iz_norm_head(x, v, b->q, &b->norm_q, 0, back);
    iz_norm_head(x, v, b->k, &b->norm_k, b->q.cols, back);
}

/* Where the documents of these rows begin. */
static struct iz_view begins_of(const struct iz_layer *a, const struct kept *b)
{
    const struct iz_block *c = a->self;
    struct iz_view v = b->attn.begins;
    if (!c->chunk || !v.rows)
        return v;
    v = tokens(v, 1);
    return iz_view_rows(v, c->chunk->first, c->seq);
}

/* Queries and keys in v become as attention takes them; back: their gradients.
 */
static void positions(struct iz_exec *x, const struct iz_layer *a,
                      const struct kept *b, struct iz_view v, bool back)
{
    const struct iz_rope *rope = rope_of(a);
    bool late = has(a, IZ_HAS_QK_LATE);
    if (b->q.rows && late == back)
        head_norms(x, b, v, back);
    if (rope)
        iz_rope(x, v, begins_of(a, b), rope, back);
    if (b->q.rows && late != back)
        head_norms(x, b, v, back);
}

/* y = r + what `proj` makes of g, behind the norm of attention (i = 0) or of
 * the MLP (1). */
static void added_forward(struct iz_exec *x, const struct iz_layer *a,
                          const struct kept *b, int i, struct iz_view y,
                          struct iz_view r, struct iz_view g)
{
    const struct iz_block *c = a->self;
    struct iz_linear proj = linear(a, i ? MLP_PROJ : ATTN_PROJ);
    if (!b->made[i].rows && c->residual == 0) {
        iz_matmul_fwd(x, y, r, g, &proj);
        return;
    }
    if (b->made[i].rows) {
        iz_matmul_fwd(x, b->made[i], IZ_NONE, g, &proj);
        iz_norm_layer_fwd(x, y, b->made[i], &b->behind[i], false);
        if (c->residual != 0)
            iz_op_scale(x, y, y, c->residual, 0);
    } else {
        proj.scale = c->residual;
        iz_matmul_fwd(x, y, IZ_NONE, g, &proj);
    }
    iz_op_add(x, y, r);
}

/* The gradient of what `proj` made from dy, that of y: in scratch, or dy. */
static struct iz_view added_backward(struct iz_exec *x,
                                     const struct iz_layer *a,
                                     const struct kept *b, int i,
                                     struct iz_view dy)
{
    const struct iz_block *c = a->self;
    if (!b->made[i].rows && c->residual == 0)
        return dy;
    struct iz_view d = iz_exec_work(x, x->act, dy.rows, dy.cols);
    if (c->residual != 0)
        iz_op_scale(x, d, dy, c->residual, 0);
    if (b->made[i].rows)
        iz_norm_layer_bwd(x, d, IZ_NONE, c->residual != 0 ? d : dy, b->made[i],
                          &b->behind[i]);
    return d;
}

/* Keys and values of a chunk's rows, which are behind the queries in these
 * rows, go to those of the sample; the gradients of the sample's come back. */
static void put_keys(struct iz_exec *x, const struct iz_sequence_chunk *k,
                     struct iz_view qkv)
{
    struct iz_view to = iz_view_rows(k->kv, k->first, qkv.rows);
    iz_op_columns(x, to, 0, qkv, qkv.cols - to.cols, to.cols);
}

static void get_key_gradients(struct iz_exec *x,
                              const struct iz_sequence_chunk *k,
                              struct iz_view dqkv)
{
    struct iz_view from = iz_view_rows(k->dkv, k->first, dqkv.rows);
    iz_op_columns(x, dqkv, dqkv.cols - from.cols, from, 0, from.cols);
}

/* Queries, keys and values of `in`. */
static void project_forward(struct iz_exec *x, const struct iz_layer *a,
                            const struct kept *b, struct iz_view in)
{
    const struct iz_block *c = a->self;
    struct iz_linear qkv = linear(a, QKV);
    int64_t mark = iz_exec_mark(x);
    struct iz_view h = normed(x, in, &b->norm_1, false); /* [M,C] */
    iz_matmul_fwd(x, b->attn.qkv, IZ_NONE, h, &qkv);     /* [M,(H+2K)D] */
    iz_exec_release(x, mark);
    positions(x, a, b, b->attn.qkv, false);
    if (c->chunk)
        put_keys(x, c->chunk, b->attn.qkv);
}

/* x2 = in + what attention makes of it. */
static void attention_forward(struct iz_exec *x, const struct iz_layer *a,
                              const struct kept *b, struct iz_view in)
{
    int64_t mark = iz_exec_mark(x);
    project_forward(x, a, b, in);
    iz_attention_fwd(x, &b->attn);                   /* [M,HD] */
    added_forward(x, a, b, 0, b->x2, in, b->attn.o); /* [M,C] */
    iz_exec_release(x, mark);
}

void iz_block_keys(struct iz_exec *x, const struct iz_layer *a, bool kept)
{
    const struct iz_block *c = a->self;
    struct kept b = block_saves(x, a);
    if (kept)
        put_keys(x, c->chunk, b.attn.qkv);
    else
        project_forward(x, a, &b, tokens(a->x, c->width));
}

void iz_block_count_saves(struct iz_exec *x, const struct iz_layer *a)
{
    block_saves(x, a);
}

void iz_block_forward(struct iz_exec *x, const struct iz_layer *a)
{
    const struct iz_block *c = a->self;
    struct kept b = block_saves(x, a);
    struct iz_linear mlp = linear(a, MLP_PROJ);
    struct iz_view in = tokens(a->x, c->width), out = tokens(a->y, c->width);
    int64_t mark = iz_exec_mark(x);
    if (has(a, IZ_HAS_PARALLEL))
        b.x2 = iz_exec_work(x, x->act, in.rows, in.cols);
    attention_forward(x, a, &b, in);
    widen_forward(x, a, &b, false);
    if (a->again && !b.made[1].rows) {
        iz_exec_release(x, mark);
        return;
    }
    if (has_experts(a)) {
        iz_experts_narrow(x, &b.routed.routes, b.u, out, b.x2, &mlp, c->act);
        iz_block_shared(x, a, &b.routed, out);
        return;
    }
    struct iz_view g = iz_exec_work(x, x->act, in.rows, c->hidden);
    iz_activation_apply(x, IZ_NONE, g, IZ_NONE, b.u, c->act);
    added_forward(x, a, &b, 1, out, b.x2, g); /* [M,C] */
    iz_exec_release(x, mark);
}

/* dx = r + the gradient through the MLP and the norm before it, from dy. */
static void block_mlp_backward(struct iz_exec *x, const struct iz_layer *a,
                               const struct kept *b, struct iz_view dx,
                               struct iz_view r, struct iz_view dy)
{
    const struct iz_block *c = a->self;
    struct iz_linear fc = linear(a, FC), proj = linear(a, MLP_PROJ);
    bool gated = has(a, IZ_HAS_GATE), shared = has(a, IZ_HAS_ONE_NORM);
    int64_t begin = iz_exec_mark(x);
    dy = added_backward(x, a, b, 1, dy);
    int64_t mark = iz_exec_mark(x);
    struct iz_view g =
        iz_exec_work(x, x->act, b->u.rows, c->hidden); /* [M,F] */
    struct iz_view in = gated ? g : b->u; /* becomes proj's input again */
    struct iz_view du = gated ? b->u : g; /* becomes the gradient of u */
    iz_matmul_da(x, g, dy, &proj);
    iz_activation_apply(x, du, in, g, b->u, c->act);
    iz_matmul_dw(x, dy, in, &proj);
    if (gated)
        iz_exec_release(x, mark);
    struct iz_view read = mlp_input(a, b);
    struct iz_view h = normed(x, read, &b->norm_2, true); /* [M,C] */
    struct iz_view dh = gradient_of(x, h, &b->norm_2);
    iz_matmul_dw(x, du, h, &fc);
    iz_matmul_da(x, dh, du, &fc);
    if (shared)
        iz_op_copy(x, dx, dh);
    else
        norm_backward(x, dx, r, dh, read, &b->norm_2);
    iz_exec_release(x, begin);
}

/* The same with experts. */
static void block_experts_backward(struct iz_exec *x, const struct iz_layer *a,
                                   const struct kept *b, struct iz_view dx,
                                   struct iz_view dy)
{
    const struct iz_block *c = a->self;
    const struct iz_routes *r = &b->routed.routes;
    struct iz_linear fc = linear(a, FC), proj = linear(a, MLP_PROJ);
    int64_t mark = iz_exec_mark(x);
    struct iz_view dweight = iz_exec_work(x, IZ_F32, dx.rows, r->weight.cols);
    struct iz_view h = iz_exec_work(x, x->act, dx.rows, dx.cols);  /* [M,C] */
    struct iz_view dh = iz_exec_work(x, x->act, dx.rows, dx.cols); /* [M,C] */
    int64_t inner = iz_exec_mark(x);
    struct iz_view by =
        iz_exec_work(x, x->act, b->u.rows, dx.cols); /* [kM,C] */
    iz_experts_narrow_bwd(x, r, b->u, dweight, by, dy, &proj, c->act);
    iz_norm_layer_fwd(x, h, b->x2, &b->norm_2, true);
    iz_experts_widen_bwd(x, r, b->u, dh, by, IZ_NONE, h, &fc);
    iz_exec_release(x, inner);
    iz_block_shared_bwd(x, a, &b->routed, dh, h, dy);
    iz_block_route_bwd(x, a, &b->routed, dweight, h, dh);
    iz_norm_layer_bwd(x, dx, dy, h, b->x2, &b->norm_2);
    iz_exec_release(x, mark);
}

/* dqkv, behind norms and positions, from the gradient of x2. */
static void scores_backward(struct iz_exec *x, const struct iz_layer *a,
                            const struct kept *b, struct iz_view dqkv,
                            struct iz_view dx2)
{
    const struct iz_block *c = a->self;
    struct iz_linear proj = linear(a, ATTN_PROJ);
    int64_t mark = iz_exec_mark(x);
    dx2 = added_backward(x, a, b, 0, dx2);
    struct iz_view d = iz_exec_work(x, x->act, dx2.rows, b->attn.o.cols);
    iz_matmul_dw(x, dx2, b->attn.o, &proj);
    iz_matmul_da(x, d, dx2, &proj);
    iz_attention_bwd(x, dqkv, d, &b->attn);
    if (c->chunk)
        get_key_gradients(x, c->chunk, dqkv);
    positions(x, a, b, dqkv, true);
    iz_exec_release(x, mark);
}

/* dx = r + the gradient through attention and norm_1, from dx2; where the MLP
 * reads the same h, dh is what it says of it. */
static void attention_backward(struct iz_exec *x, const struct iz_layer *a,
                               const struct kept *b, struct iz_view dx,
                               struct iz_view r, struct iz_view dx2,
                               struct iz_view of_mlp)
{
    const struct iz_block *c = a->self;
    struct iz_linear qkv = linear(a, QKV);
    struct iz_view in = tokens(a->x, c->width);
    int64_t mark = iz_exec_mark(x);
    struct iz_view dqkv = iz_exec_work(x, x->act, dx.rows, b->attn.qkv.cols);
    scores_backward(x, a, b, dqkv, dx2);
    struct iz_view h = normed(x, in, &b->norm_1, true); /* [M,C] */
    struct iz_view dh = gradient_of(x, h, &b->norm_1);
    iz_matmul_dw(x, dqkv, h, &qkv);
    iz_matmul_da(x, dh, dqkv, &qkv);
    if (of_mlp.rows)
        iz_op_add(x, dh, of_mlp);
    norm_backward(x, dx, r, dh, in, &b->norm_1);
    iz_exec_release(x, mark);
}

/* Both parts read the block's input: dy is read to the end. */
static void parallel_backward(struct iz_exec *x, const struct iz_layer *a,
                              const struct kept *b, struct iz_view dx,
                              struct iz_view dy)
{
    bool shared = has(a, IZ_HAS_ONE_NORM);
    struct iz_view sum = iz_exec_work(x, x->act, dx.rows, dx.cols);
    block_mlp_backward(x, a, b, sum, dy, dy);
    attention_backward(x, a, b, dx, shared ? dy : sum, dy,
                       shared ? sum : IZ_NONE);
}

void iz_block_backward(struct iz_exec *x, const struct iz_layer *a)
{
    const struct iz_block *c = a->self;
    struct kept b = block_saves(x, a);
    struct iz_view dx = tokens(a->dx, c->width), dy = tokens(a->dy, c->width);
    int64_t mark = iz_exec_mark(x);
    if (x->widens)
        widen_forward(x, a, &b, true);
    if (has(a, IZ_HAS_PARALLEL)) {
        parallel_backward(x, a, &b, dx, dy);
        iz_exec_release(x, mark);
        return;
    }
    if (has_experts(a))
        block_experts_backward(x, a, &b, dx, dy);
    else
        block_mlp_backward(x, a, &b, dx, dy, dy);
    attention_backward(x, a, &b, dx, dx, dx, IZ_NONE);
}

/* ---- a block up to its router ---- */

void iz_block_router_forward(struct iz_exec *x, const struct iz_layer *a)
{
    const struct iz_block *c = a->self;
    struct kept b = block_saves(x, a);
    struct iz_passed to = iz_passed_of(c, a->y, true);
    attention_forward(x, a, &b, tokens(a->x, c->width));
    iz_norm_layer_fwd(x, to.h, b.x2, &b.norm_2, false);
    iz_block_route(x, a, &b.routed, to.h);
    iz_block_shared_widen(x, a, &b.routed, to.h);
    if (a->again)
        return;
    iz_op_copy(x, to.c, b.x2);
    iz_block_shared(x, a, &b.routed, to.c);
    iz_routes_copy(x, &to.r, &b.routed.routes);
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
    if (x->widens)
        iz_block_shared_widen(x, a, &b.routed, h);
    iz_block_shared_bwd(x, a, &b.routed, d.h, h, d.c);
    iz_block_route_bwd(x, a, &b.routed, d.r.weight, h, d.h);
    iz_norm_layer_bwd(x, dx, d.c, h, b.x2, &b.norm_2);
    iz_exec_release(x, mark);
    attention_backward(x, a, &b, dx, dx, dx, IZ_NONE);
}
