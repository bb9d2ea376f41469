/* SPDX-License-Identifier: Apache-2.0 */
/* Token and position embedding, and tables of rows.  Backward visits the rows
 * of the table in order and adds the positions of each token in ascending
 * order: the result does not depend on who runs it. */
#include "codelets/ops/ops.h"

#include <assert.h>
#include <string.h>

#include "codelets/base/build.h"
#include "codelets/base/die.h"
#include "codelets/base/int64.h"
#include "codelets/flat/touched_rows.h"
#include "codelets/ops/embedding.h"
#include "codelets/ops/gpu_ops.h"

static const void *row_at(struct iz_view v, int64_t i)
{
    return iz_view_rows(v, i, 1).p;
}

IZ_SIMD static void add_row(float *restrict to, const float *restrict from,
                            int64_t n)
{
    for (int64_t j = 0; j < n; j++)
        to[j] += from[j];
}

static void check_tokens(const int32_t *token, int64_t n, int64_t vocab)
{
    for (int64_t i = 0; i < n; i++)
        if (token[i] < 0 || token[i] >= vocab)
            iz_die(
                "token %d at position %lld is outside the vocabulary 0..%lld",
                token[i], (long long)i, (long long)vocab - 1);
}

/* Which row of the view v of a table row r of the longer one is; -1: it is not
 * here. */
static inline int64_t row_in(struct iz_view v, const struct iz_table *t,
                             int32_t r)
{
    int64_t at = r - t->first;
    if (!v.row)
        return at >= 0 && at < v.rows ? at : -1;
    r = (int32_t)at;
    at = iz_touched_find(v.row, v.rows, r);
    return at < v.rows && v.row[at] == r ? at : -1;
}

/* row: what a row of wpe goes through. */
static void lookup_cpu(struct iz_view y, struct iz_view r,
                       const struct iz_table *a, float *row)
{
    int64_t c = y.cols, seq = a->wpe.rows;
    for (int64_t t = 0; t < y.rows; t++) {
        float *to = (float *)y.p + t * c;
        int64_t v = row_in(a->w, a, a->row[t]);
        if (v >= 0)
            iz_cast(to, IZ_F32, row_at(a->w, v), a->w.dtype, c);
        else if (!r.rows)
            memset(to, 0, (size_t)c * sizeof(*to));
        else if (r.p != y.p)
            memcpy(to, row_at(r, t), (size_t)c * sizeof(*to));
        if (seq) {
            int64_t at = iz_op_position(a->begins.p, t, seq);
            iz_cast(row, IZ_F32, row_at(a->wpe, at), a->wpe.dtype, c);
            add_row(to, row, c);
        }
    }
}

void iz_table_fwd(struct iz_exec *x, struct iz_view y, struct iz_view r,
                  const struct iz_table *t)
{
    int64_t mark = iz_exec_mark(x);
    assert(t->w.cols == y.cols && (!r.rows || r.rows == y.rows));
    assert(x->backend == IZ_CPU || !t->w.row);
    iz_exec_count(x, 0, (double)(2 * iz_view_bytes(y) + iz_view_bytes(t->wpe)));
    if (!x->dry && t->vocabulary)
        check_tokens(t->row, y.rows, t->w.rows);
    if (x->backend == IZ_CPU) {
        struct iz_view row = iz_exec_work(x, IZ_F32, t->wpe.rows > 0, y.cols);
        if (!x->dry)
            lookup_cpu(y, r, t, row.p);
    } else if (!x->dry) {
        iz_table_fwd_cuda(x, y, r, t);
    }
    iz_exec_release(x, mark);
}

/* first[v] = the first of the n rows that read row v of dw, or with `positions`
 * of dwpe, or -1; next[t] = the following one. */
static void link_rows(int32_t *first, int32_t *next, const struct iz_table *a,
                      bool positions, int64_t n)
{
    int64_t rows = positions ? a->dwpe.rows : a->dw.rows;
    for (int64_t v = 0; v < rows; v++)
        first[v] = -1;
    for (int64_t t = n - 1; t >= 0; t--) {
        int64_t v = positions ? iz_op_position(a->begins.p, t, rows)
                              : row_in(a->dw, a, a->row[t]);
        if (v >= 0) {
            next[t] = first[v];
            first[v] = (int32_t)t;
        }
    }
}

static void add_linked(struct iz_view dw, struct iz_view dy,
                       const int32_t *first, const int32_t *next, float *row)
{
    int64_t c = dy.cols;
    for (int64_t v = 0; v < dw.rows; v++) {
        struct iz_view to = iz_view_rows(dw, v, 1);
        if (first[v] < 0) {
            memset(to.p, 0, (size_t)iz_view_bytes(to));
            continue;
        }
        memset(row, 0, (size_t)c * sizeof(*row));
        for (int32_t t = first[v]; t >= 0; t = next[t])
            add_row(row, (float *)dy.p + t * c, c);
        iz_cast(to.p, to.dtype, row, IZ_F32, c);
    }
}

static void bwd_on_cpu(struct iz_exec *x, struct iz_view dy,
                       const struct iz_table *t)
{
    struct iz_view row = iz_exec_work(x, IZ_F32, 1, dy.cols);
    struct iz_view first =
        iz_exec_work(x, IZ_I32, 1, max64(t->dw.rows, t->dwpe.rows));
    struct iz_view next = iz_exec_work(x, IZ_I32, 1, dy.rows);
    for (int k = 0; k < 2; k++) {
        struct iz_view to = k ? t->dwpe : t->dw;
        if (x->dry || !iz_view_wanted(x, to))
            continue;
        link_rows(first.p, next.p, t, k, dy.rows);
        add_linked(to, dy, first.p, next.p, row.p);
    }
}

void iz_table_bwd(struct iz_exec *x, struct iz_view dy,
                  const struct iz_table *t)
{
    int64_t mark = iz_exec_mark(x);
    if (!t->dw.rows && !t->dwpe.rows) /* the table is frozen */
        return;
    assert(t->dw.cols == dy.cols && dy.rows <= INT32_MAX);
    assert(x->backend == IZ_CPU || !t->dw.row);
    iz_exec_count(x, 0,
                  (double)((t->vocabulary ? 2 : 1) * iz_view_bytes(dy) +
                           iz_view_bytes(t->dw) + iz_view_bytes(t->dwpe)));
    if (!x->dry && t->vocabulary && iz_view_wanted(x, t->dw))
        check_tokens(t->row, dy.rows, t->dw.rows);
    if (x->backend == IZ_CPU) {
        bwd_on_cpu(x, dy, t);
    } else {
        int64_t rows = max64(t->dw.rows, t->begins.rows ? t->dwpe.rows : 0);
        int64_t bytes = iz_embedding_scratch_of(dy.rows, rows, dy.cols).total;
        struct iz_view scratch = iz_exec_work(x, IZ_U8, 1, bytes);
        if (!x->dry)
            iz_table_bwd_cuda(x, dy, t, scratch);
    }
    iz_exec_release(x, mark);
}
