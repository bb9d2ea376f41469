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

static void new_line(struct iz_nest *n)
{
    fprintf(n->out, "%s\n%*s", n->first ? "" : ",", n->indent * (n->depth + 1),
            "");
    n->first = false;
}

void iz_nest_end(struct iz_nest *n)
{
    char *dot = strrchr(n->open, '.');
    *(dot ? dot : n->open) = '\0';
    n->depth--;
    fprintf(n->out, "\n%*s}", n->indent * (n->depth + 1), "");
    n->first = false;
}

static bool is_inside(const char *section, const char *name)
{
    size_t n = strlen(section);
    return n == 0 || (strncmp(section, name, n) == 0 && name[n] == '.');
}

void iz_nest_name(struct iz_nest *n, const char *name)
{
    while (!is_inside(n->open, name))
        iz_nest_end(n);
    size_t at = n->open[0] != '\0' ? strlen(n->open) + 1 : 0;
    for (const char *dot; (dot = strchr(name + at, '.')) != NULL;) {
        size_t end = (size_t)(dot - name);
        new_line(n);
        fprintf(n->out, "\"%.*s\": {", (int)(end - at), name + at);
        snprintf(n->open, sizeof(n->open), "%.*s", (int)end, name);
        n->depth++;
        n->first = true;
        at = end + 1;
    }
    new_line(n);
    iz_json_print(n->out, name + at);
    fputs(": ", n->out);
}

/* The fewest digits that read back as x. */
static void print_double(FILE *out, double x)
{
    char text[32];
    for (int digits = 15; digits <= 17; digits++) {
        snprintf(text, sizeof(text), "%.*g", digits, x);
        if (strtod(text, NULL) == x)
            break;
    }
    fprintf(out, "%s%s", text, strpbrk(text, ".e") != NULL ? "" : ".0");
}

static void print_word(FILE *out, const char *words, int i)
{
    char word[IZ_CONFIG_NAME_MAX];
    if (!iz_text_word(word, sizeof(word), words, i) ||
        strcmp(word, "null") == 0)
        fputs("null", out);
    else
        iz_json_print(out, word);
}

void iz_config_value(FILE *out, const struct iz_key *k, const void *base)
{
    const void *at = (const char *)base + k->offset;
    switch (k->type) {
    case IZ_KEY_BOOL:
        fputs(*(const bool *)at ? "true" : "false", out);
        break;
    case IZ_KEY_INT:
        fprintf(out, "%d", *(const int *)at);
        break;
    case IZ_KEY_INT64:
        fprintf(out, "%lld", (long long)*(const int64_t *)at);
        break;
    case IZ_KEY_UINT64:
        fprintf(out, "%llu", (unsigned long long)*(const uint64_t *)at);
        break;
    case IZ_KEY_DOUBLE:
        print_double(out, *(const double *)at);
        break;
    case IZ_KEY_PAIR:
        fputc('[', out);
        print_double(out, ((const double *)at)[0]);
        fputs(", ", out);
        print_double(out, ((const double *)at)[1]);
        fputc(']', out);
        break;
    case IZ_KEY_STRING:
    case IZ_KEY_LIST:
        iz_json_print(out, at);
        break;
    case IZ_KEY_INTS:
        fprintf(out, "[%s]", (const char *)at);
        break;
    case IZ_KEY_ENUM:
        print_word(out, k->words, *(const int *)at);
        break;
    }
}

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
            iz_config_value(n->out, &iz_rule_keys[k], &c->rule[i]);
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
    char name[IZ_CONFIG_NAME_MAX];
    fputc('{', out);
    for (int i = 0; iz_config_keys[i].name; i++) {
        if (file->given[i] != IZ_GIVEN_VALUE ||
            (!model && is_inside("model", iz_config_keys[i].name)))
            continue;
        iz_nest_name(&n, iz_config_keys[i].name);
        iz_config_value(out, &iz_config_keys[i], file);
    }
    for (const struct iz_key *k = model ? model->keys : NULL; k && k->name;
         k++) {
        snprintf(name, sizeof(name), "model.%s", k->name);
        iz_nest_name(&n, name);
        iz_config_value(out, k, model->target);
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
