/* SPDX-License-Identifier: Apache-2.0 */
/* The config as one JSON object: the file, with the overrides put in. */
#include "runtime/config/keys.h"

#include <errno.h>
#include <string.h>

bool iz_config_in(const char *key, const char *section)
{
    size_t n = strlen(section);
    return strncmp(key, section, n) == 0 && key[n] == '.';
}

/* The parsed file, or NULL after a fault; *rc is then a negative errno. */
static json_t *parsed(struct iz_faults *f, const char *path, int *rc)
{
    json_error_t e;
    FILE *in = fopen(path, "r");
    if (!in) {
        *rc = -errno;
        iz_fault(f, NULL, "cannot be read: %s", strerror(-*rc));
        return NULL;
    }
    errno = 0;
    int first = getc(in);
    if (first == 0xef) /* editors of Windows begin with U+FEFF */
        fseek(in, 3, SEEK_SET);
    else
        ungetc(first, in);
    json_t *root = json_loadf(in, JSON_REJECT_DUPLICATES | JSON_DECODE_ANY, &e);
    if (!root && ferror(in) && errno != 0)
        iz_fault(f, NULL, "cannot be read: %s", strerror(errno));
    else if (!root)
        iz_fault(f, NULL, "line %d, column %d: %s", e.line, e.column, e.text);
    else if (!json_is_object(root))
        iz_fault(f, NULL, "expected an object in braces");
    fclose(in);
    *rc = -EINVAL;
    if (!json_is_object(root)) {
        json_decref(root);
        return NULL;
    }
    return root;
}

/* Whether `text` of such a key may be JSON: a path that looks like a number is
 * still a path. */
static bool may_be_json(const struct iz_section *model, const char *name,
                        const char *text)
{
    const struct iz_key *k = iz_key_find(iz_config_keys, name);
    if (!k && model && iz_config_in(name, "model"))
        k = iz_key_find(model->keys, name + strlen("model."));
    if (!k || !iz_key_is_text(k) || k->type >= IZ_KEY_INTS)
        return true;
    return text[0] == '"' || strcmp(text, "null") == 0 ||
           (k->type == IZ_KEY_LIST && text[0] == '[');
}

/* New reference. */
static json_t *override_value(const struct iz_section *model, const char *name,
                              const char *text)
{
    json_t *v = NULL;
    if (may_be_json(model, name, text))
        v = json_loads(text, JSON_DECODE_ANY | JSON_REJECT_DUPLICATES, NULL);
    return v != NULL ? v : json_string(text);
}

/* Puts v (stolen) at the dotted name, making sections on the way. */
static void insert(json_t *object, char *name, json_t *v)
{
    char *dot;
    for (; (dot = strchr(name, '.')) != NULL; name = dot + 1) {
        *dot = '\0';
        json_t *child = json_object_get(object, name);
        if (!json_is_object(child)) {
            child = json_object();
            json_object_set_new(object, name, child);
        }
        object = child;
    }
    json_object_set_new(object, name, v);
}

static void apply_override(const struct iz_section *model, json_t *root,
                           struct iz_faults *f, const char *set)
{
    char name[IZ_KEY_NAME_MAX];
    size_t n = strcspn(set, "=");
    json_t *utf8 = json_string(set);
    if (set[n] != '=' || n == 0 || set[0] == '.' || n >= sizeof(name) ||
        !utf8) {
        iz_fault(f, NULL, "--set %s: %s", set,
                 utf8 ? "expected key=value" : "not UTF-8");
    } else {
        snprintf(name, sizeof(name), "%.*s", (int)n, set);
        insert(root, name, override_value(model, name, set + n + 1));
    }
    json_decref(utf8);
}

bool iz_config_overridden(const struct iz_faults *f, const char *key,
                          const char *begin)
{
    size_t len = strlen(key);
    for (int i = 0; i < f->n_set; i++)
        if (!strncmp(f->set[i], key, len) && f->set[i][len] == '=' &&
            (!begin || strspn(f->set[i] + len + 1, begin)))
            return true;
    return false;
}

/* Numbers for both its factors replace the batch of a file. */
static void override_batch(json_t *root, const struct iz_faults *f)
{
    static const char digits[] = "0123456789";
    if (iz_config_overridden(f, "train_micro_batch_size_per_gpu", digits) &&
        iz_config_overridden(f, "gradient_accumulation_steps", digits) &&
        !iz_config_overridden(f, "train_batch_size", digits))
        json_object_del(root, "train_batch_size");
}

json_t *iz_config_object(const struct iz_section *model, struct iz_faults *f,
                         const char *path, int *rc)
{
    json_t *root = path ? parsed(f, path, rc) : json_object();
    if (!root)
        return NULL;
    for (int i = 0; i < f->n_set; i++)
        apply_override(model, root, f, f->set[i]);
    override_batch(root, f);
    return root;
}
