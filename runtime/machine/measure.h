/* SPDX-License-Identifier: Apache-2.0 */
/* What this machine does, measured in well under a second before a plan is
 * chosen by it: the optimizer of all workers at once, the link, products. */
#pragma once

#include "codelets/gpu/device.h"
#include "runtime/machine/machine_file.h"

/* Fills in the rates of a GPU, which is this thread's from here on: its copies
 * and those to and from it, and products of the types t of a sum of 1 << t,
 * each for so long.  side: of their matrices, or of smaller ones where the GPU
 * has no room.  NULL, or why not. */
const char *iz_machine_measure_gpu(struct iz_machine *m, int device,
                                   unsigned types, int side, double seconds);

/* Fills in the rates of a rank's part: *m is as a machine file would be for
 * `ranks` of this host alike, without disks and without rates of a core.  p: a
 * plan whose optimizer is timed.  side: as above.  Negative errno with the
 * reason printed. */
int iz_machine_measure(struct iz_machine *m, const struct iz_plan *p,
                       const struct iz_config *c, int device, int ranks,
                       int side);
