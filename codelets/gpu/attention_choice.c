/* SPDX-License-Identifier: Apache-2.0 */
/* Whose forward of attention is faster, ours or cuDNN's, measured before the
 * first step like the algorithms of products (product_choice.c). */
#include <stdio.h>

#include "codelets/base/int64.h"
#include "codelets/gpu/pattern.h"
#include "codelets/gpu/stopwatch.h"
#include "codelets/ops/gpu_ops.h"

/* A forward that is timed. */
struct timed {
    struct iz_attention a;
    struct iz_view scratch;
};

static bool run_own(struct iz_exec *x, const void *arg)
{
    const struct timed *t = arg;
    iz_attention_fwd_cuda(x, &t->a, IZ_NONE);
    return true;
}

static bool run_cudnn(struct iz_exec *x, const void *arg)
{
    const struct timed *t = arg;
    iz_attention_fwd_cudnn(x, &t->a, t->scratch);
    return true;
}

/* Gives it memory of the work arena, and random operands; false: there is too
 * little. */
static bool place(struct iz_exec *x, struct timed *t)
{
    struct iz_view *v[] = {&t->a.qkv, &t->a.o, &t->a.lse};
    int64_t at = round_up(IZ_CUDNN_SCRATCH, 256);
    t->scratch = (struct iz_view){
        .p = x->work.base, .dtype = IZ_U8, .rows = 1, .cols = IZ_CUDNN_SCRATCH};
    for (int i = 0; i < 3; i++) {
        v[i]->p = x->work.base + at;
        at += round_up(iz_view_bytes(*v[i]), 256);
    }
    if (at > x->work.size)
        return false;
    iz_pattern_fill(t->a.qkv.p, iz_view_bytes(t->a.qkv), t->a.qkv.dtype);
    return true;
}

void iz_attention_time(struct iz_exec *x, double budget_s,
                       struct iz_attention_choice *c)
{
    struct iz_stopwatch w;
    bool whole = true;
    iz_stopwatch_open(&w, budget_s);
    for (int i = 0; i < c->asked && whole; i++) {
        struct timed t = {.a = c->kind[i]};
        whole = place(x, &t);
        if (!whole)
            break;
        c->own_s += c->calls[i] * iz_stopwatch_best(&w, x, run_own, &t);
        c->cudnn_s += c->calls[i] * iz_stopwatch_best(&w, x, run_cudnn, &t);
        whole = !iz_stopwatch_over(&w);
    }
    iz_stopwatch_close(&w);
    c->seconds = w.spent_s;
    c->cudnn = whole && c->cudnn_s < IZ_STOPWATCH_GAIN * c->own_s;
    if (!whole)
        snprintf(c->why.why, sizeof(c->why.why), "%s",
                 iz_stopwatch_over(&w)
                     ? "there was too little time"
                     : "its operands have no room in scratch");
}
