/* SPDX-License-Identifier: Apache-2.0 */
/* Products of a mixture of experts on a GPU: one after the other in the stream,
 * with as many rows as each expert has; and gates, of the rows of the experts
 * that are here.  The host must know how many these are, so it waits for the
 * stream once in a task. */
#include "codelets/base/die.h"
#include "codelets/gpu/device.h"
#include "codelets/gpu/flat_buffer.h"
#include "codelets/kernels/cuda_lib.h"
#include "codelets/ops/gpu_ops.h"

void iz_copy_cuda(struct iz_exec *x, struct iz_view y, struct iz_view a)
{
    iz_buffer_copy(x, y.p, a.p, iz_view_bytes(a));
}

typedef struct iz_product product_fn(struct iz_view to, struct iz_view from,
                                     const struct iz_linear *l);

static void pin(struct iz_cuda *c)
{
    const char *why = iz_device_pin(c->ends, sizeof(c->ends));
    if (why)
        iz_die("no pinned memory for the rows of experts: %s", why);
    c->ends_pinned = true;
}

/* Of each expert, where its rows end.  In a task, what is at an address changes
 * with a choice alone, which forgets what was read (experts.cu). */
static const int32_t *read_ends(struct iz_exec *x, struct iz_view end)
{
    struct iz_cuda *c = x->cuda;
    if (c->ends_of == end.p && c->ends_task == x->task)
        return c->ends;
    if (x->stream && !c->ends_pinned)
        pin(c);
    iz_buffer_copy(x, c->ends, end.p, iz_view_bytes(end));
    if (x->stream)
        iz_device_wait(x->stream);
    c->ends_of = end.p;
    c->ends_task = x->task;
    return c->ends;
}

static void each_expert(struct iz_exec *x, product_fn *f, struct iz_view to,
                        struct iz_view from, const struct iz_linear *l,
                        const struct iz_routes *r, struct iz_view scratch)
{
    const int32_t *end = read_ends(x, r->end);
    int64_t here = iz_experts_here(r), first;
    for (int64_t i = 0; i < here; i++) {
        struct iz_linear one = iz_expert_of(l, i, here);
        int64_t n = iz_expert_rows(end, r->first + i, 1, &first);
        struct iz_product p =
            f(iz_view_rows(to, first, n), iz_view_rows(from, first, n), &one);
        p.varies = true;
        if (n)
            iz_product_cuda(x, &p, scratch);
        else if (p.ta)
            iz_buffer_clear(x, p.d.p, iz_view_bytes(p.d));
    }
}

static struct iz_product forward_of(struct iz_view y, struct iz_view a,
                                    const struct iz_linear *l)
{
    return iz_product_fwd(y, IZ_NONE, a, l);
}

void iz_experts_fwd_cuda(struct iz_exec *x, struct iz_view y, struct iz_view a,
                         const struct iz_linear *l, const struct iz_routes *r,
                         struct iz_view scratch)
{
    each_expert(x, forward_of, y, a, l, r, scratch);
}

void iz_experts_da_cuda(struct iz_exec *x, struct iz_view da, struct iz_view dy,
                        const struct iz_linear *l, const struct iz_routes *r,
                        struct iz_view scratch)
{
    each_expert(x, iz_product_da, da, dy, l, r, scratch);
}

void iz_experts_dw_cuda(struct iz_exec *x, struct iz_view dy, struct iz_view a,
                        const struct iz_linear *l, const struct iz_routes *r,
                        struct iz_view scratch)
{
    if (iz_wanted(x, l->dw))
        each_expert(x, iz_product_dw, dy, a, l, r, scratch);
}

/* The rows by expert of the experts that are here, the first in *first. */
static int64_t rows_here(struct iz_exec *x, const struct iz_routes *r,
                         int64_t *first)
{
    return iz_expert_rows(read_ends(x, r->end), r->first, iz_experts_here(r),
                          first);
}

void iz_experts_swiglu_fwd_cuda(struct iz_exec *x, struct iz_view y,
                                struct iz_view a, const struct iz_routes *r)
{
    int64_t first, n = rows_here(x, r, &first);
    if (n)
        iz_swiglu_fwd_cuda(x, iz_view_rows(y, first, n),
                           iz_view_rows(a, first, n));
}

void iz_experts_swiglu_bwd_cuda(struct iz_exec *x, struct iz_view da,
                                struct iz_view y, struct iz_view dy,
                                struct iz_view a, const struct iz_routes *r)
{
    int64_t first, n = rows_here(x, r, &first);
    if (n)
        iz_swiglu_bwd_cuda(
            x, iz_view_rows(da, first, n), iz_view_rows(y, first, n),
            iz_view_rows(dy, first, n), iz_view_rows(a, first, n));
}
