/* SPDX-License-Identifier: Apache-2.0 */
/* Places: one for each buffer of a rank, in memory or in a file.  The plan
 * lists them.  The bytes that a table prints or that are refused are sums over
 * this list, and a run takes what is in it, one after the other. */
#pragma once

#include <stdbool.h>

#include "runtime/plan/bytes.h"

struct iz_plan;
struct iz_model;

/* What a buffer holds, and whose it is: `of` and `index` of its place.  The
 * last ones are parts of other buffers that have a name in traces. */
enum iz_datum {
    IZ_DATUM_SCRATCH, /* -, worker: those that compute units come first */
    IZ_DATUM_BOUNCE,  /* pinned, for single copies */
    IZ_DATUM_SQUARES, /* sums of the units and the tracks */
    IZ_DATUM_LOGITS,
    IZ_DATUM_PARAM,       /* unit, in a file a chunk */
    IZ_DATUM_FROZEN,      /* unit, in a file a chunk: where they are apart */
    IZ_DATUM_QUANT,       /* unit, in a file a chunk: quantised parameters */
    IZ_DATUM_SECONDARY,   /* unit: this rank's share of its group's copy */
    IZ_DATUM_STATE,       /* unit, chunk */
    IZ_DATUM_SPLIT_STATE, /* the same on the GPU of an offloaded optimizer */
    IZ_DATUM_GRAD,        /* unit, accumulator */
    IZ_DATUM_SPLIT_GRAD,  /* the same, of what the GPU has apart */
    IZ_DATUM_OWN_SUM,     /* the same, of a rank's micro-batches */
    IZ_DATUM_BLOCK_SUMS,  /* unit: squares of the blocks of each piece */
    IZ_DATUM_STAGING,     /* kind, buffer */
    IZ_DATUM_SPLIT_STAGING,
    IZ_DATUM_QUANT_STAGING, /* codes of a unit, where weights are made of them
                             */
    IZ_DATUM_MATRIX,        /* -, buffer: a unit's, to update its matrices */
    IZ_DATUM_MATRIX_DEVICE, /* the same on a GPU */
    IZ_DATUM_TOUCHED,       /* -, list */
    IZ_DATUM_TOUCHED_SCRATCH,
    IZ_DATUM_GATHERED,  /* ring, slot */
    IZ_DATUM_UNIT_GRAD, /* ring, slot */
    IZ_DATUM_RING_SUM,  /* ring, slot: of a rank's micro-batches */
    IZ_DATUM_COLL,      /* scratch of reduce-scatters by MPI */
    IZ_DATUM_COLL_STAGING,
    IZ_DATUM_COLL_EXCHANGE,
    IZ_DATUM_BOUNDARY_SLOT, /* -, slot: a boundary that came back from the host
                             */
    IZ_DATUM_BATCH,         /* -, track */
    IZ_DATUM_DY,            /* -, track */
    IZ_DATUM_REFERENCE, /* track, which: boundaries of the reference of pairs */
    IZ_DATUM_BOUNDARY,  /* unit, track */
    IZ_DATUM_SAVED,     /* unit, track */
    IZ_DATUM_SCALAR,    /* losses, control */
    IZ_DATUM_MATRIX_PART,
    IZ_DATUM_PARAM_CHILD, /* unit: StarPU's handle of a chunk's parameters */
    IZ_DATA
};

struct iz_datum_info {
    const char *name;
    enum iz_class class; /* IZ_MEM_CLASSES: a part of other memory */
    bool of_unit;        /* `of` is a unit, and says in traces which one it is;
                            else `index` does */
};
extern const struct iz_datum_info iz_datum_infos[IZ_DATA];

struct iz_place {
    enum iz_datum what;
    enum iz_tier tier;
    int of, index;
    int64_t bytes;
    int64_t at; /* bytes of its class and tier before it: where it begins in
                   the file that has these */
};

struct iz_places {
    struct iz_place *list;
    int n, room;
    /* Those before depend on no unit's repetitions, and these are theirs. */
    int fixed;
    struct iz_bytes fixed_bytes;
};

/* Lists all places of a plan whose parts have their sizes, and sums up. */
void iz_places_list(struct iz_plan *p, const struct iz_model *m);
/* Anew only what is kept from forward to backward, and what is near it. */
void iz_places_list_activations(struct iz_plan *p, const struct iz_model *m);
/* The first one, or NULL. */
const struct iz_place *iz_places_find(const struct iz_places *l,
                                      enum iz_datum what);
