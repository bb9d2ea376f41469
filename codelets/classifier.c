/* SPDX-License-Identifier: Apache-2.0 */
/* The output layer with its cross-entropy, fused over chunks of rows: logits,
 * loss, gradient of the logits in place, then both products of the backward. */
#include "codelets/ops.h"

#include <assert.h>
#include <math.h>
#include <string.h>

#include "codelets/build.h"
#include "codelets/die.h"
#include "codelets/row.h"

/* Of logits at a time: the more rows, the fewer passes over dw. */
#define CHUNK_BYTES (64 << 20)

/* Rows of a chunk, chunks being as equal as possible. */
static int64_t chunk_rows(int64_t rows, int64_t vocab)
{
    int64_t most = CHUNK_BYTES / (vocab * iz_dtype_bytes(IZ_F32)), chunks;

    most = most < 1 ? 1 : most;
    chunks = (rows + most - 1) / most;
    return (rows + chunks - 1) / chunks;
}

/* The number of targets that are not ignored. */
static int64_t check_targets(const int32_t *target, int64_t n, int64_t vocab)
{
    int64_t count = 0;

    for (int64_t i = 0; i < n; i++) {
        if (target[i] < -1 || target[i] >= vocab)
            iz_die("target %d at position %lld is outside the vocabulary "
                   "0..%lld and not -1",
                   target[i], (long long)i, (long long)vocab - 1);
        count += target[i] >= 0;
    }
    return count;
}

/* One row of logits becomes scale times the gradient of its loss, which is
 * returned. */
static inline double row_bwd(float *s, int64_t n, int32_t target, float scale)
{
    float at = s[target], m = iz_row_max(s, n), sum = iz_row_exp(s, m, n);
    float by = scale / sum;

    for (int64_t j = 0; j < n; j++)
        s[j] *= by;
    s[target] -= scale;
    return log((double)sum) + ((double)m - (double)at);
}

/* Returns the sum of the losses of the rows. */
IZ_SIMD static double rows_bwd(struct iz_view logits, const int32_t *target,
                               float scale)
{
    double sum = 0;

    for (int64_t i = 0; i < logits.rows; i++) {
        float *s = (float *)logits.p + i * logits.cols;

        if (target[i] < 0)
            memset(s, 0, (size_t)logits.cols * sizeof *s);
        else
            sum += row_bwd(s, logits.cols, target[i], scale);
    }
    return sum;
}

IZ_SIMD static double rows_fwd(struct iz_view logits, const int32_t *target)
{
    double sum = 0;

    for (int64_t i = 0; i < logits.rows; i++) {
        float *s = (float *)logits.p + i * logits.cols, m, at;

        if (target[i] < 0)
            continue;
        at = s[target[i]];
        m = iz_row_max(s, logits.cols);
        sum += log((double)iz_row_exp(s, m, logits.cols)) +
               ((double)m - (double)at);
    }
    return sum;
}

static void check(const struct iz_classifier *c)
{
    assert(c->a.cols == c->w.cols && c->a.rows > 0);
    assert(c->a.rows <= INT32_MAX);
    (void)c;
}

void iz_classifier_fwd(struct iz_exec *x, const struct iz_classifier *c)
{
    int64_t mark = iz_work_mark(x), rows = chunk_rows(c->a.rows, c->w.rows);
    struct iz_view logits = iz_work(x, IZ_F32, rows, c->w.rows);
    struct iz_linear l = {.w = c->w, .out_in = true};
    int64_t count = 0;
    double sum = 0;

    check(c);
    if (x->backend == IZ_CPU)
        count = check_targets(c->target, c->a.rows, c->w.rows);
    for (int64_t at = 0; at < c->a.rows; at += rows) {
        int64_t n = c->a.rows - at < rows ? c->a.rows - at : rows;
        struct iz_view chunk = iz_view_rows(logits, 0, n);

        iz_matmul_fwd(x, chunk, IZ_NONE, iz_view_rows(c->a, at, n), &l);
        if (x->backend == IZ_CPU)
            sum += rows_fwd(chunk, c->target + at);
    }
    if (x->backend == IZ_CPU)
        *c->loss = count ? sum / (double)count : 0;
    iz_work_release(x, mark);
}

/* Where dw is summed over the chunks: in place, or in scratch when it has to be
 * rounded once at the end. */
static struct iz_view sum_take(struct iz_exec *x, struct iz_view dw)
{
    if (dw.dtype == IZ_F32 || !iz_wanted(x, dw))
        return dw;
    return iz_work(x, IZ_F32, dw.rows, dw.cols);
}

void iz_classifier_bwd(struct iz_exec *x, const struct iz_classifier *c)
{
    int64_t mark = iz_work_mark(x), rows = chunk_rows(c->a.rows, c->w.rows);
    struct iz_view logits = iz_work(x, IZ_F32, rows, c->w.rows);
    struct iz_linear l = {.w = c->w, .out_in = true, .dw = sum_take(x, c->dw)};
    int64_t count = 0;
    double sum = 0;

    check(c);
    if (x->backend == IZ_CPU)
        count = check_targets(c->target, c->a.rows, c->w.rows);
    for (int64_t at = 0; at < c->a.rows; at += rows) {
        int64_t n = c->a.rows - at < rows ? c->a.rows - at : rows;
        struct iz_view chunk = iz_view_rows(logits, 0, n);
        struct iz_view a = iz_view_rows(c->a, at, n);

        iz_matmul_fwd(x, chunk, IZ_NONE, a, &l);
        if (x->backend == IZ_CPU)
            sum += rows_bwd(chunk, c->target + at,
                            count ? c->loss_scale / (float)count : 0);
        l.add = at > 0;
        iz_matmul_dw(x, chunk, a, &l); /* reads a, which da may replace */
        iz_matmul_da(x, iz_view_rows(c->da, at, n), chunk, &l);
    }
    if (x->backend == IZ_CPU)
        *c->loss = count ? sum / (double)count : 0;
    if (x->backend == IZ_CPU && l.dw.p != c->dw.p)
        iz_cast(c->dw.p, c->dw.dtype, l.dw.p, IZ_F32, iz_view_len(c->dw));
    iz_work_release(x, mark);
}
