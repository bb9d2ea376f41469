/* SPDX-License-Identifier: Apache-2.0 */
/* A model as the program runs it unit by unit: training, what the planner
 * relies on, and gradients beside a double-precision model that has the same
 * parameters, where these are not compared with the numbers of transformers
 * (tests/e2e/hf/families.py). */
#pragma once

#include "codelets/unit/unit.h"
#include "tests/codelets/ops/fixture.h"
#include "tests/codelets/ops/reference.h"

enum { TWIN_PARAMS = 80 };

struct twin;

/* A config and a number of samples; of a gradient every step-th element. */
struct twin_case {
    const void *config;
    int samples, step;
};

/* A program's model and how to test it. */
struct twin_kind {
    const char *name;
    int (*open)(struct iz_model **out, const void *config);
    /* The loss in double, from `param` and the samples; NULL: others compare
     * the gradients. */
    double (*loss)(const struct twin *t);
    /* A random record; NULL: samples are tokens, every fourth without target.
     */
    void (*fill)(const struct iz_model *m, void *record);
    struct twin_case gradients[9], usual, recomputed;
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
    bool again;            /* a call is a forward for a backward */
    double got;            /* the loss of the program */
    struct iz_aux aux;     /* what its units told since it was cleared */
};

/* Runs the tests that all models have, then n of the model's own. */
int twin_main(const struct twin_kind *k, const struct CMUnitTest *own,
              size_t n);

/* A model that is possible; the caller's. */
struct iz_model *twin_open(const struct twin_kind *k, const void *config);

/* Of forward and backward, by dry runs. */
double twin_flops(const struct twin_kind *k, const void *config, int samples);
