/* SPDX-License-Identifier: Apache-2.0 */
/* What keys of the section "run" share that are left to the program ("auto") in
 * a new run, and to what it began with in a resumed one. */
#ifndef IZ_RUNTIME_MACHINE_CHOICE_H
#define IZ_RUNTIME_MACHINE_CHOICE_H

#include "runtime/comm/coll.h"
#include "runtime/config/config.h"

/* Of "auto|a|b": 0 to 2, what the run in the output folder began with, by the
 * first rank's word; one that does not say so is of before there was a choice,
 * of which a is what there was.  Collective.  Negative errno with the reason
 * printed: its config cannot be read. */
int iz_choice_begun(const struct iz_config *c, struct iz_coll *coll,
                    const char *key, const char *a, const char *b);

#endif
