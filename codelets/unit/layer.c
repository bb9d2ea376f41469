/* SPDX-License-Identifier: Apache-2.0 */
/* Building the list of units of a model. */
#include "codelets/unit/layer.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "codelets/base/int64.h"
#include "codelets/base/take.h"

static void close_model(struct iz_model *m)
{
    for (int u = 0; u < m->n_units; u++)
        free(m->unit[u].param);
    free(m->unit);
    free(m->self);
    free(m);
}

struct iz_model *iz_model_open(const char *name, int n_units, const void *self,
                               size_t self_bytes)
{
    struct iz_model *m = iz_take(1, sizeof(*m), "a model");
    m->name = name;
    m->close = close_model;
    m->item = "token";
    m->tokens = 1;
    m->n_units = n_units;
    m->unit =
        iz_take(n_units, sizeof(*m->unit), "a model of %d units", n_units);
    m->self = iz_take(1, (int64_t)self_bytes, "a model");
    memcpy(m->self, self, self_bytes);
    for (int u = 0; u < n_units; u++) {
        m->unit[u].tied_unit = -1;
        m->unit[u].self = m->self;
    }
    return m;
}

void iz_model_close(struct iz_model **model)
{
    if (*model)
        (*model)->close(*model);
    *model = NULL;
}

void iz_unit_params(struct iz_unit *u, const struct iz_param *list, int n,
                    const char *prefix)
{
    u->param = iz_take(n, sizeof(*u->param), "parameters");
    u->n_params = n;
    for (int i = 0; i < n; i++) {
        size_t size = sizeof(u->param[i].name);
        u->param[i] = list[i];
        int len =
            snprintf(u->param[i].name, size, "%s%s", prefix, list[i].name);
        assert(len > 0 && (size_t)len < size);
        (void)len;
    }
}

int64_t iz_unit_elems(const struct iz_unit *u, enum iz_unit_part part)
{
    int64_t n = 0;
    for (int i = 0; i < u->n_params; i++)
        if (iz_param_part(&u->param[i]) == part)
            n += u->param[i].rows * u->param[i].cols;
    return n;
}

void iz_unit_offsets(const struct iz_unit *u, const int64_t from[IZ_PARTS],
                     int64_t *offset)
{
    int64_t at[IZ_PARTS] = {from[0], from[1], from[2]};
    for (int i = 0; i < u->n_params; i++) {
        const struct iz_param *p = &u->param[i];
        offset[i] = at[iz_param_part(p)];
        at[iz_param_part(p)] += p->rows * p->cols;
    }
}

enum iz_quant iz_unit_quant(const struct iz_unit *u)
{
    enum iz_quant q = IZ_QUANT_NONE;
    for (int i = 0; i < u->n_params && !q; i++)
        q = u->param[i].quant;
    return q;
}

bool iz_unit_next_quant(const struct iz_unit *u, struct iz_quant_matrix *m)
{
    m->first += m->n;
    m->group += m->groups;
    m->stacked += m->n > 0;
    m->n = m->groups = 0;
    for (; m->param < u->n_params; m->param++, m->stacked = 0) {
        const struct iz_param *p = &u->param[m->param];
        int64_t all = p->out_rows ? iz_param_matrices(p) : 1;
        int64_t some = p->times ? all / p->times : all;
        if (!p->quant || m->stacked >= all)
            continue;
        m->n =
            (p->out_rows ? p->outputs[m->stacked % some] : p->rows) * p->cols;
        m->groups = iz_quant_groups(m->n);
        return true;
    }
    return false;
}

int64_t iz_unit_quant_group(const struct iz_unit *u, int64_t g, int64_t *first)
{
    struct iz_quant_matrix m = {0};
    while (iz_unit_next_quant(u, &m) && g >= m.group + m.groups)
        ;
    *first = m.first;
    if (!m.n)
        return 0;
    int64_t at = (g - m.group) * IZ_QUANT_GROUP;
    *first += at;
    return min64(m.n - at, IZ_QUANT_GROUP);
}

bool iz_unit_ties_trained(const struct iz_model *m, int unit)
{
    const struct iz_unit *u = &m->unit[unit];
    return u->tied_unit >= 0 &&
           !m->unit[u->tied_unit].param[u->tied_param].frozen;
}
