/* SPDX-License-Identifier: Apache-2.0 */
/* What a resumed run keeps of the choices that its config leaves open ("auto",
 * or 0), by the identity in its checkpoint: another choice would have other
 * bits.  And a key that is set to try what a plan makes of it. */
#include "runtime/config/keys.h"

#include <assert.h>
#include <string.h>

_Static_assert(offsetof(struct iz_config_file, c) == 0,
               "keys of choices have their offsets in struct iz_config");

/* For which runs a choice is made. */
enum made_for { ALL, OF_16_BITS, SAME_MICRO_BATCH, SAME_RANKS, SAME_BATCH };

static const char *const sentence[] = {
    [ALL] = " A resumed run keeps its first choice.",
    [OF_16_BITS] = " A resumed run keeps its first choice.",
    [SAME_MICRO_BATCH] = " A run that is resumed with the same micro-batch "
                         "keeps its first choice.",
    [SAME_RANKS] = " A run that is resumed on as many ranks keeps its first "
                   "choice.",
    [SAME_BATCH] = " A run that is resumed on as many ranks keeps its first "
                   "choice."};

static const struct choice {
    const char *key;
    enum made_for made_for;
} choices[] = {
    {"train_micro_batch_size_per_gpu", SAME_BATCH},
    {"run.cpu_kernels", ALL},
    {"run.cpu_products", OF_16_BITS},
    {"run.gpu_attention", OF_16_BITS},
    {"run.gpu_attention_backward", OF_16_BITS},
    {"run.muon_products", ALL},
    {"run.gpu_logits_bytes", ALL},
    {"run.sequence_chunk", ALL},
    {"run.slices", SAME_MICRO_BATCH},
    {"run.sum_order", ALL},
    {"run.sum_group", SAME_RANKS},
};

enum { CHOICES = sizeof(choices) / sizeof(choices[0]) };
_Static_assert(CHOICES <= IZ_CHOICES_MAX, "struct iz_config.kept holds all");

/* CHOICES: none. */
static int find(const char *key)
{
    int i = 0;
    while (i < CHOICES && strcmp(choices[i].key, key) != 0)
        i++;
    return i;
}

const char *iz_config_keeps(const struct iz_key *key)
{
    int i = find(key->name);
    return i < CHOICES ? sentence[choices[i].made_for] : "";
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
static bool fits(const struct iz_config *c, enum made_for made_for,
                 const char *lines, int ranks)
{
    bool as_many = number(lines, "ranks") == ranks;
    int64_t micro = number(lines, "train_micro_batch_size_per_gpu");
    int64_t batch = number(lines, "train_batch_size");
    return made_for == ALL || (made_for == OF_16_BITS && c->dtype != IZ_F32) ||
           (made_for == SAME_MICRO_BATCH && micro == c->micro_batch) ||
           (made_for == SAME_RANKS && as_many) ||
           (made_for == SAME_BATCH && as_many && batch == c->train_batch_size);
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

static bool keep_cut(struct iz_config *c, const char *lines)
{
    int64_t cut = number(lines, "gradient_accumulation_steps");
    if (!c->cut_auto || cut < 1 || cut > IZ_BATCH_MAX)
        return false;
    iz_config_cut(c, (int)cut);
    c->cut_auto = false;
    return true;
}

void iz_config_keep(struct iz_config *c, const char *lines, int ranks)
{
    for (int i = 0; i < CHOICES; i++)
        if (fits(c, choices[i].made_for, lines, ranks))
            c->kept[i] =
                choices[i].made_for == SAME_BATCH
                    ? keep_cut(c, lines)
                    : keep_value(c, iz_key_find(iz_config_keys, choices[i].key),
                                 lines);
}

bool iz_config_is_kept(const struct iz_config *c, const char *key)
{
    assert(find(key) < CHOICES);
    return c->kept[find(key)];
}

bool iz_config_is_open(const struct iz_config *c, const char *key)
{
    assert(find(key) < CHOICES);
    return is_open(c, iz_key_find(iz_config_keys, key));
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
