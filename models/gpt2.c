/* SPDX-License-Identifier: Apache-2.0 */
/* GPT-2, written once for training, evaluation and generation; its units are
 * those of block.h. */
#include "models/gpt2.h"

#include "models/block.h"
#include "models/keys.h"
#include "models/parts.h"

#define CONFIG struct iz_gpt2_config

static struct iz_gpt2_config config;

static const struct iz_key keys[] = {
    {KEY(layers, INT, 1, MOST, NULL), "12", "Transformer blocks."},
    {KEY(heads, INT, 1, MOST, NULL), "12", "Attention heads of a block."},
    {KEY(width, INT, 1, MOST, NULL), "768", "Channels; a multiple of heads."},
    {KEY(seq, INT, 1, MOST, NULL), "1024", "Tokens of a sample."},
    {KEY(vocab, INT, 1, MOST, NULL), "50257",
     "Different tokens; 256 for bytes."},
    {0},
};

/* What a model holds: what its keys say, and so its blocks. */
struct self {
    struct iz_gpt2_config config;
    struct iz_block block;
};

static const struct iz_block_names names = {.block = "h",
                                            .norm_1 = "ln_1",
                                            .qkv = "attn.c_attn",
                                            .attn_proj = "attn.c_proj",
                                            .norm_2 = "ln_2",
                                            .fc = "mlp.c_fc",
                                            .mlp_proj = "mlp.c_proj"};

/* The head's matrix is the embedding's. */
static void gpt2_open_units(struct iz_model *m)
{
    const struct self *s = m->self;
    int w = s->block.width, vocab = s->config.vocab;
    const struct iz_param embed[] = {
        weight("wte.weight", vocab, w, IZ_BLOCK_STD),
        weight("wpe.weight", s->config.seq, w, IZ_BLOCK_STD),
    };
    const struct iz_param head[] = {
        vector("ln_f.weight", w, IZ_INIT_ONE),
        vector("ln_f.bias", w, IZ_INIT_ZERO),
    };
    read_tokens(m, s->config.seq, vocab);
    iz_block_open(m, &s->block, &names, &(struct iz_ends){embed, head, 2, 2});
}

int iz_gpt2_open(struct iz_model **out, const void *target)
{
    const struct iz_gpt2_config *c = target;
    *out = NULL;
    if (check_keys("gpt2", keys, c) ||
        iz_block_check("gpt2", c->width, c->heads))
        return -EINVAL;
    struct self s = {.config = *c,
                     .block = {.layers = c->layers,
                               .heads = c->heads,
                               .kv_heads = c->heads,
                               .head_dim = c->width / c->heads,
                               .width = c->width,
                               .hidden = 4 * c->width,
                               .seq = c->seq,
                               .norm_eps = 1e-5f,
                               .has = IZ_HAS_GPT2}};
    *out = iz_model_open("gpt2", c->layers + 2, &s, sizeof(s));
    gpt2_open_units(*out);
    return 0;
}

/* ---- published checkpoints ---- */

/* Conv1D there has our layout.  Old files have the mask as a tensor. */
#define OURS(name)                                                             \
    {                                                                          \
        .tensor = "transformer." name, .param = name                           \
    }
#define WITH_BIAS(name) OURS(name ".weight"), OURS(name ".bias")

static const struct iz_hf_name hf_names[] = {
    {.tensor = "transformer.wte.weight", .param = "wte.weight", .grows = true},
    {.tensor = "transformer.wpe.weight",
     .param = "wpe.weight",
     .layout = IZ_HF_FIRST_ROWS},
    WITH_BIAS("h.{}.ln_1"),
    WITH_BIAS("h.{}.attn.c_attn"),
    WITH_BIAS("h.{}.attn.c_proj"),
    WITH_BIAS("h.{}.ln_2"),
    WITH_BIAS("h.{}.mlp.c_fc"),
    WITH_BIAS("h.{}.mlp.c_proj"),
    WITH_BIAS("ln_f"),
    {.tensor = "lm_head.weight",
     .param = "wte.weight",
     .tied = true,
     .grows = true},
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
    {.name = "n_positions", .key = "seq", .shorter = true},
    {.name = "n_ctx", .key = "seq"},
    {.name = "vocab_size", .key = "vocab", .grows = true},
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

const struct iz_program iz_program = {
    .name = "gpt2",
    .about = "trains models of the GPT-2 family",
    .section = {.keys = keys, .target = &config, .presets = presets, .hf = &hf},
    .open = iz_gpt2_open,
};
