/* SPDX-License-Identifier: Apache-2.0 */
/* Random tensors, comparisons. */
/* madvise */
#define _DEFAULT_SOURCE

#include "tests/codelets/ops/fixture.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <sys/mman.h>

const enum iz_dtype fixture_types[3] = {IZ_F32, IZ_BF16, IZ_F16};

static uint64_t state;

static uint64_t next(void)
{
    uint64_t z = state += 0x9e3779b97f4a7c15u;

    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

void fixture_seed(void)
{
    const char *s = getenv("IZ_SEED");

    state = s ? strtoull(s, NULL, 10) : 1;
    printf("seed %llu\n", (unsigned long long)state);
}

double fixture_uniform(void)
{
    return (double)(next() >> 11) * 0x1p-52 - 1;
}

int32_t fixture_below(int64_t n)
{
    return (int32_t)(next() % (uint64_t)n);
}

void *fixture_take(int64_t bytes)
{
    size_t align = bytes < (4 << 20) ? 64 : 2 << 20;
    size_t size = ((size_t)bytes / align + 1) * align;
    void *p = aligned_alloc(align, size);

    assert_non_null(p);
    if (align > 64)
        madvise(p, size, MADV_HUGEPAGE);
    memset(p, 0xff, size);
    return p;
}

struct tensor tensor_new(enum iz_dtype t, int64_t rows, int64_t cols,
                         double scale)
{
    struct tensor r = {.v = {.dtype = t, .rows = rows, .cols = cols}};

    r.v.p = fixture_take(iz_view_bytes(r.v));
    r.d = fixture_take(iz_view_len(r.v) * (int64_t)sizeof(*r.d));
    for (int64_t i = 0; i < rows * cols; i++)
        r.d[i] = scale * fixture_uniform();
    tensor_store(&r);
    return r;
}

struct tensor tensor_copy(const struct tensor *from)
{
    struct tensor t = *from;
    int64_t bytes = iz_view_bytes(t.v), of_d = iz_view_len(t.v) * 8;

    t.v.p = fixture_take(bytes);
    t.d = fixture_take(of_d);
    memcpy(t.v.p, from->v.p, (size_t)bytes);
    memcpy(t.d, from->d, (size_t)of_d);
    return t;
}

void tensor_store(struct tensor *t)
{
    for (int64_t i = 0; i < iz_view_len(t->v); i++) {
        float f = (float)t->d[i];
        char *to = (char *)t->v.p + i * iz_dtype_bytes(t->v.dtype);
        iz_cast(to, t->v.dtype, &f, IZ_F32, 1);
    }
    tensor_load(t);
}

void tensor_load(struct tensor *t)
{
    for (int64_t i = 0; i < iz_view_len(t->v); i++) {
        float f;
        iz_cast(&f, IZ_F32, (char *)t->v.p + i * iz_dtype_bytes(t->v.dtype),
                t->v.dtype, 1);
        t->d[i] = (double)f;
    }
}

void tensor_free(struct tensor *t)
{
    free(t->v.p);
    free(t->d);
}

double fixture_dot(const double *a, const double *b, int64_t n)
{
    double s = 0;

    for (int64_t i = 0; i < n; i++)
        s += a[i] * b[i];
    return s;
}

void fixture_close(const char *what, struct tensor *got, const double *want,
                   double tol)
{
    double max = 0, half = 0;

    if (got->v.dtype != IZ_F32)
        half = got->v.dtype == IZ_BF16 ? 0x1p-8 : 0x1p-11;
    tensor_load(got);
    for (int64_t i = 0; i < iz_view_len(got->v); i++)
        max = fmax(max, fabs(want[i]));
    for (int64_t i = 0; i < iz_view_len(got->v); i++)
        if (!(fabs(got->d[i] - want[i]) <=
              tol * max + half * fabs(want[i]) + 1e-7))
            fail_msg("%s [%lld,%lld] %s: element %lld is %.9g, not %.9g", what,
                     (long long)got->v.rows, (long long)got->v.cols,
                     iz_dtype_name(got->v.dtype), (long long)i, got->d[i],
                     want[i]);
}

/* Below 2^-14 fp16 has fewer bits. */
double fixture_rounding(enum iz_dtype t, double x)
{
    double half = t == IZ_F32 ? 0x1p-24 : t == IZ_BF16 ? 0x1p-8 : 0x1p-11;

    return half * fabs(x) + (t == IZ_F16 ? 0x1p-25 : 0);
}

void fixture_near(const char *what, struct tensor *got, const struct near *want)
{
    double worst = 0;

    tensor_load(got);
    for (int64_t i = 0; i < iz_view_len(got->v); i++) {
        double off = fabs(got->d[i] - want[i].is);

        if (!(off <= want[i].within))
            fail_msg("%s [%lld,%lld] %s: element %lld is %.9g, not %.9g within "
                     "%.3g",
                     what, (long long)got->v.rows, (long long)got->v.cols,
                     iz_dtype_name(got->v.dtype), (long long)i, got->d[i],
                     want[i].is, want[i].within);
        worst = fmax(worst, off / want[i].within);
    }
    if (getenv("IZ_SHOW"))
        printf("%s %s [%lld,%lld]: %.3f of the bound\n",
               iz_dtype_name(got->v.dtype), what, (long long)got->v.rows,
               (long long)got->v.cols, worst);
}

void fixture_same_bits(const char *what, struct iz_view a, struct iz_view b)
{
    assert_int_equal(iz_view_bytes(a), iz_view_bytes(b));
    if (memcmp(a.p, b.p, (size_t)iz_view_bytes(a)))
        fail_msg("%s differs", what);
}
