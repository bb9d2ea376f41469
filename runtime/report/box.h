/* SPDX-License-Identifier: Apache-2.0 */
/* The black box: what a rank knows of a run that does not go on, in
 * stuck-rankN.json beside the run's output.  It is written when a wait ends the
 * job, on SIGQUIT, after which the run goes on, and on a fatal signal, which
 * then has its usual end.  tools/trace --stuck reads those of all ranks. */
#pragma once

#include "runtime/engine/engine.h"

/* From here on. */
void iz_box_open(const struct iz_engine *e);
/* Before what it tells of is freed. */
void iz_box_close(void);
