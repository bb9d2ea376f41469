/* SPDX-License-Identifier: Apache-2.0 */
/* Adam on the CPU, one pass over memory; the loop itself is in loops.c. */
#include "codelets/flat/adamw.h"

#include <assert.h>
#include <math.h>
#include <stddef.h>

#include "codelets/flat/simd.h"

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

/* Elements whose m and v are fp32 at a time: they stay in the first-level
 * cache, and are enough for the loops over them to overlap in the processor. */
enum { TILE = 512 };

/* Elements [i, i + n); the first of them is of this span or of a later one;
 * returns that of the last. */
static const struct iz_adam_span *update_tile(const struct iz_adam_narrow *a,
                                              const struct iz_adam_span *s,
                                              float *m, float *v, int64_t i,
                                              int64_t n)
{
    int64_t g_size = iz_dtype_bytes(a->g_type);
    int64_t out_size = iz_dtype_bytes(a->out_type);

    for (int64_t end = i + n, k; i < end; i += k) {
        while (s->end <= i)
            s++;
        k = (s->end < end ? s->end : end) - i;
        iz_adam_piece(&s->consts, k, a->p + i, m, v,
                      (const char *)a->g + i * g_size, a->g_type,
                      a->out ? (char *)a->out + i * out_size : NULL,
                      a->out_type);
        m += k;
        v += k;
    }
    return s;
}

void iz_adam_narrow(const struct iz_adam_narrow *a)
{
    const struct iz_adam_span *s = a->span;
    float m[TILE], v[TILE];

    assert(a->spans > 0 && a->span[a->spans - 1].end >= a->n);
    for (int64_t i = 0; i < a->n; i += TILE) {
        int64_t n = a->n - i < TILE ? a->n - i : TILE;

        iz_moment_load(m, &a->m, a->at + i, n);
        iz_moment_load(v, &a->v, a->at + i, n);
        s = update_tile(a, s, m, v, i, n);
        iz_moment_store(&a->m, a->at + i, m, n, a->key, a->first + i);
        iz_moment_store(&a->v, a->at + i, v, n, a->key, a->first + i);
    }
}
