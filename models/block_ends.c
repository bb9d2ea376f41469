/* SPDX-License-Identifier: Apache-2.0 */
/* The first and the last unit of a transformer; see block.h.  M = samples * T
 * rows, C = width. */
#include "models/block_modules.h"

/* Of tokens and of their positions, if these are learned. */
static struct iz_table embedding(const struct iz_layer *a)
{
    struct iz_table t = {.w = a->w[0],
                         .dw = gradient(a, 0),
                         .row = a->input,
                         .vocabulary = true,
                         .begins = a->begins};
    if (has(a, IZ_HAS_PLACES)) {
        t.wpe = a->w[1];
        t.dwpe = gradient(a, 1);
    }
    return t;
}

void iz_block_tokens_forward(struct iz_exec *x, const struct iz_layer *a)
{
    const struct iz_block *c = a->self;
    struct iz_table t = embedding(a);
    struct iz_view y = tokens(a->y, c->width);
    /* A kernel reads and writes it there, each row once. */
    if (iz_exec_host_boundaries(x))
        x->cost.bus_bytes[1] += (double)iz_view_bytes(y);
    iz_table_fwd(x, y, IZ_NONE, &t);
    if (c->embedding != 0)
        iz_op_scale(x, y, y, c->embedding, 0);
}

void iz_block_tokens_backward(struct iz_exec *x, const struct iz_layer *a)
{
    const struct iz_block *c = a->self;
    struct iz_table t = embedding(a);
    struct iz_view dy = tokens(a->dy, c->width);
    if (iz_exec_host_boundaries(x))
        x->cost.bus_bytes[0] += (double)iz_view_bytes(dy);
    if (c->embedding != 0)
        iz_op_scale(x, dy, dy, c->embedding, 0);
    iz_table_bwd(x, dy, &t);
}

int iz_block_head_matrix(const struct iz_block *b)
{
    struct iz_block_place list[BLOCK_MOST];
    return iz_block_list(list, b, KIND_HEAD);
}

/* h = norm(in) by the factor of logits; n gets the statistics. */
static struct iz_view head_norm(struct iz_exec *x, const struct iz_layer *a,
                                struct iz_view h, struct iz_norm_layer *n,
                                struct iz_view in)
{
    const struct iz_block *c = a->self;
    *n = norm(x, a, NORM_1, iz_exec_work, in.rows, 1);
    iz_norm_layer_fwd(x, h, in, n, false);
    if (c->logit_scale != 0)
        iz_op_scale(x, h, h, c->logit_scale, 0);
    return h;
}

/* The same in scratch. */
static struct iz_view head_normed(struct iz_exec *x, const struct iz_layer *a,
                                  struct iz_view in)
{
    struct iz_norm_layer n;
    struct iz_view h = iz_exec_work(x, x->act, in.rows, in.cols);
    return head_norm(x, a, h, &n, in);
}

/* The loss of the head's rows: of the targets, or of pairs of samples. */
static void head_loss(struct iz_exec *x, const struct iz_layer *a,
                      struct iz_classifier k)
{
    const struct iz_block *c = a->self;
    k.cap = c->logit_cap;
    if (c->chunk) {
        k.targets = c->chunk->targets;
        k.adds = c->chunk->adds;
    }
    if (!a->preference) {
        iz_classifier(x, &k);
        return;
    }
    struct iz_layer reference = *a;
    reference.w = a->reference_w;
    k.samples = a->samples;
    iz_preference(
        x, &k,
        &(struct iz_pairs){
            .loss = a->preference,
            .a = head_normed(x, &reference, tokens(a->reference_x, c->width)),
            .w = a->reference_w[iz_block_head_matrix(c)],
            .b = linear(&reference, FC).b,
            .weight = a->weight,
            .aux = a->aux});
}

void iz_block_head_backward(struct iz_exec *x, const struct iz_layer *a)
{
    const struct iz_block *c = a->self;
    int64_t mark = iz_exec_mark(x);
    struct iz_view in = tokens(a->x, c->width), dx = tokens(a->dx, c->width);
    struct iz_norm_layer n;
    struct iz_view h = head_norm(x, a, dx, &n, in); /* [M,C] */
    struct iz_classifier k = {.a = h,
                              .w = a->w[iz_block_head_matrix(c)],
                              .target = a->target,
                              .da = h,
                              .dw = a->dw[iz_block_head_matrix(c)],
                              .b = linear(a, FC).b,
                              .db = linear(a, FC).db,
                              .loss_scale = a->loss_scale,
                              .loss = a->loss};
    head_loss(x, a, k);
    if (c->logit_scale != 0)
        iz_op_scale(x, h, h, c->logit_scale, 0);
    iz_norm_layer_bwd(x, dx, IZ_NONE, h, in, &n);
    iz_exec_release(x, mark);
}

void iz_block_head_evaluate(struct iz_exec *x, const struct iz_layer *a)
{
    const struct iz_block *c = a->self;
    int64_t mark = iz_exec_mark(x);
    struct iz_classifier k = {.a = head_normed(x, a, tokens(a->x, c->width)),
                              .w = a->w[iz_block_head_matrix(c)],
                              .b = linear(a, FC).b,
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
    iz_matmul_fwd(x, logits, IZ_NONE, head_normed(x, a, in), &l);
    if (linear(a, FC).b.rows)
        iz_op_add(x, logits, linear(a, FC).b);
    if (c->logit_cap != 0)
        iz_op_scale(x, logits, logits, 1, c->logit_cap);
    iz_exec_release(x, mark);
}
