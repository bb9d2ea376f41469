/* SPDX-License-Identifier: Apache-2.0 */
/* The units of models with the Llama family's blocks, and the names of their
 * parameters. */
#include "models/llama.h"
#include "models/parts.h"

static const struct iz_block_names gated_names = {
    .block = "layers",
    .norm_1 = "input_layernorm",
    .qkv = "self_attn.qkv_proj",
    .attn_proj = "self_attn.o_proj",
    .norm_2 = "post_attention_layernorm",
    .fc = "mlp.gate_up_proj",
    .mlp_proj = "mlp.down_proj",
    .q_norm = "self_attn.q_norm",
    .k_norm = "self_attn.k_norm",
    .behind_1 = "self_attn.norm",
    .behind_2 = "mlp.norm",
    .sinks = "self_attn.sinks",
    .router = "mlp.gate",
    .choice = "mlp.choice",
    .shared_fc = "mlp.shared_expert.gate_up_proj",
    .shared_proj = "mlp.shared_expert.down_proj",
    .shared_gate = "mlp.shared_expert_gate",
    .experts = "mlp.experts",
    .expert_fc = "gate_up_proj",
    .expert_proj = "down_proj"};

void iz_llama_units(struct iz_model *m, const struct iz_llama_config *c,
                    const struct iz_block *b)
{
    struct iz_block_names names = gated_names;
    const struct iz_param embed[] = {
        weight("embed_tokens.weight", c->vocab, c->width, IZ_BLOCK_STD),
    };
    bool plus_one = b->has & IZ_HAS_PLUS_ONE;
    struct iz_param head[4];
    int n = 0;
    if (!(b->has & IZ_HAS_GATE))
        names.fc = "mlp.up_proj";
    if (!(b->has & IZ_HAS_BARE))
        head[n++] = vector("norm.weight", c->width,
                           plus_one ? IZ_INIT_ZERO : IZ_INIT_ONE);
    if (b->has & IZ_HAS_NORM_BIAS)
        head[n++] = vector("norm.bias", c->width, IZ_INIT_ZERO);
    if (b->has & IZ_HAS_HEAD_BIAS)
        head[n++] = vector("lm_head.bias", c->vocab, IZ_INIT_ZERO);
    if (!c->tie_embeddings)
        head[n++] = weight("lm_head.weight", c->vocab, c->width, IZ_BLOCK_STD);
    read_tokens(m, c->seq, c->vocab);
    iz_block_open(m, b, &names, &(struct iz_ends){embed, head, 1, n});
}
