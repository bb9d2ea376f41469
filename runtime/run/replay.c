/* SPDX-License-Identifier: Apache-2.0 */
/* A replay: steps of a run are computed again from a checkpoint before them, at
 * another place or the same, and their states compared with the chain. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

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

int iz_replay_open(struct run *r)
{
    struct run_replay *p = &r->replay;
    int64_t mine[2] = {
        iz_json_count(r->chain.links),
        iz_json_count_of(iz_chain_find(r, r->o.to, true), "step")};
    int64_t *all = iz_agree_numbers(r->coll, mine, 2, "the hashes");
    int other = 0;
    for (int q = 1; q < r->coll->size; q++)
        other = memcmp(all, all + 2 * q, sizeof(mine)) ? q : other;
    free(all);
    if (other)
        return iz_text_refuse(iz_run_err(r),
                              "--replay: rank %d has other hashes in %s than "
                              "rank 0: all ranks need the same folder",
                              other, r->c.run.output);
    p->begun = r->e->step;
    if (mine[1] < r->o.from || mine[1] < p->begun)
        return iz_text_refuse(iz_run_err(r),
                              "--replay: %s/metrics.jsonl has no hash of steps "
                              "%" PRId64 " to %" PRId64
                              ": the run needs run.hash_interval",
                              r->c.run.output, r->o.from, r->o.to);
    r->o.to = mine[1];
    return 0;
}

bool iz_replay_due(const struct run *r)
{
    return r->e->step >= r->o.from && iz_chain_find(r, r->e->step, false);
}

/* Names the first tensor that has another hash.  Of an array eight digits of
 * each are in the link. */
static void tell_tensors(const struct run *r, const json_t *link,
                         const struct iz_state_hash *h)
{
    const json_t *parts = json_object_get(link, "parts");
    int differ = 0, n = h->first[h->arrays.k.n_arrays];
    printf("differs: step %" PRId64 ": ", r->e->step);
    for (int i = 0; i < h->arrays.k.n_arrays; i++) {
        const char *name = h->arrays.k.array[i].name;
        const char *had = iz_json_text_of(parts, name);
        for (int t = h->first[i]; t < h->first[i + 1]; t++) {
            char digits[9];
            snprintf(digits, sizeof(digits), "%08" PRIx32,
                     (uint32_t)h->tensor[t].hash);
            bool same = strncmp(digits, had, 8) == 0;
            had += strnlen(had, 8);
            if (!same && !differ++)
                printf("%s (%s)", h->tensor[t].name, strrchr(name, '/') + 1);
        }
    }
    fputs(differ ? "" : "the scalars", stdout);
    if (differ > 1)
        printf(" and %d more of %d", differ - 1, n);
    if (r->replay.equal)
        printf("; equal up to step %" PRId64, r->replay.equal);
    printf("\n");
}

void iz_replay_compare(struct run *r)
{
    struct run_replay *p = &r->replay;
    const json_t *link = iz_chain_find(r, r->e->step, false);
    struct iz_state_hash h;
    iz_state_hash_open(&h, r->e, &r->of);
    p->differs = strtoull(iz_json_text_of(link, "state"), NULL, 16) != h.all;
    if (p->differs && iz_run_first(r))
        tell_tensors(r, link, &h);
    if (!p->differs) {
        p->first = p->hashes++ ? p->first : r->e->step;
        p->equal = r->e->step;
    }
    iz_state_hash_close(&h);
}

int iz_replay_end(struct run *r)
{
    const struct run_replay *p = &r->replay;
    if (r->chain.broken && iz_run_first(r))
        printf("metrics.jsonl: the chain breaks at step %" PRId64
               ": lines were changed or are missing\n",
               r->chain.broken);
    if (p->differs || r->chain.broken)
        return -EILSEQ;
    if (r->e->step < r->o.to)
        return iz_text_refuse(
            iz_run_err(r), "--replay: ended after step %" PRId64, r->e->step);
    if (iz_run_first(r))
        printf("equal: steps %" PRId64 " to %" PRId64 " (%" PRId64
               " hashes, computed from step %" PRId64 " on)\n",
               p->first, r->o.to, p->hashes, p->begun);
    return 0;
}
