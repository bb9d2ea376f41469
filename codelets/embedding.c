/* SPDX-License-Identifier: Apache-2.0 */
/* Token and position embedding.  Backward visits the rows of the table in order
 * and adds the positions of each token in ascending order: the result does not
 * depend on who runs it. */
#include "codelets/ops.h"

#include <assert.h>
#include <string.h>

#include "codelets/build.h"
#include "codelets/cuda.h"
#include "codelets/die.h"
#include "codelets/embedding.h"

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

static void fwd_cpu(struct iz_view y, const int32_t *token, struct iz_view wte,
                    struct iz_view wpe, float *row)
{
    int64_t c = y.cols;

    for (int64_t t = 0; t < y.rows; t++) {
        float *to = (float *)y.p + t * c;

        iz_cast(to, IZ_F32, row_at(wte, token[t]), wte.dtype, c);
        if (wpe.rows) {
            iz_cast(row, IZ_F32, row_at(wpe, t % wpe.rows), wpe.dtype, c);
            add_row(to, row, c);
        }
    }
}

static void run_fwd_cpu(struct iz_exec *x, struct iz_view y,
                        const int32_t *token, struct iz_view wte,
                        struct iz_view wpe)
{
    int64_t mark = iz_work_mark(x);
    struct iz_view row = iz_work(x, IZ_F32, 1, y.cols);

    if (iz_runs(x, IZ_CPU))
        fwd_cpu(y, token, wte, wpe, row.p);
    iz_work_release(x, mark);
}

void iz_embedding_fwd(struct iz_exec *x, struct iz_view y, const int32_t *token,
                      struct iz_view wte, struct iz_view wpe)
{
    assert(wte.cols == y.cols);
    iz_count(x, 0, (double)(2 * iz_view_bytes(y) + iz_view_bytes(wpe)));
    if (!x->dry)
        check_tokens(token, y.rows, wte.rows);
    if (x->backend == IZ_CPU)
        run_fwd_cpu(x, y, token, wte, wpe);
    if (iz_runs(x, IZ_CUDA))
        iz_cuda_ops->embedding_fwd(x, y, token, wte, wpe);
}

/* first[v] = the first position of token v or -1, next[t] = the following one.
 */
static void link_positions(int32_t *first, int32_t *next, const int32_t *token,
                           int64_t n, int64_t vocab)
{
    for (int64_t v = 0; v < vocab; v++)
        first[v] = -1;
    for (int64_t t = n - 1; t >= 0; t--) {
        next[t] = first[token[t]];
        first[token[t]] = (int32_t)t;
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
        memset(row, 0, (size_t)c * sizeof *row);
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

        memset(row, 0, (size_t)c * sizeof *row);
        for (int64_t t = p; t < dy.rows; t += dwpe.rows)
            add_row(row, (float *)dy.p + t * c, c);
        iz_cast(to.p, to.dtype, row, IZ_F32, c);
    }
}

static void run_bwd_cpu(struct iz_exec *x, struct iz_view dwte,
                        struct iz_view dwpe, struct iz_view dy,
                        const int32_t *token)
{
    int64_t mark = iz_work_mark(x);
    struct iz_view row = iz_work(x, IZ_F32, 1, dy.cols);
    struct iz_view first = iz_work(x, IZ_I32, 1, dwte.rows);
    struct iz_view next = iz_work(x, IZ_I32, 1, dy.rows);

    if (iz_runs(x, IZ_CPU) && iz_wanted(x, dwte)) {
        link_positions(first.p, next.p, token, dy.rows, dwte.rows);
        bwd_token(dwte, dy, first.p, next.p, row.p);
    }
    if (iz_runs(x, IZ_CPU) && iz_wanted(x, dwpe))
        bwd_position(dwpe, dy, row.p);
    iz_work_release(x, mark);
}

static void run_bwd_cuda(struct iz_exec *x, struct iz_view dwte,
                         struct iz_view dwpe, struct iz_view dy,
                         const int32_t *token)
{
    int64_t mark = iz_work_mark(x);
    int64_t bytes = iz_embedding_scratch_of(dy.rows, dwte.rows, dy.cols).total;
    struct iz_view scratch = iz_work(x, IZ_U8, 1, bytes);

    if (iz_runs(x, IZ_CUDA))
        iz_cuda_ops->embedding_bwd(x, dwte, dwpe, dy, token, scratch);
    iz_work_release(x, mark);
}

void iz_embedding_bwd(struct iz_exec *x, struct iz_view dwte,
                      struct iz_view dwpe, struct iz_view dy,
                      const int32_t *token)
{
    assert(dwte.cols == dy.cols && dy.rows <= INT32_MAX);
    iz_count(x, 0,
             (double)(2 * iz_view_bytes(dy) + iz_view_bytes(dwte) +
                      iz_view_bytes(dwpe)));
    if (!x->dry)
        check_tokens(token, dy.rows, dwte.rows);
    if (x->backend == IZ_CPU)
        run_bwd_cpu(x, dwte, dwpe, dy, token);
    else
        run_bwd_cuda(x, dwte, dwpe, dy, token);
}
