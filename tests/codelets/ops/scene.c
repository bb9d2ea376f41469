/* SPDX-License-Identifier: Apache-2.0 */
/* One op on the backend; see scene.h. */
#include "tests/codelets/ops/scene.h"

#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "codelets/gpu/device.h"
#include "codelets/kernels/cuda_lib.h"
#include "codelets/ops/gpu_ops.h"

enum { STRIP = 512, STRIP_BYTE = 0x3c, ALIGN = 256, SAMPLES = 20000 };
enum { SPOILED = 256 << 10 };
#define STAGING (INT64_C(16) << 20)

/* ---- memory of the backend ---------------------------------------------- */

static void *pinned_take(int64_t bytes)
{
    int64_t whole = (bytes / 4096 + 1) * 4096;
    void *p = aligned_alloc(4096, (size_t)whole);
    assert_non_null(p);
    assert_null(iz_device_pin(p, whole));
    return p;
}

static void *memory_take(int64_t bytes, bool pinned)
{
    void *p = !backend.device ? malloc((size_t)bytes)
              : pinned        ? pinned_take(bytes)
                              : iz_device_take(bytes);
    assert_non_null(p);
    return p;
}

static void memory_give(void *p, bool pinned)
{
    if (backend.device && !pinned) {
        iz_device_give(p);
        return;
    }
    if (backend.device)
        iz_device_unpin(p);
    free(p);
}

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* Pinned memory that copies of a device go through. */
static char *staging(void)
{
    static char *p;
    if (!p)
        p = pinned_take(STAGING);
    return p;
}

static void copy(char *dst, char *src, int64_t bytes)
{
    iz_device_copy(backend.x.stream, dst, src, bytes);
    iz_device_wait(backend.x.stream);
}

/* src NULL: every byte is `byte`. */
static void copy_up(char *dst, const char *src, int byte, int64_t bytes)
{
    int64_t piece = backend.device ? STAGING : bytes + 1;
    for (int64_t at = 0; at < bytes; at += piece) {
        int64_t n = least(bytes - at, piece);
        char *to = backend.device ? staging() : dst;
        if (src)
            memcpy(to, src + at, (size_t)n);
        else
            memset(to, byte, (size_t)n);
        if (backend.device)
            copy(dst + at, to, n);
    }
}

static void copy_down(char *dst, char *src, int64_t bytes)
{
    int64_t piece = backend.device ? STAGING : bytes + 1;
    for (int64_t at = 0; at < bytes; at += piece) {
        int64_t n = least(bytes - at, piece);
        if (backend.device)
            copy(staging(), src + at, n);
        memcpy(dst + at, backend.device ? staging() : src, (size_t)n);
    }
}

/* Memory between two strips, `late` bytes behind an aligned address.  Without a
 * device that is aligned to 64, 128 or 256 bytes, by turns. */
struct strips {
    char *all, *p;
    int64_t bytes;
    bool pinned;
};

static struct strips strips_take(int64_t bytes, int64_t late, int turn,
                                 bool pinned)
{
    char *all = memory_take(
        bytes + late + 2 * STRIP + (backend.device ? 0 : STRIP), pinned);
    struct strips s = {all, all + STRIP + late, bytes, pinned};
    if (!backend.device)
        s.p += -(uintptr_t)(s.p - late) % ALIGN + (size_t)turn % 4 * 64;
    copy_up(s.p - STRIP, NULL, STRIP_BYTE, STRIP);
    copy_up(s.p + bytes, NULL, STRIP_BYTE, STRIP);
    return s;
}

static void strips_give(struct strips *s)
{
    char strip[2 * STRIP];
    if (!s->all)
        return;
    copy_down(strip, s->p - STRIP, STRIP);
    copy_down(strip + STRIP, s->p + s->bytes, STRIP);
    for (int i = 0; i < 2 * STRIP; i++)
        if (strip[i] != STRIP_BYTE)
            fail_msg("memory beside a tensor was written");
    memory_give(s->all, s->pinned);
}

/* The ends of it, where it is as large as a library wants it. */
static void arena_fill(const struct strips *s, int byte)
{
    int64_t most = least(s->bytes, SPOILED);
    copy_up(s->p, NULL, byte, most);
    copy_up(s->p + s->bytes - most, NULL, byte, most);
}

/* ---- the run ------------------------------------------------------------ */

static bool has(unsigned set, int i)
{
    return set >> i & 1;
}

/* The tensor in whose memory tensor i lies. */
static int home_of(const struct scene *s, int i)
{
    for (int k = 0; k < s->n_into; k++)
        if (s->into[k][0] == i)
            return s->into[k][1];
    return i;
}

static int64_t late_bytes(const struct scene *s, int i)
{
    return has(s->late, i) ? s->late_by * iz_dtype_bytes(s->t[i].v.dtype) : 0;
}

static void views_up(struct strips *at, const struct scene *s, unsigned reads)
{
    for (int i = 0; i < s->n; i++) {
        int64_t bytes = iz_view_bytes(s->t[i].v);
        at[i] = (struct strips){0};
        if (has(s->unwanted, i) || home_of(s, i) != i)
            continue;
        at[i] = strips_take(bytes, late_bytes(s, i), 0, has(s->pinned, i));
        copy_up(at[i].p, has(reads, i) ? s->t[i].v.p : NULL, 0xff, bytes);
    }
}

static void views_down(struct iz_view *host, struct strips *at,
                       struct strips *work, const struct scene *s)
{
    for (int i = 0; i < s->n; i++) {
        char *from = at[home_of(s, i)].p;
        int64_t bytes = iz_view_bytes(s->t[i].v);
        host[i] = s->t[i].v;
        host[i].p = from ? fixture_take(bytes) : NULL;
        if (from)
            copy_down(host[i].p, from, bytes);
    }
    for (int i = 0; i < s->n; i++)
        strips_give(&at[i]);
    strips_give(work);
}

/* Nothing of the list of arguments is left when the call has returned. */
static void call(const struct pass *p, struct iz_exec *x, const struct scene *s,
                 const struct strips *at, const void *arg)
{
    struct iz_view v[SCENE_MOST];
    for (int i = 0; i < s->n; i++) {
        v[i] = s->t[i].v;
        v[i].p = at ? at[home_of(s, i)].p : NULL;
        v[i].odd = late_bytes(s, home_of(s, i)) % 16 != 0;
    }
    p->op(x, v, arg);
    memset(v, 0xff, sizeof(v));
    assert_int_equal(x->work.used, 0);
}

static void check_counts(const struct iz_exec *x, const struct iz_exec *dry,
                         const struct scene *s)
{
    if (s->unwanted) /* a dry run counts it all the same */
        return;
    assert_true(s->spare || x->work.peak == dry->work.peak);
    assert_true(x->cost.flops == dry->cost.flops &&
                x->cost.bytes == dry->cost.bytes);
}

static void run_once(struct scene *s, const struct pass *p, const void *arg,
                     int turn, struct iz_view *host)
{
    static int turns;
    struct iz_exec x = backend.x;
    struct strips at[SCENE_MOST], work;
    x.act = x.backend == IZ_CPU ? IZ_F32 : s->t[s->act].v.dtype;
    struct iz_exec dry = iz_exec_dry(x.backend, x.act);
    dry.numerics = x.numerics;
    call(p, &dry, s, NULL, arg);
    views_up(at, s, p->reads);
    work = strips_take(dry.work.peak + s->spare, 0, turns++, false);
    arena_fill(&work, turn ? 0x11 : 0xff);
    x.work = (struct iz_arena){.base = work.p, .size = work.bytes};
    call(p, &x, s, at, arg);
    if (backend.device)
        iz_device_wait(x.stream);
    views_down(host, at, &work, s);
    check_counts(&x, &dry, s);
    s->flops = x.cost.flops;
    s->scratch = x.work.peak;
}

/* The same arguments and the op of the CPU. */
static void check_bits(struct scene *s, const struct pass *p, const void *arg,
                       const struct iz_view *got)
{
    struct backend here = backend;
    struct iz_view cpu[SCENE_MOST];
    backend = (struct backend){.x = {.backend = IZ_CPU}};
    run_once(s, p, arg, 0, cpu);
    backend = here;
    for (int i = 0; i < s->n; i++) {
        if (cpu[i].p && has(p->writes, i))
            fixture_same_bits("what the CPU computes", got[i], cpu[i]);
        free(cpu[i].p);
    }
}

void scene_run(struct scene *s, const struct pass *p, const void *arg)
{
    struct iz_view first[SCENE_MOST], second[SCENE_MOST];
    assert_true(s->n <= SCENE_MOST);
    run_once(s, p, arg, 0, first);
    if (s->exact || backend.exact)
        check_bits(s, p, arg, first);
    run_once(s, p, arg, 1, second);
    for (int i = 0; i < s->n; i++) {
        bool written = has(p->writes, i), taken = false;
        for (int k = 0; k < s->n_into; k++)
            taken |= s->into[k][1] == i;
        if (!first[i].p)
            continue;
        fixture_same_bits("a second run", first[i], second[i]);
        if (written && !s->n_into)
            memcpy(s->t[i].v.p, first[i].p, (size_t)iz_view_bytes(first[i]));
        else if (written)
            fixture_same_bits("a result in place", first[i], s->t[i].v);
        else if (has(p->reads, i) && !taken)
            fixture_same_bits("an argument after the op", first[i], s->t[i].v);
        free(first[i].p);
        free(second[i].p);
    }
}

void scene_in_place(struct scene *s, const struct pass *p, const void *arg,
                    int n, const int (*pair)[2])
{
    s->into = pair;
    s->n_into = n;
    scene_run(s, p, arg);
    s->n_into = 0;
}

int scene_step(void)
{
    return backend.exact ? 5 : 1;
}

enum iz_dtype scene_type(int k)
{
    bool bf16 = k / 2 % 2 && backend_computes(IZ_BF16);
    return k % 2 == 0 ? IZ_F32 : bf16 ? IZ_BF16 : IZ_F16;
}

void scene_each(bool (*of)(enum iz_dtype t), const int64_t (*size)[4], int n,
                int large, void (*check)(enum iz_dtype t, const int64_t *size))
{
    n -= backend.large ? 0 : large;
    for (int k = 0; k < 2 * n; k += scene_step())
        if (!of || of(scene_type(k)))
            check(scene_type(k), size[k / 2]);
}

void scene_free(struct scene *s)
{
    for (int i = 0; i < s->n; i++)
        tensor_free(&s->t[i]);
}

struct tensor bytes_new(int64_t bytes)
{
    struct tensor t = {.v = {.dtype = IZ_U8, .rows = 1, .cols = bytes}};
    t.v.p = fixture_take(bytes);
    return t;
}

/* ---- comparison --------------------------------------------------------- */

/* What is expected of n elements of a tensor, from the first to the last. */
struct samples {
    const struct tensor *t;
    int64_t n;
    struct want *is;
    struct want (*want)(const void *arg, int64_t i, int64_t j);
    const void *arg;
};

static int64_t sample_at(const struct samples *s, int64_t k)
{
    return s->n > 1 ? k * (iz_view_len(s->t->v) - 1) / (s->n - 1) : 0;
}

static void samples_want(void *arg, int64_t begin, int64_t end)
{
    const struct samples *s = arg;
    int64_t cols = s->t->v.cols;
    for (int64_t k = begin; k < end; k++)
        s->is[k] =
            s->want(s->arg, sample_at(s, k) / cols, sample_at(s, k) % cols);
}

void scene_check(const char *what, struct tensor *t,
                 struct want (*want)(const void *arg, int64_t i, int64_t j),
                 const void *arg)
{
    int64_t n = least(iz_view_len(t->v), SAMPLES);
    struct want *is = calloc((size_t)n, sizeof(*is));
    struct samples samples = {t, n, is, want, arg};
    assert_non_null(is);
    if (n < 1000) /* threads would take longer */
        samples_want(&samples, 0, n);
    else
        fixture_share(n, samples_want, &samples);
    for (int64_t k = 0; k < n; k++)
        fixture_element(what, t->v, sample_at(&samples, k),
                        (struct near){is[k].is, 0x1p-21 * is[k].size +
                                                    fixture_rounding(
                                                        t->v.dtype, is[k].is)});
    free(is);
}

/* ---- the backend -------------------------------------------------------- */

bool backend_computes(enum iz_dtype t)
{
    return t != IZ_BF16 || backend.x.backend == IZ_CPU ||
           backend.x.numerics.capability >= 80;
}

bool backend_multiplies(void)
{
    return backend.x.backend == IZ_CPU ||
           (backend.x.cuda && backend.x.cuda->blas);
}

int backend_renew(void **state)
{
    if (backend.x.backend == IZ_CPU)
        return 0;
    iz_cuda_close(&backend.x.cuda);
    return iz_cuda_open(&backend.x.cuda);
}

bool backend_acts(enum iz_dtype t)
{
    return backend.act(t) == t;
}

void scene_dies(void (*f)(const void *arg), const void *arg,
                const char *message)
{
    if (!backend.refuses)
        skip();
    dies(f, arg, message);
}

static const struct group {
    const char *name;
    int (*run)(void);
} groups[] = {
    {"matmul", ops_matmul},         {"rows", ops_rows},
    {"llama", ops_llama},           {"attention", ops_attention},
    {"experts", ops_experts},       {"routers", ops_routers},
    {"embedding", ops_embedding},   {"classifier", ops_classifier},
    {"pairs", ops_pairs},           {"orthogonal", ops_orthogonal},
    {"preference", ops_preference}, {"flat", ops_flat},
    {"quant", ops_quant},           {"far", ops_far},
};

static const struct group *find(const char *name)
{
    for (int i = 0; i < COUNT(groups); i++)
        if (!strcmp(groups[i].name, name))
            return &groups[i];
    fprintf(stderr, "no group %s, but", name);
    for (int i = 0; i < COUNT(groups); i++)
        fprintf(stderr, " %s", groups[i].name);
    fprintf(stderr, "\n");
    exit(2);
}

int ops_groups(int argc, char **argv)
{
    int failed = 0;
    for (int i = 1; i < argc; i++)
        find(argv[i]);
    setvbuf(stdout, NULL, _IOLBF, 0); /* it may be ended from outside */
    /* Work arenas are large: their memory is not the system's after each run.
     */
    mallopt(M_MMAP_MAX, 0);
    mallopt(M_TRIM_THRESHOLD, 1 << 30);
    for (int i = 0; i < COUNT(groups) && argc == 1; i++)
        failed += groups[i].run();
    for (int i = 1; i < argc; i++)
        failed += find(argv[i])->run();
    return failed != 0;
}
