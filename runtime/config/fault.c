/* SPDX-License-Identifier: Apache-2.0 */
/* How faults of a config are told: one line each, with the place, the key and,
 * for a name nobody knows, the nearest one that exists. */
#include "runtime/config/keys.h"

#include <assert.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#define FAULT_MAX 1024

/* The last override that sets `key` or a section it is in, or NULL. */
static const char *override_of(const struct iz_faults *f, const char *key)
{
    for (int i = f->n_set - 1; i >= 0 && key; i--) {
        size_t n = strcspn(f->set[i], "=");
        if (strncmp(f->set[i], key, n) == 0 &&
            (key[n] == '\0' || key[n] == '.' || key[n] == '['))
            return f->set[i];
    }
    return NULL;
}

/* One that sets something in the section `key`, which the file may have too. */
static const char *override_in(const struct iz_faults *f, const char *key)
{
    size_t n = key ? strlen(key) : 0;
    for (int i = f->n_set - 1; i >= 0 && n; i--)
        if (strncmp(f->set[i], key, n) == 0 && f->set[i][n] == '.')
            return f->set[i];
    return NULL;
}

void iz_fault(struct iz_faults *f, const char *key, const char *fmt, ...)
{
    char what[FAULT_MAX], line[2 * FAULT_MAX];
    const char *set = override_of(f, key), *in = override_in(f, key);
    va_list ap;
    f->count++;
    if (!f->err || f->count > IZ_FAULTS_TOLD + 1)
        return;
    if (f->count > IZ_FAULTS_TOLD) {
        fprintf(f->err, "%s: there are more faults than these %d\n", f->path,
                IZ_FAULTS_TOLD);
        return;
    }
    va_start(ap, fmt);
    vsnprintf(what, sizeof(what), fmt, ap);
    va_end(ap);
    if (set)
        snprintf(line, sizeof(line), "--set %s: %s: %s", set, key, what);
    else
        snprintf(line, sizeof(line), "%s%s%s: %s%s%s", f->path,
                 in ? ", --set " : "", in ? in : "", key ? key : "",
                 key ? ": " : "", what);
    iz_text_make_printable(line);
    fprintf(f->err, "%s\n", line);
}

/* The key and every section it is in. */
static void nearest_try_key(struct iz_nearest *n, const char *prefix,
                            const char *key)
{
    char known[IZ_KEY_NAME_MAX];
    snprintf(known, sizeof(known), "%s%s", prefix, key);
    iz_nearest_try(n, known);
    for (char *dot; (dot = strrchr(known, '.'));) {
        *dot = '\0';
        iz_nearest_try(n, known);
    }
}

struct iz_nearest iz_nearest_key(const char *name,
                                 const struct iz_section *model)
{
    struct iz_nearest n = iz_nearest_start(name, false);
    for (const struct iz_key *k = iz_config_keys; k->name; k++)
        nearest_try_key(&n, "", k->name);
    for (const struct iz_key *k = model ? model->keys : NULL; k && k->name; k++)
        nearest_try_key(&n, "model.", k->name);
    if (model)
        iz_nearest_try(&n, "model.preset");
    for (const struct iz_foreign_key *k = iz_foreign_keys; k->name; k++)
        nearest_try_key(&n, "", k->name);
    iz_nearest_try(&n, "parameters");
    return n;
}

enum iz_given *iz_config_given(struct iz_config_file *file, const char *name)
{
    const struct iz_key *k = iz_key_find(iz_config_keys, name);
    assert(k);
    return &file->given[k - iz_config_keys];
}

bool iz_config_auto(struct iz_config_file *file, const char *name)
{
    return *iz_config_given(file, name) == IZ_GIVEN_AUTO;
}

bool iz_config_gives(struct iz_config_file *file, const char *name)
{
    return *iz_config_given(file, name) == IZ_GIVEN_VALUE;
}

bool iz_config_bad(struct iz_config_file *file, const char *names)
{
    char name[IZ_KEY_NAME_MAX];
    bool bad = false;
    for (int i = 0; iz_text_word(name, sizeof(name), names, i); i++)
        bad |= *iz_config_given(file, name) == IZ_GIVEN_BAD;
    return bad;
}

/* Prints a value as a sentence has it, without quotes; returns whether its key
 * has a fault of its own. */
static bool print_value(FILE *out, struct iz_config_file *file,
                        const char *name)
{
    if (strcmp(name, "dtype") == 0) {
        fputs(iz_dtype_name(file->c.dtype), out);
        return iz_config_bad(file, "bf16.enabled|fp16.enabled");
    }
    struct iz_text t;
    const struct iz_key *k = iz_key_find(iz_config_keys, name);
    assert(k); /* of a text of ours */
    iz_key_print(iz_text_open(&t), k, file);
    char *text = iz_text_close(&t);
    json_t *v = json_loads(text, JSON_DECODE_ANY, NULL);
    if (json_is_real(v))
        fprintf(out, "%.15g", json_real_value(v));
    else
        fputs(json_is_string(v) ? json_string_value(v) : text, out);
    json_decref(v);
    free(text);
    return iz_config_bad(file, name);
}

/* Those that are not told are put together too, so that a name in them that is
 * no key never waits for its user. */
static void conflict_tell(struct iz_config_file *file, struct iz_faults *f,
                          const struct iz_conflict *c)
{
    bool bad = iz_config_bad(file, c->key);
    char name[IZ_KEY_NAME_MAX];
    struct iz_text t;
    FILE *out = iz_text_open(&t);
    for (const char *p = c->text; *p; p++) {
        if (*p != '{') {
            fputc(*p, out);
            continue;
        }
        size_t n = strcspn(++p, "}");
        snprintf(name, sizeof(name), "%.*s", (int)n, p);
        bad |= print_value(out, file, n ? name : c->key);
        p += n;
    }
    char *text = iz_text_close(&t);
    if (c->is && !bad)
        iz_fault(f, c->key, "%s", text);
    free(text);
}

void iz_conflicts_tell(struct iz_config_file *file, struct iz_faults *f,
                       const struct iz_conflict *conflicts, size_t n)
{
    for (size_t i = 0; i < n; i++)
        conflict_tell(file, f, &conflicts[i]);
}
