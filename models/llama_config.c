/* SPDX-License-Identifier: Apache-2.0 */
/* What a config may say of a model of the Llama family: its keys, published
 * sizes as presets, what zeros stand for, and what is refused. */
#include <math.h>
#include <stddef.h>

#include "models/keys.h"
#include "models/llama.h"
#include "models/parts.h"

#define CONFIG struct iz_llama_config

const struct iz_key iz_llama_keys[] = {
#include "models/llama_keys.h"
    {0},
};

static bool odd_heads(const struct iz_llama_config *c)
{
    return (int64_t)c->heads * c->head_dim != c->width;
}

/* A key that is set, but the family has no word for; "": none. */
static const char *foreign_of(const struct iz_llama_config *c)
{
    const struct {
        const char *key;
        bool set;
    } some[] = {
        {"norm_eps", c->norm_eps != 1e-5},
        {"kv_heads", c->kv_heads != c->heads},
        {"rope_theta", c->rope_theta != 500000},
        {"partial_rotary_factor", c->partial_rotary_factor != 1},
        {"rope_local_base_freq", c->rope_local_base_freq != 0},
        {"attention_multiplier", c->attention_multiplier != 0},
        {"attn_logit_softcapping", c->attn_logit_softcapping != 0},
        {"final_logit_softcapping", c->final_logit_softcapping != 0},
        {"embedding_multiplier", c->embedding_multiplier != 1},
        {"residual_multiplier", c->residual_multiplier != 1},
        {"logits_scaling", c->logits_scaling != 1},
        {"logit_scale", c->logit_scale != 1},
        {"rope_scaling_query_beta", c->rope_scaling_query_beta != 0},
        {"query_pre_attn_scalar", c->query_pre_attn_scalar},
        {"head_dim", odd_heads(c)},
        {"window", c->window},
        {"layer_types", c->window && *c->layer_types},
        {"no_rope_layers", *c->no_rope_layers},
        {"no_rope_layer_interval", c->no_rope_layer_interval},
    };
    const char *type = iz_llama_hf.type(c);
    for (size_t i = 0; i < sizeof(some) / sizeof(*some); i++)
        if (some[i].set && type && !iz_llama_knows(type, some[i].key))
            return some[i].key;
    return "";
}

/* Words or numbers in a list with commas. */
static int list_length(const char *list)
{
    int n = *list != 0;
    for (; *list; list++)
        n += *list == ',';
    return n;
}

static const char *list_at(const char *list, int i)
{
    while (i-- && list)
        list = strchr(list, ',') ? strchr(list, ',') + 1 : NULL;
    return list ? list + strspn(list, " ") : "";
}

static bool lists_sorts(const char *list, int layers)
{
    for (int i = 0; *list && i < layers; i++)
        if (strncmp(list_at(list, i), "full_attention", 14) != 0 &&
            strncmp(list_at(list, i), "sliding_attention", 17) != 0)
            return false;
    return !*list || list_length(list) == layers;
}

static int turned_columns(const struct iz_llama_config *c)
{
    return (int)(c->head_dim * c->partial_rotary_factor);
}

/* What keys say that a block has. */
static unsigned keyed_bits(const struct iz_llama_config *c)
{
    return (c->qkv_bias ? IZ_HAS_QKV_BIAS : 0) |
           (c->qk_norm ? IZ_HAS_QK_NORM : 0) |
           (c->proj_bias ? IZ_HAS_PROJ_BIAS : 0) |
           (c->mlp_bias ? IZ_HAS_MLP_BIAS : 0);
}

static int llama_config_check(const char *model,
                              const struct iz_llama_config *c)
{
    const struct iz_family *f = iz_family_of(c->family);
    const char *type = iz_llama_hf.type(c);
    unsigned keyed = keyed_bits(c);
    unsigned fixed = f->has & (IZ_HAS_QKV_BIAS | IZ_HAS_QK_NORM) & ~f->may;
    const char *why = NULL, *name = "";
    char lacks[96];
    if (c->head_dim == 0 && c->heads > 0)
        why = "width is not divisible by heads, and there is no head_dim";
    else if (check_keys(model, iz_llama_keys, c))
        return -EINVAL;
    else if (c->heads % c->kv_heads)
        why = "heads is not divisible by kv_heads";
    else if (c->head_dim % 2 || turned_columns(c) % 2 || !turned_columns(c))
        why = "head_dim, or what partial_rotary_factor turns of it, is odd or "
              "0, but columns turn in pairs";
    else if (c->rotary_dim && c->rotary_dim != turned_columns(c))
        why = "rotary_dim contradicts partial_rotary_factor or head_dim";
    else if (!(c->rope_theta > 0 && c->rope_scaling_factor > 0))
        why = "rope_theta and rope_scaling_factor must be positive";
    else if (c->rope_scaling_factor != 1 && !(c->rope_scaling_high_freq_factor >
                                              c->rope_scaling_low_freq_factor))
        why = "rope_scaling_high_freq_factor must be above "
              "rope_scaling_low_freq_factor";
    else if (!(c->rope_scaling_beta_fast > c->rope_scaling_beta_slow))
        why = "rope_scaling_beta_fast must be above rope_scaling_beta_slow";
    else if (c->rope_scaling_type == IZ_ROPE_DEFAULT &&
             c->rope_scaling_factor != 1)
        why = "rope_scaling_factor needs rope_scaling_type llama3, linear or "
              "yarn";
    else if (c->rope_scaling_attention_factor != 0 &&
             c->rope_scaling_factor == 1)
        why = "rope_scaling_attention_factor needs a rope_scaling_factor "
              "above 1";
    else if (c->rope_scaling_type != IZ_ROPE_YARN &&
             (c->rope_scaling_beta_fast != 32 ||
              c->rope_scaling_beta_slow != 1 ||
              c->rope_scaling_attention_factor != 0))
        why = "rope_scaling_beta_fast, beta_slow and attention_factor need "
              "rope_scaling_type yarn";
    else if ((keyed & ~f->may) != fixed)
        why = "family contradicts qkv_bias, qk_norm, proj_bias or mlp_bias";
    else if (c->parallel && !f->parallel)
        why = "the family has no parallel blocks";
    else if (c->rope_scaling_query_beta != 0 && turned_columns(c) < c->head_dim)
        why = "rope_scaling_query_beta needs heads that turn whole";
    else if (type && !c->window && iz_llama_knows(type, "layer_types") &&
             !(*c->layer_types && strcmp(type, "exaone4") == 0))
        why = "window is 0, but the family has blocks with one";
    else if (type && !*c->layer_types && strcmp(type, "cwm") == 0)
        why = "layer_types is empty, but the family has it";
    else if (type && !*c->no_rope_layers && !c->no_rope_layer_interval &&
             iz_llama_knows(type, "no_rope_layers"))
        why = "no_rope_layers or no_rope_layer_interval: the family has one";
    else if (c->residual_multiplier != 1 && (c->proj_bias || c->mlp_bias))
        why = "residual_multiplier other than 1 is not built with proj_bias or "
              "mlp_bias";
    else if (type && c->rope_scaling_factor != 1 && strcmp(type, "phi3") == 0)
        why = "rope_scaling_factor: phi3 has longrope alone, which is not "
              "built";
    else if (!lists_sorts(c->layer_types, c->layers))
        why = "layer_types must be full_attention or sliding_attention for "
              "each block";
    else if (*c->no_rope_layers && list_length(c->no_rope_layers) != c->layers)
        why = "no_rope_layers must have a number for each block";
    else if (type && odd_heads(c) && iz_key_applies(type, "helium|olmoe"))
        why = "head_dim times heads must be width, as the family has it";
    else if (c->layers > IZ_LAYERS_MOST &&
             (c->window || *c->no_rope_layers || c->no_rope_layer_interval))
        why = "too many blocks of several sorts";
    else if (*(name = foreign_of(c))) {
        snprintf(lacks, sizeof(lacks),
                 "%s has no such key: set model.family to one that has", type);
        why = lacks;
    }
    if (why)
        fprintf(stderr, "%s: %s%s%s\n", model, name, *name ? ": " : "", why);
    else if (c->seq > c->context)
        fprintf(stderr,
                "%s: model.seq: %d is above model.context, %d, the longest "
                "that the model is made for\n",
                model, c->seq, c->context);
    else
        return 0;
    return -EINVAL;
}

int iz_llama_complete(const char *model, struct iz_llama_config *c)
{
    if (c->kv_heads == 0)
        c->kv_heads = c->heads;
    if (c->head_dim == 0 && c->heads > 0 && c->width % c->heads == 0)
        c->head_dim = c->width / c->heads;
    if (c->context == 0)
        c->context = c->seq;
    if (c->rope_scaling_original_seq == 0)
        c->rope_scaling_original_seq = c->context;
    if (c->rope_scaling_beta_fast == 0)
        c->rope_scaling_beta_fast = 32;
    if (c->rope_scaling_beta_slow == 0)
        c->rope_scaling_beta_slow = 1;
    double *const factors[] = {
        &c->partial_rotary_factor, &c->embedding_multiplier,
        &c->residual_multiplier, &c->logits_scaling, &c->logit_scale};
    for (size_t i = 0; i < sizeof(factors) / sizeof(*factors); i++)
        if (*factors[i] == 0)
            *factors[i] = 1;
    if (c->rotary_dim && c->partial_rotary_factor == 1 && c->head_dim > 0)
        c->partial_rotary_factor = (double)c->rotary_dim / c->head_dim;
    const char *type = iz_llama_hf.type(c);
    if (type && !c->rotary_dim && iz_llama_knows(type, "rotary_dim"))
        c->rotary_dim = turned_columns(c);
    if (type && !c->query_pre_attn_scalar && c->head_dim &&
        iz_llama_knows(type, "query_pre_attn_scalar"))
        c->query_pre_attn_scalar = c->head_dim;
    if (type && c->attention_multiplier == 0 && c->head_dim &&
        iz_llama_knows(type, "attention_multiplier"))
        c->attention_multiplier = 1 / sqrt(c->head_dim);
    if (type && c->rope_local_base_freq == 0 &&
        iz_llama_knows(type, "rope_local_base_freq"))
        c->rope_local_base_freq = c->rope_theta;
    return llama_config_check(model, c);
}

static struct iz_rope rope_of(const struct iz_llama_config *c)
{
    int turned = turned_columns(c);
    bool yarn = c->rope_scaling_type == IZ_ROPE_YARN;
    return (struct iz_rope){
        .seq = c->seq,
        .heads = c->heads + c->kv_heads,
        .d = c->head_dim,
        .turned = turned < c->head_dim ? turned : 0,
        .pairs = iz_family_of(c->family)->has & IZ_HAS_ROPE_PAIRS,
        .theta = c->rope_theta,
        .factor = c->rope_scaling_factor,
        .low_freq_factor =
            yarn ? c->rope_scaling_beta_slow : c->rope_scaling_low_freq_factor,
        .high_freq_factor =
            yarn ? c->rope_scaling_beta_fast : c->rope_scaling_high_freq_factor,
        .original_seq = c->rope_scaling_original_seq,
        .scaling = (enum iz_rope_scaling)c->rope_scaling_type,
        .fractions = !c->rope_scaling_truncate,
        .queries = c->heads,
        .query_beta = c->rope_scaling_query_beta,
        .amplitude = !yarn ? 0
                     : c->rope_scaling_attention_factor != 0
                         ? (float)c->rope_scaling_attention_factor
                         : (float)(0.1 * log(c->rope_scaling_factor) + 1)};
}

/* A window that no row of a sample reaches the end of is none. */
static void set_sorts(struct iz_block *b, const struct iz_llama_config *c)
{
    int every = iz_family_of(c->family)->every, gap = c->no_rope_layer_interval;
    bool turns_in_window = b->has & IZ_HAS_ROPE_IN_WINDOW && c->window;
    bool own_base = c->window && c->rope_local_base_freq != 0;
    b->window = c->window < c->seq ? c->window : 0;
    bool apart = b->window || own_base || iz_family_of(c->family)->local_rope;
    for (int i = 0; i < c->layers && i < IZ_LAYERS_MOST; i++) {
        bool slides = *c->layer_types ? *list_at(c->layer_types, i) == 's'
                                      : !every || (i + 1) % every;
        bool turns = *c->no_rope_layers ? *list_at(c->no_rope_layers, i) != '0'
                                        : !gap || (i + 1) % gap;
        bool local = slides && apart;
        b->sort[i] =
            (local ? IZ_SORT_WINDOW : 0) |
            (turns && (slides || !turns_in_window) ? 0 : IZ_SORT_UNTURNED);
    }
}

/* A factor of 1 is none. */
static float factor(double v)
{
    return v == 1 ? 0 : (float)v;
}

struct iz_block iz_llama_block(const struct iz_llama_config *c)
{
    const struct iz_family *f = iz_family_of(c->family);
    int scalar = c->query_pre_attn_scalar;
    struct iz_block b = {
        .layers = c->layers,
        .heads = c->heads,
        .kv_heads = c->kv_heads,
        .head_dim = c->head_dim,
        .width = c->width,
        .hidden = c->ffn,
        .seq = c->seq,
        .norm_eps = (float)c->norm_eps,
        .has = f->has | keyed_bits(c) | (c->parallel ? f->parallel : 0),
        .act = f->act,
        .rope = {rope_of(c), rope_of(c)},
        .score_cap = (float)c->attn_logit_softcapping,
        .residual = factor(c->residual_multiplier),
        .embedding =
            f->root ? sqrtf((float)c->width) : factor(c->embedding_multiplier),
        .logit_scale = factor(c->logit_scale / c->logits_scaling),
        .logit_cap = (float)c->final_logit_softcapping};
    if (c->attention_multiplier != 0)
        b.score_scale = (float)c->attention_multiplier;
    else if (scalar && scalar != c->head_dim)
        b.score_scale = (float)(1 / sqrt(scalar));
    if (c->rope_local_base_freq != 0)
        b.rope[1].theta = c->rope_local_base_freq;
    if (f->local_rope) {
        b.rope[1].factor = 1;
        b.rope[1].amplitude = 0;
    }
    set_sorts(&b, c);
    return b;
}

const char *iz_llama_idle(const void *config, const char *key)
{
    const struct iz_llama_config *c = config;
    const struct iz_family *f = iz_family_of(c->family);
    bool turned_by_window = f->has & IZ_HAS_ROPE_IN_WINDOW;
    const struct {
        bool is;
        const char *why, *keys;
    } rows[] = {
        {c->rope_scaling_factor == 1, "rope_scaling_factor is 1",
         "rope_scaling_type|rope_scaling_low_freq_factor|"
         "rope_scaling_high_freq_factor|rope_scaling_original_seq|"
         "rope_scaling_beta_fast|rope_scaling_beta_slow|rope_scaling_truncate"},
        {c->rope_scaling_type != IZ_ROPE_LLAMA3,
         "rope_scaling_type is not llama3",
         "rope_scaling_low_freq_factor|rope_scaling_high_freq_factor"},
        {c->rope_scaling_type != IZ_ROPE_YARN, "rope_scaling_type is not yarn",
         "rope_scaling_beta_fast|rope_scaling_beta_slow|rope_scaling_truncate|"
         "rope_scaling_attention_factor"},
        {c->rope_scaling_type == IZ_ROPE_LINEAR, "rope_scaling_type is linear",
         "rope_scaling_original_seq"},
        {*c->no_rope_layers, "no_rope_layers says it",
         "no_rope_layer_interval"},
        {c->window == 0 && !f->local_rope, "window is 0",
         "layer_types|rope_local_base_freq"},
        {c->window >= c->seq && !turned_by_window,
         "no sample is longer than the window", "window"},
    };
    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++)
        if (rows[i].is && iz_key_applies(key, rows[i].keys))
            return rows[i].why;
    return NULL;
}

const struct iz_preset iz_llama_presets[] = {
    {"tiny",
     "{\"layers\": 2, \"heads\": 4, \"kv_heads\": 2, \"width\": 32, "
     "\"ffn\": 48, \"seq\": 16, \"vocab\": 256, \"rope_theta\": 10000}",
     "for tests"},
    {"llama-3.2-1b",
     "{\"layers\": 16, \"heads\": 32, \"kv_heads\": 8, \"width\": 2048, "
     "\"ffn\": 8192, \"head_dim\": 64, \"seq\": 4096, \"vocab\": 128256, "
     "\"rope_theta\": 500000, \"rope_scaling_factor\": 32, "
     "\"tie_embeddings\": true}",
     "Llama 3.2 1B"},
    {"llama-3-8b",
     "{\"layers\": 32, \"heads\": 32, \"kv_heads\": 8, \"width\": 4096, "
     "\"ffn\": 14336, \"seq\": 4096, \"vocab\": 128256, "
     "\"rope_theta\": 500000}",
     "Llama 3 8B"},
    {"qwen2.5-0.5b",
     "{\"layers\": 24, \"heads\": 14, \"kv_heads\": 2, \"width\": 896, "
     "\"ffn\": 4864, \"seq\": 4096, \"vocab\": 151936, "
     "\"rope_theta\": 1000000, \"norm_eps\": 1e-6, \"qkv_bias\": true, "
     "\"tie_embeddings\": true}",
     "Qwen 2.5 0.5B"},
    {"qwen2.5-7b",
     "{\"layers\": 28, \"heads\": 28, \"kv_heads\": 4, \"width\": 3584, "
     "\"ffn\": 18944, \"seq\": 4096, \"vocab\": 152064, "
     "\"rope_theta\": 1000000, \"norm_eps\": 1e-6, \"qkv_bias\": true}",
     "Qwen 2.5 7B"},
    {"qwen3-0.6b",
     "{\"layers\": 28, \"heads\": 16, \"kv_heads\": 8, \"width\": 1024, "
     "\"ffn\": 3072, \"head_dim\": 128, \"seq\": 4096, \"vocab\": 151936, "
     "\"rope_theta\": 1000000, \"norm_eps\": 1e-6, \"qk_norm\": true, "
     "\"tie_embeddings\": true}",
     "Qwen 3 0.6B"},
    {"qwen3-8b",
     "{\"layers\": 36, \"heads\": 32, \"kv_heads\": 8, \"width\": 4096, "
     "\"ffn\": 12288, \"head_dim\": 128, \"seq\": 4096, \"vocab\": 151936, "
     "\"rope_theta\": 1000000, \"norm_eps\": 1e-6, \"qk_norm\": true}",
     "Qwen 3 8B"},
    {"mistral-7b",
     "{\"layers\": 32, \"heads\": 32, \"kv_heads\": 8, \"width\": 4096, "
     "\"ffn\": 14336, \"seq\": 4096, \"vocab\": 32768, "
     "\"rope_theta\": 1000000}",
     "Mistral 7B v0.3"},
    {0},
};
