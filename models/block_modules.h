/* SPDX-License-Identifier: Apache-2.0 */
/* What the layers of a transformer (block.c) and the lists of its units
 * (block_units.c) share. */
#pragma once

#include "models/block.h"
#include "models/parts.h"

/* Every unit has a kind of its own, but blocks of a sort are alike: with an
 * MLP, with experts, or up to their router with experts in other units, of
 * which the last is another kind.  A block's kind is this and KINDS times its
 * sort. */
enum iz_block_kind {
    KIND_EMBED,
    KIND_BLOCK,
    KIND_EXPERTS,
    KIND_ROUTER,
    KIND_PART,
    KIND_PART_LAST,
    KIND_HEAD,
    KINDS
};

/* Modules of a block, each with a weight and perhaps a bias; the head has the
 * first. */
enum iz_block_module {
    NORM_1,
    QKV,
    ATTN_PROJ,
    NORM_2,
    FC,
    MLP_PROJ,
    Q_NORM,
    K_NORM,
    ROUTER,
    BEHIND_1,
    BEHIND_2,
    SINKS,
    CHOICE,
    SHARED_FC,
    SHARED_PROJ,
    SHARED_GATE,
    MODULES
};

/* What may stand at a place of a unit's list of parameters. */
struct iz_block_place {
    enum iz_block_module module;
    bool bias;
};
enum { BLOCK_MOST = 2 * MODULES };

/* The parameters of a unit of this kind in their order; returns how many. */
int iz_block_list(struct iz_block_place list[BLOCK_MOST],
                  const struct iz_block *b, int kind);

/* ---- a unit's parameters ---- */

static inline int kind_of(const struct iz_layer *a)
{
    return a->kind % KINDS;
}

static inline int sort_of(const struct iz_layer *a)
{
    return a->kind / KINDS;
}

static inline bool has(const struct iz_layer *a, unsigned what)
{
    return ((const struct iz_block *)a->self)->has & what;
}

/* The place of a module's weight or bias in the list of the unit; -1: it has
 * none. */
static inline int place_of(const struct iz_layer *a, int module, bool bias)
{
    struct iz_block_place list[BLOCK_MOST];
    int n = iz_block_list(list, a->self, kind_of(a));
    for (int i = 0; i < n; i++)
        if ((int)list[i].module == module && list[i].bias == bias)
            return i;
    return -1;
}

static inline struct iz_linear linear(const struct iz_layer *a, int module)
{
    int w = place_of(a, module, false), b = place_of(a, module, true);
    const struct iz_block *c = a->self;
    struct iz_linear l = {.out_in = !has(a, IZ_HAS_IN_OUT),
                          .add = c->chunk && c->chunk->adds};
    if (w >= 0) {
        l.w = a->w[w];
        l.dw = gradient(a, w);
    }
    if (b >= 0) {
        l.b = a->w[b];
        l.db = gradient(a, b);
    }
    return l;
}

typedef struct iz_view take_fn(struct iz_exec *x, enum iz_dtype t, int64_t rows,
                               int64_t cols);

/* The module with this number; its statistics, of m rows and of each of
 * `heads`, are taken by iz_exec_save or iz_exec_work. */
static inline struct iz_norm_layer norm(struct iz_exec *x,
                                        const struct iz_layer *a, int module,
                                        take_fn *take, int64_t m, int heads)
{
    const struct iz_block *c = a->self;
    struct iz_linear l = linear(a, module);
    struct iz_norm_layer n = {.w = l.w,
                              .b = l.b,
                              .dw = l.dw,
                              .db = l.db,
                              .eps = c->norm_eps,
                              .plus_one = has(a, IZ_HAS_PLUS_ONE)};
    if (has(a, IZ_HAS_MEAN) && module != Q_NORM && module != K_NORM)
        n.mean = take(x, IZ_F32, m, 1);
    n.rstd = take(x, IZ_F32, m, heads);
    return n;
}

/* ---- a block with experts ---- */

/* Kept of its routes; of the shared expert u [M,2F], and of its gate what a
 * router keeps that has one expert for all. */
struct iz_block_routed {
    struct iz_routes routes, gate;
    struct iz_view shared;
};

struct iz_block_routed
iz_block_routed_saves(struct iz_exec *x, const struct iz_layer *a, int64_t m);
/* Chooses experts for the rows of h. */
void iz_block_route(struct iz_exec *x, const struct iz_layer *a,
                    const struct iz_block_routed *r, struct iz_view h);
/* From the gradients of the chosen weights and of what the experts did with h:
 * that of h in its place, and the router's. */
void iz_block_route_bwd(struct iz_exec *x, const struct iz_layer *a,
                        const struct iz_block_routed *r, struct iz_view dweight,
                        struct iz_view h, struct iz_view dh);
/* Of the shared expert, if there is one: u from h; y += what it makes of u;
 * from dy its gradients, and dh += what it says of h. */
void iz_block_shared_widen(struct iz_exec *x, const struct iz_layer *a,
                           const struct iz_block_routed *r, struct iz_view h);
void iz_block_shared(struct iz_exec *x, const struct iz_layer *a,
                     const struct iz_block_routed *r, struct iz_view y);
void iz_block_shared_bwd(struct iz_exec *x, const struct iz_layer *a,
                         const struct iz_block_routed *r, struct iz_view dh,
                         struct iz_view h, struct iz_view dy);

/* ---- layers ---- */

void iz_block_forward(struct iz_exec *x, const struct iz_layer *a);
void iz_block_backward(struct iz_exec *x, const struct iz_layer *a);
/* Of a chunk: its keys and values alone, which may be kept. */
void iz_block_keys(struct iz_exec *x, const struct iz_layer *a, bool kept);
/* Takes what a forward keeps, of an exec that only counts. */
void iz_block_count_saves(struct iz_exec *x, const struct iz_layer *a);
/* The same of all rows, some at a time where that is asked for. */
void iz_block_forward_all(struct iz_exec *x, const struct iz_layer *a);
void iz_block_backward_all(struct iz_exec *x, const struct iz_layer *a);
void iz_block_router_forward(struct iz_exec *x, const struct iz_layer *a);
void iz_block_router_backward(struct iz_exec *x, const struct iz_layer *a);
void iz_block_tokens_forward(struct iz_exec *x, const struct iz_layer *a);
void iz_block_tokens_backward(struct iz_exec *x, const struct iz_layer *a);
void iz_block_head_backward(struct iz_exec *x, const struct iz_layer *a);
void iz_block_head_evaluate(struct iz_exec *x, const struct iz_layer *a);
void iz_block_head_generate(struct iz_exec *x, const struct iz_layer *a);
/* Which parameter of the head is the matrix. */
int iz_block_head_matrix(const struct iz_block *b);
void iz_block_head_backward_all(struct iz_exec *x, const struct iz_layer *a);
void iz_block_head_evaluate_all(struct iz_exec *x, const struct iz_layer *a);
