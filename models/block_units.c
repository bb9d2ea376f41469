/* SPDX-License-Identifier: Apache-2.0 */
/* The units of a transformer and their parameters; see block.h. */
#include <stdio.h>

#include "models/block_parts.h"
#include "models/experts_units.h"
#include "models/parts.h"
#include "models/passed.h"

static int embed_open(struct iz_unit *u, const struct iz_block *b,
                      const struct iz_ends *ends)
{
    snprintf(u->name, sizeof(u->name), "embed");
    u->kind = KIND_EMBED;
    u->self = b;
    u->out_elems = (int64_t)b->seq * b->width;
    u->forward = iz_block_tokens_forward;
    u->backward = iz_block_tokens_backward;
    return iz_unit_params(u, ends->embed, ends->n_embed, "");
}

static int head_open(struct iz_model *m, const struct iz_block *b,
                     const struct iz_ends *ends)
{
    struct iz_unit *u = &m->unit[m->n_units - 1];
    snprintf(u->name, sizeof(u->name), "head");
    u->kind = KIND_HEAD;
    u->self = b;
    if (ends->n_head == iz_block_head_matrix(b))
        u->tied_unit = u->tied_param = 0;
    u->backward = iz_block_head_backward;
    u->evaluate = iz_block_head_evaluate;
    u->generate = m->vocab ? iz_block_head_generate : NULL;
    return iz_unit_params(u, ends->head, ends->n_head, "");
}

/* A part of a block; in = 0: a norm.  stacked: outputs of its matrices, if it
 * has several; {-1}: it is none.  times: of experts, how many. */
struct part {
    const char *name;
    int64_t in, out;
    float std;
    int64_t stacked[IZ_STACKED];
    int64_t times;
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
    list[n].times = p->times;
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
    float residual = iz_block_residual(b);
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
    const struct part of_heads[] = {{name->q_norm, 0, d, 0, {0}, 0},
                                    {name->k_norm, 0, d, 0, {0}, 0}};
    const struct iz_experts *e = &b->experts;
    char fc[64], proj[64];
    snprintf(fc, sizeof(fc), "%s.%s", name->experts, name->expert_fc);
    snprintf(proj, sizeof(proj), "%s.%s", name->experts, name->expert_proj);
    const struct part experts[PARTS] = {
        [FC] = {fc,
                w,
                2 * (int64_t)e->n * e->hidden,
                IZ_BLOCK_STD,
                {e->hidden, e->hidden},
                e->n},
        [MLP_PROJ] = {proj, e->hidden, e->n * w, residual, {w}, e->n}};
    const struct part router = {name->router, w, e->n, IZ_BLOCK_STD, {-1}, 0};
    bool has = iz_experts_at(e, i), whole = !has || !e->per_unit;
    struct iz_param list[BLOCK_MOST];
    char prefix[32], bias[64];
    int n = 0;
    for (int k = 0; k < (whole ? PARTS : FC); k++)
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
    u->kind = !has ? KIND_BLOCK : whole ? KIND_EXPERTS : KIND_ROUTER;
    u->own_loss = has;
    u->self = b;
    u->out_elems = whole ? b->seq * w : iz_passed_len(b);
    u->forward = whole ? iz_block_forward : iz_block_router_forward;
    u->backward = whole ? iz_block_backward : iz_block_router_backward;
    return iz_unit_params(u, list, n, prefix);
}

int iz_block_units(const struct iz_block *b)
{
    int n = b->layers;
    for (int i = 0; i < b->layers; i++)
        n += iz_experts_at(&b->experts, i) ? iz_experts_units(&b->experts) : 0;
    return n;
}

int iz_block_open(struct iz_model *m, const struct iz_block *b,
                  const struct iz_block_names *names,
                  const struct iz_ends *ends)
{
    struct iz_unit *u = m->unit;
    int rc = embed_open(u++, b, ends);
    m->knows_documents = m->knows_pairs = !b->full;
    for (int i = 0; rc == 0 && i < b->layers; i++) {
        bool has = iz_experts_at(&b->experts, i);
        int parts = has ? iz_experts_units(&b->experts) : 0;
        rc = add_block(u++, b, names, i);
        for (int k = 0; rc == 0 && k < parts; k++)
            rc = iz_experts_unit_open(u++, b, names, i, k, KIND_PART);
    }
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
