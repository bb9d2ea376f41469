/* SPDX-License-Identifier: Apache-2.0 */
/* The Adam and AdamW update of one chunk of a flat fp32 shard on the CPU, with
 * the low-precision copy of the parameters written in the same pass. */
#ifndef IZ_CODELETS_FLAT_ADAMW_H
#define IZ_CODELETS_FLAT_ADAMW_H

#include <stdbool.h>
#include <stdint.h>

#include "codelets/flat/dtype.h"
#include "codelets/flat/moment.h"

IZ_C_BEGIN

struct iz_adam {
    double lr, beta1, beta2, eps, weight_decay;
    bool adamw;           /* decay the parameter; false: add wd * p to g (L2) */
    bool bias_correction; /* divide m and v by 1 - beta^t */
    int64_t t;            /* 1-based number of this update */
    float grad_scale;     /* multiplies g: clip / (loss scale * N * G) */
};

/* What an update of an element needs, rounded to fp32 once. */
struct iz_adam_consts {
    float scale, beta1, rest1, beta2, rest2;
    float l2;   /* L2 decay, 0 with AdamW */
    float keep; /* 1 - lr * decay with AdamW, else 1 */
    float step; /* lr / (1 - beta1^t) * sqrt(1 - beta2^t) */
    float eps;  /* eps * sqrt(1 - beta2^t) */
};

struct iz_adam_consts iz_adam_consts_of(const struct iz_adam *a);

/* With g scaled:
 *     m = b1 m + (1 - b1) g         v = b2 v + (1 - b2) g^2
 *     p = p (1 - lr wd) - lr/(1 - b1^t) * m / (sqrt(v)/sqrt(1 - b2^t) + eps)
 * the fraction times sqrt(1 - b2^t), so that one division does it; in fp32,
 * each operation rounded once, so that the bits of an element depend neither on
 * where a chunk starts nor on the SIMD level.  p is the fp32 master;
 * p, m and v are updated in place.  out receives the new p as out_type, or is
 * NULL.  m and v below FLT_MIN become 0: an element without gradient would
 * otherwise stay subnormal for ever, at a hundred times the cost.  No two
 * buffers may overlap. */
void iz_adam_chunk(const struct iz_adam *a, int64_t n, float *p, float *m,
                   float *v, const void *g, enum iz_dtype g_type, void *out,
                   enum iz_dtype out_type);

/* The same with the numbers of iz_adam_consts_of, for many short pieces. */
void iz_adam_piece(const struct iz_adam_consts *c, int64_t n, float *p,
                   float *m, float *v, const void *g, enum iz_dtype g_type,
                   void *out, enum iz_dtype out_type);

/* Elements of a chunk that are updated alike, up to the one at `end`. */
struct iz_adam_span {
    struct iz_adam_consts consts;
    int64_t end;
};

/* As many as elements in a block, so that a call always gets on by one. */
enum { IZ_ADAM_SPANS = IZ_MOMENT_BLOCK };

/* An update of n elements whose m and v are kept in fewer bytes; n is a
 * multiple of IZ_MOMENT_BLOCK.  The arrays m and v are longer: the elements
 * begin at `at` of them, as in iz_moment_load.  p, g and out begin with the
 * first element; out may be NULL.  On a GPU p, g and out are aligned to 16
 * bytes, m and v in bf16 to 8. */
struct iz_adam_narrow {
    int64_t n, at;
    float *p;
    struct iz_moments m, v; /* of the same type, not fp32 */
    const void *g;
    void *out;
    enum iz_dtype g_type, out_type;
    uint64_t key;  /* of the rounding, with the position of the first */
    int64_t first; /* element: see iz_moment_store */
    const struct iz_adam_span *span; /* in order; the last one ends at n or
                                        later */
    int spans;                       /* at most IZ_ADAM_SPANS */
};

/* m and v are widened, updated as by iz_adam_chunk and rounded, a tile at a
 * time. */
void iz_adam_narrow(const struct iz_adam_narrow *a);

IZ_C_END

#endif
