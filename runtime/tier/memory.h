/* SPDX-License-Identifier: Apache-2.0 */
/* Takes every large buffer of a run and counts it by class and tier: what the
 * plan has listed. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "codelets/task/task.h"
#include "runtime/plan/places.h"

struct iz_memory;

/* Each tier becomes one allocation, which these places fill; the optimizer's
 * states on the host have their own.  pin_cpu: lock the cpu tier into memory
 * (pin_memory).  The workers of g, which is borrowed until close, touch the
 * pages to be locked or pinned.  wish: NULL, or the setting that asks for a
 * GPU, for messages: then the device tier is a GPU's, and the cpu tier is
 * pinned, but not states, which nothing copies.  Negative errno with the reason
 * printed, and half open. */
int iz_memory_open(struct iz_memory **out, struct iz_graph *g,
                   const struct iz_places *l, bool pin_cpu, const char *wish);
/* Memory of a simulation: counted addresses with nothing behind them. */
struct iz_memory *iz_memory_open_simulated(void);
void iz_memory_close(struct iz_memory **m);

/* Returns zeroed, counted memory that begins with a page, on huge ones if its
 * tier is large: what a place has, in any order.  Close frees it. */
void *iz_memory_take(struct iz_memory *m, enum iz_tier tier, enum iz_class c,
                     int64_t bytes);
/* Locks the cpu tier, if pin_cpu says so, by all workers at once: one thread
 * takes seconds for 10 GiB.  Negative errno with the reason printed. */
int iz_memory_lock(struct iz_memory *m);
/* The stand-in addresses under which StarPU knows device memory. */
struct iz_shadow iz_memory_shadow(const struct iz_memory *m);
/* Counts memory that was allocated elsewhere (files, libraries). */
void iz_memory_note(struct iz_memory *m, enum iz_tier tier, enum iz_class c,
                    int64_t bytes);
const struct iz_bytes *iz_memory_bytes(const struct iz_memory *m);

/* Largest resident set of this process so far, bytes. */
int64_t iz_memory_peak_resident(void);

/* Resident set of this process now, bytes; of it, what is in no file. */
int64_t iz_memory_resident(void);
int64_t iz_memory_own(void);

/* Memory that this host can still give to the ranks of a run, bytes: what is
 * available, less what plans leave of a host, of one with a GPU more
 * (*reserve); or the rest of a
 * control group's limit if that is less, and then *reserve is 0: somebody has
 * set it for what runs in the group. */
int64_t iz_memory_available(bool gpu, int64_t *reserve);
