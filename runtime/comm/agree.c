/* SPDX-License-Identifier: Apache-2.0 */
/* What ranks settle among themselves outside of steps; see coll.h. */
#include "runtime/comm/coll.h"

#include <stdlib.h>
#include <string.h>

#include "codelets/base/take.h"

int64_t *iz_agree_numbers(struct iz_coll *c, const int64_t *mine, int n,
                          const char *what)
{
    int64_t *all = iz_take((int64_t)c->size * n, sizeof(*all),
                           "%d numbers of %d ranks", n, c->size);
    if (n == 0)
        return all;
    memcpy(all + (int64_t)c->rank * n, mine, (size_t)n * sizeof(*all));
    iz_coll_all_gather(c, all, n * (int64_t)sizeof(*all), what);
    return all;
}

int iz_agree(struct iz_coll *c, int err)
{
    int64_t mine = err, *all;
    if (iz_coll_all_ok(c, err == 0))
        return 0;
    all = iz_agree_numbers(c, &mine, 1, "errors");
    for (int i = c->size - 1; i >= 0; i--)
        if (all[i])
            err = (int)all[i];
    free(all);
    return err;
}
