/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/ckpt/vote.h"

#include <stdatomic.h>
#include <stdlib.h>

#include "codelets/base/take.h"

/* Four numbers, exact as doubles. */
static void vote_tell(void *arg, double own[IZ_BALLOT])
{
    struct iz_vote *v = arg;
    int64_t step = atomic_load(&v->step);
    own[0] = (double)step;
    own[1] = step > 0 ? (double)v->own.bytes : 0;
    own[2] = step > 0 ? (double)(v->own.header_hash >> 32) : 0;
    own[3] = step > 0 ? (double)(v->own.header_hash & 0xffffffffU) : 0;
}

static int64_t vote_hear(void *arg, const double *all, int per)
{
    struct iz_vote *v = arg;
    int64_t step = (int64_t)all[0];
    for (int r = 0; r < v->ranks; r++) {
        const double *aux = all + r * per;
        if (aux[0] < 0)
            return -1;
        if ((int64_t)aux[0] != step)
            step = 0;
    }
    if (step == v->heard)
        return step;
    v->heard = step;
    for (int r = 0; step && r < v->ranks; r++) {
        const double *aux = all + r * per;
        v->of[r].bytes = (int64_t)aux[1];
        v->of[r].header_hash = ((uint64_t)aux[2] << 32) + (uint64_t)aux[3];
    }
    return step;
}

void iz_vote_open(struct iz_vote *v, struct iz_engine *e)
{
    v->ranks = e->plan.ranks;
    v->of = iz_take(v->ranks, sizeof(*v->of), "a vote");
    e->ballot = (struct iz_ballot){vote_tell, vote_hear, v};
}

void iz_vote_close(struct iz_vote *v, struct iz_engine *e)
{
    e->ballot = (struct iz_ballot){NULL};
    free(v->of);
    v->of = NULL;
}
