/* SPDX-License-Identifier: Apache-2.0 */
/* A mixture of experts in place of a block's MLP: a router chooses some of them
 * for each row, and their gated MLPs' outputs are added by its weights.  No row
 * is dropped. */
#pragma once

#include "codelets/ops/ops.h"
#include "codelets/unit/layer.h"

struct iz_experts {
    int n; /* 0: no block has experts */
    int per_token, hidden;
    int per_unit;   /* of units of their own (experts_units.h); 0: none have */
    bool normalise; /* the weights of a row add up to 1 */
    float scale;    /* of these; 0: 1 */
    bool sigmoid;
    int groups, kept; /* as in struct iz_routes */
    int shared;       /* hidden channels of an expert that all rows go to */
    int every;        /* blocks every - 1, 2 every - 1, ... have experts, */
    int first, last;  /* from this one on, and up to this one, */
    char dense[256];  /* but for these: numbers with commas */
    int blocks; /* that have experts: a router's loss is by so much less */
    double balance, z; /* coefficients of its losses */
};

/* Whether a block, counted from 0, has experts. */
bool iz_experts_at(const struct iz_experts *c, int block);

/* What a block keeps of its router: all of r. */
struct iz_routes iz_routes_saves(struct iz_exec *x, const struct iz_experts *c,
                                 int64_t m);
/* Chooses experts for the rows of h [M,C]. */
void iz_experts_route(struct iz_exec *x, const struct iz_experts *c,
                      const struct iz_routes *r, struct iz_view h,
                      const struct iz_linear *router, struct iz_aux *aux);
/* From dweight [M,k], and dh [M,C] of what the experts did with h: the gradient
 * of the router, and that of h in its place. */
void iz_experts_route_bwd(struct iz_exec *x, const struct iz_experts *c,
                          const struct iz_routes *r, struct iz_view dweight,
                          struct iz_view h, struct iz_view dh,
                          const struct iz_linear *router, float loss_scale);

/* What follows is of the experts that are here (struct iz_routes).  Their
 * weights lie one below the other; u [kM,2F] is their gate, up, by expert. */

/* u from h. */
void iz_experts_widen(struct iz_exec *x, const struct iz_routes *r,
                      struct iz_view u, struct iz_view h,
                      const struct iz_linear *fc);
/* y = c + what the experts make of u. */
void iz_experts_narrow(struct iz_exec *x, const struct iz_routes *r,
                       struct iz_view u, struct iz_view y, struct iz_view c,
                       const struct iz_linear *proj, enum iz_activation act);
/* From dy the gradients of the experts' last weights, and of u in its place;
 * dweight [M,k] gets what is theirs, by [kM,C] is scratch of the caller. */
void iz_experts_narrow_bwd(struct iz_exec *x, const struct iz_routes *r,
                           struct iz_view u, struct iz_view dweight,
                           struct iz_view by, struct iz_view dy,
                           const struct iz_linear *proj,
                           enum iz_activation act);
/* From these the gradients of the other weights; dh = c + that of h. */
void iz_experts_widen_bwd(struct iz_exec *x, const struct iz_routes *r,
                          struct iz_view u, struct iz_view dh,
                          struct iz_view by, struct iz_view c, struct iz_view h,
                          const struct iz_linear *fc);
