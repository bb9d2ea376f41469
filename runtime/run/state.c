/* SPDX-License-Identifier: Apache-2.0 */
/* What all files of a run ask of it. */
#include "runtime/run/state.h"

#include <errno.h>
#include <stdio.h>

bool iz_run_first(const struct run *r)
{
    return r->coll->rank == 0;
}

FILE *iz_run_err(const struct run *r)
{
    return iz_run_first(r) ? stderr : NULL;
}

/* One rank's failure is everybody's: nobody waits for a rank that has gone. */
int iz_run_agree(struct run *r, int status, const char *what)
{
    if (status == -ENOMEM && what)
        fprintf(stderr, "izar: rank %d: no memory for %s\n", r->coll->rank,
                what);
    bool ok = iz_coll_all_ok(r->coll, status == 0);
    if (ok)
        return 0;
    return status ? status : -ECANCELED;
}

int iz_run_ranks(const struct run *r)
{
    return r->o.ranks ? r->o.ranks : r->coll->size;
}
