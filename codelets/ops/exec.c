/* SPDX-License-Identifier: Apache-2.0 */
/* The arenas and counters of a running (or merely counted) layer. */
#include "codelets/ops/exec.h"

#include <assert.h>
#include <stdint.h>

#include "codelets/base/die.h"

#define ALIGN 64

static struct iz_view exec_take(struct iz_arena *a, const char *name,
                                enum iz_dtype t, int64_t rows, int64_t cols)
{
    struct iz_view v = {.dtype = t, .rows = rows, .cols = cols};
    int64_t bytes = (iz_view_bytes(v) + ALIGN - 1) / ALIGN * ALIGN;
    assert(rows >= 0 && cols >= 0);
    assert((uintptr_t)a->base % ALIGN == 0);
    if (bytes > a->size - a->used)
        iz_die("%s arena too small: %lld bytes used of %lld, %lld more wanted",
               name, (long long)a->used, (long long)a->size, (long long)bytes);
    if (a->base)
        v.p = a->base + a->used;
    a->used += bytes;
    if (a->used > a->peak)
        a->peak = a->used;
    return v;
}

struct iz_view iz_exec_work(struct iz_exec *x, enum iz_dtype t, int64_t rows,
                            int64_t cols)
{
    return exec_take(&x->work, "work", t, rows, cols);
}

int64_t iz_exec_mark(const struct iz_exec *x)
{
    return x->work.used;
}

void iz_exec_release(struct iz_exec *x, int64_t mark)
{
    assert(mark >= 0 && mark <= x->work.used);
    x->work.used = mark;
}

struct iz_view iz_exec_save(struct iz_exec *x, enum iz_dtype t, int64_t rows,
                            int64_t cols)
{
    return exec_take(x->keeps_nothing ? &x->work : &x->save, "save", t, rows,
                     cols);
}

struct iz_view iz_exec_save_widened(struct iz_exec *x, enum iz_dtype t,
                                    int64_t rows, int64_t cols)
{
    return x->widens ? iz_exec_work(x, t, rows, cols)
                     : iz_exec_save(x, t, rows, cols);
}

struct iz_exec iz_exec_dry(enum iz_backend b, enum iz_dtype act)
{
    return (struct iz_exec){.backend = b,
                            .dry = true,
                            .act = act,
                            .work = {.size = INT64_MAX},
                            .save = {.size = INT64_MAX}};
}

/* flops_per_s 0: as of other products. */
static void exec_count(struct iz_exec *x, double flops, double bytes,
                       double flops_per_s)
{
    const struct iz_rate *r = &x->rate;
    if (flops_per_s <= 0)
        flops_per_s = r->flops_per_s;
    x->cost.flops += flops;
    x->cost.bytes += bytes;
    if (r->bytes_per_s <= 0)
        return;
    double compute = flops_per_s > 0 ? flops / flops_per_s : 0;
    double memory = bytes / r->bytes_per_s;
    x->cost.seconds += r->latency_s + (compute > memory ? compute : memory);
}

void iz_exec_count(struct iz_exec *x, double flops, double bytes)
{
    exec_count(x, flops, bytes, 0);
}

void iz_exec_count_attention(struct iz_exec *x, bool cudnn, bool back,
                             double flops, double bytes)
{
    exec_count(x, flops, bytes, x->rate.attention_flops_per_s[cudnn][back]);
}

void iz_exec_count_sum(struct iz_exec *x, double flops, double bytes)
{
    exec_count(x, flops, bytes, x->rate.sum_flops_per_s);
}
