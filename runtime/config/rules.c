/* SPDX-License-Identifier: Apache-2.0 */
/* Rules for parameters by name; see rules.h. */
#include "runtime/config/rules.h"

#include <errno.h>
#include <fnmatch.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/config/keys.h"

/* All names as "a|b|c"; malloc'ed, NULL: no memory. */
static char *names_of(const struct iz_model *m)
{
    char *text = NULL;
    size_t bytes = 0;
    FILE *f = open_memstream(&text, &bytes);
    const char *glue = "";

    if (!f)
        return NULL;
    for (int u = 0; u < m->n_units; u++)
        for (int i = 0; i < m->unit[u].n_params; i++, glue = "|")
            fprintf(f, "%s%s", glue, m->unit[u].param[i].name);
    if (ferror(f) | (fclose(f) != 0)) {
        free(text);
        return NULL;
    }
    return text;
}

static void replace(char *s, char from, char to)
{
    for (; *s; s++)
        if (*s == from)
            *s = to;
}

/* The name nearest to a pattern, "" if none is near.  Names are compared as a
 * whole: the words of a config are also compared from their last dot on. */
static void nearest(char near[IZ_CONFIG_NAME_MAX], const struct iz_model *m,
                    const char *match)
{
    char whole[IZ_CONFIG_NAME_MAX], *names = names_of(m);

    near[0] = '\0';
    if (!names)
        return;
    snprintf(whole, sizeof(whole), "%s", match);
    replace(whole, '.', '/');
    replace(names, '.', '/');
    iz_word_nearest(near, whole, names);
    replace(near, '/', '.');
    free(names);
}

int iz_rules_none(const struct iz_model *m, const char *key, const char *match,
                  const char *what, FILE *err)
{
    char near[IZ_CONFIG_NAME_MAX];

    nearest(near, m, match);
    if (err)
        fprintf(err,
                "izar: %s: \"%s\" matches no %s of %s%s%s (--parameters lists "
                "them)\n",
                key, match, what, m->name, near[0] ? "; the nearest is " : "",
                near);
    return -EINVAL;
}

static void rules_apply(struct iz_param *p, const struct iz_rule *r)
{
    if (r->given[IZ_RULE_DECAY])
        p->weight_decay = r->weight_decay;
    if (r->given[IZ_RULE_LR])
        p->lr_scale = r->lr_scale;
    if (r->given[IZ_RULE_FROZEN])
        p->frozen = r->frozen;
    if (r->given[IZ_RULE_SPARSE])
        p->sparse = r->sparse;
}

static int apply_rule(struct iz_model *m, const struct iz_config *c, int i,
                      FILE *err)
{
    const struct iz_rule *r = &c->rule[i];
    char key[64];
    int found = 0;

    for (int u = 0; u < m->n_units; u++)
        for (int k = 0; k < m->unit[u].n_params; k++) {
            struct iz_param *p = &m->unit[u].param[k];

            if (fnmatch(r->match, p->name, 0) != 0)
                continue;
            rules_apply(p, r);
            found++;
        }
    snprintf(key, sizeof(key), "parameters[%d].match", i);
    return found ? 0 : iz_rules_none(m, key, r->match, "tensor", err);
}

/* What would be sparse must be a table, and trained. */
static int check_sparse(const struct iz_unit *u, const struct iz_param *p,
                        FILE *err)
{
    const char *why = NULL;

    if (!p->sparse)
        return 0;
    if (!u->table_reads)
        why = "it is no table of rows that samples choose from";
    else if (p->frozen)
        why = "it is frozen: nothing of it is updated";
    if (why && err)
        fprintf(err, "izar: parameters: sparse: true for %s: %s\n", p->name,
                why);
    return why ? -EINVAL : 0;
}

static int check_all_sparse(const struct iz_model *m, FILE *err)
{
    int status = 0;

    for (int u = 0; u < m->n_units; u++)
        for (int i = 0; i < m->unit[u].n_params && !status; i++)
            status = check_sparse(&m->unit[u], &m->unit[u].param[i], err);
    return status;
}

/* Why a sparse tensor cannot be updated in this way; NULL: it can. */
static const char *sparse_refusal(const struct iz_param *p,
                                  const struct iz_config *c, bool gpu)
{
    if (gpu)
        return "the kernels of a GPU read and update whole tables: use "
               "run.device: cpu, or sparse: false";
    if (c->run.state_dtype == IZ_MOMENT_FP8 && p->cols % IZ_MOMENT_BLOCK)
        return "with run.state_dtype: fp8, 64 numbers have one exponent, and "
               "its rows are no multiple of 64: those that no sample reads "
               "would be rounded anew";
    return NULL;
}

int iz_rules_check_sparse(const struct iz_model *m, const struct iz_config *c,
                          bool gpu, FILE *err)
{
    for (int u = 0; u < m->n_units; u++)
        for (int i = 0; i < m->unit[u].n_params; i++) {
            const struct iz_param *p = &m->unit[u].param[i];
            const char *why = p->sparse ? sparse_refusal(p, c, gpu) : NULL;

            if (!why)
                continue;
            if (err)
                fprintf(err, "izar: parameters: sparse: true for %s: %s\n",
                        p->name, why);
            return -ENOTSUP;
        }
    return 0;
}

static int check_trained(const struct iz_model *m, FILE *err)
{
    for (int u = 0; u < m->n_units; u++)
        if (iz_unit_elems(&m->unit[u], false))
            return 0;
    if (err)
        fprintf(err, "izar: parameters: every tensor is frozen: there is "
                     "nothing to train\n");
    return -EINVAL;
}

int iz_rules_apply(struct iz_model *m, const struct iz_config *c, FILE *err)
{
    int status = 0;

    for (int u = 0; u < m->n_units; u++)
        for (int k = 0; k < m->unit[u].n_params; k++) {
            struct iz_param *p = &m->unit[u].param[k];

            p->weight_decay = c->optimizer.weight_decay;
            p->lr_scale = 1;
            p->sparse = false;
            p->frozen = c->lora.rank > 0 && k < iz_unit_base(&m->unit[u]);
        }
    for (int i = 0; i < c->n_rules; i++) {
        int s = apply_rule(m, c, i, err);

        status = status ? status : s;
    }
    if (!status)
        status = check_all_sparse(m, err);
    return status ? status : check_trained(m, err);
}

void iz_rules_print(const struct iz_model *m, FILE *out)
{
    for (int u = 0; u < m->n_units; u++)
        for (int i = 0; i < m->unit[u].n_params; i++) {
            const struct iz_param *p = &m->unit[u].param[i];

            fprintf(out, "%-40s [%" PRId64 ", %" PRId64 "]  ", p->name, p->rows,
                    p->cols);
            if (p->frozen)
                fprintf(out, "frozen\n");
            else
                fprintf(out, "weight_decay %g  lr_scale %g%s\n",
                        p->weight_decay, p->lr_scale,
                        p->sparse ? "  sparse" : "");
        }
}

struct iz_segment *iz_rules_segments(const struct iz_unit *u)
{
    struct iz_segment *s = calloc((size_t)u->n_params + 1, sizeof(*s));
    int64_t at = 0;
    int n = 0;

    for (int i = 0; s && i < u->n_params; i++) {
        const struct iz_param *p = &u->param[i];
        struct iz_segment next = {.lr_scale = p->lr_scale,
                                  .weight_decay = p->weight_decay};

        if (p->frozen)
            continue;
        at += p->rows * p->cols;
        if (n == 0 || s[n - 1].lr_scale != next.lr_scale ||
            s[n - 1].weight_decay != next.weight_decay)
            s[n++] = next;
        s[n - 1].end = at;
    }
    if (n)
        s[n - 1].end = INT64_MAX;
    return s;
}
