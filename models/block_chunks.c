/* SPDX-License-Identifier: Apache-2.0 */
/* A block that handles N rows of a sample at a time, from norms to experts, so
 * that only the keys and values of a sample are whole.  A row needs those of
 * the rows before it: forward goes from the first chunk to the last.  Backward
 * goes the other way: when a chunk's turn comes, all that its keys and values
 * gave to later rows has come back.  It repeats the chunk's forward, so a block
 * keeps nothing.
 *
 * Gradients of weights are summed in fp32, in the order of the backward, and
 * rounded once. */
#include "models/block_parts.h"

enum { ADAPTERS = IZ_UNIT_PARAMS / 2 };

/* The gradients of a unit.  A chunk's layer adds to those of matrices, and has
 * its own ones of vectors. */
struct sums {
    int n, n_adapters, n_vectors;
    struct iz_view w[BLOCK_MOST], sum[BLOCK_MOST], own[BLOCK_MOST];
    struct iz_adapter adapter[ADAPTERS], *of[ADAPTERS]; /* in place of these */
    struct iz_view dm[ADAPTERS];                        /* sums, of each */
    struct {
        struct iz_view sum, own;
    } vector[BLOCK_MOST + ADAPTERS];
};

static struct iz_view sum_of(struct iz_exec *x, struct iz_view gradient)
{
    gradient.dtype = IZ_F32;
    return iz_view_wanted(x, gradient)
               ? iz_exec_work(x, IZ_F32, gradient.rows, gradient.cols)
               : gradient;
}

/* What a chunk's layer writes of a vector with this sum. */
static struct iz_view own_of(struct iz_exec *x, struct sums *s,
                             struct iz_view sum)
{
    struct iz_view own = sum_of(x, sum);
    if (iz_view_wanted(x, sum)) {
        s->vector[s->n_vectors].sum = sum;
        s->vector[s->n_vectors++].own = own;
    }
    return own;
}

/* In place of an adapter, which *f is. */
static void sum_adapter(struct iz_exec *x, struct sums *s,
                        struct iz_adapter **f)
{
    struct iz_adapter *copy = &s->adapter[s->n_adapters];
    *copy = **f;
    copy->da = sum_of(x, copy->da);
    copy->db = sum_of(x, copy->db);
    s->dm[s->n_adapters] = sum_of(x, copy->dm);
    copy->dm = own_of(x, s, s->dm[s->n_adapters]);
    s->of[s->n_adapters++] = *f;
    *f = copy;
}

static void sums_open(struct sums *s, struct iz_exec *x,
                      const struct iz_layer *a)
{
    struct iz_block_place list[BLOCK_MOST];
    s->n = iz_block_list(list, a->self, kind_of(a));
    s->n_adapters = s->n_vectors = 0;
    for (int i = 0; i < s->n; i++) {
        s->w[i] = a->w[i];
        s->sum[i] = s->own[i] = sum_of(x, gradient(a, i));
        if (s->sum[i].rows == 1)
            s->own[i] = own_of(x, s, s->sum[i]);
        for (struct iz_adapter **f = &s->w[i].adapter; *f; f = &(*f)->next)
            sum_adapter(x, s, f);
    }
}

static void clear_vectors(struct iz_exec *x, const struct sums *s)
{
    for (int i = 0; i < s->n_vectors; i++)
        iz_op_clear(x, s->vector[i].own);
}

static void add_vectors(struct iz_exec *x, const struct sums *s, bool first)
{
    for (int i = 0; i < s->n_vectors; i++)
        if (first)
            iz_op_copy(x, s->vector[i].sum, s->vector[i].own);
        else
            iz_op_add(x, s->vector[i].sum, s->vector[i].own);
}

static void round_sum(struct iz_exec *x, struct iz_view to, struct iz_view sum)
{
    if (iz_view_wanted(x, to))
        iz_convert(x, to, sum);
}

static void sums_close(struct sums *s, struct iz_exec *x,
                       const struct iz_layer *a)
{
    for (int i = 0; i < s->n; i++)
        round_sum(x, gradient(a, i), s->sum[i]);
    for (int i = 0; i < s->n_adapters; i++) {
        struct iz_adapter *to = s->of[i], *f = &s->adapter[i];
        round_sum(x, to->da, f->da);
        round_sum(x, to->db, f->db);
        round_sum(x, to->dm, s->dm[i]);
        to->seen |= f->seen;
        to->out_in |= f->out_in;
        to->experts = f->experts;
    }
}

/* ---- a chunk ---- */

/* What its layer is called with; it borrows what is in here. */
struct part {
    struct iz_layer layer;
    struct iz_block block;
    struct iz_chunk chunk;
};

static struct iz_view rows_at(struct iz_view v, const struct iz_block *c,
                              int64_t from, int64_t n)
{
    return iz_view_rows(tokens(v, c->width), from, n);
}

/* Rows `first` to first + n - 1 of a sample. */
static void set_rows(struct part *p, const struct iz_layer *a, int64_t sample,
                     int64_t first, int64_t n)
{
    const struct iz_block *c = a->self;
    int64_t at = sample * c->seq + first;
    double all = (double)a->samples * c->seq;
    p->layer = *a;
    p->layer.self = &p->block;
    p->layer.samples = 1;
    p->layer.x = rows_at(a->x, c, at, n);
    p->layer.y = rows_at(a->y, c, at, n);
    p->layer.dx = rows_at(a->dx, c, at, n);
    p->layer.dy = rows_at(a->dy, c, at, n);
    if (a->begins.rows)
        p->layer.begins = iz_view_rows(tokens(a->begins, c->seq), sample, 1);
    p->block = *c;
    p->block.chunk = &p->chunk;
    p->block.seq = (int)n;
    p->block.rope[0].first = p->block.rope[1].first = first;
    /* A router's loss is a mean over rows. */
    p->block.experts.balance *= (double)n / all;
    p->block.experts.z *= (double)n / all;
    p->chunk.first = first;
}

static void chunk_open(struct part *p, struct iz_exec *x,
                       const struct iz_layer *a, bool back)
{
    const struct iz_block *c = a->self;
    int64_t cols = 2 * (int64_t)c->kv_heads * c->head_dim;
    p->chunk = (struct iz_chunk){.seq = c->seq,
                                 .kv = iz_exec_work(x, x->act, c->seq, cols)};
    if (back)
        p->chunk.dkv = iz_exec_work(x, IZ_F32, c->seq, cols);
}

/* Of the chunk that begins there. */
static int64_t rows_from(const struct iz_exec *x, const struct iz_block *c,
                         int64_t at)
{
    int64_t n = x->numerics.chunk_rows;
    return at + n < c->seq ? n : c->seq - at;
}

/* All chunks of a sample, `again` with what a backward needs of each alone: its
 * keys and values. */
static void forward_sample(struct iz_exec *x, const struct iz_layer *a,
                           struct part *p, int64_t sample, bool again)
{
    const struct iz_block *c = a->self;
    int64_t each = x->numerics.chunk_rows, mark = iz_exec_mark(x);
    for (int64_t at = 0; at < c->seq; at += each) {
        set_rows(p, a, sample, at, rows_from(x, c, at));
        if (again)
            iz_block_keys(x, &p->layer);
        else
            iz_block_forward(x, &p->layer);
        iz_exec_release(x, mark);
    }
}

void iz_block_forward_all(struct iz_exec *x, const struct iz_layer *a)
{
    struct part p;
    if (!x->numerics.chunk_rows) {
        iz_block_forward(x, a);
        return;
    }
    int64_t mark = iz_exec_mark(x);
    x->keeps_nothing = true;
    chunk_open(&p, x, a, false);
    for (int64_t sample = 0; sample < a->samples; sample++)
        forward_sample(x, a, &p, sample, false);
    x->keeps_nothing = false;
    iz_exec_release(x, mark);
}

/* Its flops are no work of the model, and not counted, but its time is. */
static void repeat_chunk(struct iz_exec *x, struct part *p)
{
    double flops = x->flops;
    int64_t mark = iz_exec_mark(x);
    p->layer.again = true;
    iz_block_forward(x, &p->layer);
    p->layer.again = false;
    iz_exec_release(x, mark); /* what it keeps stays until the backward */
    x->flops = flops;
}

static void backward_sample(struct iz_exec *x, const struct iz_layer *a,
                            struct part *p, const struct sums *s,
                            int64_t sample)
{
    const struct iz_block *c = a->self;
    int64_t each = x->numerics.chunk_rows, mark = iz_exec_mark(x);
    double flops = x->flops;
    forward_sample(x, a, p, sample, true);
    x->flops = flops;
    iz_op_clear(x, p->chunk.dkv);
    for (int64_t at = (c->seq - 1) / each * each; at >= 0; at -= each) {
        bool first = sample == a->samples - 1 && at + each >= c->seq;
        set_rows(p, a, sample, at, rows_from(x, c, at));
        p->layer.w = s->w;
        p->layer.dw = s->own;
        p->chunk.adds = !first;
        p->layer.y = iz_exec_work(x, x->act, p->block.seq, c->width);
        clear_vectors(x, s);
        repeat_chunk(x, p);
        iz_block_backward(x, &p->layer);
        add_vectors(x, s, first);
        iz_exec_release(x, mark);
    }
}

void iz_block_backward_all(struct iz_exec *x, const struct iz_layer *a)
{
    struct part p;
    struct sums s;
    if (!x->numerics.chunk_rows) {
        iz_block_backward(x, a);
        return;
    }
    bool widens = x->widens;
    int64_t mark = iz_exec_mark(x);
    x->keeps_nothing = true;
    x->widens = false;
    sums_open(&s, x, a);
    chunk_open(&p, x, a, true);
    for (int64_t sample = a->samples - 1; sample >= 0; sample--)
        backward_sample(x, a, &p, &s, sample);
    sums_close(&s, x, a);
    x->keeps_nothing = false;
    x->widens = widens;
    iz_exec_release(x, mark);
}
