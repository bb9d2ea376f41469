/* SPDX-License-Identifier: Apache-2.0 */
/* Every large buffer of a run, by class (what it is for) and tier (where it
 * lives). The planner fills one such table by arithmetic, the allocations of a
 * run fill another; they must be equal. */
#ifndef IZ_RUNTIME_TIER_MEMORY_H
#define IZ_RUNTIME_TIER_MEMORY_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "codelets/task/task.h"

enum iz_class {
    IZ_MEM_PARAM,     /* parameters: full or this rank's shards */
    IZ_MEM_GRAD,      /* gradients, reduced */
    IZ_MEM_STATE,     /* master (when parameters are 16 bit), m, v */
    IZ_MEM_RING,      /* gathered units in flight */
    IZ_MEM_GRAD_RING, /* unit gradients before their reduction */
    IZ_MEM_BOUNDARY,  /* activations between units, and their gradients */
    IZ_MEM_SAVED,     /* activations kept inside units */
    IZ_MEM_SCRATCH,   /* of each compute worker */
    IZ_MEM_STAGING,   /* buffers between nvme and the rest */
    IZ_MEM_BATCH,     /* samples and scalars */
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

struct iz_memory;

/* pin_cpu: the cpu tier is locked into memory (pin_memory).  The workers of g,
 * borrowed until close, touch what is locked or pinned. */
int iz_memory_open(struct iz_memory **out, struct iz_graph *g, bool pin_cpu);
/* The device tier is a GPU's from now on.  Both tiers become one allocation
 * each, of `bytes` plus what the alignment of `buffers` pieces may cost; that
 * of the cpu tier is pinned and has all but the optimizer's states, which
 * nothing copies.  wish: the setting that asks for a GPU, for messages.
 * Negative errno with the reason printed. */
int iz_memory_open_gpu(struct iz_memory *m, const struct iz_bytes *bytes,
                       int64_t buffers, const char *wish);
void iz_memory_close(struct iz_memory **m);

/* Zeroed, page-aligned, huge pages where large; counted; freed by
 * close.  NULL
 * with the reason printed when the system refuses. */
void *iz_memory_take(struct iz_memory *m, enum iz_tier tier, enum iz_class c,
                     int64_t bytes);
/* What StarPU knows device memory by. */
struct iz_shadow iz_memory_shadow(const struct iz_memory *m);
/* Counts memory that somebody else allocated (files, libraries). */
void iz_memory_note(struct iz_memory *m, enum iz_tier tier, enum iz_class c,
                    int64_t bytes);
const struct iz_bytes *iz_memory_bytes(const struct iz_memory *m);

/* Largest resident set of this process so far, bytes. */
int64_t iz_memory_peak_resident(void);

/* Resident set of this process now, bytes. */
int64_t iz_memory_resident(void);

/* What this host can still give, bytes: the smaller of MemAvailable and what
 * the control group leaves. */
int64_t iz_memory_available(void);

#endif
