/* SPDX-License-Identifier: Apache-2.0 */
/* Whether all ranks have started the same collectives; see coll.h. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#include "codelets/base/die.h"
#include "runtime/comm/coll.h"

void iz_coll_tell_order(const struct iz_coll *c, double own[2])
{
    own[0] = (double)(c->order_hash >> 32);
    own[1] = (double)(c->order_hash & 0xffffffffU);
}

static bool differs(const double *all, int per, int r)
{
    const double *v = all + r * per;

    return v[0] != all[0] || v[1] != all[1];
}

bool iz_coll_hear_order(const struct iz_coll *c, const double *all, int per,
                        char *out, size_t size)
{
    size_t used = 0;
    int n = 0;

    for (int r = 1; r < c->size; r++)
        n += differs(all, per, r);
    if (n == 0)
        return true;
    const char *before = n > 1 ? "ranks " : "rank ";
    for (int r = 1; r < c->size && used < size; r++) {
        if (!differs(all, per, r))
            continue;
        used += (size_t)snprintf(out + used, size - used, "%s%d", before, r);
        before = ", ";
    }
    return false;
}

int iz_coll_check_order(struct iz_coll *c)
{
    double *all = calloc((size_t)c->size * 2, sizeof(*all));
    char who[256];

    if (!all)
        iz_die("no memory for what %d ranks have started", c->size);
    iz_coll_tell_order(c, all + 2 * c->rank);
    iz_coll_gather_doubles(c, all, 2, "order of collectives");
    bool same = iz_coll_hear_order(c, all, 2, who, sizeof(who));
    free(all);
    if (!same && c->rank == 0)
        fprintf(
            stderr,
            "izar: %s started other collectives than rank 0, or in "
            "another order: what was saved since the last step may be wrong\n",
            who);
    return same ? 0 : -EPROTO;
}
