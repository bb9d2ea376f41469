/* SPDX-License-Identifier: Apache-2.0 */
/* The tasks that call a model's layer functions: they turn buffers into views
 * of parameters and hand over to the model. */
#pragma once

#include "codelets/ops/ops.h"
#include "codelets/unit/layer.h"

enum iz_unit_call {
    IZ_CALL_FORWARD,
    IZ_CALL_BACKWARD,
    IZ_CALL_EVALUATE,
    IZ_CALL_GENERATE,
    IZ_CALL_AGAIN /* forward, inside a backward */
};

/* Where the parameters of a unit lie in its flat buffer; shared by all tasks of
 * the unit, valid as long as the run. */
struct iz_unit_layout {
    const struct iz_model *model;
    int unit;
    const int64_t *offset; /* of each own parameter, elements */
    /* Of the tied parameter in its own unit's buffer, and of what the reference
     * of pairs has in its place. */
    int64_t tied_offset, tied_reference;
    int64_t n, tied_n; /* elements of both flat gradients, padding included */
};

/* Argument of iz_unit_run: which buffer plays which part (-1: none). */
struct iz_unit_arg {
    const struct iz_unit_layout *layout;
    enum iz_unit_call call;
    int samples;
    enum iz_dtype type;            /* of parameters and unit gradients */
    signed char at_param, at_tied; /* flat parameters */
    signed char at_grad, at_tied_grad;
    signed char at_batch;         /* input records, target records, begins */
    signed char at_x, at_y, at_d; /* boundaries; d: dy in, dx out */
    signed char at_save;          /* kept activations; -1: scratch */
    signed char at_loss;          /* double */
    signed char at_scale;         /* float: loss scale */
    signed char at_weight;    /* double: of this call's loss in the step's */
    signed char at_logits;    /* float[vocab] */
    signed char at_told;      /* struct iz_aux */
    signed char at_reference; /* boundary that the last unit reads for it */
    /* Only for a sparse table: the list of touched rows
     * (codelets/flat/touched_rows.h).  Gradients hold these rows alone, and so
     * do parameters if `packed`. */
    signed char at_rows;
    bool packed;
    bool reference;              /* a forward of the reference of pairs */
    enum iz_recompute recompute; /* in training */
    int64_t save_bytes;          /* of the call */
    int64_t row;
    /* In training: the first sample's number among those of all steps; -1
     * otherwise, and then adapters have no dropout. */
    int64_t sample;
};

void iz_unit_run(struct iz_exec *x, void **buf, const void *arg);

/* Bytes and flops of a unit on `samples` samples, from dry runs of its
 * functions. */
struct iz_unit_cost {
    int64_t save_bytes[IZ_RECOMPUTES]; /* what forward keeps; FULL: nothing */
    /* Scratch of the hungriest call, without save_bytes[IZ_RECOMPUTE_NONE]. */
    int64_t work_bytes;
    /* backward without recomputing.  Seconds, at the given rates, are those of
     * the copies beside the ops, where these take longer. */
    struct iz_cost forward, backward, recompute[IZ_RECOMPUTES];
    bool attends;        /* attention is among its ops */
    const char *why_own; /* why it is ours; NULL: it may be cuDNN's */
};
/* rows: the gradient is of so many rows of a sparse table, 0: dense.  like:
 * side, type of activations and rates of the exec that will run it. */
struct iz_unit_cost iz_unit_cost(const struct iz_model *m, int unit,
                                 int samples, int64_t rows,
                                 enum iz_dtype param_type,
                                 const struct iz_exec *like);

/* Asks the libraries of a GPU's worker whether they support all operations of
 * the unit, and lets them prepare, so that steps need not wait for that.  like:
 * the worker's exec.  An earlier refusal in `why` stays. */
void iz_unit_ask(const struct iz_model *m, int unit, int samples,
                 enum iz_dtype param_type, const struct iz_exec *like,
                 struct iz_refusal *why);

/* Finds out which parameters are weights of linear layers, and how they are
 * stored: runs the unit's backward dry with adapter probe[i] for parameter i.
 * probe[] is empty on entry. */
void iz_unit_probe(const struct iz_model *m, int unit,
                   struct iz_adapter *probe);
