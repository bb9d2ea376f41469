/* SPDX-License-Identifier: Apache-2.0 */
/* A pre-norm transformer block and its head; see block.h.  M = samples * T
 * rows, C = width, F = hidden. */
#include "models/block.h"

#include <math.h>
#include <stdio.h>

#include "codelets/ops/ops.h"
#include "models/parts.h"

/* Parameters of a block in the order of its list. */
enum {
    LN_1 = 0,
    C_ATTN = 2,
    ATTN_PROJ = 4,
    LN_2 = 6,
    C_FC = 8,
    MLP_PROJ = 10,
    BLOCK_PARAMS = 12
};

static struct iz_norm_layer norm(const struct iz_layer *a, int i)
{
    struct iz_norm_layer n = {.w = a->w[i], .b = a->w[i + 1]};

    if (a->dw) {
        n.dw = a->dw[i];
        n.db = a->dw[i + 1];
    }
    return n;
}

/* What a block keeps for its backward, 5 C + F + small per token; outputs of
 * the norms and of GELU are computed again.  Backward overwrites u. */
struct kept {
    struct iz_attention attn;
    struct iz_norm_layer ln_1, ln_2;
    struct iz_view x2; /* [M,C] after attention */
    struct iz_view u;  /* [M,F] before GELU */
};

static struct kept block_saves(struct iz_exec *x, const struct iz_layer *a,
                               const struct iz_block *c)
{
    int64_t m = (int64_t)a->samples * c->seq, w = c->width;
    int64_t heads = (int64_t)a->samples * c->heads;
    struct kept b = {.ln_1 = norm(a, LN_1), .ln_2 = norm(a, LN_2)};

    b.ln_1.mean = iz_save(x, IZ_F32, m, 1);
    b.ln_1.rstd = iz_save(x, IZ_F32, m, 1);
    b.attn.qkv = iz_save(x, x->act, m, 3 * w);
    b.attn.o = iz_save(x, x->act, m, w);
    b.attn.lse = iz_save(x, IZ_F32, heads, c->seq);
    b.attn.seq = c->seq;
    b.attn.heads = c->heads;
    b.attn.full = c->full;
    b.x2 = iz_save(x, x->act, m, w);
    b.ln_2.mean = iz_save(x, IZ_F32, m, 1);
    b.ln_2.rstd = iz_save(x, IZ_F32, m, 1);
    b.u = iz_save(x, x->act, m, c->hidden);
    return b;
}

static void block_forward(struct iz_exec *x, const struct iz_layer *a)
{
    const struct iz_block *c = a->self;
    struct kept b = block_saves(x, a, c);
    struct iz_linear c_attn = affine(a, C_ATTN), proj = affine(a, ATTN_PROJ);
    struct iz_linear c_fc = affine(a, C_FC), mlp = affine(a, MLP_PROJ);
    struct iz_view in = tokens(a->x, c->width), out = tokens(a->y, c->width);
    int64_t mark = iz_work_mark(x);
    struct iz_view h = iz_work(x, x->act, in.rows, c->width); /* [M,C] */
    struct iz_view g;

    iz_layernorm_fwd(x, h, in, &b.ln_1);
    iz_matmul_fwd(x, b.attn.qkv, IZ_NONE, h, &c_attn); /* [M,3C] */
    iz_attention_fwd(x, &b.attn);                      /* [M,C] */
    iz_matmul_fwd(x, b.x2, in, b.attn.o, &proj);       /* [M,C] */
    iz_layernorm_fwd(x, h, b.x2, &b.ln_2);
    iz_matmul_fwd(x, b.u, IZ_NONE, h, &c_fc); /* [M,F] */
    iz_work_release(x, mark);
    g = iz_work(x, x->act, in.rows, c->hidden);
    iz_gelu_fwd(x, g, b.u);
    iz_matmul_fwd(x, out, b.x2, g, &mlp); /* [M,C] */
    iz_work_release(x, mark);
}

/* dx2 = dy + the gradient through ln_2 and the MLP, into `dx`. */
static void block_mlp_backward(struct iz_exec *x, const struct iz_layer *a,
                               const struct kept *b, struct iz_view dx,
                               struct iz_view dy)
{
    struct iz_linear c_fc = affine(a, C_FC), proj = affine(a, MLP_PROJ);
    int64_t mark = iz_work_mark(x);
    struct iz_view du = iz_work(x, x->act, b->u.rows, b->u.cols); /* [M,F] */
    struct iz_view h = iz_work(x, x->act, dx.rows, dx.cols);      /* [M,C] */

    iz_matmul_da(x, du, dy, &proj);
    iz_gelu_bwd(x, du, b->u, du, b->u); /* u becomes gelu(u) */
    iz_matmul_dw(x, dy, b->u, &proj);
    iz_layernorm_again(x, h, b->x2, &b->ln_2);
    iz_matmul_dw(x, du, h, &c_fc);
    iz_matmul_da(x, h, du, &c_fc); /* h becomes its own gradient */
    iz_layernorm_bwd(x, dx, dy, h, b->x2, &b->ln_2);
    iz_work_release(x, mark);
}

/* dx = dx2 + the gradient through ln_1 and attention, dx2 being in `dx`. */
static void attention_backward(struct iz_exec *x, const struct iz_layer *a,
                               const struct kept *b, struct iz_view dx,
                               struct iz_view in)
{
    struct iz_linear c_attn = affine(a, C_ATTN), proj = affine(a, ATTN_PROJ);
    int64_t mark = iz_work_mark(x);
    struct iz_view h = iz_work(x, x->act, dx.rows, dx.cols); /* [M,C] */
    struct iz_view dqkv = iz_work(x, x->act, dx.rows, 3 * dx.cols);

    iz_matmul_dw(x, dx, b->attn.o, &proj);
    iz_matmul_da(x, h, dx, &proj);
    iz_attention_bwd(x, dqkv, h, &b->attn); /* [M,3C] */
    iz_layernorm_again(x, h, in, &b->ln_1);
    iz_matmul_dw(x, dqkv, h, &c_attn);
    iz_matmul_da(x, h, dqkv, &c_attn);
    iz_layernorm_bwd(x, dx, dx, h, in, &b->ln_1);
    iz_work_release(x, mark);
}

static void block_backward(struct iz_exec *x, const struct iz_layer *a)
{
    const struct iz_block *c = a->self;
    struct kept b = block_saves(x, a, c);
    struct iz_view dx = tokens(a->dx, c->width);

    block_mlp_backward(x, a, &b, dx, tokens(a->dy, c->width));
    attention_backward(x, a, &b, dx, tokens(a->x, c->width));
}

/* h = ln_f(in) in scratch; n gets the statistics. */
static struct iz_view head_norm(struct iz_exec *x, struct iz_norm_layer *n,
                                struct iz_view in)
{
    struct iz_view h = iz_work(x, x->act, in.rows, in.cols);

    n->mean = iz_work(x, IZ_F32, in.rows, 1);
    n->rstd = iz_work(x, IZ_F32, in.rows, 1);
    iz_layernorm_fwd(x, h, in, n);
    return h;
}

static void block_head_backward(struct iz_exec *x, const struct iz_layer *a)
{
    int width = ((const struct iz_block *)a->self)->width;
    int64_t mark = iz_work_mark(x);
    struct iz_view in = tokens(a->x, width);
    struct iz_norm_layer n = norm(a, IZ_HEAD_NORM);
    struct iz_view h = head_norm(x, &n, in); /* [M,C] */
    struct iz_classifier k = {.a = h,
                              .w = a->w[IZ_HEAD_MATRIX],
                              .target = a->target,
                              .da = h,
                              .dw = a->dw[IZ_HEAD_MATRIX],
                              .loss_scale = a->loss_scale,
                              .loss = a->loss};

    iz_classifier_bwd(x, &k);
    iz_layernorm_bwd(x, tokens(a->dx, width), IZ_NONE, h, in, &n);
    iz_work_release(x, mark);
}

static void block_head_evaluate(struct iz_exec *x, const struct iz_layer *a)
{
    int width = ((const struct iz_block *)a->self)->width;
    int64_t mark = iz_work_mark(x);
    struct iz_norm_layer n = norm(a, IZ_HEAD_NORM);
    struct iz_view h = head_norm(x, &n, tokens(a->x, width));
    struct iz_classifier k = {.a = h,
                              .w = a->w[IZ_HEAD_MATRIX],
                              .target = a->target,
                              .loss = a->loss};

    iz_classifier_fwd(x, &k);
    iz_work_release(x, mark);
}

void iz_head_generate(struct iz_exec *x, const struct iz_layer *a)
{
    int width = ((const struct iz_block *)a->self)->width;
    int64_t mark = iz_work_mark(x);
    struct iz_norm_layer n = norm(a, IZ_HEAD_NORM);
    struct iz_view in = iz_view_rows(tokens(a->x, width), a->row, 1);
    struct iz_linear l = {.w = a->w[IZ_HEAD_MATRIX], .out_in = true};
    struct iz_view logits = {
        .p = a->logits, .dtype = IZ_F32, .rows = 1, .cols = l.w.rows};

    iz_matmul_fwd(x, logits, IZ_NONE, head_norm(x, &n, in), &l);
    iz_work_release(x, mark);
}

struct shape {
    int64_t rows, cols; /* of the weight; one row: a norm's */
    float std;
};

static int add_params(struct iz_param *list, int n, const char *name,
                      struct shape s)
{
    char full[64];

    snprintf(full, sizeof(full), "%s.weight", name);
    list[n] = s.rows == 1 ? vector(full, s.cols, IZ_INIT_ONE)
                          : weight(full, s.rows, s.cols, s.std);
    snprintf(full, sizeof(full), "%s.bias", name);
    list[n + 1] = vector(full, s.cols, IZ_INIT_ZERO);
    return n + 2;
}

static int add_block(struct iz_unit *u, const struct iz_block *b,
                     const struct iz_block_names *name, int i)
{
    struct iz_param list[BLOCK_PARAMS];
    int64_t w = b->width, f = b->hidden;
    /* So that the sum over all residual additions keeps its variance. */
    float residual = IZ_BLOCK_STD / sqrtf(2 * (float)b->layers);
    struct shape norm = {1, w, 0};
    char prefix[32];
    int n = 0;

    snprintf(u->name, sizeof(u->name), "%s.%d", name->block, i);
    snprintf(prefix, sizeof(prefix), "%s.%d.", name->block, i);
    u->kind = IZ_KIND_BLOCK;
    u->self = b;
    u->out_elems = (int64_t)b->seq * w;
    u->forward = block_forward;
    u->backward = block_backward;
    n = add_params(list, n, name->norm_1, norm);
    n = add_params(list, n, name->qkv, (struct shape){w, 3 * w, IZ_BLOCK_STD});
    n = add_params(list, n, name->attn_proj, (struct shape){w, w, residual});
    n = add_params(list, n, name->norm_2, norm);
    n = add_params(list, n, name->fc, (struct shape){w, f, IZ_BLOCK_STD});
    n = add_params(list, n, name->mlp_proj, (struct shape){f, w, residual});
    return iz_unit_params(u, list, n, prefix);
}

int iz_block_open(struct iz_model *m, const struct iz_block *b,
                  const struct iz_block_names *name)
{
    int rc = 0;

    for (int i = 0; rc == 0 && i < b->layers; i++)
        rc = add_block(&m->unit[1 + i], b, name, i);
    return rc;
}

int iz_head_open(struct iz_unit *u, const struct iz_block *b,
                 const struct iz_param *list, int n)
{
    snprintf(u->name, sizeof(u->name), "head");
    u->kind = IZ_KIND_HEAD;
    u->self = b;
    u->backward = block_head_backward;
    u->evaluate = block_head_evaluate;
    return iz_unit_params(u, list, n, "");
}

bool iz_block_possible(const struct iz_block *b, const char *model)
{
    if (b->width % b->heads)
        fprintf(stderr, "%s: width %d is not divisible by heads = %d\n", model,
                b->width, b->heads);
    return b->width % b->heads == 0;
}
