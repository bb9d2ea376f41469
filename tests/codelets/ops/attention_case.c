/* SPDX-License-Identifier: Apache-2.0 */
/* Attention through the op; see attention_case.h. */
#include "tests/codelets/ops/attention_case.h"

#include <stdlib.h>
#include <string.h>

#include "codelets/ops/gpu_ops.h"
#include "tests/codelets/ops/timed.h"

struct attention attention_new(enum iz_dtype act, struct shape s, double scale)
{
    int64_t m = s.samples * s.seq, c = s.heads * s.d;
    int64_t ld = c + 2 * s.kv_heads * s.d;
    struct attention t = {
        .s = {.n = ATTENTION_TENSORS,
              .pinned = BIT(BEGINS),
              .t = {[QKV] = tensor_new(act, m, ld, scale),
                    [O] = tensor_new(act, m, c, 1),
                    [LSE] = tensor_new(IZ_F32, s.samples * s.heads, s.seq, 1),
                    [DQKV] = tensor_new(act, m, ld, 1),
                    [DY] = tensor_new(act, m, c, 1),
                    [BEGINS] = bytes_new(m * 4),
                    [SINKS] = tensor_new(act, 1, s.heads, 3),
                    [DSINKS] = tensor_new(act, 1, s.heads, 1)}},
        .shape = s};
    t.begins = t.s.t[BEGINS].v.p;
    memset(t.begins, 0, (size_t)m * 4);
    return t;
}

void attention_cut(struct attention *t, bool (*starts)(int64_t i))
{
    t->apart = true;
    for (int64_t i = 0; i < t->shape.samples * t->shape.seq; i++) {
        int32_t at = (int32_t)(i % t->shape.seq);
        t->begins[i] = at == 0 || starts(at) ? at : t->begins[i - 1];
    }
}

void attention_free(struct attention *t)
{
    scene_free(&t->s);
    free(t->o);
    free(t->lse);
    free(t->dqkv);
    free(t->dsinks);
}

/* As many keys as heads may be 0 of them. */
static struct iz_attention attention_of(const struct iz_view *v,
                                        const struct attention *t)
{
    const struct shape *s = &t->shape;
    bool none = s->kv_heads == s->heads && s->seq % 2;
    return (struct iz_attention){.qkv = v[QKV],
                                 .o = v[O],
                                 .lse = v[LSE],
                                 .seq = s->seq,
                                 .heads = (int)s->heads,
                                 .kv_heads = none ? 0 : (int)s->kv_heads,
                                 .full = t->full,
                                 .begins = {.p = v[BEGINS].p,
                                            .dtype = IZ_I32,
                                            .rows = t->apart ? s->samples : 0,
                                            .cols = s->seq},
                                 .window = t->window,
                                 .scale = t->scale,
                                 .cap = t->cap,
                                 .sinks = t->sinks ? v[SINKS] : IZ_NONE,
                                 .dsinks = t->sinks ? v[DSINKS] : IZ_NONE};
}

void attention_forward(struct iz_exec *x, const struct iz_view *v,
                       const void *arg)
{
    const struct attention *t = arg;
    struct iz_attention a = attention_of(v, t);
    x->numerics.cudnn = t->cudnn;
    iz_attention_fwd(x, &a);
}

void attention_backward(struct iz_exec *x, const struct iz_view *v,
                        const void *arg)
{
    const struct attention *t = arg;
    struct iz_attention a = attention_of(v, t);
    x->numerics.cudnn_bwd = t->cudnn_bwd;
    iz_attention_bwd(x, v[DQKV], v[DY], &a);
}

void attention_run(struct attention *t, bool backward)
{
    const struct pass pass[2] = {
        {attention_forward, BIT(QKV) | BIT(BEGINS) | BIT(SINKS),
         BIT(O) | BIT(LSE)},
        {attention_backward,
         BIT(QKV) | BIT(O) | BIT(LSE) | BIT(DY) | BIT(BEGINS) | BIT(SINKS),
         BIT(DQKV) | (t->sinks ? BIT(DSINKS) : 0)}};
    scene_run(&t->s, &pass[backward], t);
}

void attention_check(struct attention *t)
{
    attention_double(t);
    attention_run(t, false);
    fixture_near("o", &t->s.t[O], t->o);
    fixture_near("lse", &t->s.t[LSE], t->lse);
    attention_run(t, true);
    fixture_near("dqkv", &t->s.t[DQKV], t->dqkv);
    if (t->sinks)
        fixture_near("dsinks", &t->s.t[DSINKS], t->dsinks);
}

static bool attention_possible(struct iz_exec *x, const struct iz_view *v,
                               const void *arg, int64_t scratch)
{
    const struct attention *t = arg;
    struct iz_attention a = attention_of(v, t);
    return !iz_cudnn_missing() &&
           iz_attention_ask_cudnn(x, &a, t->cudnn_bwd, scratch);
}

/* The library's backward, too, with scratch for 3 and 15 samples more. */
void attention_timed(const struct timed_shape *s, timed_fn *f, void *to)
{
    int64_t h = s->heads, d = s->width / h;
    struct shape shape = {s->tokens / s->seq, s->seq, h, d, h};
    struct attention own = attention_new(backend.act(backend.x.act), shape, 1);
    struct attention cudnn = own, cudnn_bwd = own;
    struct timed backward = {"attn backward by cuDNN", attention_backward,
                             .arg = &cudnn_bwd, .possible = attention_possible};
    struct timed four = backward, sixteen = backward;
    cudnn.cudnn = cudnn_bwd.cudnn_bwd = true;
    four.name = "the same, 4 at once";
    four.more = iz_gpu_cudnn_bwd_bytes(3, s->seq, h, h, d);
    sixteen.name = "the same, 16 at once";
    sixteen.more = iz_gpu_cudnn_bwd_bytes(15, s->seq, h, h, d);
    f(to, &own.s,
      (const struct timed[]){
          {"attention", attention_forward, .arg = &own},
          {"attention by cuDNN", attention_forward, .arg = &cudnn,
           .possible = attention_possible},
          {"attention backward", attention_backward, .arg = &own},
          backward,
          four,
          sixteen},
      6);
    attention_free(&own);
}
