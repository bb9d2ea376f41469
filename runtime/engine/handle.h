/* SPDX-License-Identifier: Apache-2.0 */
/* Memory of the engine as StarPU knows it. */
#pragma once

#include "runtime/engine/engine.h"

/* What a buffer holds; the second coordinate of its handle, after the unit or
 * the place in its ring. */
enum iz_datum {
    IZ_DATUM_PARAM,
    IZ_DATUM_GRAD,
    IZ_DATUM_STATE,
    IZ_DATUM_GATHERED,
    IZ_DATUM_UNIT_GRAD,
    IZ_DATUM_BOUNDARY,
    IZ_DATUM_RAISED, /* a boundary that came back from the host */
    IZ_DATUM_SAVED,
    IZ_DATUM_DY,
    IZ_DATUM_BATCH,
    IZ_DATUM_STAGING,
    IZ_DATUM_SPLIT_STATE, /* on the GPU, of an offloaded optimizer */
    IZ_DATUM_SPLIT_STAGING,
    IZ_DATUM_SPLIT_GRAD,
    IZ_DATUM_BLOCK_SUMS, /* squares of the blocks that the GPU keeps */
    IZ_DATUM_SQUARES,    /* a unit's sum of squares */
    IZ_DATUM_SCALAR,     /* losses, control */
    IZ_DATUM_PIECE, /* a part of a parameter that has a handle of its own */
    IZ_DATA
};

struct iz_datum_info {
    const char *name;
    enum iz_class class; /* IZ_MEM_CLASSES: a part of other memory */
};
extern const struct iz_datum_info iz_datum_infos[IZ_DATA];
enum iz_tier iz_datum_tier(const struct iz_plan *p, enum iz_datum d);

/* Names and places a handle for traces. */
void iz_handle_name(starpu_data_handle_t h, enum iz_datum d, int x);
/* What StarPU knows an address by: that of memory on a GPU has a stand-in. */
uintptr_t iz_handle_address(const struct iz_engine *e, const void *p);
/* Registers bytes at p, which the engine's memory owns; d and x say to traces
 * what they are. */
starpu_data_handle_t iz_handle_open(struct iz_engine *e, void *p, int64_t bytes,
                                    enum iz_datum d, int x);
/* A void one, which stands for a region of a file. */
starpu_data_handle_t iz_handle_token(enum iz_datum d, int x);
/* Takes memory of the datum's class and tier and registers it in *h.  NULL with
 * the reason printed if the system refuses. */
void *iz_handle_take(struct iz_engine *e, starpu_data_handle_t *h,
                     enum iz_datum d, int x, int64_t bytes);
/* Sets NULL, and accepts it. */
void iz_handle_close(starpu_data_handle_t *h);
/* Where that lies which host and device both touch: on the host. */
enum iz_tier iz_handle_tier(const struct iz_engine *e);
