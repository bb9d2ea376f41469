/* SPDX-License-Identifier: Apache-2.0 */
/* The GPT-2 family: learned positions, LayerNorm before attention and MLP, GELU
 * in the tanh form, and an output layer that shares the token embedding.
 * Parameters have the names and layouts of the published checkpoints. */
#pragma once

#include "codelets/unit/layer.h"

struct iz_gpt2_config {
    int layers, heads, width, seq, vocab;
};

/* Creates a model of a struct iz_gpt2_config; close it with iz_model_close.
 * Returns 0, or -EINVAL after printing the reason. */
int iz_gpt2_open(struct iz_model **out, const void *config);
