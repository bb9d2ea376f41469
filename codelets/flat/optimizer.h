/* SPDX-License-Identifier: Apache-2.0 */
/* The optimizers: one table with an entry per optimizer.type of a config.  The
 * entry holds all differences between optimizers.  Code that plans, allocates,
 * saves or updates states uses the entry, never the name of an optimizer. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "codelets/base/build.h"
#include "codelets/flat/moment.h"

IZ_C_BEGIN

/* DeepSpeed's optimizer.type; Adam and AdamW have one formula. */
enum iz_optimizer_type {
    IZ_OPTIMIZER_ADAM,
    IZ_OPTIMIZER_ADAMW,
    IZ_OPTIMIZER_LION,
    IZ_OPTIMIZER_MUON,
    IZ_OPTIMIZERS,
    /* Not in a config: Muon's first pass over chunks of nothing but matrices,
     * and its last pass. */
    IZ_OPTIMIZER_DIRECTION = IZ_OPTIMIZERS,
    IZ_OPTIMIZER_ALONG,
    IZ_UPDATES
};
#define IZ_OPTIMIZER_TYPES "Adam|AdamW|Lion|Muon" /* in this order */

/* Largest number of states of a parameter, in addition to its fp32 master. */
enum { IZ_STATES_MAX = 2 };

/* What an update of a matrix [out, in] is multiplied by; torch.optim.Muon's
 * adjust_lr_fn. */
enum iz_shape_scale {
    IZ_SCALE_ORIGINAL,  /* sqrt(max(1, out / in)), Jordan's */
    IZ_SCALE_RMS_ADAMW, /* 0.2 sqrt(max(out, in)), Moonlight's */
};
#define IZ_SHAPE_SCALES "original|match_rms_adamw" /* in this order */

/* On what Newton-Schulz iterates; see codelets/ops/orthogonal.h. */
enum iz_ns_method { IZ_NS_STANDARD, IZ_NS_GRAM };
#define IZ_NS_METHODS "standard|gram" /* in this order */

/* The numbers of a config's block "optimizer"; an optimizer's entry lists the
 * ones that it has. */
struct iz_hyper {
    enum iz_optimizer_type type;
    double lr, beta1, beta2, eps, weight_decay;
    bool adamw;           /* decay the parameter; false: add wd * p to g (L2) */
    bool bias_correction; /* divide m and v by 1 - beta^t */
    double momentum;
    bool nesterov;
    double adam_lr; /* of what Muon leaves to Adam: adam_rate times lr */
    double adam_rate;
    int ns_steps; /* Newton-Schulz's iterations */
    enum iz_ns_method ns_method;
    enum iz_shape_scale shape_scale;
};

/* The hyperparameters of one update, with its lr and the decay of the updated
 * range. */
struct iz_hyper_at {
    struct iz_hyper hyper;
    int64_t t;        /* 1-based number of this update */
    float grad_scale; /* multiplies g: clip / (loss scale * contributions) */
    bool matrix;      /* the range is of matrices that are updated as such */
};

/* What the formula needs of that (codelets/flat/consts.h). */
union iz_consts;

/* A key of optimizer.params that the optimizer has. */
struct iz_optimizer_param {
    const char *key;
    const char *fallback; /* its default as JSON, where that of the table of
                             keys is another optimizer's; else NULL */
};

struct iz_optimizer_state {
    const char *name;     /* in checkpoints, behind the name of a unit */
    enum iz_moment which; /* how it is kept in fewer bytes: with a sign as m, or
                             never negative as v */
    bool of_elements;     /* matrices that are updated as such have none */
};

struct iz_optimizer {
    const char *type; /* word of IZ_OPTIMIZER_TYPES */
    bool matrices;    /* those of blocks are updated as such */
    const char *name; /* in checkpoints: equal names can follow each other */
    const struct iz_optimizer_param *param; /* ends with key = NULL */
    int states;
    struct iz_optimizer_state state[IZ_STATES_MAX];
    void (*consts)(union iz_consts *k, const struct iz_hyper_at *s);
};

const struct iz_optimizer *iz_optimizer(enum iz_optimizer_type t);

/* What the update of a matrix is multiplied by. */
double iz_hyper_shape_scale(const struct iz_hyper *a, int64_t out, int64_t in);

/* Whether the optimizer has this key of optimizer.params. */
const struct iz_optimizer_param *
iz_optimizer_param(const struct iz_optimizer *o, const char *key);

union iz_consts iz_hyper_consts(const struct iz_hyper_at *s);

IZ_C_END
