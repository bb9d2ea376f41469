/* SPDX-License-Identifier: Apache-2.0 */
/* The pinned buffer between a GPU and the host; see bounce.h. */
#include "runtime/engine/bounce.h"

#include <string.h>

#include "codelets/base/int64.h"
#include "codelets/gpu/device.h"

bool iz_bounce_on_gpu(const struct iz_engine *e, enum iz_home h)
{
    return e->plan.target.gpu && h == IZ_HOME_NONE;
}

char *iz_bounce_way(const struct iz_engine *e, enum iz_home h, int half,
                    char *place)
{
    return iz_bounce_on_gpu(e, h)
               ? (char *)e->bounce.buffer + half * IZ_BOUNCE_BYTES / 2
               : place;
}

void iz_bounce_pass(struct iz_engine *e, char *place, char *way, int64_t bytes,
                    bool put)
{
    if (way == place)
        return;
    iz_device_copy(e->bounce.stream, put ? place : way, put ? way : place,
                   bytes);
    iz_device_wait(e->bounce.stream);
}

void iz_bounce_move(struct iz_engine *e, enum iz_home h, char *place,
                    char *host, int64_t bytes, bool put)
{
    for (int64_t i = 0, n; i < bytes; i += n) {
        char *way = iz_bounce_way(e, h, 0, place + i);
        n = min64(bytes - i, IZ_BOUNCE_BYTES);
        if (put)
            memcpy(way, host + i, (size_t)n);
        iz_bounce_pass(e, place + i, way, n, put);
        if (!put)
            memcpy(host + i, way, (size_t)n);
    }
}
