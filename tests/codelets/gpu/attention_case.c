/* SPDX-License-Identifier: Apache-2.0 */
/* Attention through the op, against double precision. */
#include "tests/codelets/gpu/attention_case.h"

#include "tests/codelets/gpu/scratch.h"

int attention_capability = 90;

struct attention attention_new(enum iz_dtype t, struct shape s, double scale)
{
    int64_t m = s.samples * s.seq, c = s.heads * s.d;
    int64_t ld = c + 2 * s.kv_heads * s.d;
    struct attention n = {
        .qkv = tensor_new(t, m, ld, scale),
        .o = tensor_new(t, m, c, 1),
        .lse = tensor_new(IZ_F32, s.samples * s.heads, s.seq, 1),
        .dqkv = tensor_new(t, m, ld, 1),
        .dy = tensor_new(t, m, c, 1),
        .ref = {s.samples, s.seq, s.heads, s.d, s.kv_heads, .t = t},
    };

    n.a = (struct iz_attention){n.qkv.v,      n.o.v,           n.lse.v, s.seq,
                                (int)s.heads, (int)s.kv_heads, false};
    n.ref.qkv = n.qkv.d;
    n.ref.dy = n.dy.d;
    return n;
}

void attention_free(struct attention *t)
{
    tensor_free(&t->qkv);
    tensor_free(&t->o);
    tensor_free(&t->lse);
    tensor_free(&t->dqkv);
    tensor_free(&t->dy);
    attention_double_free(&t->ref);
}

void attention_run(const struct attention *t, bool bwd)
{
    struct iz_exec dry = iz_exec_dry(IZ_CUDA, t->qkv.v.dtype), x;

    dry.capability = attention_capability;
    dry.cudnn = t->cudnn && !bwd;
    x = dry;
    x.cuda = t->cuda;
    for (int real = 0; real < 2; real++) {
        struct iz_exec *e = real ? &x : &dry;

        if (real) {
            x.dry = false;
            x.work = scratch_new(dry.work.peak, 1);
        }
        if (bwd)
            iz_attention_bwd(e, t->dqkv.v, t->dy.v, &t->a);
        else
            iz_attention_fwd(e, &t->a);
        assert_int_equal(e->work.used, 0);
    }
    assert_true(x.flops == dry.flops && x.bytes == dry.bytes);
    assert_int_equal(x.work.peak, dry.work.peak);
    scratch_free(&x.work);
}
