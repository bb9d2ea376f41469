/* SPDX-License-Identifier: Apache-2.0 */
/* Sleeping until another thread or process changes a word (futex(2)). */
#pragma once

#include <stdatomic.h>
#include <stdint.h>

/* A word that changes with every event, and how many sleep until it does.  May
 * lie in memory that processes share. */
struct iz_futex {
    _Atomic uint32_t changes, sleepers;
};

/* What to sleep on: read before looking whether there is a reason to. */
static inline uint32_t iz_futex_look(struct iz_futex *f)
{
    return atomic_load(&f->changes);
}

/* Returns once `changes` is no longer `seen`, after `ns` (less than a second)
 * at the latest, or sooner for no reason. */
void iz_futex_sleep(struct iz_futex *f, uint32_t seen, long ns);
/* After the event. */
void iz_futex_wake(struct iz_futex *f);
