/* SPDX-License-Identifier: Apache-2.0 */
/* The arguments of ops that are tested on the CPU and as CUDA kernels, and the
 * calls with them: x is the backend's, arg the struct.  m rows; act is the type
 * of activations. */
#ifndef IZ_TESTS_CODELETS_OPS_ARGS_H
#define IZ_TESTS_CODELETS_OPS_ARGS_H

#include "tests/codelets/ops/fixture.h"

/* ---- normalisation ---- */

#define NORM_EPS 1e-5f /* of rmsnorm */

/* Where the gradient goes; with r added but for the last. */
enum norm_place { DX_FRESH, DX_IN_R, DX_IN_DY, DX_NO_R };

struct norm {
    struct tensor a, w, b, y, r, dy, dx, dw, db, mean, rstd;
    struct iz_norm n;        /* of layernorm */
    struct iz_rmsnorm rms;   /* without b, db and mean */
    struct iz_view residual; /* r or absent */
    struct iz_view into;     /* dx of backward */
    double *out;             /* m * c, for a reference */
};

/* c columns; activations from [-scale, scale). */
struct norm norm_new(enum iz_dtype act, enum iz_dtype weights, int64_t m,
                     int64_t c, double scale);
void norm_free(struct norm *n);
void norm_place(struct norm *n, enum norm_place place);

void layernorm_forward(struct iz_exec *x, void *arg);
void layernorm_again(struct iz_exec *x, void *arg); /* into dx */
void layernorm_backward(struct iz_exec *x, void *arg);
void rmsnorm_forward(struct iz_exec *x, void *arg);
void rmsnorm_again(struct iz_exec *x, void *arg);
void rmsnorm_backward(struct iz_exec *x, void *arg);

/* ---- gated unit ---- */

struct swiglu {
    struct tensor a, y, dy, da;
};

/* f columns. */
struct swiglu swiglu_new(enum iz_dtype act, int64_t m, int64_t f, double scale);
void swiglu_free(struct swiglu *s);
void swiglu_forward(struct iz_exec *x, void *arg);
void swiglu_backward(struct iz_exec *x, void *arg);

/* ---- products of pairs ---- */

struct interact {
    struct tensor y, z, e, dy, dz, de;
    double *out; /* of the reference */
    int64_t n;
};

/* n vectors and one more, of d columns. */
struct interact interact_new(enum iz_dtype act, int64_t m, int64_t n,
                             int64_t d);
void interact_free(struct interact *t);
void interact_forward(struct iz_exec *x, void *arg);
void interact_backward(struct iz_exec *x, void *arg);
/* Fills out; its product with dy. */
double interact_objective(void *arg);
/* dz and de after interact_backward, against central differences. */
void interact_check_gradients(struct interact *t, double tol);

#endif
