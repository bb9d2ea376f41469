/* SPDX-License-Identifier: Apache-2.0 */
/* Writes the effective config: every key that has a meaning in this run with
 * its resolved value, in the order of the table, as JSON that reads back the
 * same. */
#include "runtime/config/keys.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/durable.h"
#include "runtime/base/json.h"

/* One rule per line, with what it gives. */
static void print_rules(struct iz_nest *n, const struct iz_config *c)
{
    iz_nest_name(n, "parameters");
    fputc('[', n->out);
    for (int i = 0; i < c->n_rules; i++) {
        const char *glue = "";
        fprintf(n->out, "%s\n%*s{", i > 0 ? "," : "", 8, "");
        for (int k = 0; k < IZ_RULE_KEYS; k++) {
            if (!c->rule[i].given[k])
                continue;
            fputs(glue, n->out);
            iz_json_print(n->out, iz_rule_keys[k].name);
            fputs(": ", n->out);
            iz_key_print(n->out, &iz_rule_keys[k], &c->rule[i]);
            glue = ", ";
        }
        fputc('}', n->out);
    }
    fputs("\n    ]", n->out);
}

static void print_config(FILE *out, const struct iz_config_file *file,
                         const struct iz_section *model)
{
    struct iz_nest n = {.out = out, .indent = 4, .first = true};
    char name[IZ_KEY_NAME_MAX];
    fputc('{', out);
    for (int i = 0; iz_config_keys[i].name; i++) {
        if (file->given[i] != IZ_GIVEN_VALUE ||
            (!model && !strncmp(iz_config_keys[i].name, "model.", 6)))
            continue;
        iz_nest_name(&n, iz_config_keys[i].name);
        iz_key_print(out, &iz_config_keys[i], file);
    }
    for (const struct iz_key *k = model ? model->keys : NULL; k && k->name;
         k++) {
        snprintf(name, sizeof(name), "model.%s", k->name);
        iz_nest_name(&n, name);
        iz_key_print(out, k, model->target);
    }
    if (file->c.n_rules > 0)
        print_rules(&n, &file->c);
    while (n.depth > 0)
        iz_nest_end(&n);
    fputs("\n}\n", out);
}

int iz_config_write(const struct iz_config *c, const struct iz_section *model,
                    const char *path)
{
    struct iz_config_file file;
    struct iz_text t;
    iz_config_unresolve(&file, c);
    if (iz_text_open(&t))
        print_config(t.out, &file, model);
    char *text = iz_text_close(&t);
    int rc =
        text ? iz_durable_replace("run.output", path, text)
             : iz_durable_refuse("run.output", path, "cannot create", ENOMEM);
    free(text);
    return rc;
}
