/* SPDX-License-Identifier: Apache-2.0 */
/* A model as the program runs it unit by unit, beside a double-precision model
 * of its own that has the same parameters: gradients, training, and what the
 * planner relies on. */
#pragma once

#include "codelets/unit/layer.h"
#include "tests/codelets/ops/fixture.h"

enum { TWIN_PARAMS = 80 };

struct twin;

/* A program's model and how to test it. */
struct twin_kind {
    int (*open)(struct iz_model **out, const void *config);
    /* The loss in double, from `param` and the samples. */
    double (*loss)(const struct twin *t);
    /* A random record; NULL: samples are tokens, every fourth without target.
     */
    void (*fill)(const struct iz_model *m, void *record);
};

struct twin {
    const struct twin_kind *kind;
    const void *config;
    struct iz_model *m; /* owned */
    enum iz_dtype type; /* of parameters */
    int samples, n;     /* n: parameters */
    unsigned char *records;
    void *input, *target;
    struct tensor w[TWIN_PARAMS], dw[TWIN_PARAMS]; /* unit by unit */
    struct tensor
        tied; /* what the head adds to the gradient of w[0], if tied */
    double *param[TWIN_PARAMS]; /* w[i].d */
    struct tensor *y, d;   /* boundaries; gradient, in and out in one place */
    struct iz_exec *saved; /* of each unit, when activations are kept */
    float loss_scale;      /* 1 */
    double got;            /* the loss of the program */
};

/* Parameters large enough that every path of the gradient counts. */
struct twin twin_new(const struct twin_kind *k, const void *config,
                     enum iz_dtype type, int samples);
void twin_free(struct twin *t);
/* Where the parameters of a unit begin in w. */
int twin_first(const struct twin *t, int unit);
/* All elements of parameter i become the value. */
void twin_set(struct twin *t, int i, double value);

/* Forward and backward of all units; `keep` the saved activations or compute
 * them again right before each backward.  Every call is made dry first and has
 * arenas of exactly that size. */
void twin_train(struct twin *t, bool keep);
/* The last unit alone, without gradients. */
void twin_evaluate(struct twin *t);
/* Of the last token of the first sample; logits[vocab]. */
void twin_generate(struct twin *t, float *logits);
/* Of forward and backward, by dry runs. */
double twin_flops(struct twin *t);
/* Of parameter i after twin_train, with what the head adds; loads nothing. */
double twin_gradient(const struct twin *t, int i, int64_t k);
/* So that twin_gradient can be asked. */
void twin_load(struct twin *t, int i);

/* Loss and the gradient of each parameter against central differences of the
 * loss in double, every step-th element. */
void twin_check(const struct twin_kind *k, const void *config,
                enum iz_dtype type, int samples, int step);
/* Ten steps of AdamW, here and in double; the loss falls by 0.1. */
void twin_check_steps(const struct twin_kind *k, const void *config,
                      int samples);
/* Kept and recomputed activations give the same bits with every type of
 * parameters; and so does evaluation the loss. */
void twin_check_recompute(const struct twin_kind *k, const void *config,
                          int samples);
/* NaN in all of parameter i reaches the loss, for i in [first, end). */
void twin_check_nan(const struct twin_kind *k, const void *config, int samples,
                    int first, int end);
/* Number of elements of all parameters. */
int64_t twin_parameters(const struct twin_kind *k, const void *config);
/* The model cannot be opened, and nothing is left. */
void twin_refuses(const struct twin_kind *k, const void *config);
