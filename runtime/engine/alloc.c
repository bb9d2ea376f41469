/* SPDX-License-Identifier: Apache-2.0 */
/* Allocation of all that the plan says; see alloc.h. */
#include "runtime/engine/alloc.h"

#include <errno.h>

#include "codelets/gpu/device.h"
#include "runtime/engine/buffers.h"
#include "runtime/engine/groups.h"
#include "runtime/engine/handle.h"

int iz_homes_open(struct iz_engine *e)
{
    e->scalars =
        iz_memory_take(e->memory, iz_homes_near(e), IZ_MEM_BATCH,
                       8 * ((int64_t)e->plan.n_groups + 2 * e->plan.lanes));
    if (e->plan.target.gpu) {
        e->bounce = iz_memory_take(e->memory, IZ_TIER_CPU, IZ_MEM_STAGING,
                                   IZ_BOUNCE_BYTES);
        e->stream = e->simulated ? NULL : iz_device_stream_open();
    }
    if (!e->scalars ||
        (e->plan.target.gpu && (!e->bounce || (!e->stream && !e->simulated))))
        return -ENOMEM;
    int r = iz_groups_open(e);
    return r ? r : iz_homes_open_buffers(e);
}

void iz_homes_close(struct iz_engine *e)
{
    iz_groups_close(e);
    iz_homes_close_buffers(e);
    iz_device_stream_close(e->stream);
}
