/* SPDX-License-Identifier: Apache-2.0 */
/* Reads a config's object into the fields the tables name. Every fault is
 * reported, not only the first. */
#include "runtime/config/config.h"

#include "runtime/config/keys.h"
#include "runtime/formats/published.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

struct reader {
    struct iz_config_file *file;
    const struct iz_section *model; /* may be NULL */
    FILE *notes;                    /* may be NULL */
    json_t *imported; /* keys of the model that model.import sets, or NULL */
    struct iz_text ignored; /* names of keys without effect, with commas */
    struct iz_faults faults;
};

static bool is_word(const json_t *v, const char *word)
{
    return json_is_string(v) && strcmp(json_string_value(v), word) == 0;
}

/* Tells of a value that is not what is expected; returns `is`. */
static bool expect(struct iz_faults *f, const char *key, bool is,
                   const char *what, const json_t *v)
{
    char found[IZ_WHY_MAX / 2];
    iz_key_describe(found, sizeof(found), v);
    if (!is)
        iz_fault(f, key, "expected %s, found %s", what, found);
    return is;
}

/* ---- the array "parameters" ---- */

static void read_member(struct iz_rule *rule, int index, const char *name,
                        const json_t *v, struct iz_faults *f)
{
    char key[IZ_KEY_NAME_MAX], why[IZ_WHY_MAX];
    const struct iz_key *k = iz_key_find(iz_rule_keys, name);
    struct iz_nearest near = iz_nearest_start(name, false);
    snprintf(key, sizeof(key), "parameters[%d].%.100s", index, name);
    for (int i = 0; i < IZ_RULE_KEYS; i++)
        iz_nearest_try(&near, iz_rule_keys[i].name);
    if (!k)
        iz_fault(f, key, "unknown key%s", near.hint);
    else if (!iz_key_store(why, rule, k, v))
        iz_fault(f, key, "%s", why);
    else
        rule->given[k - iz_rule_keys] = !json_is_null(v);
}

static void read_rule(struct iz_rule *rule, int index, json_t *v,
                      struct iz_faults *f)
{
    char key[64];
    const char *name;
    json_t *member;
    snprintf(key, sizeof(key), "parameters[%d]", index);
    if (!expect(f, key, json_is_object(v), "an object", v))
        return;
    json_object_foreach(v, name, member)
        read_member(rule, index, name, member, f);
    member = json_object_get(v, "match");
    if (!member || json_is_null(member) || is_word(member, ""))
        iz_fault(f, key, "has no \"match\": the names it is for");
    if (rule->frozen && (rule->given[IZ_RULE_DECAY] || rule->given[IZ_RULE_LR]))
        iz_fault(f, key,
                 "frozen: true, but what is frozen has neither weight_decay "
                 "nor lr_scale");
    if (rule->frozen && rule->sparse)
        iz_fault(f, key,
                 "frozen: true and sparse: true: what is frozen is never "
                 "updated");
}

static void read_rules(struct iz_config_file *file, struct iz_faults *f,
                       const json_t *v)
{
    size_t n = json_array_size(v);
    if (json_is_null(v) ||
        !expect(f, "parameters", json_is_array(v), "an array of rules", v))
        return;
    if (n > IZ_RULES_MAX) {
        iz_fault(f, "parameters", "%zu rules, at most %d", n, IZ_RULES_MAX);
        return;
    }
    for (size_t i = 0; i < n; i++)
        read_rule(&file->c.rule[i], (int)i, json_array_get(v, i), f);
    file->c.n_rules = (int)n;
}

/* ---- keys ---- */

static const struct iz_foreign_key *find_foreign(const char *name)
{
    for (const struct iz_foreign_key *k = iz_foreign_keys; k->name; k++)
        if (strcmp(k->name, name) == 0)
            return k;
    return NULL;
}

/* "model" is one only where there is a model. */
static bool is_section(const char *name)
{
    bool is = false;
    for (const struct iz_key *k = iz_config_keys; k->name; k++)
        is |= iz_config_in(k->name, name);
    for (const struct iz_foreign_key *k = iz_foreign_keys; k->name; k++)
        is |= iz_config_in(k->name, name);
    return is && strcmp(name, "model") != 0;
}

static bool is_auto(const struct iz_key *k, const json_t *v)
{
    return is_word(v, "auto") && !iz_key_is_text(k) &&
           (!k->words || !strstr(k->words, "auto"));
}

static void unknown(struct reader *r, const char *name)
{
    bool aux = r->faults.count < IZ_FAULTS_TOLD; /* to look takes long */
    iz_fault(&r->faults, name, "unknown key%s",
             aux ? iz_nearest_key(name, r->model).hint : "");
}

/* Of our own table: k is in iz_config_keys. */
static void read_key(struct reader *r, const struct iz_key *k, const json_t *v)
{
    enum iz_given *given = &r->file->given[k - iz_config_keys];
    char why[IZ_WHY_MAX];
    if (*given != IZ_GIVEN_NOT) {
        iz_fault(&r->faults, k->name, "given twice, by two of its names");
        *given = IZ_GIVEN_BAD;
    } else if (k->automatic && (is_auto(k, v) || json_is_null(v))) {
        struct iz_key meant = *k;
        if (is_auto(k, v) && k->automatic[0])
            meant.fallback = k->automatic;
        iz_key_store_default(r->file, &meant);
        *given = json_is_null(v) ? IZ_GIVEN_NOT : IZ_GIVEN_AUTO;
    } else if (is_auto(k, v)) {
        iz_fault(&r->faults, k->name,
                 "\"auto\" cannot be resolved here; write a value (default %s)",
                 k->fallback);
        *given = IZ_GIVEN_BAD;
    } else if (iz_key_store(why, r->file, k, v)) {
        *given = json_is_null(v) ? IZ_GIVEN_NOT : IZ_GIVEN_VALUE;
    } else {
        iz_fault(&r->faults, k->name, "%s", why);
        *given = IZ_GIVEN_BAD;
    }
}

static bool is_off(const json_t *v)
{
    const json_t *on = json_is_object(v) ? json_object_get(v, "enabled") : v;
    return !on || json_is_null(on) || json_is_false(on);
}

static void read_foreign(struct reader *r, const struct iz_foreign_key *k,
                         const json_t *v)
{
    const char *accept = k->accept;
    char found[IZ_WHY_MAX / 2];
    iz_key_describe(found, sizeof(found), v);
    if (iz_text_among(accept, "any|bool|number|string") && !json_is_null(v))
        fprintf(r->ignored.out, ", %s", k->name);
    if (iz_text_among(accept, "bool|number|string")) {
        bool fits = accept[0] == 'b'   ? json_is_boolean(v)
                    : accept[0] == 'n' ? json_is_number(v)
                                       : json_is_string(v);
        expect(&r->faults, k->name,
               fits || json_is_null(v) || is_word(v, "auto"),
               accept[0] == 'b'   ? "a boolean"
               : accept[0] == 'n' ? "a number"
                                  : "a string",
               v);
    } else if (strcmp(accept, "off") == 0) {
        if (!is_off(v))
            iz_fault(&r->faults, k->name, "not supported. %s", k->doc);
    } else if (strcmp(accept, "any") != 0 && !iz_key_among(v, accept)) {
        iz_fault(&r->faults, k->name, "%s is not supported. %s", found, k->doc);
    }
}

/* What is written beside model.import may only repeat it, or ask for less or
 * more where that has a meaning. */
static void check_imported(struct reader *r, const char *full, const char *name,
                           const json_t *v)
{
    const json_t *theirs = json_object_get(r->imported, name);
    char a[IZ_WHY_MAX / 2], b[IZ_WHY_MAX / 2];
    if (!theirs || iz_json_same(theirs, v) ||
        iz_published_free(r->model->hf, name))
        return;
    bool more = json_integer_value(v) > json_integer_value(theirs);
    if (strcmp(iz_published_resized(r->model->hf, more), name) == 0 &&
        json_is_integer(v)) {
        if (r->notes)
            fprintf(r->notes,
                    more
                        ? "%s: %lld, the folder has %lld tokens: each row more "
                          "is the mean of theirs\n"
                        : "%s: %lld of the folder's %lld positions are read, "
                          "and an export has no more\n",
                    full, json_integer_value(v), json_integer_value(theirs));
        return;
    }
    iz_key_describe(a, sizeof(a), v);
    iz_key_describe(b, sizeof(b), theirs);
    iz_fault(&r->faults, full, "%s, but in %s/config.json it is %s", a,
             r->file->c.import, b);
}

static void read_model_key(struct reader *r, const char *name, const json_t *v)
{
    const struct iz_key *k = iz_key_find(r->model->keys, name);
    char why[IZ_WHY_MAX], full[IZ_KEY_NAME_MAX];
    snprintf(full, sizeof(full), "model.%s", name);
    if (!k)
        unknown(r, full);
    else if (is_auto(k, v))
        iz_fault(&r->faults, full,
                 "\"auto\" cannot be resolved here; write a value");
    else if (!iz_key_store(why, r->model->target, k, v))
        iz_fault(&r->faults, full, "%s", why);
    else
        check_imported(r, full, name, v);
    assert(!k || k - r->model->keys < IZ_MODEL_KEYS_MAX);
    if (k)
        r->file->c.model_given[k - r->model->keys] = true;
}

static void read_preset(struct reader *r, const json_t *v)
{
    const char *name = json_string_value(v), *key;
    const struct iz_preset *p = r->model->presets;
    struct iz_nearest near = iz_nearest_start(name ? name : "", false);
    char found[IZ_WHY_MAX / 2];
    json_t *value;
    if (!v || json_is_null(v))
        return;
    for (; p && p->name && (!name || strcmp(p->name, name) != 0); p++)
        iz_nearest_try(&near, p->name);
    if (!p || !p->name) {
        iz_key_describe(found, sizeof(found), v);
        iz_fault(&r->faults, "model.preset", "%s is no preset%s", found,
                 near.hint);
        return;
    }
    json_t *object = json_loads(p->json, 0, NULL);
    assert(json_is_object(object)); /* our mistake, if it is not */
    json_object_foreach(object, key, value) read_model_key(r, key, value);
    memset(r->file->c.model_given, 0, sizeof(r->file->c.model_given));
    json_decref(object);
}

/* The shape that the imported folder's config.json has. */
static void read_import(struct reader *r, const json_t *v)
{
    const char *key, *folder = r->file->c.import;
    json_t *value;
    if (!v)
        return;
    read_key(r, iz_key_find(iz_config_keys, "model.import"), v);
    if (folder[0] == '\0')
        return;
    if (!r->model->hf) {
        iz_fault(&r->faults, "model.import", "this model has no names for it");
        return;
    }
    char *text =
        iz_published_read(r->model->hf, folder, r->notes, r->faults.err);
    if (text)
        r->imported = json_loads(text, 0, NULL);
    else
        iz_fault(&r->faults, "model.import", "%s cannot be imported", folder);
    free(text);
    json_object_foreach(r->imported, key, value)
    {
        const struct iz_key *k = iz_key_find(r->model->keys, key);
        char why[IZ_WHY_MAX];
        assert(k); /* the table of the model has no other */
        if (!iz_key_store(why, r->model->target, k, value))
            iz_fault(&r->faults, "model.import", "%s/config.json: %s: %s",
                     folder, iz_published_name(r->model->hf, key), why);
    }
}

static void read_model(struct reader *r, json_t *object)
{
    const char *key;
    json_t *v;
    read_import(r, json_object_get(object, "import"));
    read_preset(r, json_object_get(object, "preset"));
    json_object_foreach(object, key, v)
    {
        char name[IZ_KEY_NAME_MAX];
        snprintf(name, sizeof(name), "model.%s", key);
        const struct iz_key *k = iz_key_find(iz_config_keys, name);
        if (strcmp(key, "preset") == 0 || strcmp(key, "import") == 0)
            continue;
        if (k)
            read_key(r, k, v);
        else
            read_model_key(r, key, v);
    }
    json_decref(r->imported);
}

/* Names that DeepSpeed takes for others: of stage 3 without their prefix, and
 * the old one of bf16.  Returns the other name in `full`, or NULL. */
static const char *other_name(char *full, size_t size, const char *name)
{
    static const char zero[] = "zero_optimization.";
    size_t n = strlen(zero);
    if (strcmp(name, "bfloat16") == 0)
        return "bf16";
    if (strncmp(name, zero, n) != 0)
        return NULL;
    snprintf(full, size, "%sstage3_%s", zero, name + n);
    return iz_key_find(iz_config_keys, full) || find_foreign(full) ? full
                                                                   : NULL;
}

/* DeepSpeed's old names of a home on the host; returns whether it is one. */
static bool read_old_home(struct reader *r, const char *name, const json_t *v)
{
    bool optimizer = strcmp(name, "zero_optimization.cpu_offload") == 0;
    if (!optimizer && strcmp(name, "zero_optimization.cpu_offload_param") != 0)
        return false;
    const struct iz_key *home = iz_key_find(
        iz_config_keys, optimizer ? "zero_optimization.offload_optimizer.device"
                                  : "zero_optimization.offload_param.device");
    json_t *cpu = json_string("cpu");
    if (json_is_true(v))
        read_key(r, home, cpu);
    else if (!json_is_null(v) && !is_word(v, "auto"))
        expect(&r->faults, name, json_is_false(v), "a boolean", v);
    json_decref(cpu);
    return true;
}

static void read_object(struct reader *r, const char *prefix, json_t *object);

/* `name` is dotted, `v` its value. */
static void read_value(struct reader *r, const char *name, json_t *v)
{
    char full[IZ_KEY_NAME_MAX];
    const char *other = other_name(full, sizeof(full), name);
    if (other) {
        read_value(r, other, v);
        return;
    }
    if (read_old_home(r, name, v))
        return;
    const struct iz_key *k = iz_key_find(iz_config_keys, name);
    const struct iz_foreign_key *foreign = find_foreign(name);
    bool model = r->model != NULL && strcmp(name, "model") == 0;
    if (k) {
        read_key(r, k, v);
    } else if (strcmp(name, "parameters") == 0) {
        read_rules(r->file, &r->faults, v);
    } else if (foreign) {
        read_foreign(r, foreign, v);
    } else if (!model && !is_section(name)) {
        unknown(r, name);
    } else if (json_is_null(v)) { /* DeepSpeed's: an absent section */
        return;
    } else if (expect(&r->faults, name, json_is_object(v), "an object", v)) {
        if (model)
            read_model(r, v);
        else
            read_object(r, name, v);
    }
}

static void read_object(struct reader *r, const char *prefix, json_t *object)
{
    char name[IZ_KEY_NAME_MAX];
    const char *key;
    json_t *v;
    json_object_foreach(object, key, v)
    {
        int n = snprintf(name, sizeof(name), "%s%s%s", prefix,
                         prefix[0] != '\0' ? "." : "", key);
        if (n >= (int)sizeof(name))
            iz_fault(&r->faults, name, "unknown key");
        else if (strchr(key, '.') != NULL)
            iz_fault(&r->faults, name,
                     "a dot in a key; write the sections as nested objects");
        else
            read_value(r, name, v);
    }
}

/* ---- notes ---- */

static void note_value(FILE *notes, const struct iz_config_file *file,
                       const struct iz_key *k, const char *before)
{
    fprintf(notes, "%s%s ", before, k->name);
    iz_key_print(notes, k, file);
}

/* What the plan chooses, whose table has it. */
static bool is_planned(const struct iz_config_file *file, const char *key)
{
    return !strcmp(key, "zero_optimization.offload_optimizer.ratio") ||
           (file->c.cut_auto &&
            iz_text_among(key, "train_micro_batch_size_per_gpu|"
                               "gradient_accumulation_steps"));
}

static void print_notes(FILE *notes, const struct iz_config_file *file,
                        bool optimizer, const char *ignored)
{
    static const char *const assumed[] = {
        "optimizer.type", "optimizer.params.lr", "optimizer.params.betas",
        "optimizer.params.eps", "optimizer.params.weight_decay"};
    const char *before = "config: \"auto\" stands for ";
    for (const struct iz_key *k = iz_config_keys; k->name; k++)
        if (file->given[k - iz_config_keys] == IZ_GIVEN_AUTO &&
            !is_planned(file, k->name)) {
            note_value(notes, file, k, before);
            before = ", ";
        }
    fputs(before[0] == ',' ? "\n" : "", notes);
    for (int i = 0; !optimizer && i < 5; i++)
        note_value(notes, file, iz_key_find(iz_config_keys, assumed[i]),
                   i ? ", " : "config: no optimizer is given: ");
    fputs(optimizer ? "" : "\n", notes);
    if (ignored[0])
        fprintf(notes, "config: without effect here: %s\n", ignored + 2);
    fflush(notes); /* before any message of what follows */
}

/* The effective config of a run gives every key: those of an override count. */
static void keep_given(struct iz_config_file *file,
                       const struct iz_section *model,
                       const struct iz_faults *f)
{
    bool all = true;
    for (const struct iz_key *k = iz_config_keys; k->name; k++)
        all &= file->given[k - iz_config_keys] == IZ_GIVEN_VALUE ||
               !iz_config_in(k->name, "run") || !strcmp(k->fallback, "null");
    for (const struct iz_key *k = iz_config_keys; k->name; k++) {
        bool given = file->given[k - iz_config_keys] == IZ_GIVEN_VALUE;
        file->c.given[k - iz_config_keys] =
            given && (!all || iz_config_overridden(f, k->name, NULL));
    }
    for (const struct iz_key *k = model ? model->keys : NULL; k && k->name;
         k++) {
        char name[IZ_KEY_NAME_MAX];
        snprintf(name, sizeof(name), "model.%s", k->name);
        file->c.model_given[k - model->keys] &=
            !all || iz_config_overridden(f, name, NULL);
    }
}

int iz_config_read(struct iz_config *c, const struct iz_section *model,
                   const char *path, char *const *set, int n_set, int ranks,
                   FILE *notes, FILE *err)
{
    struct iz_config_file file;
    struct reader r = {.file = &file, .model = model, .notes = notes};
    int rc = 0;
    r.faults = (struct iz_faults){err, path ? path : "config", set, n_set, 0};
    json_t *root = iz_config_object(model, &r.faults, path, &rc);
    if (!root)
        return rc;
    iz_text_open(&r.ignored);
    memset(&file, 0, sizeof(file));
    iz_key_store_defaults(&file, iz_config_keys);
    if (model)
        iz_key_store_defaults(model->target, model->keys);
    read_object(&r, "", root);
    iz_config_resolve(&file, &r.faults, ranks);
    char *ignored = iz_text_close(&r.ignored);
    if (notes && r.faults.count == 0)
        print_notes(notes, &file,
                    json_is_object(json_object_get(root, "optimizer")),
                    ignored);
    free(ignored);
    json_decref(root);
    if (r.faults.count > 0)
        return -EINVAL;
    keep_given(&file, model, &r.faults);
    memcpy(c, &file.c, sizeof(*c));
    return 0;
}
