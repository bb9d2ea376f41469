/* SPDX-License-Identifier: Apache-2.0 */
/* A replay: steps of a run are computed again from a checkpoint before them, at
 * another place or the same, and their states compared with the chain. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/ckpt/state_hash.h"
#include "runtime/run/identity.h"

/* All that writes, and what comes after the last step. */
void iz_replay_settings(struct iz_run_config *c)
{
    c->save = c->task_log = c->hash = false;
    c->save_interval = c->hash_interval = 0;
    c->sample_tokens = 0;
    c->export[0] = '\0';
}

static uint64_t identity_of(const json_t *link)
{
    return strtoull(iz_json_text_of(link, "identity"), NULL, 16);
}

/* The run may have been resumed with other settings before them or after: then
 * the checkpoint before them, or the newest one, has another identity. */
int64_t iz_replay_whose(const struct run *r)
{
    const char *output = r->c.run.output;
    const json_t *link = iz_chain_find(r, r->o.to, true);
    char id[IZ_CKPT_ID], *text = NULL;
    bool found = false;
    int64_t step = INT64_MAX;
    while (link && !found && (step = iz_ckpt_dir_newest(output, step)) >= 0) {
        found = iz_ckpt_whose(output, step, id, &text) == 0 && text &&
                iz_identity_hash(text) == identity_of(link);
        free(text);
        text = NULL;
    }
    if (found)
        return step;
    step = r->from.step;
    if (step < 0)
        step = iz_ckpt_dir_newest(output, INT64_MAX);
    if (link && step >= 0)
        printf("replay: no checkpoint tells what step %" PRId64
               " was computed with: it is taken to be that of step %" PRId64
               "\n",
               iz_json_count_of(link, "step"), step);
    return step;
}

/* Steps that were not all computed with the same may differ for that. */
static void tell_resumed(const struct run *r)
{
    const json_t *before = NULL;
    for (int64_t i = 0; i < iz_json_count(r->chain.links); i++) {
        const json_t *link = json_array_get(r->chain.links, (size_t)i);
        int64_t step = iz_json_count_of(link, "step");
        if (step <= r->replay.begun || step > r->o.to)
            continue;
        if (before && identity_of(before) != identity_of(link))
            printf("replay: between steps %" PRId64 " and %" PRId64
                   " the run was resumed with other settings, or on another "
                   "machine\n",
                   iz_json_count_of(before, "step"), step);
        before = link;
    }
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
    if (iz_run_first(r))
        tell_resumed(r);
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
