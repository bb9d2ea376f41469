/* SPDX-License-Identifier: Apache-2.0 */
/* A model that reads records, as the program runs it unit by unit, beside a
 * double-precision model of its own that has the same parameters: gradients,
 * training, and what the planner relies on. */
#ifndef IZ_TESTS_MODEL_TWIN_H
#define IZ_TESTS_MODEL_TWIN_H

#include "codelets/layer.h"
#include "tests/ops/fixture.h"

enum { TWIN_PARAMS = 80 };

struct twin {
    struct iz_model *m; /* owned */
    /* The loss in double, from `param` and the records; arg is the test's. */
    double (*loss)(const struct twin *t);
    const void *arg;
    enum iz_dtype type; /* of parameters */
    int samples, n;     /* n: parameters */
    unsigned char *records;
    void *input, *target;
    struct tensor w[TWIN_PARAMS], dw[TWIN_PARAMS]; /* unit by unit */
    double *param[TWIN_PARAMS];                    /* w[i].d */
    struct tensor *y, d;   /* boundaries; gradient, in and out in one place */
    struct iz_exec *saved; /* of each unit, when activations are kept */
    double got;            /* the loss of the program */
};

/* Takes the model over; fills parameters of rows > 1 from [-scale, scale), the
 * records by `fill`. */
struct twin twin_new(struct iz_model *m, enum iz_dtype type, int samples,
                     double scale,
                     void (*fill)(const struct iz_model *m, void *record));
void twin_free(struct twin *t);

/* Forward and backward of all units; `keep` the saved activations or compute
 * them again right before each backward.  Every call is made dry first and has
 * arenas of exactly that size. */
void twin_train(struct twin *t, bool keep);
/* The last unit alone, without gradients. */
void twin_evaluate(struct twin *t);

/* Loss and the gradient of each parameter against central differences of the
 * loss in double, every step-th element. */
void twin_check(struct twin *t, int step);
/* Ten steps of AdamW, here and in double; the loss falls by `fall`. */
void twin_check_steps(struct twin *t, double fall);
/* Kept and recomputed activations give the same bits; and so does evaluation
 * the loss.  b has the parameters and records of a. */
void twin_check_recompute(struct twin *a, struct twin *b);

#endif
