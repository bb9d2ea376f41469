/* SPDX-License-Identifier: Apache-2.0 */
/* Takes the planned memory and files and registers them with StarPU: makes the
 * arrays of handles, then goes through the plan's list of places (place.c). */
#pragma once

#include "runtime/engine/engine.h"

/* 0, or negative errno with the reason printed; close also after an open that
 * failed. */
int iz_alloc_open(struct iz_engine *e);
void iz_alloc_close(struct iz_engine *e);

/* The next staging buffer of a kind, which take turns. */
struct iz_staging *iz_engine_next_staging(struct iz_engine *e,
                                          enum iz_staging_kind k);
/* Buffer for the next gradient contribution to a unit. */
starpu_data_handle_t iz_engine_next_grad(struct iz_engine *e, int unit);
/* Buffer for the next sum of micro-batches, of a unit whose ring has some. */
starpu_data_handle_t iz_engine_next_sum(struct iz_engine *e, int unit);

/* Buffer for the next unit whose matrices are updated as such. */
struct iz_matrix_buffer *iz_engine_next_matrices(struct iz_engine *e);

/* ---- place.c: memory and files for all places ---- */

/* Takes each place of the plan and hands it to its owner, whose arrays are
 * there.  -errno, with the reason printed unless it is -ENOMEM. */
int iz_places_open(struct iz_engine *e);

/* ---- unit_memory.c: what units own ---- */

/* How parameters, gradients and states lie; their places come later. */
void iz_unit_memory_open(struct iz_engine *e);
void iz_unit_memory_close(struct iz_engine *e);
/* The place of parameters, in memory or of one chunk in a file (p NULL). */
void iz_unit_memory_params(struct iz_engine *e, const struct iz_place *a,
                           void *p);
/* The place of an accumulator, or of its blocks' sums: has a handle for each
 * piece. */
void iz_unit_memory_pieces(struct iz_engine *e, const struct iz_place *a,
                           void *p);

/* ---- handle.c: memory of the engine as StarPU knows it, and arrays ---- */

/* Names and places a handle for traces. */
void iz_handle_name(starpu_data_handle_t h, enum iz_datum d, int x);
/* Registers bytes at p, which the engine's memory owns; d and x say to traces
 * what they are.  The engine owns the handle until iz_alloc_close. */
starpu_data_handle_t iz_handle_open(struct iz_engine *e, void *p, int64_t bytes,
                                    enum iz_datum d, int x);
/* A void one, which stands for a region of a file. */
starpu_data_handle_t iz_handle_token(struct iz_engine *e, enum iz_datum d,
                                     int x);
/* Unregisters all that the engine owns. */
void iz_handles_close(struct iz_engine *e);

/* n zeroed elements, or what was malloc'ed elsewhere, until iz_alloc_close. */
void *iz_engine_take(struct iz_engine *e, int64_t n, size_t size);
void *iz_engine_own(struct iz_engine *e, void *p);
