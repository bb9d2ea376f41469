/* SPDX-License-Identifier: Apache-2.0 */
/* Times the ops and the whole model in the shapes of a GPT of 6 layers x 384
 * and two samples of 256 tokens, on one thread, against bare matrix products of
 * the same shapes in the same run.  CPU time, best of several rounds. */
#include "tests/ops/fixture.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "codelets/gemm.h"
#include "models/gpt2.h"

enum { SAMPLES = 2, SEQ = 256, C = 384, HEADS = 6, LAYERS = 6 };
enum { M = SAMPLES * SEQ, ROUNDS = 7 };

static double now_s(void)
{
    struct timespec t;

    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static struct iz_arena arena_new(int64_t bytes)
{
    return (struct iz_arena){.base = fixture_take(bytes), .size = bytes};
}

/* Best time of one call of op; what it counts is added to *count. */
static double time_op(void (*op)(struct iz_exec *x, void *arg), void *arg,
                      struct iz_exec *count)
{
    struct iz_exec dry = iz_exec_dry(IZ_F32), x = {.backend = IZ_CPU};
    double best = 1e30;

    op(&dry, arg);
    x.work = arena_new(dry.work.peak);
    for (int r = 0; r < ROUNDS; r++) {
        double t = now_s();
        op(&x, arg);
        t = now_s() - t;
        best = t < best ? t : best;
    }
    count->flops += dry.flops;
    count->bytes += dry.bytes;
    free(x.work.base);
    return best;
}

static void show(const char *name, double s, const struct iz_exec *count)
{
    printf("%-28s %9.0f us  %6.1f GFLOP/s  %6.1f GB/s\n", name, 1e6 * s,
           1e-9 * count->flops / s, 1e-9 * count->bytes / s);
}

/* Every tensor an op may want, of the largest shape. */
struct buffers {
    struct iz_view y, a, dy, u, du, qkv, dqkv, lse, mean, rstd, w, dw, b, db;
};

static struct iz_view view_new(int64_t rows, int64_t cols)
{
    struct tensor t = tensor_new(IZ_F32, rows, cols, 0.5);

    free(t.d);
    return t.v;
}

static void attention_fwd(struct iz_exec *x, void *arg)
{
    struct buffers *b = arg;

    iz_attention_fwd(x,
                     &(struct iz_attention){b->qkv, b->y, b->lse, SEQ, HEADS});
}

static void attention_bwd(struct iz_exec *x, void *arg)
{
    struct buffers *b = arg;

    iz_attention_bwd(x, b->dqkv, b->dy,
                     &(struct iz_attention){b->qkv, b->y, b->lse, SEQ, HEADS});
}

static void gelu_fwd(struct iz_exec *x, void *arg)
{
    struct buffers *b = arg;

    iz_gelu_fwd(x, b->du, b->u);
}

static void gelu_bwd(struct iz_exec *x, void *arg)
{
    struct buffers *b = arg;

    iz_gelu_bwd(x, b->du, b->u, b->du, b->u);
}

static void norm_fwd(struct iz_exec *x, void *arg)
{
    struct buffers *b = arg;

    iz_layernorm_fwd(
        x, b->y, b->a,
        &(struct iz_norm){b->b, b->b, b->db, b->db, b->mean, b->rstd});
}

static void norm_bwd(struct iz_exec *x, void *arg)
{
    struct buffers *b = arg;

    iz_layernorm_bwd(
        x, b->y, b->y, b->dy, b->a,
        &(struct iz_norm){b->b, b->b, b->db, b->db, b->mean, b->rstd});
}

static void bias_bwd(struct iz_exec *x, void *arg)
{
    struct buffers *b = arg;

    iz_matmul_dw(x, b->u, b->a,
                 &(struct iz_linear){.db = {b->w.p, IZ_F32, 1, 4 * C}});
}

static void fc_fwd(struct iz_exec *x, void *arg)
{
    struct buffers *b = arg;

    iz_matmul_fwd(x, b->du, IZ_NONE, b->a, &(struct iz_linear){.w = b->w});
}

static void fc_bwd(struct iz_exec *x, void *arg)
{
    struct buffers *b = arg;
    struct iz_linear l = {.w = b->w, .dw = b->dw};

    iz_matmul_dw(x, b->u, b->a, &l);
    iz_matmul_da(x, b->y, b->u, &l);
}

static void bench_ops(void)
{
    static const struct {
        const char *name;
        void (*op)(struct iz_exec *x, void *arg);
    } op[] = {{"matmul [512,384,1536]", fc_fwd},
              {"matmul backward", fc_bwd},
              {"bias backward [512,1536]", bias_bwd},
              {"attention", attention_fwd},
              {"attention backward", attention_bwd},
              {"gelu [512,1536]", gelu_fwd},
              {"gelu backward", gelu_bwd},
              {"layernorm [512,384]", norm_fwd},
              {"layernorm backward", norm_bwd}};
    struct buffers b = {.y = view_new(M, C),
                        .a = view_new(M, C),
                        .dy = view_new(M, C),
                        .u = view_new(M, 4 * C),
                        .du = view_new(M, 4 * C),
                        .qkv = view_new(M, 3 * C),
                        .dqkv = view_new(M, 3 * C),
                        .lse = view_new(SAMPLES * HEADS, SEQ),
                        .mean = view_new(M, 1),
                        .rstd = view_new(M, 1),
                        .w = view_new(C, 4 * C),
                        .dw = view_new(C, 4 * C),
                        .b = view_new(1, C),
                        .db = view_new(1, C)};
    struct iz_view *all = (struct iz_view *)&b;

    for (size_t i = 0; i < sizeof op / sizeof op[0]; i++) {
        struct iz_exec count = {0};
        double s = time_op(op[i].op, &b, &count);
        show(op[i].name, s, &count);
    }
    for (size_t i = 0; i < sizeof b / sizeof *all; i++)
        free(all[i].p);
}

/* The three products of one weight matrix, bare. */
struct products {
    int64_t rows, in, out;
    bool out_in;
    float *a, *y, *w;
};

static void products(struct iz_exec *x, void *arg)
{
    const struct products *p = arg;
    int64_t ldw = p->out_in ? p->in : p->out;
    struct iz_gemm g[3] = {{p->rows, p->out, p->in, p->a, p->in, false, p->w,
                            ldw, p->out_in, p->y, p->out, 1, 0},
                           {p->rows, p->in, p->out, p->y, p->out, false, p->w,
                            ldw, !p->out_in, p->a, p->in, 1, 0},
                           {p->in, p->out, p->rows, p->a, p->in, true, p->y,
                            p->out, false, p->w, p->out, 1, 0}};

    if (p->out_in)
        g[2] =
            (struct iz_gemm){p->out, p->in, p->rows, p->y,  p->out, true, p->a,
                             p->in,  false, p->w,    p->in, 1,      0};
    iz_count(x, 6. * (double)(p->rows * p->in * p->out), 0);
    if (x->backend == IZ_CPU)
        for (int i = 0; i < 3; i++)
            iz_gemm_cpu(&g[i]);
}

/* Flops and best seconds of the bare products of the whole model. */
static double bare(int64_t vocab, struct iz_exec *count)
{
    struct products p[] = {{.rows = M, .in = C, .out = 3 * C},
                           {.rows = M, .in = C, .out = C},
                           {.rows = M, .in = C, .out = 4 * C},
                           {.rows = M, .in = 4 * C, .out = C},
                           {.rows = M, .in = C, .out = vocab, .out_in = true}};
    int64_t most = vocab > 4 * C ? vocab : 4 * C;
    struct iz_view a = view_new(M, 4 * C), y = view_new(M, most);
    struct iz_view w = view_new(4 * C, most);
    double s = 0;

    for (int i = 0; i < 5; i++) {
        struct iz_exec one = {0};
        int times = i < 4 ? LAYERS : 1;
        p[i].a = a.p;
        p[i].y = y.p;
        p[i].w = w.p;
        s += times * time_op(products, &p[i], &one);
        count->flops += times * one.flops;
    }
    free(a.p);
    free(y.p);
    free(w.p);
    return s;
}

/* One unit on buffers of its own; saved activations are kept. */
struct step {
    struct iz_layer a;
    const struct iz_unit *u;
    struct iz_arena save;
};

static void forward(struct iz_exec *x, void *arg)
{
    struct step *s = arg;

    if (x->backend == IZ_CPU)
        x->save = s->save;
    s->u->forward(x, &s->a);
}

static void backward(struct iz_exec *x, void *arg)
{
    struct step *s = arg;

    if (x->backend == IZ_CPU)
        x->save = s->save;
    s->u->backward(x, &s->a);
}

/* Of the size that training starts from: large numbers make other code paths.
 */
static struct iz_view weight_new(const struct iz_param *p)
{
    struct tensor t =
        tensor_new(IZ_F32, p->rows, p->cols, 1.7 * (double)p->std);

    for (int64_t i = 0; p->init == IZ_INIT_ONE && i < p->cols; i++)
        t.d[i] = 1;
    tensor_store(&t);
    free(t.d);
    return t.v;
}

static double bench_unit(const struct iz_model *m, int unit, int32_t *tokens,
                         struct iz_exec *count)
{
    const struct iz_unit *u = &m->unit[unit];
    struct iz_view w[16], dw[16], x = view_new(SAMPLES, SEQ * C);
    struct iz_view y = view_new(SAMPLES, SEQ * C),
                   d = view_new(SAMPLES, SEQ * C);
    int n = u->n_params;
    double loss, forward_s = 0, backward_s;
    struct step s = {.u = u,
                     .a = {.self = m->self,
                           .unit = unit,
                           .samples = SAMPLES,
                           .w = w,
                           .dw = dw,
                           .x = x,
                           .y = y,
                           .dy = d,
                           .dx = d,
                           .input = tokens,
                           .target = tokens,
                           .loss = &loss,
                           .loss_scale = 1},
                     .save = arena_new((int64_t)1 << 26)};

    for (int i = 0; i < n; i++) {
        w[i] = weight_new(&u->param[i]);
        dw[i] = view_new(u->param[i].rows, u->param[i].cols);
    }
    if (u->tied_unit >= 0) {
        w[n] = weight_new(&m->unit[0].param[0]);
        dw[n++] = view_new(m->vocab, C);
    }
    if (u->forward)
        forward_s = time_op(forward, &s, count);
    backward_s = time_op(backward, &s, count);
    printf("  %-8s forward %8.0f us, backward %8.0f us\n", u->name,
           1e6 * forward_s, 1e6 * backward_s);
    for (int i = 0; i < n; i++) {
        free(w[i].p);
        free(dw[i].p);
    }
    free(x.p);
    free(y.p);
    free(d.p);
    free(s.save.base);
    return forward_s + backward_s;
}

static void bench_model(int vocab)
{
    struct iz_gpt2_config c = {LAYERS, HEADS, C, SEQ, vocab};
    struct iz_exec count = {0}, gemm = {0};
    struct iz_model *m;
    int32_t *tokens = calloc(M, sizeof *tokens);
    double s = 0, gemm_s = bare(vocab, &gemm), again;

    for (int i = 0; i < M; i++)
        tokens[i] = fixture_below(vocab);
    assert_int_equal(iz_gpt2_open(&m, &c), 0);
    printf("GPT 6 x 384, vocabulary %d, 2 x 256 tokens\n", vocab);
    for (int u = 0; u < m->n_units; u += u == 1 ? LAYERS : 1) {
        struct iz_exec one = {0};
        int times = u == 1 ? LAYERS : 1;
        s += times * bench_unit(m, u, tokens, &one);
        count.flops += times * one.flops;
    }
    again =
        bare(vocab, &(struct iz_exec){0}); /* the machine may have changed */
    gemm_s = again < gemm_s ? again : gemm_s;
    printf(
        "  forward + backward %.1f ms, %.1f GFLOP/s = %.1f %% of the %.1f of "
        "its bare products\n",
        1e3 * s, 1e-9 * count.flops / s,
        100 * (count.flops / s) / (gemm.flops / gemm_s),
        1e-9 * gemm.flops / gemm_s);
    iz_model_close(&m);
    free(tokens);
}

int ops_bench(void)
{
    fixture_seed();
    bench_ops();
    bench_model(256);
    bench_model(50304);
    return 0;
}
