/* SPDX-License-Identifier: Apache-2.0 */
/* Which arithmetic a run uses where that is a choice: products of fp32 or bf16
 * on CPUs (run.cpu_products), our attention kernels or cuDNN's on a GPU
 * (run.gpu_attention).  A new run whose config says "auto" chooses; a resumed
 * run keeps the choice, because another one gives other bits. */
#ifndef IZ_RUNTIME_MACHINE_ARITHMETIC_H
#define IZ_RUNTIME_MACHINE_ARITHMETIC_H

#include "codelets/unit/layer.h"
#include "runtime/comm/coll.h"
#include "runtime/config/config.h"

struct iz_arithmetic {
    bool bf16_products; /* on CPUs; else of fp32 */
    char why[128];      /* of products of fp32 that nobody asked for; else "" */
    bool attention_kept; /* run.gpu_attention is what a resumed run had */
};

/* What the choice is for. */
struct iz_arithmetic_for {
    int workers; /* of this rank */
    bool resume; /* goes on with the run in run.output */
    bool gpu;    /* units are computed on a GPU */
};

/* Chooses both and puts the choice into the config, the same on every rank:
 * auto becomes what the config beside a resumed run's output says, or else what
 * is faster here (products, measured) and our own (attention).  Collective.
 * Negative errno with the reason printed by one rank: what the config asks for,
 * or the run started with, cannot be done on all ranks, or is not known. */
int iz_arithmetic_choose(struct iz_arithmetic *a, struct iz_config *c,
                         const struct iz_model *m,
                         const struct iz_arithmetic_for *on,
                         struct iz_coll *coll);

/* Ends the choice of cuDNN's attention where a rank has a reason `why` against
 * it (NULL: none).  Collective; negative errno with the reason printed by one
 * rank. */
int iz_arithmetic_refuse_cudnn(struct iz_coll *coll, const char *why,
                               bool kept);

#endif
