/* SPDX-License-Identifier: Apache-2.0 */
/* LoRA (arXiv 2106.09685): low-rank adapters for the linear layers of any
 * model, by the section "lora" of a config. */
#pragma once

#include <stdio.h>

#include "codelets/unit/layer.h"
#include "runtime/config/config.h"

/* Appends an adapter to the unit's parameters for every weight of a linear
 * layer that a pattern of lora.targets matches, or for every part of one that
 * is a tensor of its own in published models (hf; NULL: there are none).
 * Without patterns: for all that the folder of lora.import has.  -EINVAL with
 * all patterns of a key that match none told on `err` (NULL: nothing is). */
int iz_lora_apply(struct iz_model *m, const struct iz_config *c,
                  const struct iz_hf *hf, FILE *err);

/* Whether there is a matrix b of that name, and its rank and alpha. */
typedef bool iz_lora_find(const void *arg, const char *b, int *rank,
                          double *alpha);

/* The adapters that a checkpoint has; whether they have the root of their rank
 * is set by the caller.  Negative errno, -EINVAL with the reason printed. */
int iz_lora_restore(struct iz_model *m, const struct iz_hf *hf,
                    iz_lora_find *find, const void *arg);

/* "HEADh.0.attn.c_attn.lora_A.weight" for "h.0.attn.c_attn.weight", or of the
 * magnitudes, 'M', "....lora_magnitude_vector"; false: it does not fit. */
bool iz_lora_name(char *out, size_t size, const char *head, const char *of,
                  char matrix);

/* Whether a weight of experts, by its name, is one that PEFT has adapters of as
 * of one tensor (struct iz_lora_config).  *stem: length of its name without
 * which it is; 0: its name is another. */
bool iz_lora_fused(const struct iz_lora_config *l, const char *weight,
                   int *stem);

/* The folder of an adapter in the layout of PEFT. */
#define IZ_LORA_FILE "adapter_model.safetensors"
#define IZ_LORA_HEAD "base_model.model."

/* Where the adapters, all of them trained, begin among the unit's trained
 * parameters, which they end. */
int64_t iz_lora_first(const struct iz_unit *u);

/* w += scale b a in a unit's parameters: `in` holds the n elements from `first`
 * on of a part of them, end to end.  adapters: of the unit, all of them; of
 * magnitudes, what iz_lora_gains makes of them, and w is multiplied by that. */
void iz_lora_merge(const struct iz_model *m, int unit, enum iz_unit_part part,
                   const float *adapters, int64_t first, float *in, int64_t n);

/* Of magnitudes. */
int64_t iz_lora_outputs(const struct iz_model *m, int unit);
/* Adds the squares of w + scale b a, of those elements, for each output two
 * numbers: so that the sums are exact in any order.  adapters NULL: of w. */
void iz_lora_squares(const struct iz_model *m, int unit, enum iz_unit_part part,
                     const float *adapters, int64_t first, float *in, int64_t n,
                     int64_t *sums);
float iz_lora_norm(const int64_t sum[2]);
/* Divides the magnitudes by the norms. */
void iz_lora_gains(const struct iz_model *m, int unit, float *adapters,
                   const int64_t *sums);
