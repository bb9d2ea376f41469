/* SPDX-License-Identifier: Apache-2.0 */
/* Matrix products with weights on a GPU, through cuBLASLt, which this file
 * alone calls.  A product is one call; how the library does it is asked once
 * per shape, types and alignment, and kept: by its first algorithm, by its own
 * estimate, whose sums have a fixed order.
 *
 * The bias is added by the product (BIAS epilogue).  GELU is not, although the
 * library could: the backward needs the sum before GELU too, so the product
 * would write both, and a GELU of its own costs the same bytes once more but
 * lets the backward compute GELU again instead of keeping it. */
#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cublasLt.h>

#include "codelets/base/die.h"
#include "codelets/base/mix.h"
#include "codelets/base/take.h"
#include "codelets/kernels/cuda_lib.h"
#include "codelets/ops/gpu_ops.h"

#define PLANS 512
#define ALGOS 8 /* that the library is asked for */
#define ALIGN 256
#define WORKSPACE (IZ_PRODUCT_SCRATCH - ALIGN)

/* Reductions of a product whose k is split.  The same inputs have to give the
 * same bits.  By its documentation ("Results Reproducibility") the library
 * keeps that on one kind of GPU, as long as a stream has a workspace of its
 * own, as here.  Of the ways to split k we still allow only the one that does
 * not lean on this promise: by cublasLt.h all partial sums go in fp32 to the
 * workspace and a separate step adds them.  INPLACE adds to the output, in a
 * sequence of which the header does not say that it is always the same, and
 * like OUTPUT_TYPE it rounds every partial sum to the type of the output. */
#define REDUCTIONS                                                             \
    (CUBLASLT_REDUCTION_SCHEME_NONE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE)

/* All that the choice of an algorithm depends on; no padding. */
struct product_key {
    int64_t m, n, k, lda, ldb, ldd, ta, tb, in, out, biased, compute;
    int64_t align_a, align_b, align_c, align_d, align_bias;
};

struct product_plan {
    struct product_key key;
    bool taken, possible;
    cublasLtMatmulDescOpaque_t op;
    cublasLtMatrixLayoutOpaque_t a, b, d; /* c has the layout of d */
    cublasLtMatmulAlgo_t algo;
};

/* Open addressing; entries are never removed. */
struct iz_cublas {
    cublasLtHandle_t lt;
    struct product_plan plan[PLANS];
};

int iz_cublas_open(struct iz_cublas **out)
{
    struct iz_cublas *b = *out = iz_take(1, sizeof(*b), "products");
    cublasStatus_t s = cublasLtCreate(&b->lt);
    if (s == CUBLAS_STATUS_SUCCESS)
        return 0;
    fprintf(stderr, "izar: cublasLtCreate: %s\n", cublasLtGetStatusString(s));
    b->lt = NULL;
    iz_cublas_close(out);
    return -EIO;
}

void iz_cublas_close(struct iz_cublas **b)
{
    if (*b && (*b)->lt)
        cublasLtDestroy((*b)->lt);
    free(*b);
    *b = NULL;
}

static void matmul_cuda_check(cublasStatus_t s, const char *call,
                              const struct product_key *k)
{
    if (s != CUBLAS_STATUS_SUCCESS)
        iz_die("%s for [%lld,%lld] [%lld,%lld], %s to %s: %s", call,
               (long long)k->m, (long long)k->k, (long long)k->k,
               (long long)k->n, iz_dtype_name((enum iz_dtype)k->in),
               iz_dtype_name((enum iz_dtype)k->out),
               cublasLtGetStatusString(s));
}

static cudaDataType data_type(int64_t t)
{
    assert(t == IZ_F32 || t == IZ_BF16 || t == IZ_F16);
    return t == IZ_F32 ? CUDA_R_32F : t == IZ_BF16 ? CUDA_R_16BF : CUDA_R_16F;
}

/* Of an address in bytes, and no more than the arenas give to everything: else
 * the algorithm, and with it the bits, would depend on where scratch lies. */
static int64_t alignment(const void *p)
{
    uintptr_t u = (uintptr_t)p | 64;
    return (int64_t)(u & -u);
}

/* What is added to the product, or NULL. */
static const void *added_to(const struct iz_product *p)
{
    return p->add ? p->d.p : p->c.rows ? p->c.p : NULL;
}

/* The least power of two from n on: what a number of rows that varies is looked
 * up as. */
static int64_t rounded_rows(int64_t n)
{
    int64_t r = 16;
    while (r < n)
        r *= 2;
    return r;
}

static struct product_key key_of(const struct iz_exec *x,
                                 const struct iz_product *p)
{
    bool tf32 = x->numerics.tf32 && p->a.dtype == IZ_F32;
    const void *c = added_to(p);
    return (struct product_key){
        .m = p->d.rows,
        .n = iz_product_n(p),
        .k = iz_product_k(p),
        .lda = p->a.cols,
        .ldb = p->b.cols,
        .ldd = p->d.cols,
        .ta = p->ta,
        .tb = p->tb,
        .in = p->a.dtype,
        .out = p->d.dtype,
        .biased = p->bias.rows,
        .compute = tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F,
        .align_a = alignment(p->a.p),
        .align_b = alignment(p->b.p),
        .align_c = alignment(c ? c : p->d.p),
        .align_d = alignment(p->d.p),
        .align_bias = alignment(p->bias.rows ? p->bias.p : NULL)};
}

static uint64_t product_hash(const struct product_key *k)
{
    int64_t field[sizeof(*k) / sizeof(int64_t)];
    uint64_t h = 0;
    memcpy(field, k, sizeof(field));
    for (size_t i = 0; i < sizeof(field) / sizeof(field[0]); i++)
        h = iz_mix(h + IZ_GOLDEN + (uint64_t)field[i]);
    return h;
}

static void set(struct product_plan *q, cublasLtMatmulDescAttributes_t attr,
                const void *value, size_t size)
{
    matmul_cuda_check(cublasLtMatmulDescSetAttribute(&q->op, attr, value, size),
                      "cublasLtMatmulDescSetAttribute", &q->key);
}

static void set_operation(struct product_plan *q, int64_t transposed,
                          cublasLtMatmulDescAttributes_t attr)
{
    int32_t op = transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
    set(q, attr, &op, sizeof(op));
}

/* The search reads the alignment of the vector off its address, so it gets one
 * that is aligned as the key says and no better. */
static void set_bias(struct product_plan *q)
{
    const uint32_t epilogue = CUBLASLT_EPILOGUE_BIAS;
    const void *bias = (const void *)(uintptr_t)q->key.align_bias;
    int32_t type = data_type(q->key.out);
    if (!q->key.biased)
        return;
    set(q, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof(epilogue));
    set(q, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &type, sizeof(type));
    set(q, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias, sizeof(bias));
}

/* A row-major matrix with rows of `cols` elements: to the library, which counts
 * by columns, the same memory is the transposed matrix. */
static void set_layout(struct product_plan *q, cublasLtMatrixLayoutOpaque_t *m,
                       int64_t type, int64_t rows, int64_t cols, int64_t ld)
{
    assert(ld >= cols);
    matmul_cuda_check(cublasLtMatrixLayoutInit(m, data_type(type),
                                               (uint64_t)cols, (uint64_t)rows,
                                               ld),
                      "cublasLtMatrixLayoutInit", &q->key);
}

/* d = op(a) op(b) by rows is d' = op(b)' op(a)' by columns, so the operands
 * change places and nothing is copied. */
static void set_layouts(struct product_plan *q)
{
    const struct product_key *k = &q->key;
    set_layout(q, &q->a, k->in, k->ta ? k->k : k->m, k->ta ? k->m : k->k,
               k->lda);
    set_layout(q, &q->b, k->in, k->tb ? k->n : k->k, k->tb ? k->k : k->n,
               k->ldb);
    set_layout(q, &q->d, k->out, k->m, k->n, k->ldd);
}

static void matmul_cuda_describe(struct product_plan *q)
{
    const struct product_key *k = &q->key;
    matmul_cuda_check(cublasLtMatmulDescInit(
                          &q->op, (cublasComputeType_t)k->compute, CUDA_R_32F),
                      "cublasLtMatmulDescInit", k);
    set_operation(q, k->tb, CUBLASLT_MATMUL_DESC_TRANSA);
    set_operation(q, k->ta, CUBLASLT_MATMUL_DESC_TRANSB);
    set_bias(q);
    set_layouts(q);
}

static void prefer(cublasLtMatmulPreferenceOpaque_t *pref,
                   const struct product_key *k,
                   cublasLtMatmulPreferenceAttributes_t attr, uint32_t value)
{
    matmul_cuda_check(
        cublasLtMatmulPreferenceSetAttribute(pref, attr, &value, sizeof(value)),
        "cublasLtMatmulPreferenceSetAttribute", k);
}

static void describe_wish(cublasLtMatmulPreferenceOpaque_t *pref,
                          const struct product_key *k)
{
    uint64_t bytes = WORKSPACE;
    matmul_cuda_check(cublasLtMatmulPreferenceInit(pref),
                      "cublasLtMatmulPreferenceInit", k);
    matmul_cuda_check(cublasLtMatmulPreferenceSetAttribute(
                          pref, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                          &bytes, sizeof(bytes)),
                      "cublasLtMatmulPreferenceSetAttribute", k);
    prefer(pref, k, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, REDUCTIONS);
    prefer(pref, k, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
           (uint32_t)k->align_b);
    prefer(pref, k, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
           (uint32_t)k->align_a);
    prefer(pref, k, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
           (uint32_t)k->align_c);
    prefer(pref, k, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
           (uint32_t)k->align_d);
}

/* What the library may refuse for whatever reason: the job has another way. */
static bool is_optional(const struct product_key *k)
{
    return k->biased;
}

/* Whether an algorithm adds in the same order every time. */
static bool is_in_order(const cublasLtMatmulAlgo_t *a)
{
    uint32_t scheme = 0;
    return !cublasLtMatmulAlgoConfigGetAttribute(
               a, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, &scheme,
               sizeof(scheme), NULL) &&
           !(scheme & ~(uint32_t)REDUCTIONS);
}

/* Takes the library's best algorithm, by its estimate, that may be used.  None
 * leaves the plan impossible; without another way it ends the job. */
static void take_first(struct iz_cublas *b, struct product_plan *q)
{
    cublasLtMatmulPreferenceOpaque_t pref;
    cublasLtMatmulHeuristicResult_t found[ALGOS];
    int n = 0;
    set_bias(q); /* an address may have come in between */
    describe_wish(&pref, &q->key);
    cublasStatus_t s = cublasLtMatmulAlgoGetHeuristic(
        b->lt, &q->op, &q->b, &q->a, &q->d, &q->d, &pref, ALGOS, found, &n);
    q->possible = false;
    for (int i = 0; s == CUBLAS_STATUS_SUCCESS && i < n && !q->possible; i++) {
        q->possible = found[i].state == CUBLAS_STATUS_SUCCESS &&
                      is_in_order(&found[i].algo);
        q->algo = found[i].algo;
    }
    if (!q->possible && !is_optional(&q->key))
        matmul_cuda_check(
            s != CUBLAS_STATUS_SUCCESS ? s : CUBLAS_STATUS_NOT_SUPPORTED,
            "cublasLtMatmulAlgoGetHeuristic", &q->key);
}

static struct product_plan *plan_of(struct iz_cublas *b,
                                    const struct product_key *k)
{
    uint64_t h = product_hash(k);
    for (uint64_t i = 0; i < PLANS; i++) {
        struct product_plan *q = &b->plan[(h + i) % PLANS];
        if (q->taken && memcmp(&q->key, k, sizeof(*k)) == 0)
            return q;
        if (q->taken)
            continue;
        q->key = *k;
        q->taken = true;
        matmul_cuda_describe(q);
        take_first(b, q);
        return q;
    }
    iz_die("more than %d kinds of matrix products", PLANS);
}

/* p, of the kind that q is for, by the algorithm of q. */
static cublasStatus_t enqueue_by(struct iz_exec *x, struct product_plan *q,
                                 const struct iz_product *p,
                                 struct iz_view scratch)
{
    const void *c = added_to(p);
    float alpha = p->scale != 0 ? p->scale : 1;
    float beta = !c ? 0 : p->keep != 0 ? p->keep : 1;
    uintptr_t space = ((uintptr_t)scratch.p + ALIGN - 1) / ALIGN * ALIGN;
    assert(p->a.dtype == p->b.dtype &&
           (!p->c.rows || p->c.dtype == p->d.dtype));
    assert(!p->bias.rows || p->bias.dtype == p->d.dtype);
    assert(iz_view_bytes(scratch) >= IZ_PRODUCT_SCRATCH);
    if (p->bias.rows)
        set(q, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &p->bias.p,
            sizeof(p->bias.p));
    return cublasLtMatmul(x->cuda->blas->lt, &q->op, &alpha, p->b.p, &q->b,
                          p->a.p, &q->a, &beta, c ? c : p->d.p, &q->d, p->d.p,
                          &q->d, &q->algo, (void *)space, WORKSPACE,
                          (cudaStream_t)x->stream);
}

/* One whose rows are others in each call has the algorithm of the rounded
 * number, if the library says that it can do this one, else one of its own: no
 * table could hold all numbers, and each search would take longer than a small
 * product.  Either way the numbers alone decide. */
static bool enqueue_varying(struct iz_exec *x, const struct iz_product *p,
                            struct iz_view scratch)
{
    struct product_key k = key_of(x, p), wide = k;
    struct iz_cublas *b = x->cuda->blas;
    cublasLtMatmulHeuristicResult_t found;
    int64_t *rows = p->ta ? &wide.k : &wide.m;
    *rows = rounded_rows(*rows);
    struct product_plan q = *plan_of(b, &wide);
    if (!q.possible)
        return false;
    q.key = k;
    set_layouts(&q);
    if (cublasLtMatmulAlgoCheck(b->lt, &q.op, &q.b, &q.a, &q.d, &q.d, &q.algo,
                                &found) != CUBLAS_STATUS_SUCCESS ||
        found.workspaceSize > WORKSPACE)
        take_first(b, &q);
    if (!q.possible)
        return false;
    matmul_cuda_check(enqueue_by(x, &q, p, scratch), "cublasLtMatmul", &k);
    return true;
}

static bool enqueue(struct iz_exec *x, const struct iz_product *p,
                    struct iz_view scratch)
{
    if (x->rows_vary)
        return enqueue_varying(x, p, scratch);
    struct product_key k = key_of(x, p);
    struct product_plan *q = plan_of(x->cuda->blas, &k);
    if (!q->possible)
        return false;
    matmul_cuda_check(enqueue_by(x, q, p, scratch), "cublasLtMatmul", &k);
    return true;
}

/* Fills the operands of q that are copies of those of p. */
static void copy_operands(struct iz_exec *x, const struct iz_product *q,
                          const struct iz_product *p)
{
    int64_t m = p->d.rows, n = iz_product_n(p), k = iz_product_k(p);
    struct iz_view c = p->add ? p->d : p->c;
    if (q->a.p != p->a.p)
        iz_matmul_corner_cuda(x, q->a, p->a, p->ta ? k : m, p->ta ? m : k,
                              true);
    if (q->b.p != p->b.p)
        iz_matmul_corner_cuda(x, q->b, p->b, p->b.rows, p->b.cols, true);
    if (q->bias.p != p->bias.p)
        iz_matmul_corner_cuda(x, q->bias, p->bias, 1, n, true);
    if (q->d.p != p->d.p && c.rows)
        iz_matmul_corner_cuda(x, q->d, c, m, n, true);
}

bool iz_product_cuda(struct iz_exec *x, const struct iz_product *p,
                     struct iz_view scratch)
{
    struct iz_padded q = iz_product_pad(p, scratch.p);
    assert(iz_view_bytes(scratch) >= q.bytes);
    copy_operands(x, &q.p, p);
    if (!enqueue(x, &q.p, scratch))
        return false;
    if (q.p.d.p != p->d.p)
        iz_matmul_corner_cuda(x, p->d, q.p.d, p->d.rows, iz_product_n(p),
                              false);
    return true;
}

/* The bias with the product where the library can and it has y's type (that of
 * a router has not), else before it by a kernel of ours, to which the product
 * is added. */
void iz_matmul_fwd_cuda(struct iz_exec *x, struct iz_view y, struct iz_view r,
                        struct iz_view a, const struct iz_linear *l,
                        struct iz_view scratch)
{
    struct iz_product p = iz_product_fwd(y, r, a, l);
    bool other = l->b.rows && l->b.dtype != y.dtype;
    if (!other && iz_product_cuda(x, &p, scratch))
        return;
    iz_matmul_bias_rows_cuda(x, y, r, l->b);
    p.c = p.d;
    p.bias = IZ_NONE;
    iz_product_cuda(x, &p, scratch);
}

/* db by a kernel of ours, which reads dy once more: the library could sum while
 * it forms dw, but is no faster then (docs/gpu.md). */
void iz_matmul_dw_cuda(struct iz_exec *x, struct iz_view dy, struct iz_view a,
                       const struct iz_linear *l, struct iz_view scratch)
{
    struct iz_product p = iz_product_dw(dy, a, l);
    if (iz_view_wanted(x, l->dw))
        iz_product_cuda(x, &p, scratch);
    if (iz_view_wanted(x, l->db))
        iz_matmul_column_sum_cuda(x, l->db, dy, scratch);
}
