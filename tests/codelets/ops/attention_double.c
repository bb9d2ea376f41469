/* SPDX-License-Identifier: Apache-2.0 */
/* One head at a time, with whole matrices of scores. */
#include "tests/codelets/ops/attention_case.h"

#include <math.h>
#include <stdlib.h>

/* Matrices [n,n] of one head, and its vectors [n,d] as rows of the inputs, ld
 * apart in qkv, c in o. */
struct head {
    int64_t n, d, c, ld;
    bool full;             /* not causal */
    const int32_t *begins; /* or NULL */
    int64_t window;        /* 0: none */
    double cap;            /* 0: none */
    const double *sink;    /* or NULL */
    int64_t group;         /* heads that share keys */
    bool last;             /* of its group */
    const double *q, *k, *v, *dy;
    struct near *o, *lse, *dq, *dk, *dv, *dsink;
    bool parts;          /* what each head adds to shared keys is rounded */
    struct near *p, *ds; /* scratch: probabilities, gradients of scores */
    struct near *slope;  /* ... of scores by what they were before the cap */
    struct near *part;   /* ... and this head's dk or dv [n,d] */
    double scale;
    enum iz_dtype type, sums; /* sums: of dk and dv */
};

/* Relative error of n roundings to fp32, one after another. */
static double steps(int64_t n)
{
    return (double)n * 0x1p-24;
}

/* a . b; within: the sum of |a||b|. */
static struct near dot(const double *a, const double *b, int64_t n)
{
    struct near s = {0, 0};
    for (int64_t i = 0; i < n; i++) {
        s.is += a[i] * b[i];
        s.within += fabs(a[i] * b[i]);
    }
    return s;
}

/* Keys that row i sees: from this one on, up to the next function's. */
static int64_t first_key(const struct head *h, int64_t i)
{
    int64_t begins = h->begins ? h->begins[i] : 0;
    return h->window && i - h->window >= begins ? i - h->window + 1 : begins;
}

static int64_t keys_seen(const struct head *h, int64_t i)
{
    return h->full ? h->n : i + 1;
}

/* Caps a score.  tanh enlarges no error; a few units come with it. */
static void cap(const struct head *h, struct near *score, struct near *slope)
{
    double t = h->cap ? tanh(score->is / h->cap) : 0;
    *slope = (struct near){1 - t * t, 0};
    if (!h->cap)
        return;
    score->is = h->cap * t;
    score->within += steps(8) * fabs(score->is);
    slope->within = 2 * fabs(t) * score->within / h->cap + steps(2);
}

/* Row i of p and its lse.  An error of the exponent is a relative error of the
 * probability; 4 units more are those of the exponential and its argument. */
static void softmax(const struct head *h, int64_t i)
{
    struct near *p = h->p + i * h->n;
    double max = h->sink ? *h->sink : -INFINITY, sum = 0;
    double off = h->sink ? steps(4) * fabs(max) : 0;
    for (int64_t j = first_key(h, i); j < keys_seen(h, i); j++) {
        p[j] = dot(h->q + i * h->ld, h->k + j * h->ld, h->d);
        p[j].is *= h->scale;
        p[j].within *= h->scale * steps(h->d + 4); /* a sum in fp32 */
        cap(h, &p[j], &h->slope[i * h->n + j]);
        max = fmax(max, p[j].is);
        off = fmax(off, p[j].within);
    }
    for (int64_t j = first_key(h, i); j < keys_seen(h, i); j++)
        sum += exp(p[j].is - max);
    sum += h->sink ? exp(*h->sink - max) : 0;
    h->lse[i].is = max + log(sum);
    h->lse[i].within = off + steps(keys_seen(h, i) + 7) +
                       4 * steps(1) * (fabs(max) + fabs(log(sum)));
    for (int64_t j = first_key(h, i); j < keys_seen(h, i); j++) {
        double e = p[j].within + h->lse[i].within + steps(4) * (1 + fabs(max));
        p[j].is = exp(p[j].is - h->lse[i].is);
        p[j].within = p[j].is * e;
    }
}

/* What rounding to the type adds to an error. */
static double rounded(const struct head *h, struct near a)
{
    return a.within + fixture_rounding(h->type, fabs(a.is) + a.within) +
           0x1p-126;
}

static void output(const struct head *h, int64_t i)
{
    for (int64_t x = 0; x < h->d; x++) {
        struct near o = {0, 0};
        for (int64_t j = first_key(h, i); j < keys_seen(h, i); j++) {
            struct near p = h->p[i * h->n + j];
            double v = h->v[j * h->ld + x];
            o.is += p.is * v;
            o.within +=
                (rounded(h, p) + steps(keys_seen(h, i) + 3) * p.is) * fabs(v);
        }
        o.within = rounded(h, o);
        h->o[i * h->c + x] = o;
    }
}

/* What row i adds to the sink's gradient. */
static void sink_grad(const struct head *h, int64_t i, struct near delta)
{
    double p = exp(*h->sink - h->lse[i].is);
    double off = h->lse[i].within + steps(6) * (1 + fabs(*h->sink));
    h->dsink->is -= p * delta.is;
    h->dsink->within +=
        p * (delta.within + (off + steps(h->n)) * fabs(delta.is));
}

/* Row i of ds, before `scale`: p (dp - delta). */
static void scores_grad(const struct head *h, int64_t i)
{
    const double *dy = h->dy + i * h->c;
    struct near delta = {0, 0};
    for (int64_t x = 0; x < h->d; x++) {
        struct near o = h->o[i * h->c + x];
        delta.is += dy[x] * o.is;
        delta.within += fabs(dy[x]) * (o.within + steps(h->d) * fabs(o.is));
    }
    if (h->sink)
        sink_grad(h, i, delta);
    for (int64_t j = first_key(h, i); j < keys_seen(h, i); j++) {
        struct near p = h->p[i * h->n + j];
        struct near dp = dot(dy, h->v + j * h->ld, h->d);
        double off = dp.within * steps(h->d) + delta.within;
        struct near ds = {p.is * (dp.is - delta.is), 0};
        ds.within = p.is * off + p.within * (fabs(dp.is - delta.is) + off) +
                    2 * steps(1) * fabs(ds.is);
        struct near slope = h->slope[i * h->n + j];
        ds.within = ds.within * slope.is + fabs(ds.is) * slope.within;
        ds.is *= slope.is;
        h->ds[i * h->n + j] = ds;
    }
}

/* g[x] of row `at` of out += a b[x]: a is rounded first, n numbers are added.
 */
static void add(const struct head *h, struct near *out, struct near a,
                const double *b, int64_t n)
{
    for (int64_t x = 0; x < h->d; x++) {
        out[x].is += a.is * b[x];
        out[x].within += (rounded(h, a) + steps(n) * fabs(a.is)) * fabs(b[x]);
    }
}

/* Adds this head's part, which is still to be multiplied by `by`. */
static void join(const struct head *h, struct near *out, double by)
{
    for (int64_t i = 0; i < h->n; i++)
        for (int64_t x = 0; x < h->d; x++) {
            struct near *g = h->part + i * h->d + x;
            struct near whole = {g->is * by, g->within * by};
            out[i * h->ld + x].is += g->is;
            out[i * h->ld + x].within +=
                h->parts ? rounded(h, whole) / by : g->within;
            *g = (struct near){0, 0};
        }
}

static void finish(const struct head *h, struct near *out, double by)
{
    for (int64_t i = 0; i < h->n; i++)
        for (int64_t x = 0; x < h->d; x++) {
            struct near *g = out + i * h->ld + x;
            g->is *= by;
            g->within = rounded(h, (struct near){g->is, g->within * by});
        }
}

static void head_bwd(const struct head *h)
{
    int64_t ld = h->ld, n = h->n + 4, all = h->group * h->n + 4;
    for (int64_t i = 0; i < h->n; i++) {
        scores_grad(h, i);
        for (int64_t j = first_key(h, i); j < keys_seen(h, i); j++) {
            struct near ds = h->ds[i * h->n + j];
            add(h, h->dq + i * ld, ds, h->k + j * ld, n);
            add(h, h->part + j * h->d, ds, h->q + i * ld, all);
        }
    }
    join(h, h->dk, h->scale);
    for (int64_t i = 0; i < h->n; i++)
        for (int64_t j = first_key(h, i); j < keys_seen(h, i); j++)
            add(h, h->part + j * h->d, h->p[i * h->n + j], h->dy + i * h->c,
                all);
    join(h, h->dv, 1);
    finish(h, h->dq, h->scale);
    if (!h->last)
        return;
    struct head sums = *h;
    sums.type = h->sums;
    finish(&sums, h->dk, h->scale);
    finish(&sums, h->dv, 1);
}

static struct near *take(int64_t n)
{
    struct near *p = calloc((size_t)n, sizeof(*p));
    assert_non_null(p);
    return p;
}

/* Head i of all samples' heads. */
static void head_at(struct head *h, const struct attention *a, int64_t i)
{
    const struct shape *s = &a->shape;
    int64_t row = i / s->heads * s->seq, head = i % s->heads;
    int64_t col = head * s->d, key = h->c + head / h->group * s->d;
    int64_t q = row * h->ld + col, k = row * h->ld + key;
    int64_t v = k + s->kv_heads * s->d;
    const double *qkv = a->s.t[QKV].d;
    h->last = head % h->group == h->group - 1;
    h->begins = a->apart ? a->begins + row : NULL;
    h->q = qkv + q;
    h->k = qkv + k;
    h->v = qkv + v;
    h->dy = a->s.t[DY].d + row * h->c + col;
    h->o = a->o + row * h->c + col;
    h->lse = a->lse + i * s->seq;
    h->dq = a->dqkv + q;
    h->dk = a->dqkv + k;
    h->dv = a->dqkv + v;
    h->sink = a->sinks ? a->s.t[SINKS].d + head : NULL;
    h->dsink = a->dsinks + i;
}

/* Those of some groups that share keys. */
static void groups_work(void *arg, int64_t begin, int64_t end)
{
    const struct attention *a = arg;
    const struct shape *s = &a->shape;
    const struct tensor *t = a->s.t;
    struct head h = {.n = s->seq,
                     .d = s->d,
                     .c = t[O].v.cols,
                     .ld = t[QKV].v.cols,
                     .full = a->full,
                     .window = a->window,
                     .cap = a->cap,
                     .group = s->heads / s->kv_heads,
                     .parts = a->cudnn_bwd && s->heads != s->kv_heads,
                     .p = take(s->seq * s->seq),
                     .ds = take(s->seq * s->seq),
                     .slope = take(s->seq * s->seq),
                     .part = take(s->seq * s->d),
                     .scale = a->scale ? a->scale : 1 / sqrt((double)s->d),
                     .type = t[QKV].v.dtype,
                     .sums = a->chunk ? IZ_F32 : t[QKV].v.dtype};
    for (int64_t i = begin * h.group; i < end * h.group; i++) {
        head_at(&h, a, i);
        for (int64_t j = 0; j < s->seq; j++) {
            softmax(&h, j);
            output(&h, j);
        }
        head_bwd(&h);
    }
    free(h.p);
    free(h.ds);
    free(h.slope);
    free(h.part);
}

void attention_double(struct attention *a)
{
    const struct tensor *t = a->s.t;
    a->o = take(iz_view_len(t[O].v));
    a->lse = take(iz_view_len(t[LSE].v));
    a->dqkv = take(iz_view_len(t[DQKV].v));
    a->dsinks = take(a->shape.samples * a->shape.heads);
    fixture_share(a->shape.samples * a->shape.kv_heads, groups_work, a);
    for (int64_t i = a->shape.heads; i < a->shape.samples * a->shape.heads;
         i++) {
        struct near *sum = &a->dsinks[i % a->shape.heads];
        sum->is += a->dsinks[i].is;
        sum->within += a->dsinks[i].within;
    }
    for (int64_t i = 0; i < a->shape.heads; i++)
        a->dsinks[i].within +=
            fixture_rounding(t[DSINKS].v.dtype, a->dsinks[i].is);
}
