/* SPDX-License-Identifier: Apache-2.0 */
/* What the layers of a transformer (block.c) and the lists of its units
 * (block_units.c) share. */
#pragma once

#include "models/block.h"

/* Every unit has a kind of its own, but blocks are alike: with an MLP, with
 * experts, or up to their router with experts in other units, of which the last
 * is another kind. */
enum iz_block_kind {
    KIND_EMBED,
    KIND_BLOCK,
    KIND_EXPERTS,
    KIND_ROUTER,
    KIND_PART,
    KIND_PART_LAST,
    KIND_HEAD
};

/* What a block has, in the order of its list; with a bias behind each, or where
 * there are some with llama, behind all of them: the bias of QKV, the norms of
 * queries and keys, the router. */
enum { NORM_1, QKV, ATTN_PROJ, NORM_2, FC, MLP_PROJ, PARTS };
enum { BLOCK_MOST = 2 * PARTS };

void iz_block_forward(struct iz_exec *x, const struct iz_layer *a);
void iz_block_backward(struct iz_exec *x, const struct iz_layer *a);
void iz_block_router_forward(struct iz_exec *x, const struct iz_layer *a);
void iz_block_router_backward(struct iz_exec *x, const struct iz_layer *a);
void iz_block_tokens_forward(struct iz_exec *x, const struct iz_layer *a);
void iz_block_tokens_backward(struct iz_exec *x, const struct iz_layer *a);
void iz_block_head_backward(struct iz_exec *x, const struct iz_layer *a);
void iz_block_head_evaluate(struct iz_exec *x, const struct iz_layer *a);
void iz_block_head_generate(struct iz_exec *x, const struct iz_layer *a);
/* Which parameter of the head is the matrix. */
int iz_block_head_matrix(const struct iz_block *b);
