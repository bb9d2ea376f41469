/* SPDX-License-Identifier: Apache-2.0 */
/* Products of a mixture of experts on a GPU: one after the other in the stream,
 * with as many rows as each expert has.  The host must know how many these are,
 * so the first product after a choice waits for the stream. */
#include "codelets/base/die.h"
#include "codelets/gpu/device.h"
#include "codelets/gpu/flat_buffer.h"
#include "codelets/kernels/cuda_lib.h"
#include "codelets/ops/gpu_ops.h"

typedef struct iz_product product_fn(struct iz_view to, struct iz_view from,
                                     const struct iz_linear *l);

static void pin(struct iz_cuda *c)
{
    const char *why = iz_device_pin(c->ends, sizeof(c->ends));
    if (why)
        iz_die("no pinned memory for the rows of experts: %s", why);
    c->ends_pinned = true;
}

/* Of each expert, where its rows end.  What is at an address changes with a
 * choice alone, which forgets what was read (experts.cu). */
static const int32_t *read_ends(struct iz_exec *x, struct iz_view end)
{
    struct iz_cuda *c = x->cuda;
    if (c->ends_of == end.p)
        return c->ends;
    if (x->stream && !c->ends_pinned)
        pin(c);
    iz_buffer_copy(x, c->ends, end.p, iz_view_bytes(end));
    if (x->stream)
        iz_device_wait(x->stream);
    c->ends_of = end.p;
    return c->ends;
}

static void each_expert(struct iz_exec *x, product_fn *f, struct iz_view to,
                        struct iz_view from, const struct iz_linear *l,
                        const struct iz_routes *r, struct iz_view scratch)
{
    const int32_t *end = read_ends(x, r->end);
    for (int64_t i = 0, first = 0; i < r->end.cols; first = end[i++]) {
        struct iz_linear one = iz_expert_of(l, i, r->end.cols);
        int64_t n = end[i] - first;
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
