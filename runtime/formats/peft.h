/* SPDX-License-Identifier: Apache-2.0 */
/* adapter_config.json of Hugging Face's PEFT. */
#pragma once

#include <stdbool.h>
#include <stdio.h>

#define IZ_PEFT_CONFIG "adapter_config.json"

struct iz_peft {
    int rank;
    double alpha;
    bool use_rslora;
    bool ties;          /* ensure_weight_tying */
    bool gate_up, down; /* adapters of the fused weights of experts */
};

typedef void iz_peft_fault(void *arg, const char *what);

/* Whether a key of rank_pattern or alpha_pattern is one of this module, by the
 * name of its weight: a regular expression for the end of the name. */
bool iz_peft_matches(const char *key, const char *weight);

/* Reads such a file.  Everything that makes another adapter than this program
 * has is a fault.  False with the reason printed on `err` (may be NULL): it is
 * no JSON. */
bool iz_peft_read(struct iz_peft *p, const char *path, iz_peft_fault *fault,
                  void *arg, FILE *err);
