/* SPDX-License-Identifier: Apache-2.0 */
/* What a config may say of a model of the Llama family: its keys, published
 * sizes as presets, what zeros stand for, and what is refused. */
#include <stddef.h>

#include "models/keys.h"
#include "models/llama.h"
#include "models/parts.h"

#define CONFIG struct iz_llama_config

const struct iz_key iz_llama_keys[] = {
#include "models/llama_keys.h"
    {KEY(family, ENUM, 0, 0, IZ_LLAMA_FAMILIES), "\"auto\"",
     "As which model weights are exported; auto: the first that has this "
     "shape."},
    {0},
};

static int llama_config_check(const char *model,
                              const struct iz_llama_config *c)
{
    const char *why = NULL;
    if (c->head_dim == 0 && c->heads > 0)
        why = "width is not divisible by heads, and there is no head_dim";
    else if (check_keys(model, iz_llama_keys, c))
        return -EINVAL;
    else if (c->heads % c->kv_heads)
        why = "heads is not divisible by kv_heads";
    else if (c->head_dim % 2)
        why = "head_dim is odd, but columns turn in pairs";
    else if (!(c->rope_theta > 0 && c->rope_scaling_factor > 0))
        why = "rope_theta and rope_scaling_factor must be positive";
    else if (c->rope_scaling_factor != 1 && !(c->rope_scaling_high_freq_factor >
                                              c->rope_scaling_low_freq_factor))
        why = "rope_scaling_high_freq_factor must be above "
              "rope_scaling_low_freq_factor";
    else if (c->family != IZ_LLAMA_AUTO &&
             (c->qkv_bias != (c->family == IZ_LLAMA_QWEN2) ||
              c->qk_norm != (c->family == IZ_LLAMA_QWEN3)))
        why = "family contradicts qkv_bias or qk_norm";
    if (why)
        fprintf(stderr, "%s: %s\n", model, why);
    else if (c->seq > c->context)
        fprintf(stderr,
                "%s: model.seq: %d is above model.context, %d, the longest "
                "that the model is made for\n",
                model, c->seq, c->context);
    else if (c->window && c->window < c->seq)
        fprintf(stderr,
                "%s: model.seq: %d is above model.window, %d, but attention "
                "here has no window\n",
                model, c->seq, c->window);
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
    if (c->family == IZ_LLAMA_AUTO && !(c->qkv_bias && c->qk_norm))
        c->family = c->qkv_bias  ? IZ_LLAMA_QWEN2
                    : c->qk_norm ? IZ_LLAMA_QWEN3
                                 : IZ_LLAMA_LLAMA;
    return llama_config_check(model, c);
}

struct iz_block iz_llama_block(const struct iz_llama_config *c)
{
    return (struct iz_block){
        .layers = c->layers,
        .heads = c->heads,
        .kv_heads = c->kv_heads,
        .head_dim = c->head_dim,
        .width = c->width,
        .hidden = c->ffn,
        .seq = c->seq,
        .llama = true,
        .qkv_bias = c->qkv_bias,
        .qk_norm = c->qk_norm,
        .norm_eps = (float)c->norm_eps,
        .rope = {.seq = c->seq,
                 .heads = c->heads + c->kv_heads,
                 .d = c->head_dim,
                 .theta = c->rope_theta,
                 .factor = c->rope_scaling_factor,
                 .low_freq_factor = c->rope_scaling_low_freq_factor,
                 .high_freq_factor = c->rope_scaling_high_freq_factor,
                 .original_seq = c->rope_scaling_original_seq}};
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
