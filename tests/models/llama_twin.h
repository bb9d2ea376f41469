/* SPDX-License-Identifier: Apache-2.0 */
/* The block of the Llama family in double precision, for all models that have
 * it. */
#pragma once

#include "models/llama.h"
#include "tests/models/twin.h"

/* A block's tensors in checkpoint order; then the biases and norms that the
 * config asks for. */
enum { NORM_1, QKV, ATTN_PROJ, NORM_2, GATE_UP, DOWN, REST };

/* Zeros; freed by the caller. */
double *twin_take(int64_t n);

/* y [m,out] = r + a [m,in] w + b, with w [out,in]. */
void twin_product(double *y, double *r, double *a, double *w, double *b,
                  int64_t m, int64_t in, int64_t out);

/* Attention of a block with tensors p: x [m,width] in place, and h [m,width],
 * what goes into the MLP. */
void llama_twin_attention(const struct iz_llama_config *c, double *const *p,
                          double *x, double *h, int samples);
/* x [m,width] += the MLP of h. */
void llama_twin_mlp(const struct iz_llama_config *c, double *const *p,
                    double *x, double *h, int64_t m);
