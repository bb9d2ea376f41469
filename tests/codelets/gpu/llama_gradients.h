/* SPDX-License-Identifier: Apache-2.0 */
/* Gradients of the ops of the Llama family in double precision, as formulas. */
#ifndef IZ_TESTS_CODELETS_GPU_LLAMA_GRADIENTS_H
#define IZ_TESTS_CODELETS_GPU_LLAMA_GRADIENTS_H

#include <stdint.h>

/* One row of c columns: writes dx, adds to dw. */
void rmsnorm_gradient(double *dx, double *dw, const double *a, const double *dy,
                      const double *w, int64_t c, double eps);

/* dg and du of dy times swiglu(g, u). */
void swiglu_gradient(double *dg, double *du, double g, double u, double dy);

#endif
