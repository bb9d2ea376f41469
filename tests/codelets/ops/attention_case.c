/* SPDX-License-Identifier: Apache-2.0 */
/* Attention through the op; see attention_case.h. */
#include "tests/codelets/ops/attention_case.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "codelets/ops/gpu_ops.h"
#include "tests/codelets/ops/timed.h"

struct attention attention_new(enum iz_dtype act, struct shape s, double scale)
{
    int64_t m = s.samples * s.seq, c = s.heads * s.d;
    int64_t ld = c + 2 * s.kv_heads * s.d;
    struct attention t = {
        .s = {.n = KV,
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

void attention_cut(struct attention *t, int rows)
{
    t->apart = true;
    for (int64_t i = 0; i < t->shape.samples * t->shape.seq; i++) {
        int32_t at = (int32_t)(i % t->shape.seq);
        t->begins[i] = at - at % rows;
    }
}

void attention_chunk(struct attention *t, int64_t rows)
{
    struct tensor *all = t->s.t;
    struct iz_view qkv = all[QKV].v;
    int64_t c = all[O].v.cols, width = qkv.cols - c;
    size_t bytes = (size_t)(width * iz_dtype_bytes(qkv.dtype));
    t->chunk = rows;
    t->s.n = ATTENTION_TENSORS;
    all[KV] = tensor_new(qkv.dtype, qkv.rows, width, 1);
    all[DKV] = tensor_new(IZ_F32, qkv.rows, width, 1);
    tensor_free(&all[DSINKS]);
    all[DSINKS] = tensor_new(IZ_F32, 1, t->shape.heads, 1);
    for (int64_t i = 0; i < qkv.rows; i++) {
        char *keys = fixture_at(qkv.p, qkv.dtype, i * qkv.cols + c);
        memcpy(fixture_at(all[KV].v.p, qkv.dtype, i * width), keys, bytes);
        memset(keys, 0xff, bytes);
    }
}

/* Rows of the chunk that has row i. */
static int64_t chunk_rows(const struct attention *t, int64_t i)
{
    int64_t left = t->shape.seq - i / t->chunk * t->chunk;
    return left < t->chunk ? left : t->chunk;
}

/* The place of row i of a head in lse. */
static int64_t lse_at(const struct attention *t, int64_t head, int64_t i)
{
    int64_t r = t->chunk ? i / t->chunk * t->chunk : 0;
    int64_t rows = t->chunk ? chunk_rows(t, i) : t->shape.seq;
    return r * t->shape.heads + head * rows + i - r;
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

/* The chunk from row i on. */
static struct iz_attention chunk_of(const struct iz_view *v,
                                    const struct attention *t, int64_t i)
{
    struct iz_attention a = attention_of(v, t);
    int64_t n = chunk_rows(t, i), heads = t->shape.heads;
    struct iz_view lse = {
        .p = a.lse.p, .dtype = IZ_F32, .rows = t->shape.seq, .cols = heads};
    a.qkv = iz_view_rows(v[QKV], i, n);
    a.o = iz_view_rows(v[O], i, n);
    a.lse = iz_view_rows(lse, i, n);
    a.lse.rows = heads;
    a.lse.cols = n;
    a.kv = v[KV];
    a.dkv = v[DKV];
    a.first = i;
    return a;
}

void attention_forward(struct iz_exec *x, const struct iz_view *v,
                       const void *arg)
{
    const struct attention *t = arg;
    struct iz_attention a = attention_of(v, t);
    x->numerics.cudnn = t->cudnn;
    if (!t->chunk)
        iz_attention_fwd(x, &a);
    for (int64_t i = 0; t->chunk && i < a.seq; i += t->chunk) {
        a = chunk_of(v, t, i);
        iz_attention_fwd(x, &a);
    }
}

void attention_backward(struct iz_exec *x, const struct iz_view *v,
                        const void *arg)
{
    const struct attention *t = arg;
    struct iz_attention a = attention_of(v, t);
    x->numerics.cudnn_bwd = t->cudnn_bwd;
    if (!t->chunk)
        iz_attention_bwd(x, v[DQKV], v[DY], &a);
    for (int64_t n = t->chunk ? (a.seq - 1) / t->chunk : -1; n >= 0; n--) {
        a = chunk_of(v, t, n * t->chunk);
        iz_attention_bwd(x, iz_view_rows(v[DQKV], a.first, a.o.rows),
                         iz_view_rows(v[DY], a.first, a.o.rows), &a);
    }
}

void attention_run(struct attention *t, bool backward)
{
    const unsigned reads = BIT(QKV) | BIT(BEGINS) | BIT(SINKS) | BIT(KV);
    const unsigned sums = t->chunk ? BIT(DKV) | BIT(DSINKS) : 0;
    const struct pass pass[2] = {
        {attention_forward, reads, BIT(O) | BIT(LSE)},
        {attention_backward, reads | BIT(O) | BIT(LSE) | BIT(DY) | sums,
         BIT(DQKV) | sums | (t->sinks ? BIT(DSINKS) : 0)}};
    for (int i = 0; sums && i < ATTENTION_TENSORS; i++)
        if (sums >> i & 1)
            tensor_store(&t->s.t[i]); /* what they are before */
    scene_run(&t->s, &pass[backward], t);
}

/* Element `at` of a sum of all chunks, to which g was added. */
static void sum_check(const char *what, const struct tensor *sum, int64_t at,
                      struct near g)
{
    g.is += sum->d[at];
    g.within += 0x1p-22 * (fabs(g.is) + fabs(sum->d[at]));
    fixture_element(what, sum->v, at, g);
}

/* Of rows of queries, keys and values: queries are written, the others are
 * sums. */
static void chunks_check(const struct attention *t)
{
    const struct tensor *dqkv = &t->s.t[DQKV], *dkv = &t->s.t[DKV];
    int64_t c = t->s.t[O].v.cols, ld = dqkv->v.cols;
    for (int64_t i = 0; i < dqkv->v.rows * ld; i++) {
        int64_t row = i / ld, col = i % ld;
        if (col < c)
            fixture_element("dq", dqkv->v, i, t->dqkv[i]);
        else {
            assert_true(isnan(fixture_get(dqkv->v.p, dqkv->v.dtype, i)));
            sum_check("dkv", dkv, row * (ld - c) + col - c, t->dqkv[i]);
        }
    }
    for (int64_t i = 0; i < t->shape.heads; i++)
        sum_check("dsinks", &t->s.t[DSINKS], i,
                  t->sinks ? t->dsinks[i] : (struct near){0, 0});
}

void attention_check(struct attention *t)
{
    int64_t heads = t->shape.heads, seq = t->shape.seq;
    attention_double(t);
    attention_run(t, false);
    fixture_near("o", &t->s.t[O], t->o);
    for (int64_t i = 0; i < t->shape.samples * heads * seq; i++)
        fixture_element("lse", t->s.t[LSE].v, lse_at(t, i / seq, i % seq),
                        t->lse[i]);
    attention_run(t, true);
    if (t->chunk) {
        chunks_check(t);
        return;
    }
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
