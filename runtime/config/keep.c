/* SPDX-License-Identifier: Apache-2.0 */
/* What a resumed run keeps of the choices that its config leaves open, by the
 * identity in its checkpoint: another choice would have other bits.  And a key
 * that is set to try what a plan makes of it. */
#include "runtime/config/keys.h"

#include <assert.h>
#include <string.h>

_Static_assert(offsetof(struct iz_config_file, c) == 0,
               "keys of choices have their offsets in struct iz_config");

const char *iz_config_keeps(const struct iz_key *key)
{
    static const char *const sentences[] = {
        [IZ_KEPT_NOT] = "",
        [IZ_KEPT_ALL] = " A resumed run keeps its first choice.",
        [IZ_KEPT_OF_16_BITS] = " A resumed run keeps its first choice.",
        [IZ_KEPT_SAME_MICRO_BATCH] = " A run that is resumed with the same "
                                     "micro-batch keeps its first choice.",
        [IZ_KEPT_SAME_RANKS] = " A run that is resumed on as many ranks keeps "
                               "its first choice.",
        [IZ_KEPT_SAME_BATCH] = " A run that is resumed on as many ranks keeps "
                               "its first choice."};
    return sentences[key->kept];
}

/* New reference; NULL: there is no such line. */
static json_t *value(const char *lines, const char *key)
{
    size_t n = strlen(key);
    for (const char *p = lines; *p; p += *p == '\n') {
        size_t line = strcspn(p, "\n");
        if (!strncmp(p, key, n) && p[n] == ' ')
            return json_loadb(p + n + 1, line - n - 1, JSON_DECODE_ANY, NULL);
        p += line;
    }
    return NULL;
}

static int64_t number(const char *lines, const char *key)
{
    json_t *v = value(lines, key);
    int64_t n = iz_json_number(v, INT64_MAX);
    json_decref(v);
    return n;
}

/* Whether what was chosen for the run with these lines is for this one. */
static bool fits(const struct iz_config *c, enum iz_kept kept,
                 const char *lines, int ranks)
{
    bool as_many = number(lines, "ranks") == ranks;
    int64_t micro = number(lines, "train_micro_batch_size_per_gpu");
    int64_t batch = number(lines, "train_batch_size");
    return kept == IZ_KEPT_ALL ||
           (kept == IZ_KEPT_OF_16_BITS && c->dtype != IZ_F32) ||
           (kept == IZ_KEPT_SAME_MICRO_BATCH && micro == c->micro_batch) ||
           (kept == IZ_KEPT_SAME_RANKS && as_many) ||
           (kept == IZ_KEPT_SAME_BATCH && as_many &&
            batch == c->train_batch_size);
}

static bool is_open(const struct iz_config *c, const struct iz_key *k)
{
    const char *at = (const char *)c + k->offset;
    if (iz_key_is_text(k))
        return strcmp(at, "auto") == 0;
    return k->type == IZ_KEY_INT64 || k->type == IZ_KEY_COUNT
               ? *(const int64_t *)at == 0
               : *(const int *)at == 0;
}

/* Returns whether it is kept. */
static bool keep_value(struct iz_config *c, const struct iz_key *k,
                       const char *lines)
{
    char why[IZ_WHY_MAX];
    json_t *had = value(lines, k->name);
    bool kept =
        had && is_open(c, k) && iz_key_store(why, c, k, had) && !is_open(c, k);
    json_decref(had);
    return kept;
}

/* Not where slices or pairs of this run do not divide its micro-batches. */
static bool keep_cut(struct iz_config *c, const char *lines)
{
    int64_t cut = number(lines, "gradient_accumulation_steps");
    int64_t least = (c->run.slices ? c->run.slices : 1) * c->data.group;
    if (!c->cut_auto || cut < 1 || cut > IZ_BATCH_MAX ||
        (int64_t)c->micro_batch * c->grad_accum % (cut * least))
        return false;
    iz_config_cut(c, (int)cut);
    c->cut_auto = false;
    return true;
}

void iz_config_keep(struct iz_config *c, const char *lines, int ranks)
{
    for (const struct iz_key *k = iz_config_keys; k->name; k++)
        if (k->kept && fits(c, k->kept, lines, ranks))
            c->kept[k - iz_config_keys] = k->kept == IZ_KEPT_SAME_BATCH
                                              ? keep_cut(c, lines)
                                              : keep_value(c, k, lines);
}

bool iz_config_is_kept(const struct iz_config *c, const char *key)
{
    const struct iz_key *k = iz_key_find(iz_config_keys, key);
    assert(k && k->kept);
    return c->kept[k - iz_config_keys];
}

bool iz_config_is_open(const struct iz_config *c, const char *key)
{
    const struct iz_key *k = iz_key_find(iz_config_keys, key);
    assert(k && k->kept);
    return is_open(c, k);
}

bool iz_config_set(struct iz_config *c, const char *set)
{
    char name[IZ_KEY_NAME_MAX], why[IZ_WHY_MAX];
    struct iz_config was = *c;
    snprintf(name, sizeof(name), "%.*s", (int)strcspn(set, "="), set);
    const struct iz_key *k = iz_key_find(iz_config_keys, name);
    const char *text = set + strlen(name) + 1;
    json_t *v = json_loads(text, JSON_DECODE_ANY, NULL);
    if (!v)
        v = json_string(text);
    assert(k && k->offset + k->size <= sizeof(*c));
    bool stored = iz_key_store(why, c, k, v);
    assert(stored);
    json_decref(v);
    return memcmp((char *)c + k->offset, (char *)&was + k->offset, k->size) !=
           0;
}
