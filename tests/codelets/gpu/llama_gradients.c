/* SPDX-License-Identifier: Apache-2.0 */
/* Formulas; test_kernels_cuda holds them against central differences. */
#include "tests/codelets/gpu/llama_gradients.h"

#include <math.h>

void rmsnorm_gradient(double *dx, double *dw, const double *a, const double *dy,
                      const double *w, int64_t c, double eps)
{
    double square = 0, dot = 0, s;

    for (int64_t j = 0; j < c; j++) {
        square += a[j] * a[j] / (double)c;
        dot += dy[j] * w[j] * a[j];
    }
    s = 1 / sqrt(square + eps);
    for (int64_t j = 0; j < c; j++) {
        dw[j] += dy[j] * a[j] * s;
        dx[j] = s * dy[j] * w[j] - pow(s, 3) * a[j] * dot / (double)c;
    }
}

void swiglu_gradient(double *dg, double *du, double g, double u, double dy)
{
    double s = 1 / (1 + exp(-g));

    *dg = dy * u * (s + g * s * (1 - s));
    *du = dy * g * s;
}
