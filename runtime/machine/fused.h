/* SPDX-License-Identifier: Apache-2.0 */
/* Whose kernels do on a GPU what is fused (run.gpu_attention). */
#ifndef IZ_RUNTIME_MACHINE_FUSED_H
#define IZ_RUNTIME_MACHINE_FUSED_H

#include "runtime/step/train.h"

/* What the choice is for. */
struct iz_fused_for {
    bool resume; /* goes on with the run in run.output */
    bool gpu;    /* else nothing is fused, and a choice is only kept */
};

/* Puts its choice into the config: auto becomes what a resumed run had before,
 * where that chose anything, or else our own on a GPU.  *began: it is what the
 * run had before.  The same on every rank.  Collective.  Negative errno with
 * the reason printed by one rank. */
int iz_fused_choose(bool *began, struct iz_config *c,
                    const struct iz_fused_for *on, struct iz_coll *coll);

/* Before the first step: asks the library for all that the plan's tasks will
 * want of it, and has it make that ready.  began: as above.  Collective; errors
 * as above. */
int iz_fused_prepare(const struct iz_engine *e, bool began);

#endif
