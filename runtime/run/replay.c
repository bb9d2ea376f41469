/* SPDX-License-Identifier: Apache-2.0 */
/* A replay: steps of a run are computed again from a checkpoint before them, at
 * another place or the same, and their states compared with the chain. */
#include <inttypes.h>
#include <stdlib.h>

#include "runtime/ckpt/state_hash.h"
#include "runtime/run/state.h"

/* All that writes, and what comes after the last step. */
void iz_replay_settings(struct iz_run_config *c)
{
    c->save = c->task_log = c->hash = false;
    c->save_interval = c->hash_interval = 0;
    c->sample_tokens = 0;
    c->export[0] = '\0';
}

/* Of the links from A to B. */
static int64_t *steps_of(const struct run *r, int64_t *n)
{
    int64_t most = iz_json_count(r->chain.links);
    int64_t *steps = calloc((size_t)most + 1, sizeof(*steps));
    for (int64_t i = 0; steps && i < most; i++) {
        int64_t step =
            iz_json_count_of(json_array_get(r->chain.links, (size_t)i), "step");
        if (step >= r->o.from && step <= r->o.to && step >= r->e->step)
            steps[(*n)++] = step;
    }
    return steps;
}

int iz_replay_open(struct run *r)
{
    struct run_replay *p = &r->replay;
    if (iz_run_first(r))
        p->step = steps_of(r, &p->steps);
    iz_coll_broadcast(r->coll, &p->steps, sizeof(p->steps), 0, "the steps");
    if (!iz_run_first(r))
        p->step = calloc((size_t)p->steps + 1, sizeof(*p->step));
    int s = iz_run_agree(r, p->step ? 0 : -ENOMEM, "the steps");
    if (s)
        return s;
    iz_coll_broadcast(r->coll, p->step, p->steps * (int64_t)sizeof(*p->step), 0,
                      "the steps");
    p->begun = r->e->step;
    if (p->steps) {
        r->o.from = p->step[0];
        r->o.to = p->step[p->steps - 1];
        return 0;
    }
    return iz_text_refuse(iz_run_err(r),
                          "--replay: %s/metrics.jsonl has no hash of steps "
                          "%" PRId64 " to %" PRId64
                          ": the run needs run.hash_interval",
                          r->c.run.output, r->o.from, r->o.to);
}

bool iz_replay_due(const struct run *r)
{
    const struct run_replay *p = &r->replay;
    int64_t i = 0;
    while (i < p->steps && p->step[i] != r->e->step)
        i++;
    return i < p->steps;
}

/* Names the parts that have other hashes. */
static void tell_parts(const struct run *r, const json_t *link,
                       const struct iz_state_hash *h)
{
    const json_t *parts = json_object_get(link, "parts");
    int differ = 0, first = -1;
    for (int i = h->parts.k.n_parts; i-- > 0;) {
        const char *had = iz_json_text_of(parts, h->parts.k.part[i].name);
        if (strtoull(had, NULL, 16) == h->part[i])
            continue;
        first = i;
        differ++;
    }
    printf("differs: step %" PRId64 ": %s", r->e->step,
           first < 0 ? "the scalars" : h->parts.k.part[first].name);
    if (differ > 1)
        printf(" and %d more of %d parts", differ - 1, h->parts.k.n_parts);
    if (r->replay.equal)
        printf("; equal up to step %" PRId64, r->replay.equal);
    printf("\n");
}

void iz_replay_compare(struct run *r, const json_t *link,
                       const struct iz_state_hash *h)
{
    struct run_replay *p = &r->replay;
    if (iz_run_first(r)) {
        p->differs =
            strtoull(iz_json_text_of(link, "state"), NULL, 16) != h->all;
        if (p->differs)
            tell_parts(r, link, h);
    }
    iz_coll_broadcast(r->coll, &p->differs, sizeof(p->differs), 0, "replay");
    p->hashes += !p->differs;
    p->equal = p->differs ? p->equal : r->e->step;
}

int iz_replay_end(struct run *r)
{
    const struct run_replay *p = &r->replay;
    if (r->chain.broken && iz_run_first(r))
        printf("metrics.jsonl: the chain breaks at step %" PRId64
               ": lines were changed or are missing\n",
               r->chain.broken);
    if (p->differs || (r->chain.broken && iz_run_first(r)))
        return -EILSEQ;
    if (r->e->step < r->o.to)
        return iz_text_refuse(
            iz_run_err(r), "--replay: ended after step %" PRId64, r->e->step);
    if (iz_run_first(r))
        printf("equal: steps %" PRId64 " to %" PRId64 " (%" PRId64
               " hashes, computed from step %" PRId64 " on)\n",
               r->o.from, r->o.to, p->hashes, p->begun);
    return 0;
}
