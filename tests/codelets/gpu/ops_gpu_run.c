/* SPDX-License-Identifier: Apache-2.0 */
/* One op on the GPU; see ops_gpu.h. */
#include "tests/codelets/gpu/ops_gpu.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "codelets/gpu/device.h"

enum { STRIP = 512, STRIP_BYTE = 0x3c, MOST = 12, SAMPLES = 20000 };
#define STAGING (INT64_C(16) << 20)

static struct {
    void *stream;
    struct iz_cuda *cuda;
    char *staging; /* pinned */
    int capability;
} gpu;

/* ---- memory ------------------------------------------------------------- */

void *gpu_pinned(int64_t bytes)
{
    size_t whole = ((size_t)bytes / 4096 + 1) * 4096;
    void *p = aligned_alloc(4096, whole);

    assert_non_null(p);
    assert_null(iz_device_pin(p, (int64_t)whole));
    return p;
}

void gpu_unpin(void *p)
{
    iz_device_unpin(p);
    free(p);
}

static void move(void *dst, const void *src, int64_t bytes)
{
    iz_device_copy(gpu.stream, dst, src, bytes);
    iz_device_wait(gpu.stream);
}

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static void upload(char *dst, const char *src, int64_t bytes)
{
    for (int64_t at = 0; at < bytes; at += STAGING) {
        int64_t n = least(bytes - at, STAGING);

        memcpy(gpu.staging, src + at, (size_t)n);
        move(dst + at, gpu.staging, n);
    }
}

static void download(char *dst, const char *src, int64_t bytes)
{
    for (int64_t at = 0; at < bytes; at += STAGING) {
        int64_t n = least(bytes - at, STAGING);

        move(gpu.staging, src + at, n);
        memcpy(dst + at, gpu.staging, (size_t)n);
    }
}

static void fill(char *dst, int byte, int64_t bytes)
{
    memset(gpu.staging, byte, (size_t)least(bytes, STAGING));
    for (int64_t at = 0; at < bytes; at += STAGING)
        move(dst + at, gpu.staging, least(bytes - at, STAGING));
}

/* Device memory between two strips. */
static char *strips_take(int64_t bytes)
{
    char *p = iz_device_take(bytes + 2 * STRIP);

    assert_non_null(p);
    fill(p, STRIP_BYTE, STRIP);
    fill(p + STRIP + bytes, STRIP_BYTE, STRIP);
    return p + STRIP;
}

static void strip_check(const char *p)
{
    char strip[STRIP];

    download(strip, p, STRIP);
    for (int i = 0; i < STRIP; i++)
        if (strip[i] != STRIP_BYTE)
            fail_msg("memory beside a tensor was written");
}

static void strips_give(char *p, int64_t bytes)
{
    strip_check(p - STRIP);
    strip_check(p + bytes);
    iz_device_give(p - STRIP);
}

/* ---- the run ------------------------------------------------------------ */

static bool has(unsigned set, int i)
{
    return set >> i & 1;
}

static void views_up(struct iz_view *v, const struct gpu_op *op)
{
    for (int i = 0; i < op->n; i++) {
        int64_t bytes = iz_view_bytes(op->t[i].v);

        v[i] = op->t[i].v;
        v[i].p = NULL;
        if (has(op->unwanted, i))
            continue;
        v[i].p = strips_take(bytes);
        if (has(op->reads, i))
            upload(v[i].p, op->t[i].v.p, bytes);
        else
            fill(v[i].p, 0xff, bytes);
    }
}

static void views_down(struct iz_view *host, const struct iz_view *v,
                       const struct gpu_op *op)
{
    for (int i = 0; i < op->n; i++) {
        int64_t bytes = iz_view_bytes(v[i]);

        host[i] = v[i];
        if (!v[i].p)
            continue;
        host[i].p = fixture_take(bytes);
        download(host[i].p, v[i].p, bytes);
        strips_give(v[i].p, bytes);
    }
}

static void run_once(const struct gpu_op *op, const struct iz_exec *dry,
                     int poison, struct iz_view *host)
{
    struct iz_exec x = {.backend = IZ_CUDA,
                        .act = op->act,
                        .capability = gpu.capability,
                        .stream = gpu.stream,
                        .cuda = gpu.cuda};
    struct iz_view v[MOST];

    views_up(v, op);
    x.work = (struct iz_arena){.base = strips_take(dry->work.peak),
                               .size = dry->work.peak};
    fill(x.work.base, poison, x.work.size);
    op->run(&x, v, op->arg);
    iz_device_wait(gpu.stream);
    strips_give(x.work.base, x.work.size);
    views_down(host, v, op);
    assert_int_equal(x.work.used, 0);
    if (op->unwanted) /* a dry run counts it all the same */
        return;
    assert_int_equal(x.work.peak, dry->work.peak);
    assert_true(x.flops == dry->flops && x.bytes == dry->bytes);
}

static struct iz_exec run_dry(const struct gpu_op *op)
{
    struct iz_exec dry = iz_exec_dry(IZ_CUDA, op->act);
    struct iz_view v[MOST];

    dry.capability = gpu.capability;
    assert_true(op->n <= MOST);
    for (int i = 0; i < op->n; i++) {
        v[i] = op->t[i].v;
        v[i].p = NULL;
    }
    op->run(&dry, v, op->arg);
    assert_int_equal(dry.work.used, 0);
    return dry;
}

void gpu_run(const struct gpu_op *op)
{
    struct iz_exec dry = run_dry(op);
    struct iz_view first[MOST], second[MOST];

    run_once(op, &dry, 0xff, first);
    run_once(op, &dry, 0x11, second);
    for (int i = 0; i < op->n; i++) {
        if (!first[i].p)
            continue;
        fixture_same_bits("a second run", first[i], second[i]);
        if (has(op->writes, i))
            memcpy(op->t[i].v.p, first[i].p, (size_t)iz_view_bytes(first[i]));
        else if (has(op->reads, i))
            fixture_same_bits("an argument after the op", first[i], op->t[i].v);
        free(first[i].p);
        free(second[i].p);
    }
}

/* ---- comparison --------------------------------------------------------- */

double gpu_rounding(enum iz_dtype t, double x)
{
    double half = t == IZ_F32 ? 0x1p-24 : t == IZ_BF16 ? 0x1p-8 : 0x1p-11;

    return half * fabs(x) + (t == IZ_F16 ? 0x1p-25 : 0);
}

static double element(struct iz_view v, int64_t at)
{
    float f;

    iz_cast(&f, IZ_F32, (char *)v.p + at * iz_dtype_bytes(v.dtype), v.dtype, 1);
    return (double)f;
}

static void check_one(const char *what, struct iz_view v, int64_t at,
                      struct want w)
{
    double got = element(v, at);
    double most = 0x1p-21 * w.size + gpu_rounding(v.dtype, w.is);

    if (!(fabs(got - w.is) <= most))
        fail_msg("%s [%lld,%lld] %s: element %lld is %.9g, not %.9g within "
                 "%.3g",
                 what, (long long)v.rows, (long long)v.cols,
                 iz_dtype_name(v.dtype), (long long)at, got, w.is, most);
}

void gpu_check(const char *what, struct tensor *t,
               struct want (*want)(const void *arg, int64_t i, int64_t j),
               const void *arg)
{
    int64_t n = iz_view_len(t->v), c = t->v.cols;

    for (int64_t k = 0; k < least(n, SAMPLES); k++) {
        int64_t at = n <= SAMPLES ? k : fixture_below(n);

        if (k < 2)
            at = k * (n - 1);
        check_one(what, t->v, at, want(arg, at / c, at % c));
    }
}

/* ---- the GPU ------------------------------------------------------------ */

bool gpu_open(void)
{
    struct iz_device_info info;

    if (!iz_device_count()) {
        printf("no GPU: %s\n", iz_device_why_none());
        return false;
    }
    if (iz_device_use(0, &info))
        return false;
    printf("GPU: %s, compute capability %d.%d\n", info.name,
           info.capability / 10, info.capability % 10);
    gpu.capability = info.capability;
    gpu.stream = iz_device_stream_open();
    gpu.staging = gpu_pinned(STAGING);
    return gpu.stream && !iz_cuda_ops->open(&gpu.cuda, gpu.stream);
}

bool gpu_computes(enum iz_dtype t)
{
    return t != IZ_BF16 || gpu.capability >= 80;
}

int gpu_capability(void)
{
    return gpu.capability;
}

void gpu_close(void)
{
    iz_cuda_ops->close(&gpu.cuda);
    gpu_unpin(gpu.staging);
    iz_device_stream_close(gpu.stream);
}
