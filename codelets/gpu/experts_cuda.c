/* SPDX-License-Identifier: Apache-2.0 */
/* What the host must know of a mixture of experts on a GPU: how many rows an
 * expert has.  It waits for the stream to know it, once in a task. */
#include <string.h>

#include "codelets/base/die.h"
#include "codelets/gpu/device.h"
#include "codelets/kernels/cuda_lib.h"
#include "codelets/ops/gpu_ops.h"

/* Where kernels are tested there is no stream. */
static void copy_view(struct iz_exec *x, void *to, struct iz_view a)
{
    if (x->stream)
        iz_device_copy(x->stream, to, a.p, iz_view_bytes(a));
    else
        memcpy(to, a.p, (size_t)iz_view_bytes(a));
}

void iz_op_copy_cuda(struct iz_exec *x, struct iz_view y, struct iz_view a)
{
    copy_view(x, y.p, a);
}

void iz_op_clear_cuda(struct iz_exec *x, struct iz_view v)
{
    if (x->stream)
        iz_device_clear(x->stream, v.p, iz_view_bytes(v));
    else
        memset(v.p, 0, (size_t)iz_view_bytes(v));
}

static void pin(struct iz_cuda *c)
{
    const char *why = iz_device_pin(c->ends, sizeof(c->ends));
    if (why)
        iz_die("no pinned memory for the rows of experts: %s", why);
    c->ends_pinned = true;
}

/* In a task, what is at an address changes with a choice alone, which forgets
 * what was read (experts.cu). */
const int32_t *iz_experts_routes_end_cuda(struct iz_exec *x, struct iz_view end)
{
    struct iz_cuda *c = x->cuda;
    if (c->ends_of == end.p && c->ends_task == x->task)
        return c->ends;
    if (x->stream && !c->ends_pinned)
        pin(c);
    copy_view(x, c->ends, end);
    if (x->stream)
        iz_device_wait(x->stream);
    c->ends_of = end.p;
    c->ends_task = x->task;
    return c->ends;
}
