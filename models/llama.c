/* SPDX-License-Identifier: Apache-2.0 */
/* Llama and its relatives, written once for training, evaluation and
 * generation.  M = samples * seq rows, C = width, H = heads, K = kv_heads,
 * D = head_dim, F = ffn, V = vocab. */
#include "models/llama.h"

#include <math.h>
#include <stdio.h>

#include "codelets/ops/ops.h"
#include "models/parts.h"
#include "runtime/run/run.h"

#define INIT_STD 0.02f

enum kind { KIND_EMBED, KIND_BLOCK, KIND_HEAD };

/* Parameters of a block in the order of its list; behind them, where the model
 * has them, the bias of QKV, then the norms of queries and keys. */
enum { NORM_1, QKV, ATTN_PROJ, NORM_2, GATE_UP, DOWN, OPTIONAL };
enum { BLOCK_MOST = OPTIONAL + 3 };

/* Parameters of the head: its norm, then the matrix, its own or the tied one.
 */
enum { HEAD_NORM, HEAD_MATRIX };

/* Parameter i of the unit; its gradient in backward only. */
static struct iz_linear linear(const struct iz_layer *a, int i)
{
    struct iz_linear l = {.w = a->w[i], .out_in = true};

    if (a->dw)
        l.dw = a->dw[i];
    return l;
}

static struct iz_linear qkv_linear(const struct iz_layer *a)
{
    const struct iz_llama_config *c = a->self;
    struct iz_linear l = linear(a, QKV);

    if (c->qkv_bias) {
        l.b = a->w[OPTIONAL];
        if (a->dw)
            l.db = a->dw[OPTIONAL];
    }
    return l;
}

static struct iz_rmsnorm norm(const struct iz_layer *a, int i)
{
    const struct iz_llama_config *c = a->self;
    struct iz_rmsnorm n = {.w = a->w[i], .eps = (float)c->norm_eps};

    if (a->dw)
        n.dw = a->dw[i];
    return n;
}

static struct iz_rope rope(const struct iz_llama_config *c)
{
    return (struct iz_rope){
        .seq = c->seq,
        .heads = c->heads + c->kv_heads,
        .d = c->head_dim,
        .theta = c->rope_theta,
        .factor = c->rope_scaling_factor,
        .low_freq_factor = c->rope_scaling_low_freq_factor,
        .high_freq_factor = c->rope_scaling_high_freq_factor,
        .original_seq = c->rope_scaling_original_seq,
    };
}

static void llama_embed_forward(struct iz_exec *x, const struct iz_layer *a)
{
    const struct iz_llama_config *c = a->self;

    iz_embedding_fwd(x, tokens(a->y, c->width), a->input, a->w[0], IZ_NONE);
}

static void llama_embed_backward(struct iz_exec *x, const struct iz_layer *a)
{
    const struct iz_llama_config *c = a->self;

    iz_embedding_bwd(x, a->dw[0], IZ_NONE, tokens(a->dy, c->width), a->input);
}

/* What a block keeps for its backward; outputs of the norms of rows and of the
 * MLP's gate are computed again.  Backward overwrites u. */
struct block {
    struct iz_attention attn; /* with normalised and turned queries and keys */
    struct iz_rmsnorm norm_1, norm_2;
    struct iz_rmsnorm norm_q, norm_k; /* of heads */
    struct iz_view q, k;              /* [M,HD], [M,KD] before their norms */
    struct iz_view x2;                /* [M,C] after attention */
    struct iz_view u;                 /* [M,2F]: gate, up */
};

static void head_norm_saves(struct iz_exec *x, const struct iz_layer *a,
                            struct block *b, int64_t m)
{
    const struct iz_llama_config *c = a->self;
    int first = OPTIONAL + c->qkv_bias;

    b->norm_q = norm(a, first);
    b->norm_k = norm(a, first + 1);
    b->norm_q.rstd = iz_save(x, IZ_F32, m, c->heads);
    b->norm_k.rstd = iz_save(x, IZ_F32, m, c->kv_heads);
    b->q = iz_save(x, x->act, m, (int64_t)c->heads * c->head_dim);
    b->k = iz_save(x, x->act, m, (int64_t)c->kv_heads * c->head_dim);
}

static struct block block_saves(struct iz_exec *x, const struct iz_layer *a)
{
    const struct iz_llama_config *c = a->self;
    int64_t m = (int64_t)a->samples * c->seq, d = c->head_dim;
    int64_t heads = (int64_t)a->samples * c->heads;
    struct block b = {.norm_1 = norm(a, NORM_1), .norm_2 = norm(a, NORM_2)};

    b.norm_1.rstd = iz_save(x, IZ_F32, m, 1);
    b.attn.qkv = iz_save(x, x->act, m, (c->heads + 2 * c->kv_heads) * d);
    b.attn.o = iz_save(x, x->act, m, c->heads * d);
    b.attn.lse = iz_save(x, IZ_F32, heads, c->seq);
    b.attn.seq = c->seq;
    b.attn.heads = c->heads;
    b.attn.kv_heads = c->kv_heads;
    if (c->qk_norm)
        head_norm_saves(x, a, &b, m);
    b.x2 = iz_save(x, x->act, m, c->width);
    b.norm_2.rstd = iz_save(x, IZ_F32, m, 1);
    b.u = iz_save(x, x->act, m, 2 * (int64_t)c->ffn);
    return b;
}

/* Queries and keys as attention takes them. */
static void positions_forward(struct iz_exec *x,
                              const struct iz_llama_config *c,
                              const struct block *b)
{
    struct iz_rope r = rope(c);

    if (c->qk_norm) {
        iz_headnorm_fwd(x, b->attn.qkv, b->q, &b->norm_q, 0);
        iz_headnorm_fwd(x, b->attn.qkv, b->k, &b->norm_k, b->q.cols);
    }
    iz_rope(x, b->attn.qkv, &r, false);
}

static void positions_backward(struct iz_exec *x,
                               const struct iz_llama_config *c,
                               const struct block *b, struct iz_view dqkv)
{
    struct iz_rope r = rope(c);

    iz_rope(x, dqkv, &r, true);
    if (c->qk_norm) {
        iz_headnorm_bwd(x, dqkv, b->q, &b->norm_q, 0);
        iz_headnorm_bwd(x, dqkv, b->k, &b->norm_k, b->q.cols);
    }
}

static void block_forward(struct iz_exec *x, const struct iz_layer *a)
{
    const struct iz_llama_config *c = a->self;
    struct block b = block_saves(x, a);
    struct iz_linear qkv = qkv_linear(a), proj = linear(a, ATTN_PROJ);
    struct iz_linear gate_up = linear(a, GATE_UP), down = linear(a, DOWN);
    struct iz_view in = tokens(a->x, c->width), out = tokens(a->y, c->width);
    int64_t mark = iz_work_mark(x);
    struct iz_view h = iz_work(x, x->act, in.rows, c->width); /* [M,C] */
    struct iz_view g;

    iz_rmsnorm_fwd(x, h, in, &b.norm_1);
    iz_matmul_fwd(x, b.attn.qkv, IZ_NONE, h, &qkv); /* [M,(H+2K)D] */
    positions_forward(x, c, &b);
    iz_attention_fwd(x, &b.attn);                /* [M,HD] */
    iz_matmul_fwd(x, b.x2, in, b.attn.o, &proj); /* [M,C] */
    iz_rmsnorm_fwd(x, h, b.x2, &b.norm_2);
    iz_matmul_fwd(x, b.u, IZ_NONE, h, &gate_up); /* [M,2F] */
    iz_work_release(x, mark);
    g = iz_work(x, x->act, in.rows, c->ffn);
    iz_swiglu_fwd(x, g, b.u);
    iz_matmul_fwd(x, out, b.x2, g, &down); /* [M,C] */
    iz_work_release(x, mark);
}

/* dx2 = dy + the gradient through norm_2 and the MLP, into `dx`. */
static void llama_mlp_backward(struct iz_exec *x, const struct iz_layer *a,
                               const struct block *b, struct iz_view dx,
                               struct iz_view dy)
{
    struct iz_linear gate_up = linear(a, GATE_UP), down = linear(a, DOWN);
    int64_t mark = iz_work_mark(x);
    struct iz_view g = iz_work(x, x->act, b->u.rows, b->u.cols / 2); /* [M,F] */
    struct iz_view h;

    iz_matmul_da(x, g, dy, &down);
    iz_swiglu_bwd(x, b->u, g, g, b->u); /* u becomes du, g the down's input */
    iz_matmul_dw(x, dy, g, &down);
    iz_work_release(x, mark);
    h = iz_work(x, x->act, dx.rows, dx.cols); /* [M,C] */
    iz_rmsnorm_again(x, h, b->x2, &b->norm_2);
    iz_matmul_dw(x, b->u, h, &gate_up);
    iz_matmul_da(x, h, b->u, &gate_up); /* h becomes its own gradient */
    iz_rmsnorm_bwd(x, dx, dy, h, b->x2, &b->norm_2);
    iz_work_release(x, mark);
}

/* dqkv, behind norms and positions, from the gradient of x2. */
static void scores_backward(struct iz_exec *x, const struct iz_layer *a,
                            const struct block *b, struct iz_view dqkv,
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
                               const struct block *b, struct iz_view dx,
                               struct iz_view in)
{
    struct iz_linear qkv = qkv_linear(a);
    int64_t mark = iz_work_mark(x);
    struct iz_view dqkv = iz_work(x, x->act, dx.rows, b->attn.qkv.cols);
    struct iz_view h;

    scores_backward(x, a, b, dqkv, dx);
    h = iz_work(x, x->act, dx.rows, dx.cols); /* [M,C] */
    iz_rmsnorm_again(x, h, in, &b->norm_1);
    iz_matmul_dw(x, dqkv, h, &qkv);
    iz_matmul_da(x, h, dqkv, &qkv);
    iz_rmsnorm_bwd(x, dx, dx, h, in, &b->norm_1);
    iz_work_release(x, mark);
}

static void block_backward(struct iz_exec *x, const struct iz_layer *a)
{
    const struct iz_llama_config *c = a->self;
    struct block b = block_saves(x, a);
    struct iz_view dx = tokens(a->dx, c->width);

    llama_mlp_backward(x, a, &b, dx, tokens(a->dy, c->width));
    attention_backward(x, a, &b, dx, tokens(a->x, c->width));
}

/* h = norm(in) in scratch; n gets the statistics. */
static struct iz_view head_norm(struct iz_exec *x, struct iz_rmsnorm *n,
                                struct iz_view in)
{
    struct iz_view h = iz_work(x, x->act, in.rows, in.cols);

    n->rstd = iz_work(x, IZ_F32, in.rows, 1);
    iz_rmsnorm_fwd(x, h, in, n);
    return h;
}

static void llama_head_backward(struct iz_exec *x, const struct iz_layer *a)
{
    const struct iz_llama_config *c = a->self;
    int64_t mark = iz_work_mark(x);
    struct iz_view in = tokens(a->x, c->width);
    struct iz_rmsnorm n = norm(a, HEAD_NORM);
    struct iz_view h = head_norm(x, &n, in); /* [M,C] */
    struct iz_classifier k = {.a = h,
                              .w = a->w[HEAD_MATRIX],
                              .target = a->target,
                              .da = h,
                              .dw = a->dw[HEAD_MATRIX],
                              .loss_scale = a->loss_scale,
                              .loss = a->loss};

    iz_classifier_bwd(x, &k);
    iz_rmsnorm_bwd(x, tokens(a->dx, c->width), IZ_NONE, h, in, &n);
    iz_work_release(x, mark);
}

static void llama_head_evaluate(struct iz_exec *x, const struct iz_layer *a)
{
    const struct iz_llama_config *c = a->self;
    int64_t mark = iz_work_mark(x);
    struct iz_rmsnorm n = norm(a, HEAD_NORM);
    struct iz_view h = head_norm(x, &n, tokens(a->x, c->width));
    struct iz_classifier k = {
        .a = h, .w = a->w[HEAD_MATRIX], .target = a->target, .loss = a->loss};

    iz_classifier_fwd(x, &k);
    iz_work_release(x, mark);
}

static void head_generate(struct iz_exec *x, const struct iz_layer *a)
{
    const struct iz_llama_config *c = a->self;
    int64_t mark = iz_work_mark(x);
    struct iz_rmsnorm n = norm(a, HEAD_NORM);
    struct iz_view in = iz_view_rows(tokens(a->x, c->width), a->row, 1);
    struct iz_linear l = {.w = a->w[HEAD_MATRIX], .out_in = true};
    struct iz_view logits = {
        .p = a->logits, .dtype = IZ_F32, .rows = 1, .cols = c->vocab};

    iz_matmul_fwd(x, logits, IZ_NONE, head_norm(x, &n, in), &l);
    iz_work_release(x, mark);
}

static int llama_embed_open(struct iz_unit *u, const struct iz_llama_config *c)
{
    const struct iz_param list[] = {
        weight("embed_tokens.weight", c->vocab, c->width, INIT_STD),
    };

    snprintf(u->name, sizeof(u->name), "embed");
    u->kind = KIND_EMBED;
    u->out_elems = (int64_t)c->seq * c->width;
    u->forward = llama_embed_forward;
    u->backward = llama_embed_backward;
    return iz_unit_params(u, list, 1, "");
}

/* The parameters of a block; returns how many.  Those of one product are
 * stacked by rows: queries, keys, values; gate, up. */
static int block_params(struct iz_param *list, const struct iz_llama_config *c)
{
    int64_t w = c->width, d = c->head_dim, o = c->heads * d;
    int64_t qkv = o + 2 * c->kv_heads * d;
    /* So that the sum over all residual additions keeps its variance. */
    float residual = INIT_STD / sqrtf(2 * (float)c->layers);
    int n = OPTIONAL;

    list[NORM_1] = vector("input_layernorm.weight", w, IZ_INIT_ONE);
    list[QKV] = weight("self_attn.qkv_proj.weight", qkv, w, INIT_STD);
    list[ATTN_PROJ] = weight("self_attn.o_proj.weight", w, o, residual);
    list[NORM_2] = vector("post_attention_layernorm.weight", w, IZ_INIT_ONE);
    list[GATE_UP] =
        weight("mlp.gate_up_proj.weight", 2 * (int64_t)c->ffn, w, INIT_STD);
    list[DOWN] = weight("mlp.down_proj.weight", w, c->ffn, residual);
    if (c->qkv_bias)
        list[n++] = vector("self_attn.qkv_proj.bias", qkv, IZ_INIT_ZERO);
    if (c->qk_norm) {
        list[n++] = vector("self_attn.q_norm.weight", d, IZ_INIT_ONE);
        list[n++] = vector("self_attn.k_norm.weight", d, IZ_INIT_ONE);
    }
    return n;
}

static int block_open(struct iz_unit *u, const struct iz_llama_config *c, int i)
{
    struct iz_param list[BLOCK_MOST];
    char prefix[32];

    snprintf(u->name, sizeof(u->name), "layers.%d", i);
    snprintf(prefix, sizeof(prefix), "layers.%d.", i);
    u->kind = KIND_BLOCK;
    u->out_elems = (int64_t)c->seq * c->width;
    u->forward = block_forward;
    u->backward = block_backward;
    return iz_unit_params(u, list, block_params(list, c), prefix);
}

static int head_open(struct iz_unit *u, const struct iz_llama_config *c)
{
    const struct iz_param list[] = {
        vector("norm.weight", c->width, IZ_INIT_ONE),
        weight("lm_head.weight", c->vocab, c->width, INIT_STD),
    };

    snprintf(u->name, sizeof(u->name), "head");
    u->kind = KIND_HEAD;
    if (c->tie_embeddings) {
        u->tied_unit = 0;
        u->tied_param = 0;
    }
    u->backward = llama_head_backward;
    u->evaluate = llama_head_evaluate;
    u->generate = head_generate;
    return iz_unit_params(u, list, c->tie_embeddings ? 1 : 2, "");
}

static int llama_open_units(struct iz_model *m, const struct iz_llama_config *c)
{
    int rc = llama_embed_open(&m->unit[0], c);

    for (int i = 0; rc == 0 && i < c->layers; i++)
        rc = block_open(&m->unit[1 + i], c, i);
    return rc ? rc : head_open(&m->unit[1 + c->layers], c);
}

int iz_llama_open(struct iz_model **out, const struct iz_llama_config *given)
{
    struct iz_llama_config c = *given;
    int rc = iz_llama_complete(&c);

    *out = NULL;
    if (rc)
        return rc;
    rc = iz_model_open(out, "llama", c.layers + 2, sizeof(c));
    if (rc)
        goto fail;
    *(struct iz_llama_config *)(*out)->self = c;
    (*out)->input_bytes = (int64_t)c.seq * (int64_t)sizeof(int32_t);
    (*out)->target_bytes = (*out)->input_bytes;
    (*out)->tokens = c.seq;
    (*out)->vocab = c.vocab;
    rc = llama_open_units(*out, &c);
    if (rc)
        goto fail;
    return 0;
fail:
    fprintf(stderr, "llama: no memory for a model of %d layers\n", c.layers);
    iz_model_close(out);
    return rc;
}

/* ---- the program ---- */

static struct iz_llama_config config;

static int llama_open_program(struct iz_model **out, const void *target)
{
    return iz_llama_open(out, target);
}

const struct iz_program iz_program = {
    .name = "llama",
    .about = "trains models of the Llama family",
    .section = {.keys = iz_llama_keys,
                .target = &config,
                .presets = iz_llama_presets,
                .hf = &iz_llama_hf},
    .open = llama_open_program,
};
