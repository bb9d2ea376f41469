/* SPDX-License-Identifier: Apache-2.0 */
/* The ops of a GPU for the stand-in.  A call waits in a stream; when its turn
 * comes, it reaches device memory through the stand-in and calls the op of the
 * CPU with scratch of its own, so that the bits are those of a run on a CPU.
 * bodies.py makes the functions of gpu_ops.h of their declarations: each calls
 * one of the functions `call` here. */
#include "codelets/ops/gpu_ops.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "codelets/base/die.h"
#include "codelets/flat/flat.h"
#include "codelets/gpu/device.h"
#include "tests/fake/cuda_on_cpu/launch.h"

static constexpr size_t ALIGN = 64;
static constexpr int POISON = 0xff; /* NaN in every type */
static constexpr int64_t POISONED = 65536;

/* ---- a call that waits ---- */

template <class F> static void run(void *arg)
{
    F *f = (F *)arg;
    (*f)();
    delete f;
}

/* Calls f() in x's stream. */
template <class F> static void enqueue(struct iz_exec *x, F f)
{
    if (x->backend != IZ_CUDA || x->dry)
        iz_die("a call of the stand-in that is not one of a GPU");
    emu_enqueue(x->stream, run<F>, new F(f));
}

/* ---- arguments, in a stream ---- */

/* A device pointer to n bytes as one of the host. */
template <class T> static T *reach(T *p, int64_t n)
{
    return (T *)emu_reach(p, (size_t)n);
}

/* Makes the pointers of arguments, which come in order, pointers of the host.
 * Tokens, and rows of a table, are as many as the rows of the last tensor
 * before them. */
struct reacher {
    int64_t rows;

    void all()
    {
    }

    template <class T, class... More> void all(T &a, More &...more)
    {
        one(a);
        all(more...);
    }

    void one(struct iz_view &v)
    {
        v.p = reach(v.p, iz_view_bytes(v));
        rows = v.rows ? v.rows : rows;
    }

    void one(const int32_t *&token)
    {
        token = reach(token, rows * (int64_t)sizeof(*token));
    }

    void one(struct iz_linear &l)
    {
        all(l.w, l.b, l.dw, l.db);
    }

    void one(struct iz_magnitude &g)
    {
        all(g.w, g.a, g.b, g.m);
    }

    void one(struct iz_norm_layer &n)
    {
        all(n.w, n.b, n.dw, n.db, n.mean, n.rstd);
    }

    void one(struct iz_attention &a)
    {
        all(a.sinks, a.dsinks, a.qkv, a.kv, a.dkv, a.o, a.lse, a.begins);
    }

    void one(struct iz_table &t)
    {
        one(t.row);
        all(t.w, t.dw, t.wpe, t.dwpe, t.begins);
    }

    void one(struct iz_classifier &k)
    {
        int64_t samples = k.samples;
        all(k.w, k.dw, k.da, k.a, k.b, k.db, k.target);
        k.loss = reach(k.loss, sizeof(*k.loss));
        k.each = reach(k.each, samples * (int64_t)sizeof(*k.each));
        k.scales = reach(k.scales, samples * (int64_t)sizeof(*k.scales));
    }

    void one(struct iz_orthogonal &m)
    {
        m.p = reach(m.p,
                    ((m.rows - 1) * m.stride + m.cols) * (int64_t)sizeof(*m.p));
    }

    void one(struct iz_routes &r)
    {
        all(r.choice, r.p, r.lse, r.weight, r.place, r.chosen, r.end);
    }

    void one(struct iz_aux *&aux)
    {
        aux = reach(aux, sizeof(*aux));
    }

    /* What has no addresses. */
    template <class T> void one(T &)
    {
        static_assert(std::is_arithmetic_v<T> || std::is_enum_v<T> ||
                      std::is_same_v<T, struct iz_rope> ||
                      std::is_same_v<T, struct iz_drop>);
    }
};

/* What a call keeps of an argument until it runs: a copy of a struct that it
 * reads. */
template <class T> static auto keep(T a)
{
    using pointed = std::remove_pointer_t<T>;
    if constexpr (std::is_class_v<pointed> && std::is_const_v<pointed>)
        return std::remove_const_t<pointed>(*a);
    else
        return a;
}

/* And what the op, which has a parameter of type P, gets. */
template <class P, class T> static P give(T &kept)
{
    if constexpr (std::is_pointer_v<P> && !std::is_pointer_v<T>)
        return &kept;
    else
        return kept;
}

/* ---- scratch ---- */

/* Enough of it to be noticed: some scratch is large. */
static void poison(struct iz_view v)
{
    int64_t bytes = iz_view_bytes(v);
    if (v.p)
        memset(v.p, POISON, (size_t)(bytes < POISONED ? bytes : POISONED));
}

/* The scratch of the GPU is overwritten before and after, because nothing may
 * rely on what is in it. */
template <class F> static void between_poison(struct iz_view scratch, F f)
{
    scratch.p = reach(scratch.p, iz_view_bytes(scratch));
    poison(scratch);
    f();
    poison(scratch);
}

/* The last argument if it is more than the op has, else none. */
template <size_t N, class T> static struct iz_view scratch_of(const T &kept)
{
    if constexpr (N < std::tuple_size_v<T>)
        return std::get<N>(kept);
    else
        return {};
}

/* ---- calls ---- */

template <class... P, class T, size_t... I>
static void run_op(void (*op)(struct iz_exec *, P...), struct iz_exec *x,
                   T &kept, std::index_sequence<I...>)
{
    op(x, give<P>(std::get<I>(kept))...);
}

/* An op with its arguments and perhaps scratch. */
template <class... P, class... A>
static void call(void (*op)(struct iz_exec *, P...), struct iz_exec *x, A... a)
{
    auto waits = [op, kept = std::make_tuple(keep(a)...)]() mutable {
        const std::index_sequence_for<P...> all;
        struct iz_view scratch = scratch_of<sizeof...(P)>(kept);
        struct iz_exec cpu = iz_exec_dry(IZ_CPU, IZ_F32);
        run_op(op, &cpu, kept, all);
        cpu.dry = false;
        cpu.work.size = cpu.work.peak;
        cpu.work.base = (char *)aligned_alloc(
            ALIGN, ((size_t)cpu.work.size / ALIGN + 1) * ALIGN);
        if (!cpu.work.base)
            iz_die("no memory for %lld bytes of scratch",
                   (long long)cpu.work.size);
        std::apply([](auto &...args) { reacher{0}.all(args...); }, kept);
        between_poison(scratch, [&] { run_op(op, &cpu, kept, all); });
        free(cpu.work.base);
    };
    enqueue(x, waits);
}

/* Also holds the count that the caller has formed against the targets. */
static void call(decltype(&iz_classifier) op, struct iz_exec *x,
                 const struct iz_classifier *c, int64_t count,
                 struct iz_view scratch)
{
    int64_t rows = c->a.rows;
    const int32_t *target = c->target;
    count = c->targets ? -1 : count;
    enqueue(x, [=] {
        const int32_t *t = reach(target, rows * (int64_t)sizeof(*t));
        int64_t n = 0;
        for (int64_t i = 0; i < rows; i++)
            n += t[i] != -1;
        if (count >= 0 && n != count)
            iz_die("classifier: %lld targets, but a count of %lld",
                   (long long)n, (long long)count);
    });
    call(op, x, c, scratch);
}

static void call(decltype(&iz_pair_loss) op, struct iz_exec *x,
                 const struct iz_classifier *given,
                 const struct iz_pairs *pairs,
                 const struct iz_sample_loss *each, float *scales)
{
    struct iz_classifier c = *given;
    struct iz_pairs p = *pairs;
    enqueue(x, [=]() mutable {
        struct iz_exec cpu = iz_exec_dry(IZ_CPU, IZ_F32);
        cpu.dry = false;
        c.loss = reach(c.loss, sizeof(*c.loss));
        reacher{0}.all(p.aux);
        op(&cpu, &c, &p, reach(each, 2 * c.samples * (int64_t)sizeof(*each)),
           reach(scales, c.samples * (int64_t)sizeof(*scales)));
    });
}

/* What the program does with it, it does at once. */
const int32_t *iz_experts_routes_end_cuda(struct iz_exec *x, struct iz_view end)
{
    static thread_local std::vector<int32_t> ends;
    int32_t *to = (ends.resize((size_t)end.cols), ends.data());
    enqueue(x, [=] {
        memcpy(to, reach(end.p, iz_view_bytes(end)),
               (size_t)iz_view_bytes(end));
    });
    iz_device_wait(x->stream);
    return to;
}

static void call(decltype(&iz_flat_sum) sum, struct iz_exec *x, void *out,
                 enum iz_dtype out_type, bool accumulate, const void *const *in,
                 int n_in, enum iz_dtype in_type, int64_t n)
{
    std::vector<const void *> list(in, in + n_in);
    enqueue(x, [=]() mutable {
        for (const void *&p : list)
            p = reach(p, n * iz_dtype_bytes(in_type));
        sum(reach(out, n * iz_dtype_bytes(out_type)), out_type, accumulate,
            list.data(), n_in, in_type, n);
    });
}

static void call(decltype(&iz_flat_norm2) norm2, struct iz_exec *x,
                 double *result, const void *p, enum iz_dtype type, int64_t n,
                 struct iz_view scratch)
{
    enqueue(x, [=] {
        between_poison(scratch, [=] {
            *reach(result, sizeof(*result)) =
                norm2(reach(p, n * iz_dtype_bytes(type)), type, n);
        });
    });
}

static void call(decltype(&iz_flat_squares) squares, struct iz_exec *x,
                 double *sum, const void *p, enum iz_dtype type, int64_t n)
{
    enqueue(x, [=] {
        squares(reach(sum, iz_norm2_blocks(n) * (int64_t)sizeof(*sum)),
                reach(p, n * iz_dtype_bytes(type)), type, n);
    });
}

static void call(decltype(&iz_quant_load) load, struct iz_exec *x,
                 enum iz_quant q, void *out, enum iz_dtype type,
                 const void *groups, int64_t n)
{
    enqueue(x, [=] {
        const int64_t most = IZ_QUANT_GROUP, bytes = iz_quant_bytes(q);
        char *to = (char *)reach(out, n * iz_dtype_bytes(type));
        const char *from =
            (const char *)reach(groups, iz_quant_groups(n) * bytes);
        for (int64_t i = 0; i < n; i += most, from += bytes)
            load(q, to + i * iz_dtype_bytes(type), type, from,
                 n - i < most ? n - i : most);
    });
}

static void call(decltype(&iz_update) op, struct iz_exec *x,
                 const struct iz_update *given)
{
    std::vector<struct iz_update_range> range(given->range,
                                              given->range + given->ranges);
    struct iz_update u = *given;
    enqueue(x, [=]() mutable {
        u.range = range.data();
        if (u.lower)
            u.lower = reach(u.lower, u.n * iz_dtype_bytes(IZ_BF16));
        else
            u.p = reach(u.p, u.n * iz_dtype_bytes(IZ_F32));
        u.g = reach(u.g, u.n * iz_dtype_bytes(u.g_type));
        u.d = reach(u.d, u.n * iz_dtype_bytes(IZ_F32));
        u.out = reach(u.out, u.n * iz_dtype_bytes(u.out_type));
        for (int i = 0; i < iz_optimizer(u.optimizer)->states; i++)
            u.state[i] = reach(
                u.state[i], iz_moment_bytes(u.type, u.room - u.lacks[i].all));
        op(&u);
    });
}

#include "codelets/standin_ops.h"

/* ---- the libraries ---- */

/* What a test wants cuDNN to be: "gone", or without any plan: "none",
 * or without one for the backward: "no backward". */
static bool cudnn_is(const char *what)
{
    const char *is = getenv("IZ_STANDIN_CUDNN");
    return is && strcmp(is, what) == 0;
}

const char *iz_cudnn_missing(void)
{
    return cudnn_is("gone") ? "libcudnn.so.9: not found" : NULL;
}

/* The bits of our own forward. */
void iz_attention_fwd_cudnn(struct iz_exec *x, const struct iz_attention *a,
                            struct iz_view scratch)
{
    iz_attention_fwd_cuda(x, a, scratch);
}

void iz_attention_bwd_cudnn(struct iz_exec *x, struct iz_view dqkv,
                            struct iz_view dy, const struct iz_attention *a,
                            struct iz_view, struct iz_view scratch)
{
    iz_attention_bwd_cuda(x, dqkv, dy, a, scratch);
}

bool iz_attention_ask_cudnn(struct iz_exec *x, const struct iz_attention *a,
                            bool back, int64_t)
{
    bool none = cudnn_is("none") || (back && cudnn_is("no backward"));
    if (none)
        snprintf(x->ask->why, sizeof(x->ask->why), "no plan for %lld tokens",
                 (long long)a->seq);
    return !none;
}

/* No library has a handle here, but who opens one closes it. */
int iz_cuda_open(struct iz_cuda **out)
{
    *out = (struct iz_cuda *)calloc(1, 1);
    if (!*out)
        fprintf(stderr, "izar: no memory\n");
    return *out ? 0 : -ENOMEM;
}

void iz_cuda_close(struct iz_cuda **c)
{
    free(*c);
    *c = NULL;
}

int iz_cuda_capability(void)
{
    return 70;
}

/* As on a CPU, whose ops these are. */
enum iz_dtype iz_cuda_act(enum iz_dtype)
{
    return IZ_F32;
}
