/* SPDX-License-Identifier: Apache-2.0 */
/* GPT-2, written once for training, evaluation and generation.  M = samples * T
 * rows, C = width, H = heads, V = vocab. */
#include "models/gpt2.h"

#include <errno.h>
#include <math.h>
#include <stddef.h>
#include <stdio.h>

#include "codelets/ops.h"
#include "runtime/run.h"

#define INIT_STD 0.02f
/* Larger widths, depths or vocabularies are typing errors. */
#define MOST (1 << 24)

enum kind { KIND_EMBED, KIND_BLOCK, KIND_HEAD };

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

/* Parameters of the head: ln_f, then the tied wte. */
enum { LN_F = 0, HEAD_PARAMS = 2, HEAD_WTE = 2 };

/* A boundary tensor [samples, T*C] as [M,C]. */
static struct iz_view tokens(struct iz_view v, int width)
{
    v.rows = iz_view_len(v) / width;
    v.cols = width;
    return v;
}

/* Weight i and bias i + 1 of the unit; gradients in backward only. */
static struct iz_linear linear(const struct iz_layer *a, int i)
{
    struct iz_linear l = {.w = a->w[i], .b = a->w[i + 1]};

    if (a->dw) {
        l.dw = a->dw[i];
        l.db = a->dw[i + 1];
    }
    return l;
}

static struct iz_norm norm(const struct iz_layer *a, int i)
{
    struct iz_norm n = {.w = a->w[i], .b = a->w[i + 1]};

    if (a->dw) {
        n.dw = a->dw[i];
        n.db = a->dw[i + 1];
    }
    return n;
}

static void embed_forward(struct iz_exec *x, const struct iz_layer *a)
{
    const struct iz_gpt2_config *c = a->self;

    iz_embedding_fwd(x, tokens(a->y, c->width), a->input, a->w[0], a->w[1]);
}

static void embed_backward(struct iz_exec *x, const struct iz_layer *a)
{
    const struct iz_gpt2_config *c = a->self;

    iz_embedding_bwd(x, a->dw[0], a->dw[1], tokens(a->dy, c->width), a->input);
}

/* What a block keeps for its backward, 9 C + small per token; outputs of the
 * norms and of GELU are computed again.  Backward overwrites u. */
struct block {
    struct iz_attention attn;
    struct iz_norm ln_1, ln_2;
    struct iz_view x2; /* [M,C] after attention */
    struct iz_view u;  /* [M,4C] before GELU */
};

static struct block block_saves(struct iz_exec *x, const struct iz_layer *a)
{
    const struct iz_gpt2_config *c = a->self;
    int64_t m = (int64_t)a->samples * c->seq, w = c->width;
    int64_t heads = (int64_t)a->samples * c->heads;
    struct block b = {.ln_1 = norm(a, LN_1), .ln_2 = norm(a, LN_2)};

    b.ln_1.mean = iz_save(x, IZ_F32, m, 1);
    b.ln_1.rstd = iz_save(x, IZ_F32, m, 1);
    b.attn.qkv = iz_save(x, x->act, m, 3 * w);
    b.attn.o = iz_save(x, x->act, m, w);
    b.attn.lse = iz_save(x, IZ_F32, heads, c->seq);
    b.attn.seq = c->seq;
    b.attn.heads = c->heads;
    b.x2 = iz_save(x, x->act, m, w);
    b.ln_2.mean = iz_save(x, IZ_F32, m, 1);
    b.ln_2.rstd = iz_save(x, IZ_F32, m, 1);
    b.u = iz_save(x, x->act, m, 4 * w);
    return b;
}

static void block_forward(struct iz_exec *x, const struct iz_layer *a)
{
    const struct iz_gpt2_config *c = a->self;
    struct block b = block_saves(x, a);
    struct iz_linear c_attn = linear(a, C_ATTN), proj = linear(a, ATTN_PROJ);
    struct iz_linear c_fc = linear(a, C_FC), mlp = linear(a, MLP_PROJ);
    struct iz_view in = tokens(a->x, c->width), out = tokens(a->y, c->width);
    int64_t mark = iz_work_mark(x);
    struct iz_view h = iz_work(x, x->act, in.rows, c->width); /* [M,C] */
    struct iz_view g;

    iz_layernorm_fwd(x, h, in, &b.ln_1);
    iz_matmul_fwd(x, b.attn.qkv, IZ_NONE, h, &c_attn); /* [M,3C] */
    iz_attention_fwd(x, &b.attn);                      /* [M,C] */
    iz_matmul_fwd(x, b.x2, in, b.attn.o, &proj);       /* [M,C] */
    iz_layernorm_fwd(x, h, b.x2, &b.ln_2);
    iz_matmul_fwd(x, b.u, IZ_NONE, h, &c_fc); /* [M,4C] */
    iz_work_release(x, mark);
    g = iz_work(x, x->act, in.rows, 4 * c->width);
    iz_gelu_fwd(x, g, b.u);
    iz_matmul_fwd(x, out, b.x2, g, &mlp); /* [M,C] */
    iz_work_release(x, mark);
}

/* dx2 = dy + the gradient through ln_2 and the MLP, into `dx`. */
static void mlp_backward(struct iz_exec *x, const struct iz_layer *a,
                         const struct block *b, struct iz_view dx,
                         struct iz_view dy)
{
    struct iz_linear c_fc = linear(a, C_FC), proj = linear(a, MLP_PROJ);
    int64_t mark = iz_work_mark(x);
    struct iz_view du = iz_work(x, x->act, b->u.rows, b->u.cols); /* [M,4C] */
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
                               const struct block *b, struct iz_view dx,
                               struct iz_view in)
{
    struct iz_linear c_attn = linear(a, C_ATTN), proj = linear(a, ATTN_PROJ);
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
    const struct iz_gpt2_config *c = a->self;
    struct block b = block_saves(x, a);
    struct iz_view dx = tokens(a->dx, c->width);

    mlp_backward(x, a, &b, dx, tokens(a->dy, c->width));
    attention_backward(x, a, &b, dx, tokens(a->x, c->width));
}

/* h = ln_f(in) in scratch; n gets the statistics. */
static struct iz_view head_norm(struct iz_exec *x, struct iz_norm *n,
                                struct iz_view in)
{
    struct iz_view h = iz_work(x, x->act, in.rows, in.cols);

    n->mean = iz_work(x, IZ_F32, in.rows, 1);
    n->rstd = iz_work(x, IZ_F32, in.rows, 1);
    iz_layernorm_fwd(x, h, in, n);
    return h;
}

static void head_backward(struct iz_exec *x, const struct iz_layer *a)
{
    const struct iz_gpt2_config *c = a->self;
    int64_t mark = iz_work_mark(x);
    struct iz_view in = tokens(a->x, c->width);
    struct iz_norm n = norm(a, LN_F);
    struct iz_view h = head_norm(x, &n, in); /* [M,C] */
    struct iz_classifier k = {.a = h,
                              .w = a->w[HEAD_WTE],
                              .target = a->target,
                              .da = h,
                              .dw = a->dw[HEAD_WTE],
                              .loss_scale = a->loss_scale,
                              .loss = a->loss};

    iz_classifier_bwd(x, &k);
    iz_layernorm_bwd(x, tokens(a->dx, c->width), IZ_NONE, h, in, &n);
    iz_work_release(x, mark);
}

static void head_evaluate(struct iz_exec *x, const struct iz_layer *a)
{
    const struct iz_gpt2_config *c = a->self;
    int64_t mark = iz_work_mark(x);
    struct iz_norm n = norm(a, LN_F);
    struct iz_view h = head_norm(x, &n, tokens(a->x, c->width));
    struct iz_classifier k = {
        .a = h, .w = a->w[HEAD_WTE], .target = a->target, .loss = a->loss};

    iz_classifier_fwd(x, &k);
    iz_work_release(x, mark);
}

static void head_generate(struct iz_exec *x, const struct iz_layer *a)
{
    const struct iz_gpt2_config *c = a->self;
    int64_t mark = iz_work_mark(x);
    struct iz_norm n = norm(a, LN_F);
    struct iz_view in = iz_view_rows(tokens(a->x, c->width), a->row, 1);
    struct iz_linear l = {.w = a->w[HEAD_WTE], .out_in = true};
    struct iz_view logits = {a->logits, IZ_F32, 1, c->vocab};

    iz_matmul_fwd(x, logits, IZ_NONE, head_norm(x, &n, in), &l);
    iz_work_release(x, mark);
}

static struct iz_param weight(const char *name, int64_t rows, int64_t cols,
                              float std)
{
    struct iz_param p = {
        .rows = rows, .cols = cols, .init = IZ_INIT_NORMAL, .std = std};

    snprintf(p.name, sizeof p.name, "%s", name);
    return p;
}

static struct iz_param vector(const char *name, int64_t n, enum iz_init init)
{
    struct iz_param p = {.rows = 1, .cols = n, .init = init};

    snprintf(p.name, sizeof p.name, "%s", name);
    return p;
}

static int embed_open(struct iz_unit *u, const struct iz_gpt2_config *c)
{
    const struct iz_param list[] = {
        weight("wte.weight", c->vocab, c->width, INIT_STD),
        weight("wpe.weight", c->seq, c->width, INIT_STD),
    };

    snprintf(u->name, sizeof u->name, "embed");
    u->kind = KIND_EMBED;
    u->out_elems = (int64_t)c->seq * c->width;
    u->forward = embed_forward;
    u->backward = embed_backward;
    return iz_unit_params(u, list, 2, "");
}

static int block_open(struct iz_unit *u, const struct iz_gpt2_config *c, int i)
{
    int64_t w = c->width;
    /* So that the sum over all residual additions keeps its variance. */
    float residual = INIT_STD / sqrtf(2 * (float)c->layers);
    const struct iz_param list[BLOCK_PARAMS] = {
        vector("ln_1.weight", w, IZ_INIT_ONE),
        vector("ln_1.bias", w, IZ_INIT_ZERO),
        weight("attn.c_attn.weight", w, 3 * w, INIT_STD),
        vector("attn.c_attn.bias", 3 * w, IZ_INIT_ZERO),
        weight("attn.c_proj.weight", w, w, residual),
        vector("attn.c_proj.bias", w, IZ_INIT_ZERO),
        vector("ln_2.weight", w, IZ_INIT_ONE),
        vector("ln_2.bias", w, IZ_INIT_ZERO),
        weight("mlp.c_fc.weight", w, 4 * w, INIT_STD),
        vector("mlp.c_fc.bias", 4 * w, IZ_INIT_ZERO),
        weight("mlp.c_proj.weight", 4 * w, w, residual),
        vector("mlp.c_proj.bias", w, IZ_INIT_ZERO),
    };
    char prefix[32];

    snprintf(u->name, sizeof u->name, "h.%d", i);
    snprintf(prefix, sizeof prefix, "h.%d.", i);
    u->kind = KIND_BLOCK;
    u->out_elems = (int64_t)c->seq * c->width;
    u->forward = block_forward;
    u->backward = block_backward;
    return iz_unit_params(u, list, BLOCK_PARAMS, prefix);
}

static int head_open(struct iz_unit *u, const struct iz_gpt2_config *c)
{
    const struct iz_param list[HEAD_PARAMS] = {
        vector("ln_f.weight", c->width, IZ_INIT_ONE),
        vector("ln_f.bias", c->width, IZ_INIT_ZERO),
    };

    snprintf(u->name, sizeof u->name, "head");
    u->kind = KIND_HEAD;
    u->tied_unit = 0;
    u->tied_param = 0;
    u->backward = head_backward;
    u->evaluate = head_evaluate;
    u->generate = head_generate;
    return iz_unit_params(u, list, HEAD_PARAMS, "");
}

static int check(const struct iz_gpt2_config *c)
{
    const struct {
        const char *name;
        int value;
    } field[] = {{"layers", c->layers},
                 {"heads", c->heads},
                 {"width", c->width},
                 {"seq", c->seq},
                 {"vocab", c->vocab}};

    for (size_t i = 0; i < sizeof field / sizeof field[0]; i++)
        if (field[i].value < 1 || field[i].value > MOST) {
            fprintf(stderr, "gpt2: %s = %d: must be in 1..%d\n", field[i].name,
                    field[i].value, MOST);
            return -EINVAL;
        }
    if (c->width % c->heads) {
        fprintf(stderr, "gpt2: width %d is not divisible by heads = %d\n",
                c->width, c->heads);
        return -EINVAL;
    }
    return 0;
}

static int open_units(struct iz_model *m, const struct iz_gpt2_config *c)
{
    int rc = embed_open(&m->unit[0], c);

    for (int i = 0; rc == 0 && i < c->layers; i++)
        rc = block_open(&m->unit[1 + i], c, i);
    return rc ? rc : head_open(&m->unit[1 + c->layers], c);
}

int iz_gpt2_open(struct iz_model **out, const struct iz_gpt2_config *c)
{
    int rc = check(c);

    *out = NULL;
    if (rc)
        return rc;
    rc = iz_model_open(out, "gpt2", c->layers + 2, sizeof *c);
    if (rc)
        goto fail;
    *(struct iz_gpt2_config *)(*out)->self = *c;
    (*out)->input_bytes = (int64_t)c->seq * (int64_t)sizeof(int32_t);
    (*out)->target_bytes = (*out)->input_bytes;
    (*out)->tokens = c->seq;
    (*out)->vocab = c->vocab;
    rc = open_units(*out, c);
    if (rc)
        goto fail;
    return 0;
fail:
    fprintf(stderr, "gpt2: no memory for a model of %d layers\n", c->layers);
    iz_model_close(out);
    return rc;
}

/* ---- published checkpoints ---- */

/* Conv1D there has our layout.  Old files have the mask as a tensor. */
static const struct iz_hf_name hf_names[] = {
    {.tensor = "transformer.wte.weight", .param = "wte.weight"},
    {.tensor = "transformer.wpe.weight", .param = "wpe.weight"},
    {.tensor = "transformer.h.{}.ln_1.weight", .param = "h.{}.ln_1.weight"},
    {.tensor = "transformer.h.{}.ln_1.bias", .param = "h.{}.ln_1.bias"},
    {.tensor = "transformer.h.{}.attn.c_attn.weight",
     .param = "h.{}.attn.c_attn.weight"},
    {.tensor = "transformer.h.{}.attn.c_attn.bias",
     .param = "h.{}.attn.c_attn.bias"},
    {.tensor = "transformer.h.{}.attn.c_proj.weight",
     .param = "h.{}.attn.c_proj.weight"},
    {.tensor = "transformer.h.{}.attn.c_proj.bias",
     .param = "h.{}.attn.c_proj.bias"},
    {.tensor = "transformer.h.{}.ln_2.weight", .param = "h.{}.ln_2.weight"},
    {.tensor = "transformer.h.{}.ln_2.bias", .param = "h.{}.ln_2.bias"},
    {.tensor = "transformer.h.{}.mlp.c_fc.weight",
     .param = "h.{}.mlp.c_fc.weight"},
    {.tensor = "transformer.h.{}.mlp.c_fc.bias", .param = "h.{}.mlp.c_fc.bias"},
    {.tensor = "transformer.h.{}.mlp.c_proj.weight",
     .param = "h.{}.mlp.c_proj.weight"},
    {.tensor = "transformer.h.{}.mlp.c_proj.bias",
     .param = "h.{}.mlp.c_proj.bias"},
    {.tensor = "transformer.ln_f.weight", .param = "ln_f.weight"},
    {.tensor = "transformer.ln_f.bias", .param = "ln_f.bias"},
    {.tensor = "lm_head.weight", .param = "wte.weight", .tied = true},
    {.tensor = "transformer.h.{}.attn.bias"},
    {.tensor = "transformer.h.{}.attn.masked_bias"},
    {0},
};

/* What is not here does not change what the model computes, but for dropout,
 * which this one has not. */
static const struct iz_hf_key hf_keys[] = {
    {.name = "n_layer", .key = "layers"},
    {.name = "n_head", .key = "heads"},
    {.name = "n_embd", .key = "width"},
    {.name = "n_positions", .key = "seq"},
    {.name = "n_ctx", .key = "seq"},
    {.name = "vocab_size", .key = "vocab"},
    {.name = "activation_function",
     .values = "\"gelu_new\"|\"gelu_pytorch_tanh\""},
    {.name = "layer_norm_epsilon", .values = "1e-05"},
    {.name = "scale_attn_weights", .values = "true"},
    {.name = "scale_attn_by_inverse_layer_idx", .values = "false"},
    {.name = "add_cross_attention", .values = "false"},
    {.name = "tie_word_embeddings", .values = "true"},
    {0},
};

static const struct iz_hf_type hf_types[] = {
    {.name = "gpt2", .architecture = "GPT2LMHeadModel"},
    {0},
};

static const struct iz_hf hf = {.types = hf_types,
                                .prefix = "transformer.",
                                .names = hf_names,
                                .keys = hf_keys};

/* ---- the program ---- */

static struct iz_gpt2_config config;

#define FIELD(f) offsetof(struct iz_gpt2_config, f), sizeof(int), 1, MOST, NULL

static const struct iz_key keys[] = {
    {"layers", IZ_KEY_INT, FIELD(layers), "12", "Transformer blocks."},
    {"heads", IZ_KEY_INT, FIELD(heads), "12", "Attention heads of a block."},
    {"width", IZ_KEY_INT, FIELD(width), "768",
     "Channels; a multiple of heads."},
    {"seq", IZ_KEY_INT, FIELD(seq), "1024", "Tokens of a sample."},
    {"vocab", IZ_KEY_INT, FIELD(vocab), "50257",
     "Different tokens; 256 for bytes."},
    {0},
};

#define SHAPE(l, h, w)                                                         \
    "{\"layers\": " #l ", \"heads\": " #h ", \"width\": " #w                   \
    ", \"seq\": 1024, \"vocab\": 50257}"

static const struct iz_preset presets[] = {
    {"tiny",
     "{\"layers\": 2, \"heads\": 2, \"width\": 32, \"seq\": 16, "
     "\"vocab\": 256}",
     "for tests"},
    {"gpt2-124m", SHAPE(12, 12, 768), "GPT-2 small"},
    {"gpt2-350m", SHAPE(24, 16, 1024), "GPT-2 medium"},
    {"gpt2-774m", SHAPE(36, 20, 1280), "GPT-2 large"},
    {"gpt2-1.5b", SHAPE(48, 25, 1600), "GPT-2 XL"},
    {"gpt3-2.7b", SHAPE(32, 32, 2560), "shape of GPT-3 2.7B"},
    {"gpt3-6.7b", SHAPE(32, 32, 4096), "shape of GPT-3 6.7B"},
    {"gpt3-10b", SHAPE(50, 32, 4096), "10B of ZeRO-Offload's evaluation"},
    {"gpt3-13b", SHAPE(65, 32, 4096), "13B, as above"},
    {"gpt3-20b", SHAPE(25, 64, 8192), "20B, as above"},
    {"gpt3-40b", SHAPE(50, 64, 8192), "40B, as above"},
    {0},
};

static int open_program(struct iz_model **out, const void *target)
{
    return iz_gpt2_open(out, target);
}

const struct iz_program iz_program = {
    .name = "gpt2",
    .about = "trains models of the GPT-2 family",
    .section = {.keys = keys, .target = &config, .presets = presets, .hf = &hf},
    .open = open_program,
};
