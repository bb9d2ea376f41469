/* SPDX-License-Identifier: Apache-2.0 */
/* The choice of a run's arithmetic: whose kernels make products on CPUs
 * (run.cpu_kernels), products of fp32 or bf16 there (run.cpu_products), our
 * attention kernels or cuDNN's on a GPU (run.gpu_attention, and
 * run.gpu_attention_backward), how many logits are computed there at a time
 * (run.gpu_logits_bytes), which side updates Muon's matrices
 * (run.muon_products), how many micro-batches a step is cut into and how many
 * slices a micro-batch (run.slices), and in which order gradients are added
 * (run.sum_order, run.sum_group).  A run chooses where its config says "auto"
 * and, if it is resumed, what it began with does too (iz_config_keep). */
#pragma once

#include "codelets/unit/layer.h"
#include "runtime/comm/coll.h"
#include "runtime/config/config.h"

struct iz_arithmetic {
    bool bf16_products; /* on CPUs; false: fp32 */
    char note[128];     /* sentence about slow kernels; otherwise "" */
    char why[128];      /* reason if auto chose fp32 products; otherwise "" */
    /* run.gpu_attention, and ..._backward, is still "auto", until the plan and
     * the library have decided; or is own, for this reason */
    bool attention_open[2];
    struct iz_refusal attention_why[2];
};

/* What the choice is for. */
struct iz_arithmetic_for {
    int workers;    /* of this rank */
    bool gpu;       /* units are computed on a GPU */
    int capability; /* of that, 90 for 9.0 */
    bool here;      /* in this process; false: in another, of --ranks */
};

/* Replaces auto in the config by a choice, the same on every rank: the faster
 * products, as measured here, izar's own attention where some rank cannot have
 * cuDNN's, and the ranks of a host as a group of sums.  Collective.
 * Negative errno with the reason printed by one rank: the choice of the config
 * or of the resumed run is unknown, or impossible on some rank. */
int iz_arithmetic_choose(struct iz_arithmetic *a, struct iz_config *c,
                         const struct iz_model *m,
                         const struct iz_arithmetic_for *on,
                         struct iz_coll *coll);

/* Takes our attention, or its backward, in place of cuDNN's if any rank has a
 * reason `why` (NULL: none) and the config left it open; otherwise refuses to:
 * negative errno with the reason printed by one rank.  Collective. */
int iz_arithmetic_no_cudnn(struct iz_arithmetic *a, struct iz_config *c,
                           struct iz_coll *coll, bool back, const char *why);
