/* SPDX-License-Identifier: Apache-2.0 */
/* Adam on the CPU, one pass over memory.  The bits are part of the contract:
 * build this file with -ffp-contract=off. */
#include "codelets/adamw.h"

#include <assert.h>
#include <float.h>
#include <math.h>
#include <stddef.h>

#include "codelets/build.h"

enum {
    BLOCK = 1024
}; /* elements converted at a time, in the first-level cache */

struct iz_adam_consts iz_adam_consts_of(const struct iz_adam *a)
{
    double t = (double)a->t, wd = a->weight_decay;
    double c1 = a->bias_correction ? 1.0 - pow(a->beta1, t) : 1.0;
    double c2 = a->bias_correction ? 1.0 - pow(a->beta2, t) : 1.0;

    return (struct iz_adam_consts){
        .scale = a->grad_scale,
        .beta1 = (float)a->beta1,
        .rest1 = (float)(1.0 - a->beta1),
        .beta2 = (float)a->beta2,
        .rest2 = (float)(1.0 - a->beta2),
        .l2 = a->adamw ? 0.0f : (float)wd,
        .keep = a->adamw ? (float)(1.0 - a->lr * wd) : 1.0f,
        .step = (float)(a->lr / c1),
        .unbias = (float)sqrt(c2),
        .eps = (float)a->eps,
    };
}

static inline float flush(float x)
{
    return fabsf(x) < FLT_MIN ? 0.0f : x;
}

/* Decay that differs between elements would come in here, as arrays or as runs
 * in place of c->l2 and c->keep. */
IZ_SIMD static void update(const struct iz_adam_consts *restrict c, int64_t n,
                           float *restrict p, float *restrict m,
                           float *restrict v, const float *restrict g)
{
    const struct iz_adam_consts k = *c;

    for (int64_t i = 0; i < n; i++) {
        float gi = g[i] * k.scale + k.l2 * p[i];
        float mi = flush(k.beta1 * m[i] + k.rest1 * gi);
        float vi = flush(k.beta2 * v[i] + k.rest2 * (gi * gi));

        m[i] = mi;
        v[i] = vi;
        p[i] = p[i] * k.keep - k.step * (mi / (sqrtf(vi) / k.unbias + k.eps));
    }
}

/* One block: g is expanded and p is narrowed while they are in the cache. */
static void update_block(const struct iz_adam_consts *c, int64_t n, float *p,
                         float *m, float *v, const void *g,
                         enum iz_dtype g_type)
{
    float buf[BLOCK];

    if (g_type != IZ_F32) {
        iz_cast(buf, IZ_F32, g, g_type, n);
        g = buf;
    }
    update(c, n, p, m, v, g);
}

void iz_adam_chunk(const struct iz_adam *a, int64_t n, float *p, float *m,
                   float *v, const void *g, enum iz_dtype g_type, void *out,
                   enum iz_dtype out_type)
{
    const struct iz_adam_consts c = iz_adam_consts_of(a);
    const int64_t g_bytes = iz_dtype_bytes(g_type);
    const int64_t out_bytes = iz_dtype_bytes(out_type);

    assert(a->t >= 1 && n >= 0);
    for (int64_t i = 0; i < n; i += BLOCK) {
        int64_t k = n - i < BLOCK ? n - i : BLOCK;

        update_block(&c, k, p + i, m + i, v + i, (const char *)g + i * g_bytes,
                     g_type);
        if (out != NULL)
            iz_cast((char *)out + i * out_bytes, out_type, p + i, IZ_F32, k);
    }
}
