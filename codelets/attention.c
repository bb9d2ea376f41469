/* SPDX-License-Identifier: Apache-2.0 */
/* Multi-head attention, a tile of query rows of one head at a time: the scores
 * of a tile against all keys it sees are the only scratch.  Where it is causal,
 * keys after the last row of the tile are never touched. */
#include "codelets/ops.h"

#include <assert.h>
#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "codelets/build.h"
#include "codelets/cuda.h"
#include "codelets/die.h"
#include "codelets/gemm.h"
#include "codelets/row.h"

/* Small, because BLAS libraries have kernels for small products that do not
 * copy their operands, and because half of the last square of a tile is wasted.
 */
#define TILE 32
/* Keys of one product, for the same reason. */
#define KEYS 240
/* Side of the squares that are transposed at once. */
#define BLOCK 16

/* One head of one sample: rows are `ld` (of qkv) or `ldo` (of o) apart. The
 * first head of a group that shares keys transposes them and writes their
 * gradients, the others add. */
struct head {
    const float *q, *k, *v, *o, *dy;
    float *dq, *dk, *dv;
    float *out, *lse; /* lse: [seq] */
    float *kt, *vt;   /* scratch [d,seq]: keys and values transposed */
    int64_t d, ld, ldo, seq;
    float scale;
    bool first;
    bool full; /* not causal */
};

/* One operand of a product, and whether it is transposed. */
struct side {
    const float *p;
    int64_t ld;
    bool t;
};

/* c[m,n] = alpha op(a) op(b) + beta c. */
static void product(float *c, int64_t ldc, float beta, float alpha,
                    const int64_t mnk[3], const struct side ab[2])
{
    iz_gemm_cpu(&(struct iz_gemm){.m = mnk[0],
                                  .n = mnk[1],
                                  .k = mnk[2],
                                  .a = ab[0].p,
                                  .lda = ab[0].ld,
                                  .ta = ab[0].t,
                                  .b = ab[1].p,
                                  .ldb = ab[1].ld,
                                  .tb = ab[1].t,
                                  .c = c,
                                  .ldc = ldc,
                                  .alpha = alpha,
                                  .beta = beta});
}

/* Keys per product when n of them are shared out evenly. */
static int64_t keys_of(int64_t n)
{
    int64_t parts = (n + KEYS - 1) / KEYS;

    return (n + parts - 1) / parts;
}

/* s[rows,n] = alpha a[rows,d] bt[d,n]: a query side against keys. */
static void against_keys(float *s, int64_t rows, int64_t n, float alpha,
                         struct side a, struct side bt, int64_t d)
{
    int64_t step = keys_of(n);

    for (int64_t j = 0; j < n; j += step) {
        int64_t m = n - j < step ? n - j : step;

        product(s + j, n, 0, alpha, (int64_t[]){rows, m, d},
                (struct side[]){a, {bt.p + j, bt.ld, false}});
    }
}

/* out[rows,d] = s[rows,n] b[n,d]: a sum over keys. */
static void over_keys(float *out, int64_t ldo, const float *s, int64_t rows,
                      int64_t n, struct side b, int64_t d)
{
    int64_t step = keys_of(n);

    for (int64_t j = 0; j < n; j += step) {
        int64_t k = n - j < step ? n - j : step;

        product(
            out, ldo, j ? 1 : 0, 1, (int64_t[]){rows, d, k},
            (struct side[]){{s + j, n, false}, {b.p + j * b.ld, b.ld, false}});
    }
}

/* out[n,d] = s[rows,n]^T b[rows,d] + beta out: what a tile gives to its keys.
 */
static void to_keys(float *out, int64_t ldo, float beta, const float *s,
                    int64_t rows, int64_t n, struct side b, int64_t d)
{
    int64_t step = keys_of(n);

    for (int64_t j = 0; j < n; j += step) {
        int64_t m = n - j < step ? n - j : step;

        product(out + j * ldo, ldo, beta, 1, (int64_t[]){m, d, rows},
                (struct side[]){{s + j, n, true}, b});
    }
}

/* to[d,n] = from[n,d] transposed. */
IZ_SIMD static void transpose(float *restrict to, const float *restrict from,
                              int64_t n, int64_t d, int64_t ld)
{
    for (int64_t i0 = 0; i0 < n; i0 += BLOCK) {
        int64_t m = n - i0 < BLOCK ? n - i0 : BLOCK;

        for (int64_t k = 0; k < d; k++)
            for (int64_t i = 0; i < m; i++)
                to[k * n + i0 + i] = from[(i0 + i) * ld + k];
    }
}

/* Keys that row i sees. */
static inline int64_t keys_seen(const struct head *h, int64_t i)
{
    return h->full ? h->seq : i + 1;
}

/* Turns scores into exponentials, zero for keys that a row does not see; inv =
 * 1 / sum. */
IZ_SIMD static void softmax(float *s, float *inv, const struct head *h,
                            int64_t i0, int64_t rows, int64_t n)
{
    for (int64_t r = 0; r < rows; r++) {
        float *row = s + r * n;
        int64_t live = keys_seen(h, i0 + r);
        float m = iz_row_max(row, live), sum = iz_row_exp(row, m, live);

        memset(row + live, 0, (size_t)(n - live) * sizeof *row);
        inv[r] = 1 / sum;
        h->lse[i0 + r] = m + logf(sum);
    }
}

IZ_SIMD static void scale_rows(float *o, int64_t ld, const float *by,
                               int64_t rows, int64_t d)
{
    for (int64_t r = 0; r < rows; r++)
        for (int64_t j = 0; j < d; j++)
            o[r * ld + j] *= by[r];
}

static void head_fwd(const struct head *h, float *s, float *inv)
{
    if (h->first)
        transpose(h->kt, h->k, h->seq, h->d, h->ld);
    for (int64_t i0 = 0; i0 < h->seq; i0 += TILE) {
        int64_t rows = h->seq - i0 < TILE ? h->seq - i0 : TILE;
        int64_t n = keys_seen(h, i0 + rows - 1);
        float *out = h->out + i0 * h->ldo;

        against_keys(s, rows, n, h->scale,
                     (struct side){h->q + i0 * h->ld, h->ld, false},
                     (struct side){h->kt, h->seq, false}, h->d);
        softmax(s, inv, h, i0, rows, n);
        over_keys(out, h->ldo, s, rows, n, (struct side){h->v, h->ld, false},
                  h->d);
        scale_rows(out, h->ldo, inv, rows, h->d);
    }
}

/* delta[r] = dy . o of a row: the part of the softmax gradient that its
 * normalisation takes away. */
IZ_SIMD static void deltas(float *delta, const struct head *h, int64_t i0,
                           int64_t rows)
{
    for (int64_t r = 0; r < rows; r++) {
        const float *o = h->o + (i0 + r) * h->ldo;
        const float *dy = h->dy + (i0 + r) * h->ldo;
        float sum = 0;

#pragma omp simd reduction(+ : sum)
        for (int64_t j = 0; j < h->d; j++)
            sum += o[j] * dy[j];
        delta[r] = sum;
    }
}

/* s: scores -> probabilities; dp: their gradient -> gradient of q . k. */
IZ_SIMD static void softmax_bwd(float *restrict s, float *restrict dp,
                                const float *delta, const struct head *h,
                                int64_t i0, int64_t rows)
{
    int64_t n = keys_seen(h, i0 + rows - 1);

    for (int64_t r = 0; r < rows; r++) {
        float *restrict p = s + r * n, *restrict g = dp + r * n;
        float lse = h->lse[i0 + r], d = delta[r], scale = h->scale;
        int64_t live = keys_seen(h, i0 + r);

        for (int64_t j = 0; j < live; j++) {
            float e = iz_expf(p[j] - lse);
            p[j] = e;
            g[j] = e * (g[j] - d) * scale;
        }
        memset(p + live, 0, (size_t)(n - live) * sizeof *p);
        memset(g + live, 0, (size_t)(n - live) * sizeof *g);
    }
}

/* From the last tile to the first: the last one reaches every key, so that of
 * the first head writes dk and dv and the others add. */
static void head_bwd(const struct head *h, float *s, float *dp, float *delta)
{
    int64_t d = h->d, ld = h->ld;

    if (h->first) {
        transpose(h->kt, h->k, h->seq, d, ld);
        transpose(h->vt, h->v, h->seq, d, ld);
    }
    for (int64_t i0 = (h->seq - 1) / TILE * TILE; i0 >= 0; i0 -= TILE) {
        int64_t rows = h->seq - i0 < TILE ? h->seq - i0 : TILE;
        int64_t n = keys_seen(h, i0 + rows - 1);
        float beta = h->first && i0 + rows == h->seq ? 0 : 1;
        struct side q = {h->q + i0 * ld, ld, false};
        struct side dy = {h->dy + i0 * h->ldo, h->ldo, false};

        against_keys(s, rows, n, h->scale, q,
                     (struct side){h->kt, h->seq, false}, d);
        against_keys(dp, rows, n, 1, dy, (struct side){h->vt, h->seq, false},
                     d);
        deltas(delta, h, i0, rows);
        softmax_bwd(s, dp, delta, h, i0, rows);
        over_keys(h->dq + i0 * ld, ld, dp, rows, n,
                  (struct side){h->k, ld, false}, d);
        to_keys(h->dk, ld, beta, dp, rows, n, q, d);
        to_keys(h->dv, ld, beta, s, rows, n, dy, d);
    }
}

/* Head i of all samples; dqkv and dy are NULL in forward. */
static struct head head_at(const struct iz_attention *a, int64_t i, float *dqkv,
                           const float *dy)
{
    int64_t c = a->o.cols, ld = a->qkv.cols, d = c / a->heads;
    int64_t row = i / a->heads * a->seq, head = i % a->heads;
    int64_t keys = iz_attention_keys(a), group = a->heads / keys;
    /* From the first column of a row to the keys of this head. */
    int64_t to_k = c + head / group * d, to_v = to_k + keys * d;
    const float *qkv = (float *)a->qkv.p + row * ld;
    float *o = (float *)a->o.p + row * c + head * d;
    struct head h = {.q = qkv + head * d,
                     .k = qkv + to_k,
                     .v = qkv + to_v,
                     .o = o,
                     .out = o,
                     .lse = (float *)a->lse.p + i * a->seq,
                     .d = d,
                     .ld = ld,
                     .ldo = c,
                     .seq = a->seq,
                     .scale = 1 / sqrtf((float)d),
                     .first = head % group == 0,
                     .full = a->full};

    if (dqkv) {
        h.dy = dy + row * c + head * d;
        h.dq = dqkv + row * ld + head * d;
        h.dk = dqkv + row * ld + to_k;
        h.dv = dqkv + row * ld + to_v;
    }
    return h;
}

/* Heads of all samples. */
static int64_t all_heads(const struct iz_attention *a)
{
    return a->o.rows / a->seq * a->heads;
}

/* Flops of one product of all heads, of the keys that are seen. */
static double flops(const struct iz_attention *a)
{
    int64_t twice = a->full ? 2 * a->seq : a->seq + 1;

    return (double)a->o.rows * (double)a->o.cols * (double)twice;
}

static void check(const struct iz_attention *a)
{
    int keys = iz_attention_keys(a);

    assert(a->o.rows % a->seq == 0 && a->o.cols % a->heads == 0);
    assert(a->heads % keys == 0 && a->qkv.rows == a->o.rows);
    assert(a->qkv.cols == a->o.cols / a->heads * (a->heads + 2 * keys));
    (void)keys;
    assert(iz_view_len(a->lse) == a->o.rows * a->heads);
    (void)a;
}

/* Scratch of one head on the CPU. */
struct scratch {
    struct iz_view s, dp, line, kt, vt;
};

static struct scratch cpu_scratch(struct iz_exec *x,
                                  const struct iz_attention *a, bool bwd)
{
    int64_t tile = a->seq < TILE ? a->seq : TILE, d = a->o.cols / a->heads;
    struct scratch w = {.s = iz_work(x, IZ_F32, tile, a->seq),
                        .line = iz_work(x, IZ_F32, 1, tile),
                        .kt = iz_work(x, IZ_F32, d, a->seq)};

    if (bwd) {
        w.dp = iz_work(x, IZ_F32, tile, a->seq);
        w.vt = iz_work(x, IZ_F32, d, a->seq);
    }
    return w;
}

static void cpu_fwd(struct iz_exec *x, const struct iz_attention *a)
{
    struct scratch w = cpu_scratch(x, a, false);

    for (int64_t i = 0; iz_runs(x, IZ_CPU) && i < all_heads(a); i++) {
        struct head h = head_at(a, i, NULL, NULL);

        h.kt = w.kt.p;
        head_fwd(&h, w.s.p, w.line.p);
    }
}

static void cpu_bwd(struct iz_exec *x, struct iz_view dqkv, struct iz_view dy,
                    const struct iz_attention *a)
{
    struct scratch w = cpu_scratch(x, a, true);

    for (int64_t i = 0; iz_runs(x, IZ_CPU) && i < all_heads(a); i++) {
        struct head h = head_at(a, i, dqkv.p, dy.p);

        h.kt = w.kt.p;
        h.vt = w.vt.p;
        head_bwd(&h, w.s.p, w.dp.p, w.line.p);
    }
}

/* The kernels' registers and 16-byte pieces set the limits. */
static void check_cuda(const struct iz_exec *x, const struct iz_attention *a)
{
    int64_t d = a->o.cols / a->heads;

    if (d > 256 || (x->act != IZ_F32 && d % 8))
        iz_die("attention in %s on a GPU: heads of %lld columns; possible are "
               "%s up to 256",
               iz_dtype_name(x->act), (long long)d,
               x->act == IZ_F32 ? "all" : "multiples of 8");
}

static void cuda_fwd(struct iz_exec *x, const struct iz_attention *a)
{
    check_cuda(x, a);
    if (iz_runs(x, IZ_CUDA))
        iz_cuda_ops->attention_fwd(x, a, IZ_NONE);
}

/* The scratch has the dy . o of every row of every head. */
static void cuda_bwd(struct iz_exec *x, struct iz_view dqkv, struct iz_view dy,
                     const struct iz_attention *a)
{
    struct iz_view delta = iz_work(x, IZ_F32, a->lse.rows, a->lse.cols);

    check_cuda(x, a);
    if (iz_runs(x, IZ_CUDA))
        iz_cuda_ops->attention_bwd(x, dqkv, dy, a, delta);
}

void iz_attention_fwd(struct iz_exec *x, const struct iz_attention *a)
{
    int64_t mark = iz_work_mark(x);

    check(a);
    iz_count_fused(x, 2 * flops(a),
                   (double)(iz_view_bytes(a->qkv) + iz_view_bytes(a->o)));
    if (x->backend == IZ_CPU)
        cpu_fwd(x, a);
    else
        cuda_fwd(x, a);
    iz_work_release(x, mark);
}

/* The scores are formed again, which is not counted: it is no work of the
 * model. */
void iz_attention_bwd(struct iz_exec *x, struct iz_view dqkv, struct iz_view dy,
                      const struct iz_attention *a)
{
    int64_t mark = iz_work_mark(x);

    check(a);
    iz_count_fused(x, 4 * flops(a),
                   (double)(iz_view_bytes(a->qkv) + iz_view_bytes(a->o) +
                            iz_view_bytes(dqkv) + iz_view_bytes(dy)));
    if (x->backend == IZ_CPU)
        cpu_bwd(x, dqkv, dy, a);
    else
        cuda_bwd(x, dqkv, dy, a);
    iz_work_release(x, mark);
}
