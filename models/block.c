/* SPDX-License-Identifier: Apache-2.0 */
/* The units of a transformer; see block.h.  M = samples * T rows, C = width,
 * H = heads, K = kv_heads, D = head_dim, F = hidden. */
#include "models/block.h"

#include <math.h>
#include <stdio.h>

#include "models/parts.h"

/* Every unit has a kind of its own, but blocks are alike. */
enum { KIND_EMBED, KIND_BLOCK, KIND_EXPERTS, KIND_HEAD };

/* What a block has, in the order of its list; with a bias behind each, or where
 * there are some with llama, behind all of them: the bias of QKV, the norms of
 * queries and keys, the router. */
enum { NORM_1, QKV, ATTN_PROJ, NORM_2, FC, MLP_PROJ, PARTS };
enum { BLOCK_MOST = 2 * PARTS };

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
        l.b = a->w[PARTS];
        l.db = gradient(a, PARTS);
    }
    return l;
}

/* ---- norms ---- */

typedef struct iz_view take_fn(struct iz_exec *x, enum iz_dtype t, int64_t rows,
                               int64_t cols);

/* The part with this number; its statistics, of m rows and of each of `heads`,
 * are taken by iz_save or iz_work. */
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
    struct iz_experts_kept experts; /* or these */
};

static bool has_experts(const struct iz_layer *a)
{
    return a->kind == KIND_EXPERTS;
}

static struct iz_experts_weights experts_of(const struct iz_layer *a)
{
    const struct iz_block *c = a->self;
    return (struct iz_experts_weights){
        .router = linear(a, PARTS + c->qkv_bias + 2 * c->qk_norm),
        .fc = linear(a, FC),
        .proj = linear(a, MLP_PROJ)};
}

static void head_norm_saves(struct iz_exec *x, const struct iz_layer *a,
                            struct kept *b, int64_t m)
{
    const struct iz_block *c = a->self;
    int first = PARTS + c->qkv_bias;
    b->norm_q = norm(x, a, first, iz_save, m, c->heads);
    b->norm_k = norm(x, a, first + 1, iz_save, m, c->kv_heads);
    b->q = iz_save(x, x->act, m, (int64_t)c->heads * c->head_dim);
    b->k = iz_save(x, x->act, m, (int64_t)c->kv_heads * c->head_dim);
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
    b.norm_1 = norm(x, a, NORM_1, iz_save, m, 1);
    b.attn.qkv = iz_save(x, x->act, m, (c->heads + 2 * c->kv_heads) * d);
    b.attn.o = iz_save(x, x->act, m, c->heads * d);
    b.attn.lse = iz_save(x, IZ_F32, heads, c->seq);
    if (c->qk_norm)
        head_norm_saves(x, a, &b, m);
    b.x2 = iz_save(x, x->act, m, c->width);
    b.norm_2 = norm(x, a, NORM_2, iz_save, m, 1);
    if (has_experts(a))
        b.experts = iz_experts_saves(x, &c->experts, m);
    else
        b.u = iz_save_widened(x, x->act, m,
                              (c->llama ? 2 : 1) * (int64_t)c->hidden);
    return b;
}

/* The same of experts; again: they have been chosen. */
static void widen_experts(struct iz_exec *x, const struct iz_layer *a,
                          const struct kept *b, struct iz_view h, bool again)
{
    const struct iz_block *c = a->self;
    struct iz_experts_weights w = experts_of(a);
    if (!again)
        iz_experts_route(x, &c->experts, &b->experts, h, &w,
                         a->again ? NULL : a->told);
    iz_experts_widen(x, &b->experts, h, &w.fc);
}

/* u from x2; again: with norm_2's saved statistics. */
static void widen_forward(struct iz_exec *x, const struct iz_layer *a,
                          const struct kept *b, bool again)
{
    struct iz_linear fc = linear(a, FC);
    int64_t mark = iz_work_mark(x);
    struct iz_view h = iz_work(x, x->act, b->x2.rows, b->x2.cols); /* [M,C] */
    iz_norm_layer_fwd(x, h, b->x2, &b->norm_2, again);
    if (has_experts(a))
        widen_experts(x, a, b, h, again);
    else
        iz_matmul_fwd(x, b->u, IZ_NONE, h, &fc); /* [M,F] or [M,2F] */
    iz_work_release(x, mark);
}

/* Queries and keys as attention takes them. */
static void positions_forward(struct iz_exec *x, const struct iz_block *c,
                              const struct kept *b)
{
    if (c->qk_norm) {
        iz_headnorm_fwd(x, b->attn.qkv, b->q, &b->norm_q, 0);
        iz_headnorm_fwd(x, b->attn.qkv, b->k, &b->norm_k, b->q.cols);
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
        iz_headnorm_bwd(x, dqkv, b->q, &b->norm_q, 0);
        iz_headnorm_bwd(x, dqkv, b->k, &b->norm_k, b->q.cols);
    }
}

static void block_forward(struct iz_exec *x, const struct iz_layer *a)
{
    const struct iz_block *c = a->self;
    struct kept b = block_saves(x, a);
    struct iz_linear qkv = linear(a, QKV), proj = linear(a, ATTN_PROJ);
    struct iz_linear mlp = linear(a, MLP_PROJ);
    struct iz_view in = tokens(a->x, c->width), out = tokens(a->y, c->width);
    int64_t mark = iz_work_mark(x);
    struct iz_view h = iz_work(x, x->act, in.rows, c->width); /* [M,C] */
    iz_norm_layer_fwd(x, h, in, &b.norm_1, false);
    iz_matmul_fwd(x, b.attn.qkv, IZ_NONE, h, &qkv); /* [M,(H+2K)D] */
    positions_forward(x, c, &b);
    iz_attention_fwd(x, &b.attn);                /* [M,HD] */
    iz_matmul_fwd(x, b.x2, in, b.attn.o, &proj); /* [M,C] */
    iz_work_release(x, mark);
    widen_forward(x, a, &b, false);
    if (a->again)
        return;
    if (has_experts(a)) {
        iz_experts_narrow(x, &b.experts, out, b.x2, &mlp);
        return;
    }
    struct iz_view g = iz_work(x, x->act, in.rows, c->hidden);
    if (c->llama)
        iz_swiglu_fwd(x, g, b.u);
    else
        iz_gelu_fwd(x, g, b.u);
    iz_matmul_fwd(x, out, b.x2, g, &mlp); /* [M,C] */
    iz_work_release(x, mark);
}

/* dx2 = dy + the gradient through norm_2 and the MLP, into `dx`. */
static void block_mlp_backward(struct iz_exec *x, const struct iz_layer *a,
                               const struct kept *b, struct iz_view dx,
                               struct iz_view dy)
{
    const struct iz_block *c = a->self;
    struct iz_linear fc = linear(a, FC), proj = linear(a, MLP_PROJ);
    int64_t mark = iz_work_mark(x);
    struct iz_view g = iz_work(x, x->act, b->u.rows, c->hidden); /* [M,F] */
    struct iz_view in = c->llama ? g : b->u; /* becomes proj's input again */
    struct iz_view du = c->llama ? b->u : g; /* becomes the gradient of u */
    iz_matmul_da(x, g, dy, &proj);
    if (c->llama)
        iz_swiglu_bwd(x, du, in, g, b->u);
    else
        iz_gelu_bwd(x, du, in, g, b->u);
    iz_matmul_dw(x, dy, in, &proj);
    if (c->llama)
        iz_work_release(x, mark);
    struct iz_view h = iz_work(x, x->act, dx.rows, dx.cols); /* [M,C] */
    iz_norm_layer_fwd(x, h, b->x2, &b->norm_2, true);
    iz_matmul_dw(x, du, h, &fc);
    iz_matmul_da(x, h, du, &fc); /* h becomes its own gradient */
    iz_norm_layer_bwd(x, dx, dy, h, b->x2, &b->norm_2);
    iz_work_release(x, mark);
}

/* The same with experts. */
static void block_experts_backward(struct iz_exec *x, const struct iz_layer *a,
                                   const struct kept *b, struct iz_view dx,
                                   struct iz_view dy)
{
    const struct iz_block *c = a->self;
    const struct iz_experts_kept *e = &b->experts;
    struct iz_experts_weights w = experts_of(a);
    int64_t mark = iz_work_mark(x);
    struct iz_view dweight = iz_work(x, IZ_F32, dx.rows, e->r.weight.cols);
    struct iz_view by = iz_work(x, x->act, e->u.rows, dx.cols); /* [kM,C] */
    iz_experts_narrow_bwd(x, e, dweight, by, dy, &w.proj);
    struct iz_view h = iz_work(x, x->act, dx.rows, dx.cols); /* [M,C] */
    iz_norm_layer_fwd(x, h, b->x2, &b->norm_2, true);
    iz_experts_widen_bwd(x, &c->experts, e, dweight, by, h, &w, a->loss_scale);
    iz_norm_layer_bwd(x, dx, dy, h, b->x2, &b->norm_2);
    iz_work_release(x, mark);
}

/* dqkv, behind norms and positions, from the gradient of x2. */
static void scores_backward(struct iz_exec *x, const struct iz_layer *a,
                            const struct kept *b, struct iz_view dqkv,
                            struct iz_view dx2)
{
    struct iz_linear proj = linear(a, ATTN_PROJ);
    int64_t mark = iz_work_mark(x);
    struct iz_view d = iz_work(x, x->act, dx2.rows, b->attn.o.cols);
    iz_matmul_dw(x, dx2, b->attn.o, &proj);
    iz_matmul_da(x, d, dx2, &proj);
    iz_attention_bwd(x, dqkv, d, &b->attn);
    positions_backward(x, a->self, b, dqkv);
    iz_work_release(x, mark);
}

/* dx = dx2 + the gradient through norm_1 and attention, dx2 being in `dx`. */
static void attention_backward(struct iz_exec *x, const struct iz_layer *a,
                               const struct kept *b, struct iz_view dx,
                               struct iz_view in)
{
    struct iz_linear qkv = linear(a, QKV);
    int64_t mark = iz_work_mark(x);
    struct iz_view dqkv = iz_work(x, x->act, dx.rows, b->attn.qkv.cols);
    scores_backward(x, a, b, dqkv, dx);
    struct iz_view h = iz_work(x, x->act, dx.rows, dx.cols); /* [M,C] */
    iz_norm_layer_fwd(x, h, in, &b->norm_1, true);
    iz_matmul_dw(x, dqkv, h, &qkv);
    iz_matmul_da(x, h, dqkv, &qkv);
    iz_norm_layer_bwd(x, dx, dx, h, in, &b->norm_1);
    iz_work_release(x, mark);
}

static void block_backward(struct iz_exec *x, const struct iz_layer *a)
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

static void tokens_forward(struct iz_exec *x, const struct iz_layer *a)
{
    const struct iz_block *c = a->self;
    struct iz_table t = embedding(a);
    iz_table_fwd(x, tokens(a->y, c->width), IZ_NONE, &t);
}

static void tokens_backward(struct iz_exec *x, const struct iz_layer *a)
{
    const struct iz_block *c = a->self;
    struct iz_table t = embedding(a);
    iz_table_bwd(x, tokens(a->dy, c->width), &t);
}

/* Which parameter of the head is the matrix. */
static int head_matrix(const struct iz_block *b)
{
    return b->llama ? 1 : 2;
}

/* h = norm(in) in scratch; n gets the statistics. */
static struct iz_view head_norm(struct iz_exec *x, const struct iz_layer *a,
                                struct iz_norm_layer *n, struct iz_view in)
{
    struct iz_view h = iz_work(x, x->act, in.rows, in.cols);
    *n = norm(x, a, 0, iz_work, in.rows, 1);
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
            .w = a->reference_w[head_matrix(c)],
            .weight = a->weight,
            .told = a->told});
}

static void block_head_backward(struct iz_exec *x, const struct iz_layer *a)
{
    const struct iz_block *c = a->self;
    int64_t mark = iz_work_mark(x);
    struct iz_view in = tokens(a->x, c->width);
    struct iz_norm_layer n;
    struct iz_view h = head_norm(x, a, &n, in); /* [M,C] */
    struct iz_classifier k = {.a = h,
                              .w = a->w[head_matrix(c)],
                              .target = a->target,
                              .da = h,
                              .dw = a->dw[head_matrix(c)],
                              .loss_scale = a->loss_scale,
                              .loss = a->loss};
    head_loss(x, a, k);
    iz_norm_layer_bwd(x, tokens(a->dx, c->width), IZ_NONE, h, in, &n);
    iz_work_release(x, mark);
}

static void block_head_evaluate(struct iz_exec *x, const struct iz_layer *a)
{
    const struct iz_block *c = a->self;
    int64_t mark = iz_work_mark(x);
    struct iz_norm_layer n;
    struct iz_classifier k = {.a = head_norm(x, a, &n, tokens(a->x, c->width)),
                              .w = a->w[head_matrix(c)],
                              .target = a->target,
                              .loss = a->loss};
    head_loss(x, a, k);
    iz_work_release(x, mark);
}

static void head_generate(struct iz_exec *x, const struct iz_layer *a)
{
    const struct iz_block *c = a->self;
    int64_t mark = iz_work_mark(x);
    struct iz_view in = iz_view_rows(tokens(a->x, c->width), a->row, 1);
    struct iz_linear l = {.w = a->w[head_matrix(c)], .out_in = true};
    struct iz_view logits = {
        .p = a->logits, .dtype = IZ_F32, .rows = 1, .cols = l.w.rows};
    struct iz_norm_layer n;
    iz_matmul_fwd(x, logits, IZ_NONE, head_norm(x, a, &n, in), &l);
    iz_work_release(x, mark);
}

/* ---- units ---- */

static int embed_open(struct iz_unit *u, const struct iz_block *b,
                      const struct iz_ends *ends)
{
    snprintf(u->name, sizeof(u->name), "embed");
    u->kind = KIND_EMBED;
    u->self = b;
    u->out_elems = (int64_t)b->seq * b->width;
    u->forward = tokens_forward;
    u->backward = tokens_backward;
    return iz_unit_params(u, ends->embed, ends->n_embed, "");
}

static int head_open(struct iz_model *m, const struct iz_block *b,
                     const struct iz_ends *ends)
{
    struct iz_unit *u = &m->unit[1 + b->layers];
    snprintf(u->name, sizeof(u->name), "head");
    u->kind = KIND_HEAD;
    u->self = b;
    if (ends->n_head == head_matrix(b))
        u->tied_unit = u->tied_param = 0;
    u->backward = block_head_backward;
    u->evaluate = block_head_evaluate;
    u->generate = m->vocab ? head_generate : NULL;
    return iz_unit_params(u, ends->head, ends->n_head, "");
}

/* A part of a block; in = 0: a norm.  stacked: outputs of its matrices, if it
 * has several; {-1}: it is none. */
struct part {
    const char *name;
    int64_t in, out;
    float std;
    int64_t stacked[IZ_STACKED];
};

/* Writes the weight and, where the block has one, the bias; returns the next
 * place. */
static int add_part(struct iz_param *list, int n, const struct iz_block *b,
                    const struct part *p)
{
    int64_t rows = b->llama ? p->out : p->in, cols = b->llama ? p->in : p->out;
    char full[64];
    snprintf(full, sizeof(full), "%s.weight", p->name);
    list[n] = p->in ? weight(full, rows, cols, p->std)
                    : vector(full, p->out, IZ_INIT_ONE);
    if (p->stacked[0] >= 0)
        memcpy(list[n].outputs, p->stacked, sizeof(p->stacked));
    if (p->in && !p->stacked[0])
        list[n].outputs[0] = p->out;
    list[n++].out_rows = b->llama;
    snprintf(full, sizeof(full), "%s.bias", p->name);
    if (!b->llama)
        list[n++] = vector(full, p->out, IZ_INIT_ZERO);
    return n;
}

static int add_block(struct iz_unit *u, const struct iz_block *b,
                     const struct iz_block_names *name, int i)
{
    int64_t w = b->width, f = b->hidden, d = b->head_dim, o = b->heads * d;
    int64_t kv = b->kv_heads * d, qkv = o + 2 * kv;
    /* So that the sum over all residual additions keeps its variance. */
    float residual = IZ_BLOCK_STD / sqrtf(2 * (float)b->layers);
    const struct part part[PARTS] = {
        [NORM_1] = {name->norm_1, 0, w, 0, {0}},
        [QKV] = {name->qkv, w, qkv, IZ_BLOCK_STD, {o, kv, kv}},
        [ATTN_PROJ] = {name->attn_proj, o, w, residual, {0}},
        [NORM_2] = {name->norm_2, 0, w, 0, {0}},
        [FC] = {name->fc,
                w,
                b->llama ? 2 * f : f,
                IZ_BLOCK_STD,
                {f, b->llama ? f : 0}},
        [MLP_PROJ] = {name->mlp_proj, f, w, residual, {0}}};
    const struct part of_heads[] = {{name->q_norm, 0, d, 0, {0}},
                                    {name->k_norm, 0, d, 0, {0}}};
    const struct iz_experts *e = &b->experts;
    /* Of experts, one matrix below the other: none that an optimizer of
     * matrices knows as such. */
    const struct part experts[PARTS] = {
        [FC] = {name->expert_fc,
                w,
                2 * (int64_t)e->n * e->hidden,
                IZ_BLOCK_STD,
                {-1}},
        [MLP_PROJ] = {name->expert_proj, e->hidden, e->n * w, residual, {-1}}};
    const struct part router = {name->router, w, e->n, IZ_BLOCK_STD, {-1}};
    bool has = iz_experts_at(e, i);
    struct iz_param list[BLOCK_MOST];
    char prefix[32], bias[64];
    int n = 0;
    for (int k = 0; k < PARTS; k++)
        n = add_part(list, n, b, has && k >= FC ? &experts[k] : &part[k]);
    snprintf(bias, sizeof(bias), "%s.bias", name->qkv);
    if (b->qkv_bias)
        list[n++] = vector(bias, qkv, IZ_INIT_ZERO);
    for (int k = 0; b->qk_norm && k < 2; k++)
        n = add_part(list, n, b, &of_heads[k]);
    if (has)
        n = add_part(list, n, b, &router);
    snprintf(u->name, sizeof(u->name), "%s.%d", name->block, i);
    snprintf(prefix, sizeof(prefix), "%s.%d.", name->block, i);
    u->kind = has ? KIND_EXPERTS : KIND_BLOCK;
    u->own_loss = has;
    u->self = b;
    u->out_elems = (int64_t)b->seq * w;
    u->forward = block_forward;
    u->backward = block_backward;
    return iz_unit_params(u, list, n, prefix);
}

int iz_block_open(struct iz_model *m, const struct iz_block *b,
                  const struct iz_block_names *names,
                  const struct iz_ends *ends)
{
    int rc = embed_open(&m->unit[0], b, ends);
    m->knows_documents = m->knows_pairs = !b->full;
    for (int i = 0; rc == 0 && i < b->layers; i++)
        rc = add_block(&m->unit[1 + i], b, names, i);
    return rc ? rc : head_open(m, b, ends);
}

int iz_block_check(const char *model, int width, int heads)
{
    if (width % heads == 0)
        return 0;
    fprintf(stderr, "%s: width %d is not divisible by heads = %d\n", model,
            width, heads);
    return -EINVAL;
}
