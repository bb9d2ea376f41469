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

void iz_bounce_move(struct iz_engine *e, enum iz_home h, char *place,
                    char *host, int64_t bytes, bool put)
{
    char *bounce = e->bounce.buffer;
    if (!iz_bounce_on_gpu(e, h)) {
        memcpy(put ? place : host, put ? host : place, (size_t)bytes);
        return;
    }
    for (int64_t i = 0, n; i < bytes; i += n) {
        n = min64(bytes - i, IZ_BOUNCE_BYTES);
        if (put)
            memcpy(bounce, host + i, (size_t)n);
        iz_device_copy(e->bounce.stream, put ? place + i : bounce,
                       put ? bounce : place + i, n);
        iz_device_wait(e->bounce.stream);
        if (!put)
            memcpy(host + i, bounce, (size_t)n);
    }
}
