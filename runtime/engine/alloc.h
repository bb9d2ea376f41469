/* SPDX-License-Identifier: Apache-2.0 */
/* Takes the planned memory and files and registers them with StarPU: first the
 * units (unit_memory.c), then the buffers that no unit owns: staging, lists of
 * rows, rings of gathered units and of gradients, the tracks of micro-batches,
 * scalars, collectives. */
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

/* ---- unit_memory.c: what units own ---- */

/* Parameters, gradients and states, in memory or in files.  -errno, with the
 * reason printed unless it is -ENOMEM. */
int iz_unit_memory_open(struct iz_engine *e);
void iz_unit_memory_close(struct iz_engine *e);

/* ---- handle.c: memory of the engine as StarPU knows it ---- */

/* What a buffer holds; the second coordinate of its handle, after the unit or
 * the place in its ring. */
enum iz_datum {
    IZ_DATUM_PARAM,
    IZ_DATUM_FROZEN, /* frozen parameters that are apart */
    IZ_DATUM_QUANT,  /* quantised parameters */
    IZ_DATUM_COPY,   /* this rank's part of its group's copy */
    IZ_DATUM_GRAD,
    IZ_DATUM_STATE,
    IZ_DATUM_GATHERED,
    IZ_DATUM_UNIT_GRAD,
    IZ_DATUM_OWN_SUM,  /* of a rank's micro-batches, in a unit's own buffer */
    IZ_DATUM_RING_SUM, /* the same in a ring */
    IZ_DATUM_BOUNDARY,
    IZ_DATUM_REFERENCE, /* boundaries of the reference of pairs */
    IZ_DATUM_RAISED,    /* a boundary that came back from the host */
    IZ_DATUM_SAVED,
    IZ_DATUM_DY,
    IZ_DATUM_BATCH,
    IZ_DATUM_STAGING,
    IZ_DATUM_SPLIT_STATE, /* on the GPU, of an offloaded optimizer */
    IZ_DATUM_SPLIT_STAGING,
    IZ_DATUM_SPLIT_GRAD,
    IZ_DATUM_BLOCK_SUMS,   /* squares of the blocks of each piece */
    IZ_DATUM_SQUARES,      /* a unit's sum of squares */
    IZ_DATUM_SCALAR,       /* losses, control */
    IZ_DATUM_MATRIX,       /* a unit's, to update its matrices */
    IZ_DATUM_MATRIX_ABOVE, /* the same on a GPU */
    IZ_DATUM_MATRIX_PART,
    IZ_DATUM_QUANT_STAGING, /* codes of a unit, where weights are made of them
                             */
    IZ_DATUM_PIECE, /* a part of a parameter that has a handle of its own */
    IZ_DATA
};

struct iz_datum_info {
    const char *name;
    enum iz_class class; /* IZ_MEM_CLASSES: a part of other memory */
};
extern const struct iz_datum_info iz_datum_infos[IZ_DATA];
enum iz_tier iz_handle_datum_tier(const struct iz_plan *p, enum iz_datum d);

/* What StarPU knows an address by: that of memory on a GPU has a stand-in. */
uintptr_t iz_handle_address(const struct iz_engine *e, const void *p);
/* Names and places a handle for traces. */
void iz_handle_name(starpu_data_handle_t h, enum iz_datum d, int x);
/* The same, and the engine owns the handle: until iz_alloc_close, as it does
 * those that are made below. */
starpu_data_handle_t iz_handle_keep(struct iz_engine *e, starpu_data_handle_t h,
                                    enum iz_datum d, int x);
/* Registers bytes at p, which the engine's memory owns; d and x say to traces
 * what they are. */
starpu_data_handle_t iz_handle_open(struct iz_engine *e, void *p, int64_t bytes,
                                    enum iz_datum d, int x);
/* A void one, which stands for a region of a file. */
starpu_data_handle_t iz_handle_token(struct iz_engine *e, enum iz_datum d,
                                     int x);
/* Takes memory of the datum's class and tier and registers it in *h.  NULL with
 * the reason printed if the system refuses. */
void *iz_handle_take(struct iz_engine *e, starpu_data_handle_t *h,
                     enum iz_datum d, int x, int64_t bytes);
/* Unregisters all that the engine owns. */
void iz_handles_close(struct iz_engine *e);
/* Where that lies which host and device both touch: on the host. */
enum iz_tier iz_handle_tier(const struct iz_engine *e);
