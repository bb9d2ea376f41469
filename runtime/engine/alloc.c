/* SPDX-License-Identifier: Apache-2.0 */
/* Allocation of all that the plan says; see alloc.h. */
#include "runtime/engine/alloc.h"

#include <errno.h>

#include "codelets/gpu/device.h"
#include "runtime/engine/buffers.h"
#include "runtime/engine/groups.h"
#include "runtime/engine/handle.h"

int iz_alloc_open(struct iz_engine *e)
{
    e->scalars =
        iz_memory_take(e->memory, iz_handle_tier(e), IZ_MEM_BATCH,
                       8 * ((int64_t)e->plan.n_groups + 2 * e->plan.tracks));
    if (e->plan.target.gpu) {
        e->bounce = iz_memory_take(e->memory, IZ_TIER_CPU, IZ_MEM_STAGING,
                                   IZ_BOUNCE_BYTES);
        e->stream = e->simulated ? NULL : iz_device_stream_open();
    }
    if (!e->scalars ||
        (e->plan.target.gpu && (!e->bounce || (!e->stream && !e->simulated))))
        return -ENOMEM;
    int r = iz_groups_open(e);
    return r ? r : iz_buffers_open(e);
}

void iz_alloc_close(struct iz_engine *e)
{
    iz_groups_close(e);
    iz_buffers_close(e);
    iz_device_stream_close(e->stream);
}
