/* SPDX-License-Identifier: Apache-2.0 */
/* Attention through the op; see attention_case.h. */
#include "tests/codelets/ops/attention_case.h"

#include <stdlib.h>

struct attention attention_new(enum iz_dtype act, struct shape s, double scale)
{
    int64_t m = s.samples * s.seq, c = s.heads * s.d;
    int64_t ld = c + 2 * s.kv_heads * s.d;
    return (struct attention){
        .s = {.n = ATTENTION_TENSORS,
              .t = {[QKV] = tensor_new(act, m, ld, scale),
                    [O] = tensor_new(act, m, c, 1),
                    [LSE] = tensor_new(IZ_F32, s.samples * s.heads, s.seq, 1),
                    [DQKV] = tensor_new(act, m, ld, 1),
                    [DY] = tensor_new(act, m, c, 1)}},
        .shape = s};
}

void attention_free(struct attention *t)
{
    scene_free(&t->s);
    free(t->o);
    free(t->lse);
    free(t->dqkv);
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
                                 .full = t->full};
}

void attention_forward(struct iz_exec *x, const struct iz_view *v,
                       const void *arg)
{
    const struct attention *t = arg;
    struct iz_attention a = attention_of(v, t);
    x->cudnn = t->cudnn;
    iz_attention_fwd(x, &a);
}

void attention_backward(struct iz_exec *x, const struct iz_view *v,
                        const void *arg)
{
    const struct attention *t = arg;
    struct iz_attention a = attention_of(v, t);
    x->cudnn_bwd = t->cudnn_bwd;
    iz_attention_bwd(x, v[DQKV], v[DY], &a);
}

void attention_run(struct attention *t, bool backward)
{
    static const struct pass pass[2] = {
        {attention_forward, BIT(QKV), BIT(O) | BIT(LSE)},
        {attention_backward, BIT(QKV) | BIT(O) | BIT(LSE) | BIT(DY),
         BIT(DQKV)}};
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
}
