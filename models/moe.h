/* SPDX-License-Identifier: Apache-2.0 */
/* Mixture-of-experts transformers of the families of families.h: the Llama
 * family's attention, and experts in place of the MLP of some blocks or all. */
#pragma once

#include "models/llama.h"

/* The names that config.json has for them. */
struct iz_moe_config {
    struct iz_llama_config llama;
    int num_experts, num_experts_per_tok, moe_intermediate_size;
    int decoder_sparse_step, experts_per_unit;
    char mlp_only_layers[256]; /* numbers with commas */
    int first_k_dense_replace, moe_layer_end_index;
    int shared_expert_intermediate_size, n_shared_experts;
    int n_group, topk_group;
    double routed_scaling_factor;
    bool norm_topk_prob;
    double router_aux_loss_coef, router_z_loss_coef;
};

/* Their tensors and keys; its self begins with a struct iz_moe_config. */
extern const struct iz_hf iz_moe_hf;

/* Creates a model of a struct iz_moe_config; close it with iz_model_close.
 * Returns 0, or -EINVAL after printing the reason. */
int iz_moe_open(struct iz_model **out, const void *config);
