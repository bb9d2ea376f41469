/* SPDX-License-Identifier: Apache-2.0 */
/* What a resumed run keeps of the choices that its config leaves open ("auto",
 * or 0), by the config beside its output: another choice would have other bits.
 */
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

/* `before`, as JSON: what a config means that was written before there was a
 * choice; NULL: nothing. */
static const struct choice {
    const char *key;
    enum made_for made_for;
    const char *before;
} choices[] = {
    {"train_micro_batch_size_per_gpu", SAME_BATCH, NULL},
    {"run.cpu_kernels", ALL, "\"BLAS\""},
    {"run.cpu_products", OF_16_BITS, "\"fp32\""},
    {"run.gpu_attention", OF_16_BITS, "\"own\""},
    {"run.gpu_attention_backward", OF_16_BITS, "\"own\""},
    {"run.muon_products", ALL, "\"host\""},
    {"run.gpu_logits_bytes", ALL, "268435456"},
    {"run.slices", SAME_MICRO_BATCH, NULL},
    {"run.sum_order", ALL, "\"ranks_first\""},
    {"run.sum_group", SAME_RANKS, "1"},
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

static int64_t number(const json_t *j, const char *key)
{
    return iz_json_number(json_object_get(j, key), (int64_t)IZ_BATCH_MAX);
}

/* Whether what was chosen for the run with config j is for this one. */
static bool fits(const struct iz_config *c, enum made_for made_for,
                 const json_t *j, int ranks)
{
    int64_t micro = number(j, "train_micro_batch_size_per_gpu");
    int64_t accum = number(j, "gradient_accumulation_steps");
    int64_t batch = iz_json_count_of(j, "train_batch_size");
    bool as_many = micro > 0 && batch == micro * accum * ranks;
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
    return k->type == IZ_KEY_INT64 ? *(const int64_t *)at == 0
                                   : *(const int *)at == 0;
}

/* Returns whether it is kept. */
static bool keep_value(struct iz_config *c, const struct choice *choice,
                       const json_t *run)
{
    char why[IZ_WHY_MAX];
    const struct iz_key *k = iz_key_find(iz_config_keys, choice->key);
    json_t *had = json_incref(json_object_get(run, k->name + strlen("run.")));
    if (!had && choice->before)
        had = json_loads(choice->before, JSON_DECODE_ANY, NULL);
    bool kept =
        had && is_open(c, k) && iz_key_store(why, c, k, had) && !is_open(c, k);
    json_decref(had);
    return kept;
}

static bool keep_cut(struct iz_config *c, const json_t *j)
{
    if (!c->cut_auto)
        return false;
    iz_config_cut(c, (int)number(j, "gradient_accumulation_steps"));
    c->cut_auto = false;
    return true;
}

bool iz_config_keep(struct iz_config *c, const char *text, int64_t bytes,
                    int ranks)
{
    json_t *j = bytes ? iz_json_open(text, bytes) : NULL;
    const json_t *run = json_object_get(j, "run");
    for (int i = 0; run && i < CHOICES; i++)
        if (fits(c, choices[i].made_for, j, ranks))
            c->kept[i] = choices[i].made_for == SAME_BATCH
                             ? keep_cut(c, j)
                             : keep_value(c, &choices[i], run);
    json_decref(j);
    return run != NULL;
}

bool iz_config_lists_algorithms(const char *text, int64_t bytes)
{
    json_t *j = bytes ? iz_json_open(text, bytes) : NULL;
    const char *list =
        iz_json_text_of(json_object_get(j, "run"), "gpu_products");
    bool any = strchr(list, ':') != NULL;
    json_decref(j);
    return any;
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
