/* SPDX-License-Identifier: Apache-2.0 */
/* How faults of a config are told: one line each, with the place, the key and,
 * for a name nobody knows, the nearest one that exists. */
#include "runtime/config/keys.h"

#include <stdarg.h>
#include <string.h>
#include <strings.h>

#define FAULT_MAX 1024

/* What a user typed must not break the line. */
static void config_fault_print_line(FILE *out, const char *s)
{
    for (; *s != '\0'; s++) {
        unsigned char c = (unsigned char)*s;
        fputc(c < 0x20 || c == 0x7f ? '?' : c, out);
    }
    fputc('\n', out);
}

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

void iz_fault(struct iz_faults *f, const char *key, const char *fmt, ...)
{
    char what[FAULT_MAX], line[2 * FAULT_MAX];
    const char *set = override_of(f, key);
    va_list ap;

    f->count++;
    if (!f->err)
        return;
    va_start(ap, fmt);
    vsnprintf(what, sizeof(what), fmt, ap);
    va_end(ap);
    if (set)
        snprintf(line, sizeof(line), "--set %s: %s: %s", set, key, what);
    else
        snprintf(line, sizeof(line), "%s: %s%s%s", f->path, key ? key : "",
                 key ? ": " : "", what);
    config_fault_print_line(f->err, line);
}

bool iz_word(char *word, size_t size, const char *words, int i)
{
    for (; i > 0 && words; i--) {
        words = strchr(words, '|');
        words = words ? words + 1 : NULL;
    }
    if (!words)
        return false;
    snprintf(word, size, "%.*s", (int)strcspn(words, "|"), words);
    return true;
}

static int min3(int a, int b, int c)
{
    int m = a < b ? a : b;
    return m < c ? m : c;
}

/* Insertions, deletions and replacements between a and b, case ignored. */
static int distance(const char *a, const char *b)
{
    int row[IZ_CONFIG_NAME_MAX + 1];
    int nb = (int)strlen(b);

    if (nb > IZ_CONFIG_NAME_MAX)
        return IZ_CONFIG_NAME_MAX;
    for (int j = 0; j <= nb; j++)
        row[j] = j;
    for (int i = 0; a[i] != '\0'; i++) {
        int corner = row[0];
        row[0] = i + 1;
        for (int j = 0; j < nb; j++) {
            int same = strncasecmp(&a[i], &b[j], 1) == 0;
            int next = min3(corner + !same, row[j] + 1, row[j + 1] + 1);
            corner = row[j + 1];
            row[j + 1] = next;
        }
    }
    return row[nb];
}

static const char *last_part(const char *name)
{
    const char *dot = strrchr(name, '.');
    return dot != NULL ? dot + 1 : name;
}

static bool ends_with(const char *s, const char *end)
{
    size_t n = strlen(s), m = strlen(end);
    return m >= 4 && n >= m && strcmp(s + n - m, end) == 0;
}

/* A key in the wrong section, or without its prefix, is near too. */
static int score(const char *name, const char *known)
{
    const char *a = last_part(name), *b = last_part(known);
    int whole = distance(name, known), part = 1 + distance(a, b);

    if (ends_with(b, a) || ends_with(a, b))
        part = part < 2 ? part : 2;
    return whole < part ? whole : part;
}

struct nearest {
    const char *name;
    char *near;
    int score;
};

static void nearest_start(struct nearest *n, char *near, const char *name)
{
    int length = (int)strlen(last_part(name));

    near[0] = '\0';
    *n = (struct nearest){.name = name, .near = near};
    n->score = 1 + (length / 3 > 2 ? length / 3 : 2);
}

static void nearest_try(struct nearest *n, const char *known)
{
    int s = score(n->name, known);

    if (s >= n->score)
        return;
    n->score = s;
    snprintf(n->near, IZ_CONFIG_NAME_MAX, "%s", known);
}

/* The key and every section it is in. */
static void nearest_try_key(struct nearest *n, const char *prefix,
                            const char *key)
{
    char known[IZ_CONFIG_NAME_MAX];

    snprintf(known, sizeof(known), "%s%s", prefix, key);
    nearest_try(n, known);
    for (char *dot; (dot = strrchr(known, '.')) != NULL;) {
        *dot = '\0';
        nearest_try(n, known);
    }
}

void iz_config_nearest(char *near, const char *name,
                       const struct iz_section *model)
{
    struct nearest n;

    nearest_start(&n, near, name);
    for (const struct iz_key *k = iz_config_keys; k->name; k++)
        nearest_try_key(&n, "", k->name);
    if (model) {
        for (const struct iz_key *k = model->keys; k->name; k++)
            nearest_try_key(&n, "model.", k->name);
        nearest_try(&n, "model.preset");
    }
    for (const struct iz_foreign_key *k = iz_foreign_keys; k->name; k++)
        nearest_try_key(&n, "", k->name);
    nearest_try(&n, "parameters");
}

void iz_word_nearest(char *near, const char *word, const char *words)
{
    char known[IZ_CONFIG_NAME_MAX];
    struct nearest n;

    nearest_start(&n, near, word);
    for (int i = 0; iz_word(known, sizeof(known), words, i); i++)
        nearest_try(&n, known);
}

void iz_preset_nearest(char *near, const char *name,
                       const struct iz_preset *presets)
{
    struct nearest n;

    nearest_start(&n, near, name);
    for (; presets && presets->name; presets++)
        nearest_try(&n, presets->name);
}
