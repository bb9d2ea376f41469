/* SPDX-License-Identifier: Apache-2.0 */
/* See call.h. */
#include "tests/fake/standin/call.h"

#include <assert.h>
#include <cuda_runtime_api.h>
#include <stdlib.h>
#include <string.h>

#include "codelets/base/die.h"
#include "tests/fake/standin/standin.h"

#define ALIGN 64
#define POISON 0xff /* NaN in every type */
#define POISONED 65536

void *standin_reach(const void *p, int64_t bytes)
{
    if (!p || bytes == 0)
        return (void *)(uintptr_t)p;
    return iz_standin_kernel(p, (size_t)bytes);
}

void standin_reach_view(struct iz_view *v)
{
    v->p = standin_reach(v->p, iz_view_bytes(*v));
}

/* Enough of it to be noticed: some scratch is large. */
static void poison(struct iz_view v)
{
    int64_t bytes = iz_view_bytes(v);
    if (v.p)
        memset(v.p, POISON, (size_t)(bytes < POISONED ? bytes : POISONED));
}

/* Memory for an arena of so many bytes, not empty. */
static char *arena_take(int64_t bytes)
{
    size_t whole = ((size_t)bytes / ALIGN + 1) * ALIGN;
    char *p = aligned_alloc(ALIGN, whole);

    if (!p)
        iz_die("no memory for %lld bytes of scratch", (long long)bytes);
    return p;
}

/* In the thread of the stream. */
static void run(void *arg)
{
    struct call *c = arg;
    struct iz_exec x = iz_exec_dry(IZ_CPU, IZ_F32);

    c->op(&x, c);
    x.dry = false;
    x.work.size = x.work.peak;
    x.work.base = arena_take(x.work.size);
    for (int i = 0; i < 5; i++)
        standin_reach_view(&c->v[i]);
    standin_reach_view(&c->scratch);
    if (c->reach)
        c->reach(c);
    poison(c->scratch);
    c->op(&x, c);
    poison(c->scratch);
    free(x.work.base);
    free(c);
}

void standin_submit_more(struct iz_exec *x, const struct call *c,
                         const void *const *in)
{
    size_t more = (size_t)c->flat.n_in * sizeof(*in);
    struct call *copy = malloc(sizeof(*copy) + more);

    assert(x->backend == IZ_CUDA && !x->dry);
    if (!copy)
        iz_die("no memory for a call");
    *copy = *c;
    if (in)
        memcpy(copy->in, in, more);
    if (cudaLaunchHostFunc(x->stream, run, copy))
        iz_die("the stand-in refuses a call: is %p a stream?", x->stream);
}

void standin_submit(struct iz_exec *x, const struct call *c)
{
    standin_submit_more(x, c, NULL);
}
