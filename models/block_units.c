/* SPDX-License-Identifier: Apache-2.0 */
/* The units of a transformer and their parameters; see block.h. */
#include <stdio.h>

#include "models/block_modules.h"
#include "models/experts_units.h"
#include "models/parts.h"
#include "models/passed.h"

static void embed_open(struct iz_unit *u, const struct iz_block *b,
                       const struct iz_ends *ends)
{
    snprintf(u->name, sizeof(u->name), "embed");
    u->kind = KIND_EMBED;
    u->self = b;
    u->out_elems = (int64_t)b->seq * b->width;
    u->forward = iz_block_tokens_forward;
    u->backward = iz_block_tokens_backward;
    iz_unit_params(u, ends->embed, ends->n_embed, "");
}

static void head_open(struct iz_model *m, const struct iz_block *b,
                      const struct iz_ends *ends)
{
    struct iz_unit *u = &m->unit[m->n_units - 1];
    snprintf(u->name, sizeof(u->name), "head");
    u->kind = KIND_HEAD;
    u->self = b;
    if (ends->n_head == iz_block_head_matrix(b))
        u->tied_unit = u->tied_param = 0;
    u->backward = iz_block_head_backward_all;
    u->evaluate = iz_block_head_evaluate_all;
    u->generate = m->vocab ? iz_block_head_generate : NULL;
    iz_unit_params(u, ends->head, ends->n_head, "");
}

/* A module of a block; in = 0: a norm.  stacked: outputs of its matrices, if it
 * has several; {-1}: it is none.  times: of experts, how many. */
struct module {
    const char *name;
    int64_t in, out;
    float std;
    int64_t stacked[IZ_STACKED];
    int64_t times;
};

/* The weight of a module, or its bias. */
static struct iz_param param_of(const struct iz_block *b,
                                const struct module *p, bool bias)
{
    bool in_out = b->has & IZ_HAS_IN_OUT;
    char full[64];
    snprintf(full, sizeof(full), "%s.%s", p->name, bias ? "bias" : "weight");
    if (bias || !p->in) {
        bool ones = !bias && !(b->has & IZ_HAS_PLUS_ONE);
        struct iz_param v =
            vector(full, p->out, ones ? IZ_INIT_ONE : IZ_INIT_ZERO);
        v.out_rows = !bias && !in_out;
        v.times = p->times;
        return v;
    }
    struct iz_param w =
        weight(full, in_out ? p->in : p->out, in_out ? p->out : p->in, p->std);
    if (p->stacked[0] >= 0)
        memcpy(w.outputs, p->stacked, sizeof(p->stacked));
    if (!p->stacked[0])
        w.outputs[0] = p->out;
    w.times = p->times;
    w.out_rows = !in_out;
    return w;
}

static void add_block(struct iz_unit *u, const struct iz_block *b,
                      const struct iz_block_names *name, int i)
{
    int64_t w = b->width, f = b->hidden, d = b->head_dim, o = b->heads * d;
    int64_t kv = b->kv_heads * d, qkv = o + 2 * kv;
    bool gate = b->has & IZ_HAS_GATE, whole_qk = b->has & IZ_HAS_QK_WHOLE;
    bool turns = b->act == IZ_SWISH_7; /* gate and up are one matrix */
    float residual = iz_block_residual(b);
    const struct iz_experts *e = &b->experts;
    bool has = iz_experts_at(e, i), whole = !has || !e->per_unit;
    char fc[64], proj[64];
    snprintf(fc, sizeof(fc), "%s.%s", name->experts, name->expert_fc);
    snprintf(proj, sizeof(proj), "%s.%s", name->experts, name->expert_proj);
    const struct module mlp = {name->fc,          w,
                               gate ? 2 * f : f,  IZ_BLOCK_STD,
                               {f, gate ? f : 0}, 0},
                        mlp_proj = {name->mlp_proj, f, w, residual, {0}, 0},
                        experts = {fc,
                                   w,
                                   2 * (int64_t)e->n * e->hidden,
                                   IZ_BLOCK_STD,
                                   {turns ? 2 * (int64_t)e->hidden : e->hidden,
                                    turns ? 0 : e->hidden},
                                   e->n},
                        experts_proj = {proj,     e->hidden, e->n * w,
                                        residual, {w},       e->n};
    int64_t shared = e->shared;
    const struct module module[MODULES] = {
        [NORM_1] = {name->norm_1, 0, w, 0, {0}, 0},
        [QKV] = {name->qkv, w, qkv, IZ_BLOCK_STD, {o, kv, kv}, 0},
        [ATTN_PROJ] = {name->attn_proj, o, w, residual, {0}, 0},
        [NORM_2] = {name->norm_2, 0, w, 0, {0}, 0},
        [FC] = has ? experts : mlp,
        [MLP_PROJ] = has ? experts_proj : mlp_proj,
        [Q_NORM] = {name->q_norm, 0, whole_qk ? o : d, 0, {0}, 0},
        [K_NORM] = {name->k_norm, 0, whole_qk ? kv : d, 0, {0}, 0},
        [ROUTER] = {name->router, w, e->n, IZ_BLOCK_STD, {-1}, 0},
        [BEHIND_1] = {name->behind_1, 0, w, 0, {0}, 0},
        [BEHIND_2] = {name->behind_2, 0, w, 0, {0}, 0},
        [SINKS] = {name->sinks, 0, b->heads, 0, {0}, 0},
        [CHOICE] = {name->choice, 0, e->n, 0, {0}, 0},
        [SHARED_FC] =
            {name->shared_fc, w, 2 * shared, IZ_BLOCK_STD, {shared, shared}, 0},
        [SHARED_PROJ] = {name->shared_proj, shared, w, residual, {0}, 0},
        [SHARED_GATE] = {name->shared_gate, w, 1, IZ_BLOCK_STD, {-1}, 0}};
    struct iz_block_place list[BLOCK_MOST];
    struct iz_param param[BLOCK_MOST];
    char prefix[32];
    int kind = !has ? KIND_BLOCK : whole ? KIND_EXPERTS : KIND_ROUTER;
    int n = iz_block_list(list, b, kind);
    for (int k = 0; k < n; k++) {
        param[k] = param_of(b, &module[list[k].module], list[k].bias);
        param[k].always_frozen = list[k].module == CHOICE;
        if (list[k].module == SINKS)
            param[k].init = IZ_INIT_ZERO;
    }
    snprintf(u->name, sizeof(u->name), "%s.%d", name->block, i);
    snprintf(prefix, sizeof(prefix), "%s.%d.", name->block, i);
    u->kind = kind + KINDS * (i < IZ_LAYERS_MOST ? b->sort[i] : 0);
    u->own_loss = has;
    u->self = b;
    u->out_elems = whole ? b->seq * w : iz_passed_len(b);
    u->forward = whole ? iz_block_forward_all : iz_block_router_forward;
    u->backward = whole ? iz_block_backward_all : iz_block_router_backward;
    iz_unit_params(u, param, n, prefix);
}

int iz_block_units(const struct iz_block *b)
{
    int n = b->layers;
    for (int i = 0; i < b->layers; i++)
        n += iz_experts_at(&b->experts, i) ? iz_experts_units(&b->experts) : 0;
    return n;
}

void iz_block_open(struct iz_model *m, const struct iz_block *b,
                   const struct iz_block_names *names,
                   const struct iz_ends *ends)
{
    struct iz_unit *u = m->unit;
    embed_open(u++, b, ends);
    m->knows_documents = m->knows_pairs = !b->full;
    m->knows_chunks = !b->full && !b->experts.per_unit;
    for (int i = 0; i < b->layers; i++) {
        bool has = iz_experts_at(&b->experts, i);
        int units = has ? iz_experts_units(&b->experts) : 0;
        add_block(u++, b, names, i);
        for (int k = 0; k < units; k++)
            iz_experts_unit_open(u++, b, names, i, k, KIND_PART);
    }
    head_open(m, b, ends);
}

int iz_block_check(const char *model, int width, int heads)
{
    if (width % heads == 0)
        return 0;
    fprintf(stderr, "%s: width %d is not divisible by heads = %d\n", model,
            width, heads);
    return -EINVAL;
}
