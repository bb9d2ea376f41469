/* SPDX-License-Identifier: Apache-2.0 */
/* A block that handles N rows of a sample at a time, from norms to experts, so
 * that only the keys and values of a sample are whole; and the last unit.  A
 * row needs those of the rows before it: forward goes from the first chunk to
 * the last.  Backward goes the other way: when a chunk's turn comes, all that
 * its keys and values gave to later rows has come back.  What chunks keep
 * lies one after the other; where they keep nothing, backward recomputes the
 * forward of each.
 *
 * Gradients of weights are summed in fp32, in the order of the backward, and
 * rounded once. */
#include "models/block_modules.h"

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
struct chunk_call {
    struct iz_layer layer;
    struct iz_block block;
    struct iz_sequence_chunk chunk;
    /* What the unit before gave, this one gives, and the gradients of these,
     * which a block has in one place. */
    struct iz_staged x, y, d;
    int64_t saved; /* bytes that a chunk keeps, if it has all its rows */
    int64_t saved_sample;
};

/* Chunks of a sample, or of all rows. */
struct cut {
    int64_t first, rows, each;
};

/* Rows of the chunk that begins there; 0: there is none. */
static int64_t rows_at(const struct cut *c, int64_t at)
{
    int64_t left = c->first + c->rows - at;
    return at < c->first || left <= 0 ? 0 : left < c->each ? left : c->each;
}

static int64_t last_of(const struct cut *c)
{
    return c->first + (c->rows - 1) / c->each * c->each;
}

/* One chunk after the other, from the first on, or from the last with a step
 * back.  Where there are many a dry run counts one in the middle of `times` for
 * all of these: what ops count grows evenly with the rows before.  It comes to
 * the last two themselves, of which one has all its rows and the most before
 * them: so it finds how much scratch there has to be. */
struct walk {
    const struct cut *cut;
    int64_t next, stride;
    int64_t at, n, times; /* the chunk that it has come to, and its rows */
    struct iz_cost before;
};

enum { COUNTED = 64 }; /* chunks that a dry run goes to, or up to twice that */

static struct walk walk_of(const struct cut *c, bool back)
{
    return (struct walk){.cut = c,
                         .next = back ? last_of(c) : c->first,
                         .stride = back ? -c->each : c->each,
                         .times = 1};
}

/* False: there are no more. */
static bool walk_on(struct iz_exec *x, struct walk *w)
{
    int64_t each = w->cut->each;
    int64_t many = x->dry ? w->cut->rows / each / COUNTED | 1 : 1;
    if (w->times > 1) {
        struct iz_cost one = x->cost;
        iz_cost_add(&one, &w->before, -1);
        iz_cost_add(&x->cost, &one, (double)(w->times - 1));
    }
    int64_t first = w->stride > 0 ? w->next : w->next + (many - 1) * w->stride;
    if (!rows_at(w->cut, first) || !rows_at(w->cut, first + (many + 1) * each))
        many = 1;
    w->at = w->next + many / 2 * w->stride;
    w->n = rows_at(w->cut, w->at);
    w->next += many * w->stride;
    w->times = many;
    w->before = x->cost;
    return w->n > 0;
}

/* Loads the chunk's rows of a matrix, and those of the next one. */
static struct iz_view load(struct iz_exec *x, struct iz_staged *s,
                           const struct walk *w)
{
    int64_t next = w->times > 1 ? 0 : rows_at(w->cut, w->next);
    return iz_staged_load(x, s, w->at, w->n, w->next, next);
}

static void chunk_open(struct chunk_call *p, struct iz_exec *x,
                       const struct iz_layer *a)
{
    const struct iz_block *c = a->self;
    p->layer = *a;
    p->layer.self = &p->block;
    p->layer.samples = 1;
    p->block = *c;
    p->block.chunk = &p->chunk;
    p->chunk = (struct iz_sequence_chunk){.seq = c->seq};
    p->x = iz_staged_open(x, tokens(a->x, c->width), x->numerics.chunk_rows);
}

/* The rows from `at` on of all, which are of this sample. */
static void set_rows(struct chunk_call *p, const struct iz_layer *a,
                     int64_t sample, const struct walk *w)
{
    const struct iz_block *c = a->self;
    double share = (double)w->n / ((double)a->samples * c->seq);
    if (a->begins.rows)
        p->layer.begins = iz_view_rows(tokens(a->begins, c->seq), sample, 1);
    p->block.seq = (int)w->n;
    p->chunk.first = w->at - w->cut->first;
    p->block.rope[0].first = p->block.rope[1].first = p->chunk.first;
    /* A router's loss is a mean over rows. */
    p->block.experts.balance = c->experts.balance * share;
    p->block.experts.z = c->experts.z * share;
}

static struct cut sample_of(const struct iz_exec *x, const struct iz_block *c,
                            int64_t sample)
{
    return (struct cut){sample * c->seq, c->seq, x->numerics.chunk_rows};
}

/* ---- a block ---- */

/* What a chunk of n rows keeps. */
static int64_t saved_of(const struct iz_exec *x, struct chunk_call *p,
                        int64_t n)
{
    struct iz_exec dry = iz_exec_dry(x->backend, x->act);
    dry.numerics = x->numerics;
    dry.widens = x->widens;
    p->block.seq = (int)n;
    iz_block_count_saves(&dry, &p->layer);
    return dry.save.used;
}

static void saves_open(struct chunk_call *p, const struct iz_exec *x,
                       const struct iz_block *c)
{
    const struct cut cut = sample_of(x, c, 0);
    p->saved = saved_of(x, p, cut.each);
    p->saved_sample = last_of(&cut) / cut.each * p->saved +
                      saved_of(x, p, rows_at(&cut, last_of(&cut)));
}

/* What is kept next is of the chunk that begins there. */
static void seek(struct iz_exec *x, const struct chunk_call *p,
                 const struct walk *w)
{
    const struct cut *c = w->cut;
    if (!x->keeps_nothing)
        x->save.used = c->first / c->rows * p->saved_sample +
                       (w->at - c->first) / c->each * p->saved;
}

/* All of it has been counted. */
static void saves_close(struct iz_exec *x, const struct chunk_call *p,
                        const struct iz_layer *a)
{
    int64_t all = a->samples * p->saved_sample;
    if (!x->keeps_nothing && x->save.peak < all)
        x->save.peak = all;
}

static void keys_open(struct chunk_call *p, struct iz_exec *x,
                      const struct iz_block *c, bool back)
{
    int64_t cols = 2 * (int64_t)c->kv_heads * c->head_dim;
    p->chunk.kv = iz_exec_work(x, x->act, c->seq, cols);
    if (back)
        p->chunk.dkv = iz_exec_work(x, IZ_F32, c->seq, cols);
}

/* All chunks of a sample, `again` with what a backward needs of each alone: its
 * keys and values. */
static void forward_sample(struct iz_exec *x, const struct iz_layer *a,
                           struct chunk_call *p, int64_t sample, bool again)
{
    const struct cut cut = sample_of(x, a->self, sample);
    struct walk w = walk_of(&cut, false);
    int64_t mark = iz_exec_mark(x);
    while (walk_on(x, &w)) {
        set_rows(p, a, sample, &w);
        seek(x, p, &w);
        if (!again)
            p->layer.y = iz_staged_room(x, &p->y, w.at, w.n);
        if (!again || x->keeps_nothing)
            p->layer.x = load(x, &p->x, &w);
        if (again)
            iz_block_keys(x, &p->layer, !x->keeps_nothing);
        else
            iz_block_forward(x, &p->layer);
        if (!again)
            iz_staged_store(x, &p->y, w.at, w.n);
        iz_exec_release(x, mark);
    }
}

void iz_block_forward_all(struct iz_exec *x, const struct iz_layer *a)
{
    const struct iz_block *c = a->self;
    struct chunk_call p;
    if (!x->numerics.chunk_rows) {
        iz_block_forward(x, a);
        return;
    }
    int64_t mark = iz_exec_mark(x);
    chunk_open(&p, x, a);
    saves_open(&p, x, c);
    p.y = iz_staged_open(x, tokens(a->y, c->width), x->numerics.chunk_rows);
    keys_open(&p, x, c, false);
    for (int64_t sample = 0; sample < a->samples; sample++)
        forward_sample(x, a, &p, sample, false);
    saves_close(x, &p, a);
    iz_staged_close(x, &p.x);
    iz_staged_close(x, &p.y);
    iz_exec_release(x, mark);
}

static void recompute_chunk(struct iz_exec *x, struct chunk_call *p)
{
    p->layer.y = iz_exec_work(x, x->act, p->block.seq, p->block.width);
    int64_t mark = iz_exec_mark(x);
    p->layer.again = true;
    iz_block_forward(x, &p->layer);
    p->layer.again = false;
    iz_exec_release(x, mark); /* what it keeps stays until the backward */
}

static void backward_sample(struct iz_exec *x, const struct iz_layer *a,
                            struct chunk_call *p, const struct sums *s,
                            int64_t sample)
{
    const struct iz_block *c = a->self;
    const struct cut cut = sample_of(x, c, sample);
    struct walk w = walk_of(&cut, true);
    int64_t mark = iz_exec_mark(x);
    forward_sample(x, a, p, sample, true);
    iz_op_clear(x, p->chunk.dkv);
    while (walk_on(x, &w)) {
        bool first = sample == a->samples - 1 && w.at == last_of(&cut);
        set_rows(p, a, sample, &w);
        seek(x, p, &w);
        p->layer.w = s->w;
        p->layer.dw = s->own;
        p->chunk.adds = !first;
        p->layer.x = load(x, &p->x, &w);
        p->layer.dx = p->layer.dy = load(x, &p->d, &w);
        clear_vectors(x, s);
        if (x->keeps_nothing)
            recompute_chunk(x, p);
        iz_block_backward(x, &p->layer);
        iz_staged_store(x, &p->d, w.at, w.n);
        add_vectors(x, s, first);
        iz_exec_release(x, mark);
    }
}

void iz_block_backward_all(struct iz_exec *x, const struct iz_layer *a)
{
    const struct iz_block *c = a->self;
    struct chunk_call p;
    struct sums s;
    if (!x->numerics.chunk_rows) {
        iz_block_backward(x, a);
        return;
    }
    int64_t mark = iz_exec_mark(x);
    sums_open(&s, x, a);
    chunk_open(&p, x, a);
    saves_open(&p, x, c);
    p.d = iz_staged_open(x, tokens(a->dy, c->width), x->numerics.chunk_rows);
    keys_open(&p, x, c, true);
    for (int64_t sample = a->samples - 1; sample >= 0; sample--)
        backward_sample(x, a, &p, &s, sample);
    sums_close(&s, x, a);
    saves_close(x, &p, a);
    iz_staged_close(x, &p.x);
    iz_staged_close(x, &p.d);
    iz_exec_release(x, mark);
}

/* ---- the last unit ---- */

/* Its loss is a mean over the targets of all rows, so these are counted first;
 * pairs are handled whole: their gradients wait for the losses of whole
 * samples. */
static bool head_in_chunks(const struct iz_exec *x, const struct iz_layer *a)
{
    return x->numerics.chunk_rows && !a->preference;
}

static int64_t targets_of(const struct iz_exec *x, const struct iz_layer *a,
                          int64_t rows)
{
    const struct iz_view *w = &a->w[iz_block_head_matrix(a->self)];
    int64_t n = x->dry ? 1 : iz_classifier_targets(a->target, rows, w->rows);
    return n ? n : 1;
}

/* Where the gradient of its matrix is summed. */
static struct iz_view matrix_sum(struct iz_exec *x, struct iz_view w,
                                 struct iz_view dw)
{
    int64_t room = iz_classifier_room(x, w);
    struct iz_view v = dw;
    if (!iz_view_wanted(x, dw))
        return dw;
    v = iz_exec_work(x, IZ_F32, 1, iz_view_len(dw) + room);
    v.rows = dw.rows;
    v.cols = dw.cols;
    v.room = room;
    return v;
}

/* back: with gradients, which go to d. */
static void head_chunks(struct iz_exec *x, const struct iz_layer *a,
                        struct chunk_call *p, const struct sums *s, bool back)
{
    const struct iz_block *c = a->self;
    const struct cut cut = {0, a->samples * (int64_t)c->seq,
                            x->numerics.chunk_rows};
    struct walk w = walk_of(&cut, false);
    int64_t mark = iz_exec_mark(x);
    p->chunk.targets = targets_of(x, a, cut.rows);
    while (walk_on(x, &w)) {
        p->block.seq = (int)w.n;
        p->chunk.adds = w.at > 0;
        p->layer.target = (const int32_t *)a->target + w.at;
        if (back)
            p->layer.dx = iz_staged_room(x, &p->d, w.at, w.n);
        p->layer.x = load(x, &p->x, &w);
        if (back) {
            clear_vectors(x, s);
            iz_block_head_backward(x, &p->layer);
            iz_staged_store(x, &p->d, w.at, w.n);
            add_vectors(x, s, w.at == 0);
        } else {
            iz_block_head_evaluate(x, &p->layer);
        }
        iz_exec_release(x, mark);
    }
}

void iz_block_head_backward_all(struct iz_exec *x, const struct iz_layer *a)
{
    const struct iz_block *c = a->self;
    int matrix = iz_block_head_matrix(c);
    int64_t mark = iz_exec_mark(x);
    struct chunk_call p;
    struct sums s;
    if (!head_in_chunks(x, a)) {
        iz_block_head_backward(x, a);
        return;
    }
    sums_open(&s, x, a);
    s.w[matrix] = a->w[matrix];
    s.own[matrix] = matrix_sum(x, a->w[matrix], a->dw[matrix]);
    chunk_open(&p, x, a);
    p.d = iz_staged_open(x, tokens(a->dx, c->width), x->numerics.chunk_rows);
    p.layer.w = s.w;
    p.layer.dw = s.own;
    head_chunks(x, a, &p, &s, true);
    sums_close(&s, x, a);
    round_sum(x, a->dw[matrix], s.own[matrix]);
    iz_staged_close(x, &p.x);
    iz_staged_close(x, &p.d);
    iz_exec_release(x, mark);
}

void iz_block_head_evaluate_all(struct iz_exec *x, const struct iz_layer *a)
{
    int64_t mark = iz_exec_mark(x);
    struct chunk_call p;
    if (!head_in_chunks(x, a)) {
        iz_block_head_evaluate(x, a);
        return;
    }
    chunk_open(&p, x, a);
    head_chunks(x, a, &p, NULL, false);
    iz_staged_close(x, &p.x);
    iz_exec_release(x, mark);
}
