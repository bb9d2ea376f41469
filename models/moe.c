/* SPDX-License-Identifier: Apache-2.0 */
/* Mixtures of experts, written once for training, evaluation and generation;
 * their units are those of block.h and, with experts_per_unit, of
 * experts_units.h. */
#include "models/moe.h"

#include <stdlib.h>

#include "models/block.h"
#include "models/keys.h"
#include "models/parts.h"

static const struct iz_key moe_keys[] = {
#define CONFIG struct iz_llama_config
#include "models/llama_keys.h"
#undef CONFIG
#define CONFIG struct iz_moe_config
    {KEY(num_experts, INT, 1, IZ_EXPERTS_MOST, NULL), "8",
     "Experts of a block."},
    {KEY(num_experts_per_tok, INT, 1, IZ_EXPERTS_MOST, NULL), "2",
     "Experts that a token goes to."},
    {KEY(moe_intermediate_size, INT, 1, MOST, NULL), "1024",
     "Hidden channels of an expert."},
    {KEY(norm_topk_prob, BOOL, 0, 0, NULL), "true",
     "Whether the weights of a token's experts add up to 1."},
    {KEY(decoder_sparse_step, INT, 1, MOST, NULL), "1",
     "Every block whose number, from 1, is a multiple has experts, the others "
     "an MLP of `ffn` channels."},
    {KEY(experts_per_unit, INT, 0, IZ_EXPERTS_MOST, NULL), "0",
     "Experts of a unit, if a block's are to be several: a block then need not "
     "be whole in memory. 0: they are in their block's unit."},
    {KEY(mlp_only_layers, INTS, 0, 0, NULL), "[]",
     "Blocks, counted from 0, that have that MLP in any case."},
    {KEY(first_k_dense_replace, INT, 0, MOST, NULL), "0",
     "So many first blocks have it, too."},
    {KEY(moe_layer_end_index, INT, -1, MOST, NULL), "-1",
     "So have those behind this one, counted from 0; -1: none."},
    {KEY(shared_expert_intermediate_size, INT, 0, MOST, NULL), "0",
     "Hidden channels of an expert that all tokens go to; 0: by "
     "n_shared_experts."},
    {KEY(n_shared_experts, INT, 0, IZ_EXPERTS_MOST, NULL), "0",
     "It is as wide as so many others; 0: there is none."},
    {KEY(n_group, INT, 1, IZ_GROUPS_MOST, NULL), "1",
     "Groups of neighbouring experts ..."},
    {KEY(topk_group, INT, 1, IZ_GROUPS_MOST, NULL), "1",
     "... of which so many have the experts of a token: those whose two best "
     "ones are."},
    {KEY(routed_scaling_factor, DOUBLE, 1e-6, 1e6, NULL), "1",
     "Factor of the weights of a token's experts."},
    {KEY(router_aux_loss_coef, DOUBLE, 0, 1e6, NULL), "0.001",
     "Coefficient of the loss that balances experts, in training; 0: none."},
    {KEY(router_z_loss_coef, DOUBLE, 0, 1e6, NULL), "0",
     "Coefficient of the mean square of the log of a router's sum of "
     "exponentials; 0: none."},
    {0},
};

/* What a model holds: what its keys say, and so its blocks. */
struct self {
    struct iz_moe_config config;
    struct iz_block block;
};

/* Whether these numbers are those of blocks. */
static bool lists_blocks(const char *list, int layers)
{
    char *end;
    for (; *list; list += *list == ',') {
        long block = strtol(list, &end, 10);
        if (block < 0 || block >= layers)
            return false;
        list = end + strcspn(end, ",");
    }
    return true;
}

static struct iz_experts experts_of(const struct iz_moe_config *c)
{
    double residual = c->llama.residual_multiplier;
    struct iz_experts e = {
        .n = c->num_experts,
        .per_token = c->num_experts_per_tok,
        .hidden = c->moe_intermediate_size,
        .per_unit = c->experts_per_unit,
        .normalise = c->norm_topk_prob,
        .scale = (float)(c->routed_scaling_factor * residual),
        .sigmoid = iz_family_of(c->llama.family)->has & IZ_HAS_SIGMOID,
        .groups = c->n_group,
        .kept = c->topk_group,
        .shared = c->shared_expert_intermediate_size,
        .every = c->decoder_sparse_step,
        .first = c->first_k_dense_replace,
        .last = c->moe_layer_end_index < 0 ? c->llama.layers
                                           : c->moe_layer_end_index,
        .balance = c->router_aux_loss_coef,
        .z = c->router_z_loss_coef};
    memcpy(e.dense, c->mlp_only_layers, sizeof(e.dense));
    for (int i = 0; i < c->llama.layers; i++)
        e.blocks += iz_experts_at(&e, i);
    return e;
}

static const char *moe_idle(const void *base, const char *key)
{
    const struct iz_moe_config *c = base;
    if (strcmp(key, "ffn") == 0 && experts_of(c).blocks == c->llama.layers)
        return "every block has experts";
    return iz_llama_idle(&c->llama, key);
}

/* What is set that the type has no word for; NULL: nothing. */
static const char *foreign_of(const struct iz_moe_config *c, const char *type)
{
    const struct {
        const char *key;
        bool set;
    } some[] = {
        {"first_k_dense_replace", c->first_k_dense_replace},
        {"moe_layer_end_index", c->moe_layer_end_index >= 0},
        {"decoder_sparse_step", c->decoder_sparse_step != 1},
        {"mlp_only_layers", *c->mlp_only_layers},
        {"n_group", c->n_group != 1},
        {"routed_scaling_factor", c->routed_scaling_factor != 1},
        {"router_aux_loss_coef", c->router_aux_loss_coef != 0},
        {"window", c->llama.window},
    };
    bool shared = iz_llama_knows(type, "n_shared_experts") ||
                  iz_llama_knows(type, "shared_expert_intermediate_size");
    if (c->shared_expert_intermediate_size && !shared)
        return "shared_expert_intermediate_size";
    for (size_t i = 0; i < sizeof(some) / sizeof(*some); i++)
        if (some[i].set && !iz_llama_knows(type, some[i].key))
            return some[i].key;
    return NULL;
}

/* The family of a model that names none; auto if no other is such. */
static int family_of(const struct iz_moe_config *c)
{
    bool everywhere = c->decoder_sparse_step == 1 && !c->mlp_only_layers[0];
    bool qwen = c->llama.qk_norm && !c->llama.window;
    bool mixtral = !c->llama.qk_norm && everywhere && c->norm_topk_prob;
    const char *type = qwen ? "qwen3_moe" : "mixtral";
    return c->llama.qkv_bias || !(qwen || mixtral) || foreign_of(c, type)
               ? IZ_FAMILY_AUTO
               : iz_family_named(type);
}

static int moe_check(const struct iz_moe_config *c)
{
    const struct iz_hf_type *type = iz_family_type(c->llama.family);
    bool ours = !type || iz_family_is_mixture(c->llama.family);
    const char *why = NULL, *foreign = type ? foreign_of(c, type->name) : NULL;
    if (check_keys("moe", moe_keys, c))
        return -EINVAL;
    if (ours && foreign) {
        fprintf(
            stderr,
            "moe: %s: the family %s has none: set what stands for nothing\n",
            foreign, type->name);
        return -EINVAL;
    }
    if (c->num_experts_per_tok > c->num_experts)
        why = "num_experts_per_tok is above num_experts";
    else if (c->experts_per_unit > c->num_experts)
        why = "experts_per_unit is above num_experts";
    else if (!lists_blocks(c->mlp_only_layers, c->llama.layers))
        why = "mlp_only_layers must be numbers of blocks with commas, such as "
              "\"0,3\", each below layers";
    else if (c->num_experts % c->n_group || c->topk_group > c->n_group ||
             (c->n_group > 1 && c->num_experts / c->n_group < 2) ||
             c->num_experts_per_tok >
                 c->num_experts / c->n_group * c->topk_group)
        why = "n_group must divide num_experts into groups of at least two, of "
              "which topk_group have num_experts_per_tok";
    else if (c->experts_per_unit && iz_family_of(c->llama.family)->joined)
        why = "experts_per_unit: the family has all experts of a block in one "
              "tensor: set 0";
    else if (type && iz_llama_knows(type->name, "n_shared_experts") &&
             c->shared_expert_intermediate_size !=
                 c->n_shared_experts * c->moe_intermediate_size)
        why = "shared_expert_intermediate_size is not n_shared_experts times "
              "moe_intermediate_size, as the family has it";
    else if (!ours)
        why = "family: the program llama has it";
    else if (experts_of(c).sigmoid && c->router_z_loss_coef != 0)
        why = "router_z_loss_coef: a router by sigmoid has none: set 0";
    else if (!experts_of(c).blocks)
        why = "no block has experts: see decoder_sparse_step and "
              "mlp_only_layers, or use the program llama";
    if (!why)
        return 0;
    fprintf(stderr, "moe: %s\n", why);
    return -EINVAL;
}

int iz_moe_open(struct iz_model **out, const void *target)
{
    struct iz_moe_config config = *(const struct iz_moe_config *)target;
    struct iz_llama_config *c = &config.llama;
    if (!config.shared_expert_intermediate_size)
        config.shared_expert_intermediate_size =
            config.n_shared_experts * config.moe_intermediate_size;
    int *const ones[] = {&config.n_group, &config.topk_group};
    for (int i = 0; i < 2; i++)
        *ones[i] = *ones[i] ? *ones[i] : 1;
    if (config.routed_scaling_factor == 0)
        config.routed_scaling_factor = 1;
    if (c->family == IZ_FAMILY_AUTO)
        c->family = family_of(&config);
    int rc = iz_llama_complete("moe", c);
    *out = NULL;
    if (rc == 0)
        rc = moe_check(&config);
    if (rc)
        return rc;
    struct self s = {.config = config, .block = iz_llama_block(c)};
    s.block.experts = experts_of(&config);
    *out = iz_model_open("moe", iz_block_units(&s.block) + 2, &s, sizeof(s));
    const struct self *own = (*out)->self;
    (*out)->experts = true;
    iz_llama_units(*out, &own->config.llama, &own->block);
    return 0;
}

/* ---- the program ---- */

static struct iz_moe_config config;

static const struct iz_preset presets[] = {
    {"tiny",
     "{\"layers\": 2, \"heads\": 4, \"kv_heads\": 2, \"width\": 32, "
     "\"ffn\": 48, \"seq\": 16, \"vocab\": 256, \"rope_theta\": 10000, "
     "\"moe_intermediate_size\": 24}",
     "for tests"},
    {"qwen3-30b-a3b",
     "{\"layers\": 48, \"heads\": 32, \"kv_heads\": 4, \"width\": 2048, "
     "\"ffn\": 6144, \"head_dim\": 128, \"seq\": 4096, \"vocab\": 151936, "
     "\"rope_theta\": 1000000, \"norm_eps\": 1e-6, \"qk_norm\": true, "
     "\"num_experts\": 128, \"num_experts_per_tok\": 8, "
     "\"moe_intermediate_size\": 768}",
     "Qwen 3 30B-A3B"},
    {"gpt-oss-20b",
     "{\"family\": \"gpt_oss\", \"layers\": 24, \"heads\": 64, "
     "\"kv_heads\": 8, \"width\": 2880, \"head_dim\": 64, \"seq\": 4096, "
     "\"vocab\": 201088, \"qkv_bias\": true, \"window\": 128, "
     "\"rope_theta\": 150000, \"rope_scaling_type\": \"yarn\", "
     "\"rope_scaling_factor\": 32, \"rope_scaling_original_seq\": 4096, "
     "\"rope_scaling_truncate\": false, \"num_experts\": 32, "
     "\"num_experts_per_tok\": 4, \"moe_intermediate_size\": 2880}",
     "gpt-oss 20B"},
    {"mixtral-8x7b",
     "{\"layers\": 32, \"heads\": 32, \"kv_heads\": 8, \"width\": 4096, "
     "\"seq\": 4096, \"vocab\": 32000, \"rope_theta\": 1000000, "
     "\"moe_intermediate_size\": 14336}",
     "Mixtral 8x7B v0.1"},
    {0},
};

const struct iz_program iz_program = {
    .name = "moe",
    .about = "trains mixtures of experts",
    .section = {.keys = moe_keys,
                .target = &config,
                .presets = presets,
                .hf = &iz_moe_hf,
                .idle = moe_idle},
    .open = iz_moe_open,
};
