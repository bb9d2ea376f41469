/* SPDX-License-Identifier: Apache-2.0 */
/* Bytes by class (what a buffer is for) and tier (where it lives).  The planner
 * fills one such table as it lists its places, and a run another as it takes
 * them, of which the summary tells. */
#pragma once

#include <stdint.h>
#include <stdio.h>

enum iz_class {
    IZ_MEM_PARAM,     /* parameters: full or this rank's shards */
    IZ_MEM_SECONDARY, /* a rank's share of the secondary partition (hpZ) */
    IZ_MEM_GRAD,      /* gradients, reduced */
    IZ_MEM_STATE,     /* master (when parameters are 16 bit), m, v */
    IZ_MEM_RING,      /* gathered units in flight */
    IZ_MEM_GRAD_RING, /* unit gradients before their reduction */
    IZ_MEM_BOUNDARY,  /* activations between units, and their gradients */
    IZ_MEM_SAVED,     /* activations kept inside units */
    IZ_MEM_SCRATCH,   /* of each compute worker */
    IZ_MEM_STAGING,   /* buffers on the way: nvme, host and GPU, checkpoints */
    IZ_MEM_BATCH,     /* samples and scalars */
    IZ_MEM_MATRIX,    /* units whose matrices are updated as such */
    IZ_MEM_COMM,      /* receive buffers of collectives */
    IZ_MEM_CLASSES
};

enum iz_tier { IZ_TIER_DEVICE, IZ_TIER_CPU, IZ_TIER_NVME, IZ_TIERS };

extern const char *const iz_class_names[IZ_MEM_CLASSES];
extern const char *const iz_tier_names[IZ_TIERS];

struct iz_bytes {
    int64_t b[IZ_TIERS][IZ_MEM_CLASSES];
};

int64_t iz_bytes_tier(const struct iz_bytes *t, enum iz_tier tier);
/* The table as text, MiB, one line per class that is not empty. */
void iz_bytes_print(const struct iz_bytes *t, FILE *out);
