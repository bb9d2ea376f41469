/* SPDX-License-Identifier: Apache-2.0 */
/* One matrix product with all its tensors, and what must come out. */
#pragma once

#include "tests/codelets/ops/scene.h"

/* The last six: an adapter, where it has a rank, and its magnitudes. */
enum {
    Y,
    R,
    A,
    W,
    B,
    DY,
    DA,
    DW,
    DB,
    LA,
    LB,
    DLA,
    DLB,
    LM,
    DLM,
    PRODUCT_TENSORS
};

struct product {
    struct scene s;
    int64_t m, in, out, rank;
    int64_t first, part; /* the adapter's outputs */
    bool out_in, add, with_r, with_b, in_place, with_m;
    bool bf16, tf32, rows_vary; /* as in struct iz_exec */
    unsigned absent;            /* bit i: gradient i is no argument */
    float scale;                /* of the product, or of the adapter */
    double drop;                /* of what the adapter reads */
    /* What intermediate roundings may add, in parts of the magnitudes that a
     * number is made of. */
    double slack, slack_dw; /* of all but dw; of dw, which no adapter rounds */
};

/* s: samples, in, out; dw: type of the weights' gradient. */
struct product product_new(enum iz_dtype param, enum iz_dtype dw,
                           const int64_t s[3], bool out_in);
void product_free(struct product *p);

/* Odd sizes, of which the last is larger. */
extern const int64_t product_sizes[9][3];
/* Calls check with products of n sizes in both layouts, in fp32 and each in one
 * of the other types. */
void product_each(void (*check)(struct product *p), const int64_t (*size)[3],
                  int n, bool wide_dw);

/* The three ops, on the tensors of a product. */
enum call { FORWARD, GRADIENT_A, GRADIENT_W };
scene_op product_forward, product_gradient_a, product_gradient_w;

/* Returns which tensors it had to write, bit by bit: with an adapter its
 * gradients in place of dw. */
unsigned product_run(struct product *p, enum call call);
/* These tensors with what must come out: in dw, where p->add, added to what was
 * there. */
void product_compare(struct product *p, unsigned written);
/* Both. */
void product_check(struct product *p, enum call call);
void product_check_forward(struct product *p, bool with_r, bool with_b);
void product_check_in_place(struct product *p);
/* All of these: the forward with r, b, both, neither, scaled, and r in y. */
void product_check_all(struct product *p);
