/* SPDX-License-Identifier: Apache-2.0 */
/* What this machine does, measured in well under a second before a plan is
 * chosen by it: the optimizer of all workers at once, the link, products. */
#pragma once

#include "codelets/gpu/device.h"
#include "runtime/machine/machine_file.h"

/* Fills in the rates of copies by a stream of this thread's GPU, and to and
 * from it, of so many bytes.  -ENOMEM. */
int iz_machine_measure_link(struct iz_machine *m, void *stream, int64_t bytes);

/* Fills in the rates of a rank's part: *m is as a machine file would be for
 * `ranks` of this host alike, without disks and without rates of a core.  p: a
 * plan whose optimizer is timed.  side: of the product that is timed, or a
 * smaller one where the GPU has no room.  Negative errno with the reason
 * printed. */
int iz_machine_measure(struct iz_machine *m, const struct iz_plan *p,
                       const struct iz_config *c, int device, int ranks,
                       int side);
