/* SPDX-License-Identifier: Apache-2.0 */
/* Random tensors, comparisons. */
/* madvise */
#define _DEFAULT_SOURCE

#include "tests/codelets/ops/fixture.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

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

int fixture_seed(void **test)
{
    const char *s = getenv("IZ_SEED");
    state = s ? strtoull(s, NULL, 10) : 1;
    printf("seed %llu\n", (unsigned long long)state);
    return 0;
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

struct iz_view fixture_map(enum iz_dtype t, int64_t rows, int64_t cols)
{
    struct iz_view v = {.dtype = t, .rows = rows, .cols = cols};
    v.p = mmap(NULL, (size_t)iz_view_bytes(v), PROT_READ | PROT_WRITE,
               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    assert_true(v.p != MAP_FAILED);
    return v;
}

void fixture_unmap(struct iz_view v)
{
    munmap(v.p, (size_t)iz_view_bytes(v));
}

struct share {
    void (*work)(void *arg, int64_t begin, int64_t end);
    void *arg;
    int64_t begin, end;
};

static void *share_work(void *arg)
{
    struct share *s = arg;
    s->work(s->arg, s->begin, s->end);
    return NULL;
}

void fixture_share(int64_t n,
                   void (*work)(void *arg, int64_t begin, int64_t end),
                   void *arg)
{
    enum { MOST = 64 };
    pthread_t thread[MOST];
    struct share share[MOST];
    int64_t cores = sysconf(_SC_NPROCESSORS_ONLN), parts = n;
    parts = parts > cores ? cores : parts;
    parts = parts > MOST ? MOST : parts;
    for (int64_t i = 0; i < parts; i++) {
        share[i] =
            (struct share){work, arg, n * i / parts, n * (i + 1) / parts};
        assert_int_equal(
            0, pthread_create(&thread[i], NULL, share_work, &share[i]));
    }
    for (int64_t i = 0; i < parts; i++)
        pthread_join(thread[i], NULL);
}

bool fixture_bare;

struct tensor tensor_new(enum iz_dtype t, int64_t rows, int64_t cols,
                         double scale)
{
    struct tensor r = {.v = {.dtype = t, .rows = rows, .cols = cols}};
    if (fixture_bare)
        return r;
    r.v.p = fixture_take(iz_view_bytes(r.v));
    r.d = fixture_take(iz_view_len(r.v) * (int64_t)sizeof(*r.d));
    for (int64_t i = 0; i < rows * cols; i++)
        r.d[i] = scale * fixture_uniform();
    tensor_store(&r);
    return r;
}

struct tensor tensor_copy(const struct tensor *from)
{
    struct tensor t = {.v = from->v};
    int64_t bytes = iz_view_bytes(t.v), of_d = iz_view_len(t.v) * 8;
    t.v.p = memcpy(fixture_take(bytes), from->v.p, (size_t)bytes);
    t.d = memcpy(fixture_take(of_d), from->d, (size_t)of_d);
    return t;
}

void *fixture_at(const void *x, enum iz_dtype t, int64_t i)
{
    return (char *)x + i * iz_dtype_bytes(t);
}

double fixture_get(const void *x, enum iz_dtype t, int64_t i)
{
    float f;
    iz_cast(&f, IZ_F32, fixture_at(x, t, i), t, 1);
    return (double)f;
}

enum { PIECE = 1024 }; /* elements that are converted at a time */

static int64_t piece_of(const struct tensor *t, int64_t at)
{
    int64_t left = iz_view_len(t->v) - at;
    return left < PIECE ? left : PIECE;
}

void tensor_store(struct tensor *t)
{
    float f[PIECE];
    for (int64_t at = 0; at < iz_view_len(t->v); at += PIECE) {
        int64_t n = piece_of(t, at);
        for (int64_t i = 0; i < n; i++)
            f[i] = (float)t->d[at + i];
        iz_cast(fixture_at(t->v.p, t->v.dtype, at), t->v.dtype, f, IZ_F32, n);
    }
    tensor_load(t);
}

void tensor_load(struct tensor *t)
{
    float f[PIECE];
    for (int64_t at = 0; at < iz_view_len(t->v); at += PIECE) {
        int64_t n = piece_of(t, at);
        iz_cast(f, IZ_F32, fixture_at(t->v.p, t->v.dtype, at), t->v.dtype, n);
        for (int64_t i = 0; i < n; i++)
            t->d[at + i] = (double)f[i];
    }
}

double *tensor_want(struct tensor *t)
{
    free(t->want);
    t->want = calloc((size_t)iz_view_len(t->v), sizeof(*t->want));
    assert_non_null(t->want);
    return t->want;
}

void tensor_free(struct tensor *t)
{
    free(t->v.p);
    free(t->d);
    free(t->want);
}

double fixture_dot(const double *a, const double *b, int64_t n)
{
    double s = 0;
    for (int64_t i = 0; i < n; i++)
        s += a[i] * b[i];
    return s;
}

/* Below 2^-14 fp16 has fewer bits. */
double fixture_rounding(enum iz_dtype t, double x)
{
    double half = t == IZ_F32 ? 0x1p-24 : t == IZ_BF16 ? 0x1p-8 : 0x1p-11;
    return half * fabs(x) + (t == IZ_F16 ? 0x1p-25 : 0);
}

double fixture_element(const char *what, struct iz_view v, int64_t i,
                       struct near want)
{
    double got = fixture_get(v.p, v.dtype, i), off = fabs(got - want.is);
    if (!(off <= want.within))
        fail_msg("%s [%lld,%lld] %s: element %lld is %.9g, not %.9g within "
                 "%.3g",
                 what, (long long)v.rows, (long long)v.cols,
                 iz_dtype_name(v.dtype), (long long)i, got, want.is,
                 want.within);
    return off / want.within;
}

void fixture_close(const char *what, struct tensor *got, double tol)
{
    enum iz_dtype t = got->v.dtype;
    double max = 0;
    for (int64_t i = 0; i < iz_view_len(got->v); i++)
        max = fmax(max, fabs(got->want[i]));
    for (int64_t i = 0; i < iz_view_len(got->v); i++) {
        double is = got->want[i];
        double half = t == IZ_F32 ? 0 : fixture_rounding(t, is);
        fixture_element(what, got->v, i,
                        (struct near){is, tol * max + half + 1e-7});
    }
}

void fixture_near(const char *what, struct tensor *got, const struct near *want)
{
    double worst = 0;
    for (int64_t i = 0; i < iz_view_len(got->v); i++)
        worst = fmax(worst, fixture_element(what, got->v, i, want[i]));
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
