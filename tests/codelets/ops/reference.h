/* SPDX-License-Identifier: Apache-2.0 */
/* The ops once more, as plain loops in double precision.  Gradients are central
 * differences, or formulas; those of ops that agree with these are held against
 * PyTorch in the gradients of whole models (tests/e2e/hf/theirs.py). */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "codelets/ops/ops.h"

/* y [m,out] = r + a [m,in] w + b, with w [in,out], or [out,in] where out_in; r
 * and b may be NULL. */
struct ref_matmul {
    double *y, *r, *a, *w, *b;
    int64_t m, in, out;
    bool out_in;
};
void ref_matmul(const struct ref_matmul *p);

/* Layer normalisation of a [m,c]; without b (NULL) RMSNorm, which takes the
 * mean for 0; y may be a. */
void ref_norm(double *y, const double *a, const double *w, const double *b,
              int64_t m, int64_t c, double eps);
/* Of a row, with an eps of 1e-5: writes dx, adds to dw and db; without db
 * (NULL) of RMSNorm. */
void ref_norm_gradient(double *dx, double *dw, double *db, const double *a,
                       const double *dy, const double *w, int64_t c);

double ref_gelu(double a);
double ref_activation(enum iz_activation act, double a);
/* By differences, to nine digits. */
double ref_activation_gradient(enum iz_activation act, double a);
/* What the gate of a gated row is multiplied with. */
double ref_up(enum iz_activation act, double u);

/* Turns heads of a [m,ld] in place, by complex numbers. */
void ref_rope(double *a, int64_t m, int64_t ld, const struct iz_rope *r,
              bool back);

/* o [samples*seq, c] from qkv [.., 3 c]; every row of a sample sees all of it.
 */
struct ref_attention {
    double *o;
    const double *qkv;
    int64_t samples, seq, heads, c;
};
void ref_attention(const struct ref_attention *p);

/* y [m, d + n (n + 1) / 2] from z [m,d] and e [m n, d]. */
void ref_interact(double *y, const double *z, const double *e, int64_t m,
                  int64_t n, int64_t d);

/* Mean cross-entropy of a [m,c] times w [v,c] transposed. */
double ref_classifier(const double *a, const double *w, const int32_t *target,
                      int64_t m, int64_t c, int64_t v);

/* grad[i] = df/din[i] by central differences; `in` is put back. */
void ref_gradient(double *grad, double (*f)(void *), void *arg, double *in,
                  int64_t n);
