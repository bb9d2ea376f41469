/* SPDX-License-Identifier: Apache-2.0 */
/* The few functions of cuBLASLt that the program calls; see the header.  The
 * descriptors live in the library's opaque structs.  An algorithm remembers the
 * problem that it was found for, and refuses any other, but for one with fewer
 * columns of D or shorter sums of which it was asked just before.  Before the
 * one that it has it offers one that is not supported, and one whose sums have
 * no fixed order, which it refuses to run.  It has none for matrices of 16 bits
 * whose neighbours in memory do not come in eights. */
#include "tests/fake/cublaslt.h"

#include <assert.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include "codelets/base/mix.h"
#include "codelets/base/take.h"
#include "codelets/flat/dtype.h"
#include "tests/fake/cuda_on_cpu/launch.h"

enum { SPOILED = 64 << 10 };

struct fake_cublaslt fake_cublaslt;

struct op {
    int32_t compute, scale, trans_a, trans_b, bias_type;
    uint32_t epilogue;
    void *bias;
};

struct layout {
    int64_t type, rows, cols, ld;
};

struct wish {
    uint64_t workspace;
    uint32_t reductions, align[4]; /* of A, B, C, D */
};

struct algo {
    uint64_t problem, kind, workspace;
    int32_t cols, k;     /* of D; of a sum */
    uint32_t align[5];   /* of A, B, C, D and the bias */
    uint32_t reductions; /* its scheme */
};

static_assert(sizeof(struct algo) <= sizeof(cublasLtMatmulAlgo_t), "opaque");

static struct op *op_of(cublasLtMatmulDesc_t d)
{
    return (struct op *)d->data;
}

static struct layout *layout_of(cublasLtMatrixLayout_t m)
{
    return (struct layout *)m->data;
}

cublasStatus_t cublasLtCreate(cublasLtHandle_t *h)
{
    *h = iz_take(1, 1, "a handle");
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtDestroy(cublasLtHandle_t h)
{
    free(h);
    return CUBLAS_STATUS_SUCCESS;
}

const char *cublasLtGetStatusString(cublasStatus_t s)
{
    return s == CUBLAS_STATUS_NOT_SUPPORTED ? "not supported" : "an error";
}

cublasStatus_t cublasLtMatmulDescInit_internal(cublasLtMatmulDesc_t d,
                                               size_t size,
                                               cublasComputeType_t compute,
                                               cudaDataType_t scale)
{
    if (size < sizeof(*d) || sizeof(struct op) > sizeof(*d))
        return CUBLAS_STATUS_ALLOC_FAILED;
    memset(d, 0, size);
    *op_of(d) = (struct op){.compute = (int32_t)compute,
                            .scale = (int32_t)scale,
                            .bias_type = -1,
                            .epilogue = CUBLASLT_EPILOGUE_DEFAULT};
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t
cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t d,
                               cublasLtMatmulDescAttributes_t attr,
                               const void *value, size_t size)
{
    struct op *o = op_of(d);
    void *to = attr == CUBLASLT_MATMUL_DESC_TRANSA           ? &o->trans_a
               : attr == CUBLASLT_MATMUL_DESC_TRANSB         ? &o->trans_b
               : attr == CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE ? &o->bias_type
               : attr == CUBLASLT_MATMUL_DESC_EPILOGUE ? (void *)&o->epilogue
               : attr == CUBLASLT_MATMUL_DESC_BIAS_POINTER ? (void *)&o->bias
                                                           : NULL;
    size_t want = attr == CUBLASLT_MATMUL_DESC_BIAS_POINTER ? 8 : 4;
    if (!to || size != want)
        return CUBLAS_STATUS_INVALID_VALUE;
    memcpy(to, value, size);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutInit_internal(cublasLtMatrixLayout_t m,
                                                 size_t size, cudaDataType type,
                                                 uint64_t rows, uint64_t cols,
                                                 int64_t ld)
{
    if (size < sizeof(*m) || rows == 0 || cols == 0 || ld < (int64_t)rows)
        return CUBLAS_STATUS_INVALID_VALUE;
    memset(m, 0, size);
    *layout_of(m) =
        (struct layout){(int64_t)type, (int64_t)rows, (int64_t)cols, ld};
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t
cublasLtMatmulPreferenceInit_internal(cublasLtMatmulPreference_t p, size_t size)
{
    struct wish w = {.reductions = CUBLASLT_REDUCTION_SCHEME_MASK,
                     .align = {256, 256, 256, 256}};
    memset(p, 0, size);
    memcpy(p, &w, sizeof(w));
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t
cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t p,
                                     cublasLtMatmulPreferenceAttributes_t attr,
                                     const void *value, size_t size)
{
    struct wish *w = (struct wish *)p->data;
    void *to = NULL;
    if (attr >= CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES &&
        attr <= CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES)
        to = &w->align[attr - CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES];
    if (attr == CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK)
        to = &w->reductions;
    if (attr == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES)
        to = &w->workspace;
    if (!to || size != (to == &w->workspace ? 8u : 4u))
        return CUBLAS_STATUS_INVALID_VALUE;
    memcpy(to, value, size);
    return CUBLAS_STATUS_SUCCESS;
}

/* Everything but addresses; C has the layout of D. */
struct problem {
    struct op o;
    struct layout a, b, d;
};

static struct problem problem_of(cublasLtMatmulDesc_t d,
                                 cublasLtMatrixLayout_t a,
                                 cublasLtMatrixLayout_t b,
                                 cublasLtMatrixLayout_t out)
{
    struct problem p = {*op_of(d), *layout_of(a), *layout_of(b),
                        *layout_of(out)};
    p.o.bias = NULL;
    return p;
}

static uint64_t hash(const struct problem *p)
{
    const unsigned char *c = (const unsigned char *)p;
    uint64_t h = 1;
    for (size_t i = 0; i < sizeof(*p); i++)
        h = iz_mix(h * IZ_GOLDEN + c[i]);
    return h;
}

/* What it has in common with a smaller one. */
static uint64_t kind(struct problem p)
{
    p.a.rows = p.a.cols = p.b.rows = p.b.cols = p.d.cols = 0;
    return hash(&p);
}

static int64_t terms(const struct problem *p)
{
    return p->o.trans_a ? p->a.rows : p->a.cols;
}

static bool has_bias(const struct op *o)
{
    return o->epilogue == CUBLASLT_EPILOGUE_BIAS;
}

static uint32_t align_of(const void *p)
{
    uintptr_t u = (uintptr_t)p | 256;
    return (uint32_t)(u & -u);
}

/* The library has kernels for others, but they are slow. */
static bool comes_in_eights(const struct layout *m)
{
    return m->rows % 8 == 0 && m->ld % 8 == 0;
}

/* Whether op(A) op(B) fits into D, and the types go together: 16-bit operands
 * with an output of their type or fp32, or all fp32. */
static bool fits(const struct op *o, const struct problem *p)
{
    const struct layout *a = &p->a, *b = &p->b, *d = &p->d;
    int64_t m = o->trans_a ? a->cols : a->rows;
    int64_t n = o->trans_b ? b->rows : b->cols;
    int64_t k = o->trans_b ? b->cols : b->rows;
    return m == d->rows && n == d->cols && k == terms(p) &&
           a->type == b->type &&
           (d->type == a->type || d->type == CUDA_R_32F) &&
           o->scale == CUDA_R_32F &&
           (a->type == CUDA_R_32F ||
            (comes_in_eights(a) && comes_in_eights(b) && comes_in_eights(d))) &&
           (o->epilogue == CUBLASLT_EPILOGUE_DEFAULT ||
            (has_bias(o) && o->bias && o->bias_type == d->type));
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(
    cublasLtHandle_t h, cublasLtMatmulDesc_t d, cublasLtMatrixLayout_t a,
    cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c,
    cublasLtMatrixLayout_t out, cublasLtMatmulPreference_t p, int wanted,
    cublasLtMatmulHeuristicResult_t found[], int *n)
{
    const struct wish *w = (const struct wish *)p->data;
    struct problem asked = problem_of(d, a, b, out);
    if (!h || wanted < 3 || !fits(op_of(d), &asked) ||
        memcmp(c, out, sizeof(*c)) != 0)
        return CUBLAS_STATUS_INVALID_VALUE;
    fake_cublaslt.searches++;
    *n = 0;
    if (fake_cublaslt.fails)
        return (cublasStatus_t)fake_cublaslt.fails;
    if (fake_cublaslt.bias_fails && has_bias(op_of(d)))
        return (cublasStatus_t)fake_cublaslt.bias_fails;
    if (fake_cublaslt.no_bias && has_bias(op_of(d)))
        return CUBLAS_STATUS_SUCCESS;
    /* only sums that do not depend on who comes first */
    if (w->reductions & ~(uint32_t)CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE)
        return CUBLAS_STATUS_INVALID_VALUE;
    memset(found, 0, (size_t)wanted * sizeof(*found));
    found[0].state = CUBLAS_STATUS_NOT_SUPPORTED;
    struct algo one = {.problem = hash(&asked),
                       .kind = kind(asked),
                       .workspace = w->workspace,
                       .cols = (int32_t)asked.d.cols,
                       .k = (int32_t)terms(&asked),
                       .reductions = CUBLASLT_REDUCTION_SCHEME_INPLACE};
    memcpy(one.align, w->align, sizeof(w->align));
    one.align[4] = align_of(op_of(d)->bias);
    memcpy(&found[1].algo, &one, sizeof(one));
    one.reductions = CUBLASLT_REDUCTION_SCHEME_NONE;
    memcpy(&found[2].algo, &one, sizeof(one));
    *n = 3;
    return CUBLAS_STATUS_SUCCESS;
}

static uint64_t checked; /* the last problem that an algorithm can do */

/* As the header says: of an algorithm, not of addresses. */
cublasStatus_t
cublasLtMatmulAlgoCheck(cublasLtHandle_t h, cublasLtMatmulDesc_t d,
                        cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                        cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t out,
                        const cublasLtMatmulAlgo_t *algo,
                        cublasLtMatmulHeuristicResult_t *result)
{
    struct problem asked = problem_of(d, a, b, out);
    struct algo g;
    memcpy(&g, algo, sizeof(g));
    result->workspaceSize = (size_t)g.workspace;
    int64_t cols = asked.d.cols, k = terms(&asked);
    bool smaller = !fake_cublaslt.fixed && g.kind == kind(asked) &&
                   ((cols < g.cols && k == g.k) || (cols == g.cols && k < g.k));
    checked = smaller ? hash(&asked) : g.problem;
    return h && checked == hash(&asked) ? CUBLAS_STATUS_SUCCESS
                                        : CUBLAS_STATUS_INVALID_VALUE;
}

cublasStatus_t
cublasLtMatmulAlgoConfigGetAttribute(const cublasLtMatmulAlgo_t *algo,
                                     cublasLtMatmulAlgoConfigAttributes_t attr,
                                     void *value, size_t size, size_t *written)
{
    struct algo g;
    memcpy(&g, algo, sizeof(g));
    if (attr != CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME || size != 4)
        return CUBLAS_STATUS_INVALID_VALUE;
    memcpy(value, &g.reductions, size);
    return CUBLAS_STATUS_SUCCESS;
}

static enum iz_dtype dtype(int64_t t)
{
    return t == CUDA_R_32F ? IZ_F32 : t == CUDA_R_16BF ? IZ_BF16 : IZ_F16;
}

/* A call that may wait in a stream. */
struct product {
    struct problem of; /* with its bias */
    const void *a, *b, *c;
    void *d, *workspace;
    size_t workspace_bytes;
    double alpha, beta;
};

static double get(const void *p, int64_t type, int64_t i)
{
    enum iz_dtype t = dtype(type);
    float f;
    iz_cast(&f, IZ_F32, (const char *)p + i * iz_dtype_bytes(t), t, 1);
    return (double)f;
}

static void put(void *p, int64_t type, int64_t i, double value)
{
    enum iz_dtype t = dtype(type);
    float f = (float)value;
    iz_cast((char *)p + i * iz_dtype_bytes(t), t, &f, IZ_F32, 1);
}

/* The vectors of a matrix that are multiplied, one after the other: its columns
 * or its rows. */
static double *vectors(const void *p, const struct layout *m, bool cols)
{
    double *x = iz_take(m->rows * m->cols, sizeof(*x), "a product");
    for (int64_t j = 0; j < m->cols; j++)
        for (int64_t i = 0; i < m->rows; i++)
            x[cols ? j * m->rows + i : i * m->cols + j] =
                get(p, m->type, j * m->ld + i);
    return x;
}

/* Of two such vectors, for element i of column j. */
static double element(const struct product *p, const double *a, const double *b,
                      int64_t i, int64_t j)
{
    const struct layout *d = &p->of.d;
    double s = 0;
    for (int64_t k = 0; k < terms(&p->of); k++)
        s += a[k] * b[k];
    s *= p->alpha;
    if (p->beta != 0)
        s += p->beta * get(p->c, d->type, j * d->ld + i);
    if (has_bias(&p->of.o))
        s += get(p->of.o.bias, d->type, i);
    return s;
}

static size_t extent(const struct layout *m)
{
    int64_t elems = (m->cols - 1) * m->ld + m->rows;
    return (size_t)(elems * iz_dtype_bytes(dtype(m->type)));
}

static void reach(struct product *p)
{
    const struct layout *d = &p->of.d;
    p->a = emu_reach(p->a, extent(&p->of.a));
    p->b = emu_reach(p->b, extent(&p->of.b));
    p->c = emu_reach(p->c, extent(d));
    p->d = emu_reach(p->d, extent(d));
    p->workspace = emu_reach(p->workspace, p->workspace_bytes);
    if (has_bias(&p->of.o))
        p->of.o.bias = emu_reach(
            p->of.o.bias, (size_t)(d->rows * iz_dtype_bytes(dtype(d->type))));
}

/* Both ends of the workspace: all of its 32 MiB would take longer than the
 * products of small models. */
static void spoil(const struct product *p)
{
    size_t n = p->workspace_bytes, some = n < SPOILED ? n : SPOILED;
    memset(p->workspace, 0x5a, some);
    memset((char *)p->workspace + n - some, 0x5a, some);
}

/* Owns the product. */
static void run(void *arg)
{
    struct product *p = arg;
    const struct layout *d = &p->of.d;
    int64_t n = terms(&p->of);
    reach(p);
    spoil(p);
    double *a = vectors(p->a, &p->of.a, p->of.o.trans_a);
    double *b = vectors(p->b, &p->of.b, !p->of.o.trans_b);
    for (int64_t j = 0; j < d->cols; j++)
        for (int64_t i = 0; i < d->rows; i++)
            put(p->d, d->type, j * d->ld + i,
                element(p, a + i * n, b + j * n, i, j));
    free(a);
    free(b);
    free(p);
}

static bool overlap(const void *p, const struct layout *m, const void *q,
                    const struct layout *n)
{
    uintptr_t a = (uintptr_t)p, b = (uintptr_t)q;
    return a < b + extent(n) && b < a + extent(m);
}

/* Of A, B, C, D and the bias; small: 16 bits. */
static bool as_promised(const struct algo *g, const void *const address[5],
                        bool small)
{
    for (int i = 0; i < 5; i++)
        if ((uintptr_t)address[i] % g->align[i] != 0 ||
            (small && (uintptr_t)address[i] % 16 != 0))
            return false;
    return true;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t h, cublasLtMatmulDesc_t d,
                              const void *alpha, const void *a,
                              cublasLtMatrixLayout_t la, const void *b,
                              cublasLtMatrixLayout_t lb, const void *beta,
                              const void *c, cublasLtMatrixLayout_t lc,
                              void *out, cublasLtMatrixLayout_t ld,
                              const cublasLtMatmulAlgo_t *algo, void *workspace,
                              size_t workspace_bytes, cudaStream_t stream)
{
    const void *const address[] = {a, b, c, out, op_of(d)->bias};
    struct problem asked = problem_of(d, la, lb, ld);
    struct algo g;
    memcpy(&g, algo, sizeof(g));
    bool may = hash(&asked) == g.problem ||
               (hash(&asked) == checked && g.kind == kind(asked));
    if (!h || !may || memcmp(lc, ld, sizeof(*lc)) != 0 ||
        g.reductions == CUBLASLT_REDUCTION_SCHEME_INPLACE ||
        !as_promised(&g, address, asked.a.type != CUDA_R_32F) ||
        workspace_bytes < g.workspace || (uintptr_t)workspace % 256 != 0 ||
        overlap(out, &asked.d, a, &asked.a) ||
        overlap(out, &asked.d, b, &asked.b))
        return CUBLAS_STATUS_INVALID_VALUE;
    struct product *p = iz_take(1, sizeof(*p), "a product");
    *p = (struct product){.of = asked,
                          .a = a,
                          .b = b,
                          .c = c,
                          .d = out,
                          .workspace = workspace,
                          .workspace_bytes = workspace_bytes,
                          .alpha = *(const float *)alpha,
                          .beta = *(const float *)beta};
    p->of.o.bias = op_of(d)->bias;
    fake_cublaslt.compute = asked.o.compute;
    emu_enqueue(stream, run, p);
    return CUBLAS_STATUS_SUCCESS;
}
