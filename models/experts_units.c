/* SPDX-License-Identifier: Apache-2.0 */
/* See experts_units.h.  M = rows, C = width, k = experts of a row, F = hidden
 * channels of an expert. */
#include "models/experts_units.h"

#include "models/parts.h"
#include "models/passed.h"

/* ---- a unit ---- */

enum { FC, PROJ };

static struct iz_linear linear(const struct iz_layer *a, int i)
{
    return (struct iz_linear){
        .w = a->w[i], .dw = gradient(a, i), .out_in = true};
}

static int experts_of(const struct iz_experts *c, int index)
{
    int left = c->n - index * c->per_unit;
    return left < c->per_unit ? left : c->per_unit;
}

static bool is_last(const struct iz_experts *c, int index)
{
    return index + 1 == iz_experts_units(c);
}

/* The boundary before the unit, whose experts are here. */
static struct iz_passed read_passed(const struct iz_layer *a)
{
    const struct iz_block *b = a->self;
    struct iz_passed p = iz_passed_of(b, a->x, true);
    p.r.first = a->index * b->experts.per_unit;
    p.r.here = experts_of(&b->experts, a->index);
    return p;
}

static struct iz_view widened(struct iz_exec *x, const struct iz_layer *a,
                              const struct iz_passed *p)
{
    const struct iz_block *b = a->self;
    return iz_exec_save_widened(x, x->act, iz_view_len(p->r.place),
                                2 * (int64_t)b->experts.hidden);
}

static void part_forward(struct iz_exec *x, const struct iz_layer *a)
{
    const struct iz_block *b = a->self;
    bool last = is_last(&b->experts, a->index);
    struct iz_passed from = read_passed(a), to = iz_passed_of(b, a->y, !last);
    struct iz_linear fc = linear(a, FC), proj = linear(a, PROJ);
    struct iz_view u = widened(x, a, &from);
    iz_experts_widen(x, &from.r, u, from.h, &fc);
    if (a->again)
        return;
    iz_experts_narrow(x, &from.r, u, to.c, from.c, &proj, b->act);
    if (last)
        return;
    iz_op_copy(x, to.h, from.h);
    iz_routes_copy(x, &to.r, &from.r);
}

/* The gradient of c stays where it is: what the unit adds does not depend on c.
 */
static void part_backward(struct iz_exec *x, const struct iz_layer *a)
{
    const struct iz_block *b = a->self;
    bool last = is_last(&b->experts, a->index);
    struct iz_passed p = read_passed(a), d = iz_passed_of(b, a->dx, true);
    struct iz_passed dy = iz_passed_of(b, a->dy, !last);
    struct iz_linear fc = linear(a, FC), proj = linear(a, PROJ);
    struct iz_view u = widened(x, a, &p);
    int64_t mark = iz_exec_mark(x);
    if (x->widens)
        iz_experts_widen(x, &p.r, u, p.h, &fc);
    struct iz_view by = iz_exec_work(x, x->act, u.rows, b->width); /* [kM,C] */
    iz_experts_narrow_bwd(x, &p.r, u, d.r.weight, by, d.c, &proj, b->act);
    iz_experts_widen_bwd(x, &p.r, u, d.h, by, dy.h, p.h, &fc);
    iz_exec_release(x, mark);
}

/* ---- units ---- */

int iz_experts_units(const struct iz_experts *c)
{
    return c->per_unit ? (c->n + c->per_unit - 1) / c->per_unit : 0;
}

void iz_experts_unit_open(struct iz_unit *u, const struct iz_block *b,
                          const struct iz_block_names *name, int block,
                          int index, int kind)
{
    const struct iz_experts *c = &b->experts;
    int first = index * c->per_unit;
    int64_t n = experts_of(c, index), w = b->width, f = c->hidden;
    struct iz_param list[] = {[FC] = weight("", 2 * n * f, w, IZ_BLOCK_STD),
                              [PROJ] =
                                  weight("", n * w, f, iz_block_residual(b))};
    char prefix[64];
    for (int i = FC; i <= PROJ; i++)
        snprintf(list[i].name, sizeof(list[i].name), "%s.weight",
                 i == FC ? name->expert_fc : name->expert_proj);
    list[FC].out_rows = list[PROJ].out_rows = true;
    list[FC].times = list[PROJ].times = n;
    list[FC].outputs[0] = list[FC].outputs[1] = f;
    list[PROJ].outputs[0] = w;
    snprintf(u->name, sizeof(u->name), "%s.%d.%d", name->block, block, first);
    snprintf(prefix, sizeof(prefix), "%s.%d.%s.%d.", name->block, block,
             name->experts, first);
    u->kind = kind + is_last(c, index);
    u->index = index;
    u->self = b;
    u->out_elems = is_last(c, index) ? b->seq * w : iz_passed_len(b);
    u->forward = part_forward;
    u->backward = part_backward;
    iz_unit_params(u, list, 2, prefix);
}
