/* SPDX-License-Identifier: Apache-2.0 */
/* Token and position embedding, and tables of rows.  Backward visits the rows
 * of the table in order and adds the positions of each token in ascending
 * order: the result does not depend on who runs it. */
#include "codelets/ops/ops.h"

#include <assert.h>
#include <string.h>

#include "codelets/base/build.h"
#include "codelets/base/die.h"
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
    at = iz_rows_find(v.row, v.rows, r);
    return at < v.rows && v.row[at] == r ? at : -1;
}

/* y[t] = the row of position t, or where the table has none that of r or zeros;
 * plus that of wpe, which goes through `row`. */
static void lookup_cpu(struct iz_view y, struct iz_view r,
                       const struct iz_table *a, struct iz_view wpe, float *row)
{
    int64_t c = y.cols;
    for (int64_t t = 0; t < y.rows; t++) {
        float *to = (float *)y.p + t * c;
        int64_t v = row_in(a->w, a, a->row[t]);
        if (v >= 0)
            iz_cast(to, IZ_F32, row_at(a->w, v), a->w.dtype, c);
        else if (!r.rows)
            memset(to, 0, (size_t)c * sizeof(*to));
        else if (r.p != y.p)
            memcpy(to, row_at(r, t), (size_t)c * sizeof(*to));
        if (wpe.rows) {
            iz_cast(row, IZ_F32, row_at(wpe, t % wpe.rows), wpe.dtype, c);
            add_row(to, row, c);
        }
    }
}

void iz_embedding_fwd(struct iz_exec *x, struct iz_view y, const int32_t *token,
                      struct iz_view wte, struct iz_view wpe)
{
    assert(wte.cols == y.cols);
    iz_count(x, 0, (double)(2 * iz_view_bytes(y) + iz_view_bytes(wpe)));
    if (!x->dry)
        check_tokens(token, y.rows, wte.rows);
    if (x->backend == IZ_CPU) {
        int64_t mark = iz_work_mark(x);
        struct iz_view row = iz_work(x, IZ_F32, 1, y.cols);
        if (!x->dry)
            lookup_cpu(y, IZ_NONE, &(struct iz_table){.w = wte, .row = token},
                       wpe, row.p);
        iz_work_release(x, mark);
    } else if (!x->dry) {
        iz_embedding_fwd_cuda(x, y, token, wte, wpe);
    }
}

/* first[v] = the first position of row v or -1, next[t] = the following one. */
static void link_positions(int32_t *first, int32_t *next,
                           const struct iz_table *a, int64_t n)
{
    for (int64_t v = 0; v < a->dw.rows; v++)
        first[v] = -1;
    for (int64_t t = n - 1; t >= 0; t--) {
        int64_t v = row_in(a->dw, a, a->row[t]);
        if (v >= 0) {
            next[t] = first[v];
            first[v] = (int32_t)t;
        }
    }
}

static void bwd_token(struct iz_view dwte, struct iz_view dy,
                      const int32_t *first, const int32_t *next, float *row)
{
    int64_t c = dy.cols;
    for (int64_t v = 0; v < dwte.rows; v++) {
        struct iz_view to = iz_view_rows(dwte, v, 1);
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

static void bwd_position(struct iz_view dwpe, struct iz_view dy, float *row)
{
    int64_t c = dy.cols;
    for (int64_t p = 0; p < dwpe.rows; p++) {
        struct iz_view to = iz_view_rows(dwpe, p, 1);
        memset(row, 0, (size_t)c * sizeof(*row));
        for (int64_t t = p; t < dy.rows; t += dwpe.rows)
            add_row(row, (float *)dy.p + t * c, c);
        iz_cast(to.p, to.dtype, row, IZ_F32, c);
    }
}

static void run_table_bwd(struct iz_exec *x, struct iz_view dy,
                          const struct iz_table *t)
{
    int64_t mark = iz_work_mark(x);
    struct iz_view row = iz_work(x, IZ_F32, 1, dy.cols);
    struct iz_view first = iz_work(x, IZ_I32, 1, t->dw.rows);
    struct iz_view next = iz_work(x, IZ_I32, 1, dy.rows);
    if (iz_runs(x, IZ_CPU) && iz_wanted(x, t->dw)) {
        link_positions(first.p, next.p, t, dy.rows);
        bwd_token(t->dw, dy, first.p, next.p, row.p);
    }
    iz_work_release(x, mark);
}

static struct iz_view embedding_cuda_scratch(struct iz_exec *x,
                                             struct iz_view dy, int64_t rows)
{
    return iz_work(x, IZ_U8, 1,
                   iz_embedding_scratch_of(dy.rows, rows, dy.cols).total);
}

void iz_embedding_bwd(struct iz_exec *x, struct iz_view dwte,
                      struct iz_view dwpe, struct iz_view dy,
                      const int32_t *token)
{
    int64_t mark = iz_work_mark(x);
    assert(dwte.cols == dy.cols && dy.rows <= INT32_MAX);
    iz_count(x, 0,
             (double)(2 * iz_view_bytes(dy) + iz_view_bytes(dwte) +
                      iz_view_bytes(dwpe)));
    if (!x->dry && iz_wanted(x, dwte))
        check_tokens(token, dy.rows, dwte.rows);
    if (x->backend == IZ_CPU) {
        run_table_bwd(x, dy,
                      &(struct iz_table){.w = dwte, .dw = dwte, .row = token});

        struct iz_view row = iz_work(x, IZ_F32, 1, dy.cols);
        if (!x->dry && iz_wanted(x, dwpe))
            bwd_position(dwpe, dy, row.p);
    } else {
        struct iz_view scratch = embedding_cuda_scratch(x, dy, dwte.rows);
        if (!x->dry)
            iz_embedding_bwd_cuda(x, dwte, dwpe, dy, token, scratch);
    }
    iz_work_release(x, mark);
}

/* ---- tables ---- */

void iz_table_fwd(struct iz_exec *x, struct iz_view y, struct iz_view r,
                  const struct iz_table *t)
{
    assert(t->w.cols == y.cols && (!r.rows || r.rows == y.rows));
    assert(x->backend == IZ_CPU || !t->w.row);
    iz_count(x, 0, (double)(2 * iz_view_bytes(y)));
    if (iz_runs(x, IZ_CPU))
        lookup_cpu(y, r, t, IZ_NONE, NULL);
    if (iz_runs(x, IZ_CUDA))
        iz_table_fwd_cuda(x, y, r, t);
}

void iz_table_bwd(struct iz_exec *x, struct iz_view dy,
                  const struct iz_table *t)
{
    int64_t mark = iz_work_mark(x);
    if (!t->dw.rows) /* the table is frozen */
        return;
    assert(t->dw.cols == dy.cols && dy.rows <= INT32_MAX);
    assert(x->backend == IZ_CPU || !t->dw.row);
    iz_count(x, 0, (double)(iz_view_bytes(dy) + iz_view_bytes(t->dw)));
    if (x->backend == IZ_CPU) {
        run_table_bwd(x, dy, t);
    } else {
        struct iz_view scratch = embedding_cuda_scratch(x, dy, t->dw.rows);
        if (iz_runs(x, IZ_CUDA))
            iz_table_bwd_cuda(x, dy, t, scratch);
    }
    iz_work_release(x, mark);
}
