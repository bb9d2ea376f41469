/* SPDX-License-Identifier: Apache-2.0 */
/* Adapters as parameters of their units; see lora.h. */
#define _DEFAULT_SOURCE /* strsep */

#include "runtime/config/lora.h"

#include <errno.h>
#include <fnmatch.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "codelets/base/die.h"
#include "codelets/base/int64.h"
#include "codelets/unit/unit.h"
#include "runtime/base/text.h"
#include "runtime/config/rules.h"

/* ---- making them ---- */

/* The patterns of lora.targets, between commas. */
struct targets {
    char text[IZ_PATH_MAX];
    const char *pattern[IZ_PATH_MAX / 2];
    bool found[IZ_PATH_MAX / 2];
    int n;
};

static void split(struct targets *t, const char *text)
{
    char *rest = t->text, *part;
    memset(t, 0, sizeof(*t));
    snprintf(t->text, sizeof(t->text), "%s", text);
    while ((part = strsep(&rest, ","))) {
        part += strspn(part, " ");
        part[strcspn(part, " ")] = '\0';
        if (*part)
            t->pattern[t->n++] = part;
    }
}

static bool is_target(struct targets *t, const char *name)
{
    bool any = false;
    for (int i = 0; i < t->n; i++)
        if (fnmatch(t->pattern[i], name, 0) == 0)
            any = t->found[i] = true;
    return any;
}

bool iz_lora_name(char *out, size_t size, const char *head, const char *of,
                  char matrix)
{
    static const char tail[] = ".weight";
    int n = (int)strlen(of), cut = (int)sizeof(tail) - 1;
    if (n > cut && strcmp(of + n - cut, tail) == 0)
        n -= cut;
    return snprintf(out, size, "%s%.*s.lora_%c%s", head, n, of, matrix, tail) <
           (int)size;
}

/* a is normal with the variance of PEFT's uniform one, 1 / (3 in); b is zero,
 * so that the first step is that of the model without. */
static int add_adapter(struct iz_unit *u, int target, bool out_in, int rank)
{
    const struct iz_param w = u->param[target];
    int64_t in = out_in ? w.cols : w.rows, out = out_in ? w.rows : w.cols;
    struct iz_param *a = &u->param[u->n_params], *b = a + 1;
    *a = (struct iz_param){.rows = rank,
                           .cols = in,
                           .init = IZ_INIT_NORMAL,
                           .std = (float)sqrt(1 / (3.0 * (double)in)),
                           .adapts = target,
                           .out_in = out_in};
    *b = (struct iz_param){.rows = out,
                           .cols = rank,
                           .init = IZ_INIT_ZERO,
                           .adapts = target,
                           .out_in = out_in};
    u->n_params += 2;
    u->n_adapters++;
    bool named = iz_lora_name(a->name, sizeof(a->name), "", w.name, 'A') &&
                 iz_lora_name(b->name, sizeof(b->name), "", w.name, 'B');
    return named ? 0 : -ENAMETOOLONG;
}

static int add_adapters(struct iz_model *m, int unit, struct targets *t,
                        int rank)
{
    struct iz_unit *u = &m->unit[unit];
    int n = u->n_params, err = 0;
    struct iz_adapter *probe = calloc((size_t)n + 1, sizeof(*probe));
    struct iz_param *list = realloc(u->param, 3 * (size_t)n * sizeof(*list));
    if (list)
        u->param = list;
    if (probe && list)
        iz_unit_probe(m, unit, probe);
    else
        err = -ENOMEM;
    for (int i = 0; i < n && !err; i++)
        if (probe[i].seen && is_target(t, u->param[i].name))
            err = add_adapter(u, i, probe[i].out_in, rank);
    free(probe);
    return err;
}

int iz_lora_apply(struct iz_model *m, const struct iz_config *c, FILE *err)
{
    const struct iz_lora_config *l = &c->lora;
    struct targets t;
    int status = 0;
    if (l->rank == 0)
        return 0;
    split(&t, l->targets);
    for (int u = 0; u < m->n_units && !status; u++) {
        status = add_adapters(m, u, &t, l->rank);
        if (status)
            iz_refuse(err, "lora.targets: %s: adapters of %s: %s", l->targets,
                      m->unit[u].name,
                      status == -ENAMETOOLONG ? "a name becomes too long"
                                              : strerror(-status));
    }
    m->adapter_scale = (float)(l->alpha / l->rank);
    for (int i = 0; i < t.n && !status; i++)
        if (!t.found[i])
            status = iz_rules_none(m, "lora.targets", t.pattern[i],
                                   "weight of a linear layer", err);
    return status;
}

/* ---- merging them ---- */

struct merge {
    const struct iz_param *w, *a, *b;
    const float *av, *bv; /* their values */
    float scale;
};

/* Row i of w, columns [from, from + n). */
static void merge_row(const struct merge *g, int64_t i, int64_t from,
                      float *out, int64_t n)
{
    int64_t rank = g->a->rows, in = g->a->cols;
    for (int64_t j = 0; j < n; j++) {
        int64_t o = g->a->out_in ? i : from + j;
        int64_t k = g->a->out_in ? from + j : i;
        float sum = 0;
        for (int64_t r = 0; r < rank; r++)
            sum += g->bv[o * rank + r] * g->av[r * in + k];
        out[j] += g->scale * sum;
    }
}

/* What of w, which begins at `at` in its array, is among the n elements from
 * `first` on. */
static void merge_range(const struct merge *g, int64_t at, int64_t first,
                        float *in, int64_t n)
{
    int64_t cols = g->w->cols;
    int64_t from = max64(first, at);
    int64_t end = min64(at + g->w->rows * cols, first + n);
    while (from < end) {
        int64_t i = (from - at) / cols, j = (from - at) % cols;
        int64_t k = min64(cols - j, end - from);
        merge_row(g, i, j, in + (from - first), k);
        from += k;
    }
}

void iz_lora_merge(const struct iz_model *m, int unit, bool frozen,
                   const float *trained, int64_t first, float *in, int64_t n)
{
    const struct iz_unit *u = &m->unit[unit];
    int64_t *offset = calloc((size_t)u->n_params + 1, sizeof(*offset));
    if (!offset)
        iz_die("merging adapters: out of memory");
    iz_unit_offsets(u, 0, offset);
    for (int i = iz_unit_base(u); i < u->n_params; i += 2) {
        const struct iz_param *a = &u->param[i];
        struct merge g = {.w = &u->param[a->adapts],
                          .a = a,
                          .b = a + 1,
                          .av = trained + offset[i],
                          .bv = trained + offset[i + 1],
                          .scale = m->adapter_scale};
        if (g.w->frozen == frozen)
            merge_range(&g, offset[a->adapts], first, in, n);
    }
    free(offset);
}
