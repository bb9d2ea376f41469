/* SPDX-License-Identifier: Apache-2.0 */
/* Writes the effective config: every key that has a meaning in this run with
 * its resolved value, in the order of the table, as JSON that reads back the
 * same. */
#include "runtime/config/keys.h"

#include <stdlib.h>
#include <string.h>

#include "runtime/base/durable.h"
#include "runtime/base/json.h"

/* What each rule gives, with `before` in front of it and `behind` at the end.
 */
static void print_rules(FILE *out, const struct iz_config *c,
                        const char *before, const char *behind)
{
    fputc('[', out);
    for (int i = 0; i < c->n_rules; i++) {
        const char *glue = "";
        fprintf(out, "%s%s{", i > 0 ? "," : "", before);
        for (int k = 0; k < IZ_RULE_KEYS; k++) {
            if (!c->rule[i].given[k])
                continue;
            fputs(glue, out);
            iz_json_print(out, iz_rule_keys[k].name);
            fputs(": ", out);
            iz_key_print(out, &iz_rule_keys[k], &c->rule[i]);
            glue = ", ";
        }
        fputc('}', out);
    }
    fprintf(out, "%s]", behind);
}

/* Calls `name` before it prints a value. */
static void print_keys(FILE *out, const struct iz_config *c,
                       const struct iz_section *model,
                       void (*name)(void *arg, const char *key), void *arg)
{
    struct iz_config_file file;
    char key[IZ_KEY_NAME_MAX];
    iz_config_unresolve(&file, c);
    for (int i = 0; iz_config_keys[i].name; i++) {
        if (file.given[i] != IZ_GIVEN_VALUE ||
            (!model && !strncmp(iz_config_keys[i].name, "model.", 6)))
            continue;
        name(arg, iz_config_keys[i].name);
        iz_key_print(out, &iz_config_keys[i], &file);
    }
    for (const struct iz_key *k = model ? model->keys : NULL; k && k->name;
         k++) {
        snprintf(key, sizeof(key), "model.%s", k->name);
        name(arg, key);
        iz_key_print(out, k, model->target);
    }
}

static void name_member(void *arg, const char *key)
{
    iz_nest_name(arg, key);
}

static void print_config(FILE *out, const struct iz_config *c,
                         const struct iz_section *model)
{
    struct iz_nest n = {.out = out, .indent = 4, .first = true};
    fputc('{', out);
    print_keys(out, c, model, name_member, &n);
    if (c->n_rules > 0) {
        iz_nest_name(&n, "parameters");
        print_rules(out, c, "\n        ", "\n    ");
    }
    while (n.depth > 0)
        iz_nest_end(&n);
    fputs("\n}\n", out);
}

static void name_line(void *arg, const char *key)
{
    fprintf(arg, "\n%s ", key);
}

void iz_config_lines(FILE *out, const struct iz_config *c,
                     const struct iz_section *model)
{
    print_keys(out, c, model, name_line, out);
    fputs("\nparameters ", out);
    print_rules(out, c, "", "");
    fputc('\n', out);
}

bool iz_config_change(const char *key, enum iz_change *change)
{
    const struct iz_key *k = iz_key_find(iz_config_keys, key);
    if (k)
        *change = k->change;
    return k != NULL;
}

int iz_config_write(const struct iz_config *c, const struct iz_section *model,
                    const char *path)
{
    struct iz_text t;
    print_config(iz_text_open(&t), c, model);
    char *text = iz_text_close(&t);
    int rc = iz_durable_replace("run.output", path, text);
    free(text);
    return rc;
}
