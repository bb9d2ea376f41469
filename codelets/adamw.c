/* SPDX-License-Identifier: Apache-2.0 */
/* Adam on the CPU, one pass over memory; the loop itself is in exact.c. */
#include "codelets/adamw.h"

#include <assert.h>
#include <math.h>
#include <stddef.h>

#include "codelets/simd.h"

struct iz_adam_consts iz_adam_consts_of(const struct iz_adam *a)
{
    double t = (double)a->t, wd = a->weight_decay;
    double c1 = a->bias_correction ? 1.0 - pow(a->beta1, t) : 1.0;
    double unbias = a->bias_correction ? sqrt(1.0 - pow(a->beta2, t)) : 1.0;

    return (struct iz_adam_consts){
        .scale = a->grad_scale,
        .beta1 = (float)a->beta1,
        .rest1 = (float)(1.0 - a->beta1),
        .beta2 = (float)a->beta2,
        .rest2 = (float)(1.0 - a->beta2),
        .l2 = a->adamw ? 0.0f : (float)wd,
        .keep = a->adamw ? (float)(1.0 - a->lr * wd) : 1.0f,
        .step = (float)(a->lr / c1 * unbias),
        .eps = (float)(a->eps * unbias),
    };
}

void iz_adam_piece(const struct iz_adam_consts *c, int64_t n, float *p,
                   float *m, float *v, const void *g, enum iz_dtype g_type,
                   void *out, enum iz_dtype out_type)
{
    const struct iz_adam_streams s = {p, m, v, g, g_type, out, out_type};

    assert(n >= 0);
    iz_simd()->adam(c, &s, n);
}

void iz_adam_chunk(const struct iz_adam *a, int64_t n, float *p, float *m,
                   float *v, const void *g, enum iz_dtype g_type, void *out,
                   enum iz_dtype out_type)
{
    const struct iz_adam_consts c = iz_adam_consts_of(a);

    assert(a->t >= 1);
    iz_adam_piece(&c, n, p, m, v, g, g_type, out, out_type);
}
