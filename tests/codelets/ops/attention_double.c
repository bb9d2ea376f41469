/* SPDX-License-Identifier: Apache-2.0 */
/* One row of queries of one head at a time. */
#include "tests/codelets/ops/attention_case.h"

#include <math.h>
#include <stdlib.h>

/* What fp32 may lose of the magnitudes that a number is made of: some
 * roundings, and what a GPU's exponential is off by. */
#define LOST 0x1p-20

/* Vectors of one head and sample as rows of the inputs, ld apart in qkv, c in
 * o. */
struct head {
    const struct attention *a;
    int64_t c, ld;
    double scale;
    const int32_t *begins; /* or NULL */
    const double *sink;    /* or NULL */
    const double *q, *k, *v, *dy;
    struct near *o, *lse, *dq, *dk, *dv, *dsink;
};

/* The keys that a row sees. */
struct seen {
    int64_t first, end;
    struct near *p; /* probabilities */
    double *slope;  /* of scores by what they were before the cap */
    double most;    /* the largest magnitude of a score */
};

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

/* What rounding to a type adds to an error. */
static double rounded(enum iz_dtype type, struct near a)
{
    return a.within + fixture_rounding(type, fabs(a.is) + a.within) + 0x1p-126;
}

/* An error of the exponent is a relative error of the probability. */
static void softmax(const struct head *h, int64_t i, struct seen *s)
{
    const struct attention *a = h->a;
    double max = h->sink ? *h->sink : -INFINITY, sum = 0;
    int64_t begins = h->begins ? h->begins[i] : 0, window = a->window;
    s->first = window && i - window >= begins ? i - window + 1 : begins;
    s->end = a->full ? a->shape.seq : i + 1;
    s->most = 0;
    for (int64_t j = s->first; j < s->end; j++) {
        struct near z = dot(h->q + i * h->ld, h->k + j * h->ld, a->shape.d);
        double cap = (double)a->cap, score = z.is * h->scale;
        double t = a->cap ? tanh(score / cap) : 0;
        s->slope[j] = 1 - t * t;
        s->p[j] = (struct near){a->cap ? cap * t : score, z.within * h->scale};
        max = fmax(max, s->p[j].is);
        s->most = fmax(s->most, s->p[j].within);
    }
    s->most = fmax(s->most, fabs(max));
    for (int64_t j = s->first; j < s->end; j++)
        sum += exp(s->p[j].is - max);
    sum += h->sink ? exp(*h->sink - max) : 0;
    double lse = max + log(sum);
    h->lse[i] = (struct near){lse, LOST * (1 + s->most + log(sum))};
    for (int64_t j = s->first; j < s->end; j++) {
        struct near *p = &s->p[j];
        double off = LOST * (1 + p->within + s->most);
        *p = (struct near){exp(p->is - lse), off * exp(p->is - lse)};
    }
}

/* out += a b, where a is rounded first. */
static void add(const struct head *h, struct near *out, struct near a,
                const double *b)
{
    double within = rounded(h->a->s.t[QKV].v.dtype, a);
    for (int64_t x = 0; x < h->a->shape.d; x++) {
        out[x].is += a.is * b[x];
        out[x].within += within * fabs(b[x]);
    }
}

/* Returns dy . o. */
static struct near output(const struct head *h, int64_t i, const struct seen *s)
{
    struct near delta = {0, 0}, *o = h->o + i * h->c;
    for (int64_t j = s->first; j < s->end; j++)
        add(h, o, s->p[j], h->v + j * h->ld);
    for (int64_t x = 0; x < h->a->shape.d; x++) {
        double dy = h->dy[i * h->c + x];
        o[x].within = rounded(h->a->s.t[O].v.dtype, o[x]);
        delta.is += dy * o[x].is;
        delta.within += fabs(dy) * (o[x].within + LOST * fabs(o[x].is));
    }
    return delta;
}

/* Of row i, before scores are scaled. */
static void gradients(const struct head *h, int64_t i, const struct seen *s,
                      struct near delta)
{
    const double *dy = h->dy + i * h->c;
    double by_cap = h->a->cap ? 2 / (double)h->a->cap : 0;
    for (int64_t j = s->first; j < s->end; j++) {
        struct near p = s->p[j], ds;
        struct near dp = dot(dy, h->v + j * h->ld, h->a->shape.d);
        double above = dp.is - delta.is;
        ds.is = p.is * above * s->slope[j];
        ds.within = p.is * (LOST * dp.within + delta.within) +
                    p.within * fabs(above) * (1 + by_cap);
        add(h, h->dq + i * h->ld, ds, h->k + j * h->ld);
        add(h, h->dk + j * h->ld, ds, h->q + i * h->ld);
        add(h, h->dv + j * h->ld, p, dy);
    }
    if (!h->sink)
        return;
    double p = exp(*h->sink - h->lse[i].is), off = LOST * (2 + 2 * s->most);
    h->dsink->is -= p * delta.is;
    h->dsink->within += p * (delta.within + off * fabs(delta.is));
}

static struct near *take(int64_t n)
{
    struct near *p = calloc((size_t)n, sizeof(*p));
    assert_non_null(p);
    return p;
}

static struct head head_at(const struct attention *a, int64_t sample,
                           int64_t head)
{
    const struct shape *s = &a->shape;
    const struct tensor *t = a->s.t;
    int64_t c = t[O].v.cols, ld = t[QKV].v.cols, row = sample * s->seq;
    int64_t o = row * c + head * s->d, q = row * ld + head * s->d;
    int64_t k = row * ld + c + head / (s->heads / s->kv_heads) * s->d;
    int64_t v = k + s->kv_heads * s->d;
    return (struct head){.a = a,
                         .c = c,
                         .ld = ld,
                         .scale = a->scale ? (double)a->scale
                                           : 1 / sqrt((double)s->d),
                         .begins = a->apart ? a->begins + row : NULL,
                         .sink = a->sinks ? t[SINKS].d + head : NULL,
                         .q = t[QKV].d + q,
                         .k = t[QKV].d + k,
                         .v = t[QKV].d + v,
                         .dy = t[DY].d + o,
                         .o = a->o + o,
                         .lse = a->lse + (sample * s->heads + head) * s->seq,
                         .dq = a->dqkv + q,
                         .dk = a->dqkv + k,
                         .dv = a->dqkv + v,
                         .dsink = a->dsinks + head};
}

/* Those of some groups that share keys. */
static void groups_work(void *arg, int64_t begin, int64_t end)
{
    const struct attention *a = arg;
    int64_t seq = a->shape.seq, group = a->shape.heads / a->shape.kv_heads;
    struct seen seen = {.p = take(seq),
                        .slope = malloc((size_t)seq * sizeof(double))};
    for (int64_t b = 0; b < a->shape.samples; b++)
        for (int64_t k = begin * group; k < end * group; k++) {
            struct head h = head_at(a, b, k);
            for (int64_t i = 0; i < seq; i++) {
                softmax(&h, i, &seen);
                gradients(&h, i, &seen, output(&h, i, &seen));
            }
        }
    free(seen.p);
    free(seen.slope);
}

/* The library's backward rounds what each head adds to shared keys. */
void attention_double(struct attention *a)
{
    const struct tensor *t = a->s.t;
    const struct shape *s = &a->shape;
    enum iz_dtype type = t[QKV].v.dtype, sums = a->chunk ? IZ_F32 : type;
    int64_t c = t[O].v.cols, ld = t[QKV].v.cols, v = c + s->kv_heads * s->d;
    double scale = head_at(a, 0, 0).scale;
    int parts = 1 + (a->cudnn_bwd && s->heads != s->kv_heads);
    a->o = take(iz_view_len(t[O].v));
    a->lse = take(iz_view_len(t[LSE].v));
    a->dqkv = take(iz_view_len(t[DQKV].v));
    a->dsinks = take(s->heads);
    fixture_share(s->kv_heads, groups_work, a);
    for (int64_t i = 0; i < iz_view_len(t[DQKV].v); i++) {
        struct near *g = &a->dqkv[i];
        double by = i % ld < v ? scale : 1;
        g->is *= by;
        g->within *= by * (i % ld < c ? 1 : parts);
        g->within = rounded(i % ld < c ? type : sums, *g);
    }
    for (int64_t i = 0; i < s->heads; i++)
        a->dsinks[i].within = rounded(t[DSINKS].v.dtype, a->dsinks[i]);
}
