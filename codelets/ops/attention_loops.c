/* SPDX-License-Identifier: Apache-2.0 */
/* Attention of one head, a tile of scores at a time (Dao et al. 2022,
 * FlashAttention): the T x T scores exist for IZ_HEAD_KEYS x IZ_HEAD_ROWS of
 * them, in the first-level cache.  Scores lie transposed, [key][query], so that
 * maxima, exponentials and sums of a query go down a lane of a vector, and so
 * that a tile of them is at once the right operand of the product that sums
 * over keys and the left one of the product that sums over queries.
 *
 * Compiled once per SIMD level.  Levels may give different bits; at one level
 * those of a head depend on nothing but the head. */
#include "codelets/ops/attention.h"

#include <assert.h>
#include <float.h>
#include <math.h>
#include <string.h>

#include "codelets/base/build.h"
#include "codelets/ops/attention_vectors.h"

enum {
    ROWS = IZ_HEAD_ROWS,
    KEYS = IZ_HEAD_KEYS,
    PANEL = IZ_HEAD_PANEL,
    LANES = IZ_LANES,
    STRIP = IZ_STRIP, /* rows of a result that are in registers at a time */
    GRAIN = LANES > PANEL ? LANES : PANEL
};

extern const struct iz_attention_loops IZ_ATTENTION_TABLE;

#define ALIGNED __attribute__((aligned(64)))

/* The left operand of a product: element (r, k) is p[r row + k col]. */
struct left {
    const float *p;
    int64_t row, col;
};

/* c[STRIP, nv LANES] = (add ? c : 0) + a[STRIP,n] b[n, nv LANES]; all
 * accumulators are in registers. */
IZ_INLINE void strip(float *c, int64_t ldc, bool add, int nv, struct left a,
                     const float *b, int64_t ldb, int64_t n)
{
    vec sum[STRIP][2];
#pragma GCC unroll 8
    for (int r = 0; r < STRIP; r++)
#pragma GCC unroll 2
        for (int v = 0; v < nv; v++)
            sum[r][v] =
                add ? *(const vec *)(c + r * ldc + v * LANES) : (vec){0};
    for (int64_t k = 0; k < n; k++) {
        vec right[2];
#pragma GCC unroll 2
        for (int v = 0; v < nv; v++)
            right[v] = *(const vec *)(b + k * ldb + v * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < STRIP; r++)
#pragma GCC unroll 2
            for (int v = 0; v < nv; v++)
                sum[r][v] += a.p[r * a.row + k * a.col] * right[v];
    }
#pragma GCC unroll 8
    for (int r = 0; r < STRIP; r++)
#pragma GCC unroll 2
        for (int v = 0; v < nv; v++)
            *(vec *)(c + r * ldc + v * LANES) = sum[r][v];
}

/* c[rows, cols] = (add ? c : 0) + a[rows,n] b[n,cols]; rows is a multiple of
 * STRIP, cols of LANES. */
IZ_INLINE void product(float *c, int64_t ldc, bool add, int64_t rows,
                       int64_t cols, struct left a, const float *b, int64_t ldb,
                       int64_t n)
{
    for (int64_t r = 0; r < rows; r += STRIP) {
        struct left at = {a.p + r * a.row, a.row, a.col};
        int64_t j = 0;
        for (; j + 2 * LANES <= cols; j += 2 * LANES)
            strip(c + r * ldc + j, ldc, add, 2, at, b + j, ldb, n);
        if (j < cols)
            strip(c + r * ldc + j, ldc, add, 1, at, b + j, ldb, n);
    }
}

/* The first key that row i sees; of rows behind the last, what that one
 * sees. */
static int64_t first_key(const struct iz_head *h, int64_t i)
{
    int64_t last = h->i0 + h->rows - 1, row = i < last ? i : last;
    int64_t first = row + 1 - h->window;
    int64_t begins = h->begins ? h->begins[row] : 0;
    return first > begins ? first : begins;
}

/* What a head has in its scratch. */
struct work {
    int64_t k0;           /* its first key: that of its first panel */
    int64_t c;            /* columns, rounded up to vectors */
    float *keys, *values; /* [keys,c] */
    float *dk, *dv;       /* [keys,c] */
    float *q, *dy;        /* [ROWS,c] */
    float *qt, *dyt;      /* [d,ROWS] */
    float *sum;           /* [ROWS,c]: o or dq */
    float *s, *ds;        /* [KEYS,ROWS] */
};

static float *attention_loops_take(float **p, int64_t floats)
{
    float *at = *p;
    *p += floats;
    return at;
}

static struct work work_of(const struct iz_head *h, bool bwd)
{
    struct work w = {.k0 = first_key(h, h->i0) / PANEL * PANEL,
                     .c = iz_attention_head_cols(h->d)};
    int64_t keys = h->keys - w.k0, tile = ROWS * w.c;
    int64_t all = iz_attention_head_keys(keys) * w.c;
    float *p = h->work;
    w.keys = attention_loops_take(&p, all);
    w.values = attention_loops_take(&p, all);
    w.q = attention_loops_take(&p, tile);
    w.qt = attention_loops_take(&p, tile);
    w.sum = attention_loops_take(&p, tile);
    w.s = attention_loops_take(&p, ROWS * KEYS);
    if (!bwd) {
        assert(p == h->work + iz_attention_head_floats(keys, h->d, false));
        return w;
    }
    w.dk = attention_loops_take(&p, all);
    w.dv = attention_loops_take(&p, all);
    w.dy = attention_loops_take(&p, tile);
    w.dyt = attention_loops_take(&p, tile);
    w.ds = attention_loops_take(&p, ROWS * KEYS);
    assert(p == h->work + iz_attention_head_floats(keys, h->d, true));
    return w;
}

/* ---- packing ---- */

/* Rows of a matrix that are fetched ahead: they may lie pages apart, where the
 * processor does not do it. */
enum { AHEAD = 2 * PANEL };

typedef float square_row
    __attribute__((vector_size(4 * PANEL), aligned(sizeof(float)), may_alias));

/* to = from transposed, 8 x 8: three times rows i and i + 4 are interleaved, as
 * one shuffles two halves of a pack of cards. */
static inline void turn_square(float *to, int64_t ldto, const float *from,
                               int64_t ld)
{
    square_row a[PANEL], b[PANEL];
#pragma GCC unroll 8
    for (int i = 0; i < PANEL; i++)
        a[i] = *(const square_row *)(from + i * ld);
#pragma GCC unroll 3
    for (int n = 0; n < 3; n++) {
#pragma GCC unroll 4
        for (int i = 0; i < PANEL / 2; i++) {
            b[2 * i] = __builtin_shufflevector(a[i], a[i + PANEL / 2], 0, 8, 1,
                                               9, 2, 10, 3, 11);
            b[2 * i + 1] = __builtin_shufflevector(a[i], a[i + PANEL / 2], 4,
                                                   12, 5, 13, 6, 14, 7, 15);
        }
#pragma GCC unroll 8
        for (int i = 0; i < PANEL; i++)
            a[i] = b[i];
    }
#pragma GCC unroll 8
    for (int i = 0; i < PANEL; i++)
        *(square_row *)(to + i * ldto) = a[i];
}

/* to[n,c] = from[rows,d], zeros elsewhere. */
static void attention_loops_copy(float *restrict to, int64_t n, int64_t c,
                                 const float *restrict from, int64_t ld,
                                 int64_t rows, int64_t d)
{
    for (int64_t i = 0; i < rows; i++) {
        if (i + AHEAD < rows)
            for (int64_t k = 0; k < d; k += 16)
                __builtin_prefetch(from + (i + AHEAD) * ld + k);
        memcpy(to + i * c, from + i * ld, (size_t)d * sizeof(*to));
        memset(to + i * c + d, 0, (size_t)(c - d) * sizeof(*to));
    }
    memset(to + rows * c, 0, (size_t)((n - rows) * c) * sizeof(*to));
}

/* Rows from i0 of q or dy: [ROWS,c] and, of the d columns, transposed. */
static void pack_tile(float *restrict to, float *restrict turned, int64_t c,
                      const float *restrict from, int64_t ld, int64_t rows,
                      int64_t d)
{
    attention_loops_copy(to, ROWS, c, from, ld, rows, d);
    for (int64_t k = 0; k < d; k += PANEL)
        for (int64_t i = 0; i < ROWS; i += PANEL)
            turn_square(turned + k * ROWS + i, ROWS, to + i * c + k, c);
}

/* to[rows,d] = (add ? to : 0) + by from[rows,c]. */
static void write_rows(float *restrict to, int64_t ld,
                       const float *restrict from, int64_t c, int64_t rows,
                       int64_t d, float by, bool add)
{
    for (int64_t i = 0; i < rows; i++)
#pragma omp simd
        for (int64_t k = 0; k < d; k++)
            to[i * ld + k] = add ? to[i * ld + k] + by * from[i * c + k]
                                 : by * from[i * c + k];
}

/* ---- a tile of scores ---- */

/* Queries from i0 against keys from j0, the first of them from `start`. */
struct tile {
    int64_t i0, j0, keys, start;
    bool full, hides; /* hides: keys before the first of some query */
    int32_t begins[ROWS] ALIGNED; /* the first key that each query sees */
};

/* The first query of a tile that sees the key: negative where all do. */
static inline int64_t sees(const struct tile *t, int64_t key)
{
    return t->full ? -1 : t->j0 + key - t->i0;
}

/* That of the first key of its panel, to whole vectors and panels: queries
 * before it are not computed. */
static inline int64_t sees_from(const struct tile *t, int64_t key)
{
    int64_t q = sees(t, key / PANEL * PANEL);
    return q > 0 ? q / GRAIN * GRAIN : 0;
}

/* Keys of which the queries from c to c + LANES were computed. */
static inline int64_t seen_by(const struct tile *t, int64_t c)
{
    int64_t end = t->i0 + c / GRAIN * GRAIN + GRAIN;
    int64_t n = (end - t->j0 + PANEL - 1) / PANEL * PANEL;
    return t->full || n > t->keys ? t->keys : n;
}

/* s[keys,ROWS] = keys[keys,d] qt[d,ROWS]; here and below, keys of a tile. */
static void scores(float *s, const struct tile *t, const float *keys,
                   const float *qt, int64_t c, int64_t d)
{
    for (int64_t j = 0; j < t->keys; j += PANEL) {
        int64_t from = sees_from(t, j);
        struct left a = {keys + j * c, c, 1};
        product(s + j * ROWS + from, ROWS, false, PANEL, ROWS - from, a,
                qt + from, ROWS, d);
    }
}

/* sum[ROWS,c] += s[keys,ROWS]^T b[keys,c]: what a tile gives to its queries. */
static void to_queries(float *sum, const struct tile *t, const float *s,
                       const float *b, int64_t c)
{
    for (int64_t q = 0; q < ROWS; q += PANEL) {
        int64_t seen = t->full ? t->keys : t->i0 + q + PANEL - t->j0;
        struct left a = {s + q, 1, ROWS};
        product(sum + q * c, c, true, PANEL, c, a, b, c,
                seen < t->keys ? seen : t->keys);
    }
}

/* sum[keys,c] += s[keys,ROWS] b[ROWS,c]: what a tile gives to its keys. */
static void to_keys(float *sum, const struct tile *t, const float *s,
                    const float *b, int64_t c)
{
    for (int64_t j = 0; j < t->keys; j += PANEL) {
        int64_t q = sees(t, j) > 0 ? sees(t, j) : 0;
        struct left a = {s + j * ROWS + q, ROWS, 1};
        product(sum + j * c, c, true, PANEL, c, a, b + q * c, c, ROWS - q);
    }
}

/* Before the first tile of the queries from i0.  Keys that none of them sees
 * are skipped, but for those that share a panel with one that is seen: so a
 * document that begins with a tile has the tiles that it has alone. */
static void first_tile(struct tile *t, const struct iz_head *h, int64_t i0)
{
    t->i0 = i0;
    t->keys = 0;
    t->full = h->full;
    for (int64_t q = 0; q < ROWS; q++)
        t->begins[q] = (int32_t)first_key(h, i0 + q);
    t->j0 = t->start = t->begins[0] / PANEL * PANEL;
}

/* Of the queries from c to c + LANES, those that do not see the key because it
 * lies before their first one. */
static inline ivec before_first(const struct tile *t, int64_t c, int64_t key)
{
    return *(const ivec *)(t->begins + c) > (int32_t)(t->j0 + key);
}

/* Tiles of the queries from i0: as many panels of keys as they see. */
static bool next_tile(struct tile *t, const struct iz_head *h)
{
    int64_t end = iz_attention_head_keys(t->i0 + ROWS), left;
    t->j0 += t->keys;
    if (h->full || end > h->keys)
        end = h->keys;
    left = end - t->j0;
    t->keys = left < KEYS ? left : KEYS;
    t->hides = t->begins[ROWS - 1] > t->j0;
    return left > 0;
}

static float scale_of(const struct iz_head *h)
{
    return h->scale != 0 ? h->scale : 1 / sqrtf((float)h->d);
}

/* What a tile's scores are multiplied by: with a cap they are tanh(s / cap). */
static float unit_of(const struct iz_head *h)
{
    return h->cap != 0 ? h->cap : scale_of(h);
}

/* A tile's score times this is a power of two. */
static float power_of(const struct iz_head *h)
{
    if (h->scale != 0 || h->cap != 0)
        return (float)(LOG2_E * (double)unit_of(h));
    return (float)(LOG2_E / sqrt((double)h->d));
}

/* s = tanh(by s), of the scores that were computed. */
static void squash(float *s, float by, const struct tile *t)
{
    for (int64_t c = 0; c < ROWS; c += LANES)
        for (int64_t j = 0; j < seen_by(t, c); j++) {
            vec *x = (vec *)(s + j * ROWS + c);
            *x = tanh_of(by * *x);
        }
}

/* The scores of a tile, capped. */
static void head_scores(const struct iz_head *h, const struct work *w,
                        const struct tile *t)
{
    scores(w->s, t, w->keys + (t->j0 - w->k0) * w->c, w->qt, w->c, h->d);
    if (h->cap != 0)
        squash(w->s, scale_of(h) / h->cap, t);
}

/* ---- forward ---- */

/* most = max(most, s), where keys that a query does not see become -infinity.
 * A query may see no key of the tile. */
static void maxima(float *most, float *s, const struct tile *t)
{
    vec m[ROWS / LANES];
    memcpy(m, most, sizeof(m));
    for (int64_t j = 0; j < t->keys; j++)
#pragma GCC unroll 8
        for (int v = 0; v < ROWS / LANES; v++) {
            vec *x = (vec *)(s + j * ROWS) + v;
            int64_t hidden = sees(t, j) - v * LANES;
            if (hidden > 0)
                *x = pick(first_lanes(hidden), (vec){0} - INFINITY, *x);
            if (t->hides)
                *x = pick(before_first(t, v * LANES, j), (vec){0} - INFINITY,
                          *x);
            m[v] = pick(*x > m[v], *x, m[v]);
        }
    memcpy(most, m, sizeof(m));
}

/* s = 2^(by (s - most)), total += s. */
static void exponentials(float *s, float *total, const float *most, float by,
                         const struct tile *t)
{
    for (int64_t c = 0; c < ROWS; c += LANES) {
        vec sum = *(vec *)(total + c), m = *(const vec *)(most + c);
        for (int64_t j = 0; j < seen_by(t, c); j++) {
            vec *x = (vec *)(s + j * ROWS + c);
            *x = exp2_of(by * (*x - m));
            sum += *x;
        }
        *(vec *)(total + c) = sum;
    }
}

/* What was summed with the maximum `before` is brought to `most`. */
static void rescale(float *restrict sum, float *restrict total,
                    float *restrict before, const float *restrict most,
                    float by, int64_t c)
{
#pragma omp simd
    for (int q = 0; q < ROWS; q++) {
        before[q] = iz_math_exp2f(by * (before[q] - most[q]));
        total[q] *= before[q];
    }
    for (int64_t q = 0; q < ROWS; q++)
#pragma omp simd
        for (int64_t k = 0; k < c; k++)
            sum[q * c + k] *= before[q];
}

/* Of the queries from row i0 of the chunk. */
static void tile_fwd(const struct iz_head *h, const struct work *w, int64_t i0)
{
    int64_t rows = h->rows - i0 < ROWS ? h->rows - i0 : ROWS;
    struct tile t;
    float most[ROWS] ALIGNED, before[ROWS], total[ROWS] ALIGNED;
    float by = power_of(h);
    for (int q = 0; q < ROWS; q++) {
        most[q] = h->sink ? *h->sink / unit_of(h) : -FLT_MAX;
        if (most[q] < -FLT_MAX)
            most[q] = -FLT_MAX; /* finite: differences are numbers */
        total[q] = h->sink ? 1 : 0;
    }
    first_tile(&t, h, h->i0 + i0);
    memset(w->sum, 0, (size_t)(ROWS * w->c) * sizeof(*w->sum));
    pack_tile(w->q, w->qt, w->c, h->q + i0 * h->ld, h->ld, rows, h->d);
    while (next_tile(&t, h)) {
        head_scores(h, w, &t);
        memcpy(before, most, sizeof(most));
        maxima(most, w->s, &t);
        if (h->sink || t.j0 > t.start)
            rescale(w->sum, total, before, most, by, w->c);
        exponentials(w->s, total, most, by, &t);
        to_queries(w->sum, &t, w->s, w->values + (t.j0 - w->k0) * w->c, w->c);
    }
    for (int64_t q = 0; q < rows; q++) {
        h->lse[i0 + q] = unit_of(h) * most[q] + logf(total[q]);
        write_rows(h->out + (i0 + q) * h->ldo, h->ldo, w->sum + q * w->c, w->c,
                   1, h->d, 1 / total[q], false);
    }
}

/* Keys and values of a group's first head. */
static void pack_keys(const struct iz_head *h, const struct work *w)
{
    int64_t keys = h->keys - w->k0, n = iz_attention_head_keys(keys);
    int64_t at = w->k0 * h->ldk;
    if (h->first) {
        attention_loops_copy(w->keys, n, w->c, h->k + at, h->ldk, keys, h->d);
        attention_loops_copy(w->values, n, w->c, h->v + at, h->ldk, keys, h->d);
    }
}

static void head_fwd(const struct iz_head *h)
{
    struct work w = work_of(h, false);
    pack_keys(h, &w);
    for (int64_t i0 = 0; i0 < h->rows; i0 += ROWS)
        tile_fwd(h, &w, i0);
}

/* ---- backward ---- */

/* lse in powers of two; delta = dy . o of a row: the part of the softmax
 * gradient that its normalisation takes away. */
static void row_sums(float *lse, float *delta, const struct iz_head *h,
                     int64_t i0, int64_t rows)
{
    for (int64_t q = 0; q < ROWS; q++)
        lse[q] = delta[q] = 0;
    for (int64_t q = 0; q < rows; q++) {
        const float *o = h->o + (i0 + q) * h->ldo;
        const float *dy = h->dy + (i0 + q) * h->ldo;
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t j = 0; j < h->d; j++)
            sum += o[j] * dy[j];
        delta[q] = sum;
        lse[q] = (float)(LOG2_E * (double)h->lse[i0 + q]);
    }
}

/* The gradient of a sink: its value is 0, so is the gradient of its
 * probability.
 */
static void sink_bwd(const struct iz_head *h, const float *lse,
                     const float *delta, int64_t rows)
{
    float sum = 0, sink = (float)(LOG2_E * (double)*h->sink);
    for (int64_t q = 0; q < rows; q++) {
        float x = sink - lse[q]; /* above 0 only where lse was rounded */
        sum += iz_math_exp2f(x > 0 ? 0 : x) * delta[q];
    }
    *h->dsink -= sum;
}

/* s: scores -> probabilities; ds: their gradient -> that of the scores, before
 * they were capped. */
IZ_INLINE void softmax_bwd(float *s, float *ds, const float *lse,
                           const float *delta, float by, bool capped,
                           const struct tile *t)
{
    for (int64_t c = 0; c < ROWS; c += LANES) {
        vec l = *(const vec *)(lse + c), d = *(const vec *)(delta + c);
        for (int64_t j = 0; j < seen_by(t, c); j++) {
            vec *p = (vec *)(s + j * ROWS + c);
            vec *g = (vec *)(ds + j * ROWS + c);
            vec x = by * *p - l; /* above 0 only where l was rounded */
            vec e = exp2_of(pick(x > 0.f, (vec){0}, x)), de = e * (*g - d);
            if (capped)
                de *= 1.f - *p * *p;
            if (sees(t, j) > c) {
                ivec hidden = first_lanes(sees(t, j) - c);
                e = pick(hidden, (vec){0}, e);
                de = pick(hidden, (vec){0}, de);
            }
            if (t->hides) {
                ivec hidden = before_first(t, c, j);
                e = pick(hidden, (vec){0}, e);
                de = pick(hidden, (vec){0}, de);
            }
            *p = e;
            *g = de;
        }
    }
}

static void tile_bwd(const struct iz_head *h, const struct work *w, int64_t i0)
{
    int64_t rows = h->rows - i0 < ROWS ? h->rows - i0 : ROWS, c = w->c;
    struct tile t;
    float lse[ROWS] ALIGNED, delta[ROWS] ALIGNED;
    first_tile(&t, h, h->i0 + i0);
    pack_tile(w->q, w->qt, c, h->q + i0 * h->ld, h->ld, rows, h->d);
    pack_tile(w->dy, w->dyt, c, h->dy + i0 * h->ldo, h->ldo, rows, h->d);
    row_sums(lse, delta, h, i0, rows);
    if (h->sink)
        sink_bwd(h, lse, delta, rows);
    memset(w->sum, 0, (size_t)(ROWS * c) * sizeof(*w->sum));
    while (next_tile(&t, h)) {
        int64_t at = (t.j0 - w->k0) * c;
        head_scores(h, w, &t);
        scores(w->ds, &t, w->values + at, w->dyt, c, h->d);
        if (h->cap != 0)
            softmax_bwd(w->s, w->ds, lse, delta, power_of(h), true, &t);
        else
            softmax_bwd(w->s, w->ds, lse, delta, power_of(h), false, &t);
        to_queries(w->sum, &t, w->ds, w->keys + at, c);
        to_keys(w->dk + at, &t, w->ds, w->q, c);
        to_keys(w->dv + at, &t, w->s, w->dy, c);
    }
    write_rows(h->dq + i0 * h->ld, h->ld, w->sum, c, rows, h->d, scale_of(h),
               false);
}

static void head_bwd(const struct iz_head *h)
{
    struct work w = work_of(h, true);
    int64_t keys = h->keys - w.k0, at = w.k0 * h->ldk;
    int64_t all = iz_attention_head_keys(keys) * w.c;
    pack_keys(h, &w);
    if (h->first) {
        memset(w.dk, 0, (size_t)all * sizeof(*w.dk));
        memset(w.dv, 0, (size_t)all * sizeof(*w.dv));
    }
    for (int64_t i0 = 0; i0 < h->rows; i0 += ROWS)
        tile_bwd(h, &w, i0);
    if (h->last) {
        write_rows(h->dk + at, h->ldk, w.dk, w.c, keys, h->d, scale_of(h),
                   h->adds);
        write_rows(h->dv + at, h->ldk, w.dv, w.c, keys, h->d, 1, h->adds);
    }
}

const struct iz_attention_loops IZ_ATTENTION_TABLE = {
    .attention_fwd = head_fwd, .attention_bwd = head_bwd};
