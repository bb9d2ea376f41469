/* SPDX-License-Identifier: Apache-2.0 */
/* The chain of hashes in metrics.jsonl.  Every link has a hash of weights and
 * states, and one that follows from it, from the link before, from the run's
 * identity and from the position in its data.  A replay computes the states of
 * some links again, and writes nothing. */
#include <inttypes.h>
#include <stdlib.h>

#include "codelets/base/mix.h"
#include "runtime/base/text.h"
#include "runtime/ckpt/state_hash.h"
#include "runtime/run/identity.h"

static uint64_t hash_of(const json_t *link, const char *key)
{
    return strtoull(iz_json_text_of(link, key), NULL, 16);
}

static int64_t step_of(const json_t *link)
{
    return iz_json_count_of(link, "step");
}

const json_t *iz_chain_find(const struct run *r, int64_t step, bool before)
{
    for (int64_t i = iz_json_count(r->chain.links); i-- > 0;) {
        const json_t *link = json_array_get(r->chain.links, (size_t)i);
        if (before ? step_of(link) <= step : step_of(link) == step)
            return link;
    }
    return NULL;
}

static uint64_t follow(const json_t *before, uint64_t identity, int64_t samples,
                       uint64_t state)
{
    uint64_t h = before ? hash_of(before, "chain") : 0;
    return iz_mix(iz_mix(iz_mix(h + identity) + (uint64_t)samples) + state);
}

/* Whether a link is what it must be behind those before it. */
static bool holds(const struct run *r, const json_t *link)
{
    int64_t after = iz_json_count_of(link, "after");
    const json_t *before = iz_chain_find(r, after, false);
    return (before || after == 0) &&
           hash_of(link, "chain") == follow(before, hash_of(link, "identity"),
                                            iz_json_count_of(link, "samples"),
                                            hash_of(link, "state"));
}

/* What the run has left: it went on from `step`, where it had been before. */
static void forget_behind(struct run *r, int64_t step)
{
    json_t *links = r->chain.links;
    for (size_t n = json_array_size(links); n-- > 0;)
        if (step_of(json_array_get(links, n)) > step)
            json_array_remove(links, n);
}

static void keep_link(void *arg, json_t *line)
{
    struct run *r = arg;
    json_t *link = json_object_get(line, "hash");
    forget_behind(r, iz_json_count_of(link, "after"));
    if (!r->chain.broken && !holds(r, link))
        r->chain.broken = step_of(link);
    json_array_append(r->chain.links, link);
}

void iz_chain_open(struct run *r)
{
    char path[IZ_PATH_MAX + 32];
    if (!iz_run_first(r) && !r->o.replay)
        return;
    snprintf(path, sizeof(path), "%s/metrics.jsonl", r->c.run.output);
    r->chain.links = json_array();
    if (r->o.resume)
        iz_json_lines(path, "hash", keep_link, r);
    if (r->o.resume && !r->o.replay)
        forget_behind(r, r->from.step);
}

void iz_chain_close(struct run *r)
{
    json_decref(r->chain.links);
    r->chain.links = NULL;
}

static int64_t samples(const struct run *r)
{
    return r->e->step * r->c.train_batch_size;
}

/* malloc'ed. */
static char *link_text(const struct run *r, const struct iz_state_hash *h)
{
    const json_t *before = iz_chain_find(r, r->e->step - 1, true);
    uint64_t identity = iz_identity_hash(r->identity);
    struct iz_text t;
    FILE *f = iz_text_open(&t);
    fprintf(f,
            "{\"step\": %" PRId64 ", \"after\": %" PRId64
            ", \"samples\": %" PRId64 ", \"state\": \"%016" PRIx64
            "\", \"identity\": \"%016" PRIx64 "\", \"chain\": \"%016" PRIx64
            "\", \"parts\": {",
            r->e->step, before ? step_of(before) : 0, samples(r), h->all,
            identity, follow(before, identity, samples(r), h->all));
    for (int i = 0; i < h->arrays.k.n_arrays; i++) {
        fprintf(f, "%s\"%s\": \"", i ? ", " : "", h->arrays.k.array[i].name);
        for (int t = h->first[i]; t < h->first[i + 1]; t++)
            fprintf(f, "%08" PRIx32, (uint32_t)h->tensor[t].hash);
        fputc('"', f);
    }
    fputs("}}", f);
    return iz_text_close(&t);
}

void iz_chain_hash(struct run *r)
{
    struct iz_state_hash h;
    iz_state_hash_open(&h, r->e, &r->of);
    char *text = iz_run_first(r) ? link_text(r, &h) : NULL;
    json_t *link = text ? iz_json_open(text, (int64_t)strlen(text)) : NULL;
    iz_metrics_pause(r->metrics);
    iz_metrics_line(r->metrics, "{\"hash\": %s}", text ? text : "");
    if (link)
        json_array_append_new(r->chain.links, link);
    free(text);
    iz_state_hash_close(&h);
}
