/* SPDX-License-Identifier: Apache-2.0 */
/* Times the ops and the whole model in the shapes of a GPT of 6 layers x 384
 * and two samples of 256 tokens, on one thread, against bare matrix products of
 * the same shapes in the same run.  CPU time. */
#include "tests/codelets/ops/fixture.h"
#include "tests/codelets/ops/test_ops.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "codelets/ops/gemm.h"
#include "models/gpt2.h"

enum { SAMPLES = 2, SEQ = 256, C = 384, HEADS = 6, LAYERS = 6 };
enum { M = SAMPLES * SEQ, ROUNDS = 9, MAX_PARAMS = 16 };

static double now_s(void)
{
    struct timespec t;

    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* One function to time, `times` per step of the model. */
struct job {
    const char *name;
    void (*op)(struct iz_exec *x, void *arg);
    void *arg;
    int times;
    bool product; /* a bare matrix product, for comparison */
    struct iz_exec x;
    double flops, bytes, last_s, best_s;
};

static struct job job_new(const char *name,
                          void (*op)(struct iz_exec *x, void *arg), void *arg,
                          int times)
{
    struct iz_exec dry = iz_exec_dry(IZ_CPU, IZ_F32);
    struct job j = {.name = name,
                    .op = op,
                    .arg = arg,
                    .times = times,
                    .x = {.backend = IZ_CPU},
                    .best_s = 1e30};

    op(&dry, arg);
    j.x.work = (struct iz_arena){.base = fixture_take(dry.work.peak),
                                 .size = dry.work.peak};
    j.flops = dry.flops;
    j.bytes = dry.bytes;
    op(&j.x, arg); /* touches all memory */
    return j;
}

static void job_run(struct job *j)
{
    double t = now_s();

    j->op(&j->x, j->arg);
    j->last_s = now_s() - t;
    j->best_s = j->last_s < j->best_s ? j->last_s : j->best_s;
}

static void job_show(const struct job *j)
{
    printf("  %-26s %9.0f us  %6.1f GFLOP/s  %6.1f GB/s\n", j->name,
           1e6 * j->best_s, 1e-9 * j->flops / j->best_s,
           1e-9 * j->bytes / j->best_s);
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

    iz_attention_fwd(
        x, &(struct iz_attention){b->qkv, b->y, b->lse, SEQ, HEADS, 0, false});
}

static void attention_bwd(struct iz_exec *x, void *arg)
{
    struct buffers *b = arg;

    iz_attention_bwd(
        x, b->dqkv, b->dy,
        &(struct iz_attention){b->qkv, b->y, b->lse, SEQ, HEADS, 0, false});
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
        &(struct iz_norm_layer){b->b, b->b, b->db, b->db, b->mean, b->rstd});
}

static void norm_bwd(struct iz_exec *x, void *arg)
{
    struct buffers *b = arg;

    iz_layernorm_bwd(
        x, b->y, b->y, b->dy, b->a,
        &(struct iz_norm_layer){b->b, b->b, b->db, b->db, b->mean, b->rstd});
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

    printf("ops\n");
    for (size_t i = 0; i < sizeof(op) / sizeof(op[0]); i++) {
        struct job t = job_new(op[i].name, op[i].op, &b, 1);

        for (int r = 0; r < ROUNDS; r++)
            job_run(&t);
        job_show(&t);
        free(t.x.work.base);
    }
    for (size_t i = 0; i < sizeof(b) / sizeof(*all); i++)
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

/* One unit on buffers of its own; saved activations are kept. */
struct step {
    struct iz_layer a;
    const struct iz_unit *u;
    struct iz_arena save;
    struct iz_view w[MAX_PARAMS], dw[MAX_PARAMS];
    double loss;
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

static void step_open(struct step *s, const struct iz_model *m, int unit,
                      int32_t *tokens)
{
    const struct iz_unit *u = &m->unit[unit];
    struct iz_view x = view_new(SAMPLES, SEQ * C),
                   y = view_new(SAMPLES, SEQ * C);
    struct iz_view d = view_new(SAMPLES, SEQ * C);
    int n = u->n_params;

    *s = (struct step){.u = u, .save = {.size = 1 << 26}};
    s->save.base = fixture_take(s->save.size);
    for (int i = 0; i < n; i++) {
        s->w[i] = weight_new(&u->param[i]);
        s->dw[i] = view_new(u->param[i].rows, u->param[i].cols);
    }
    if (u->tied_unit >= 0) {
        s->w[n] = weight_new(&m->unit[0].param[0]);
        s->dw[n] = view_new(m->vocab, C);
    }
    s->a = (struct iz_layer){.self = u->self,
                             .unit = unit,
                             .samples = SAMPLES,
                             .w = s->w,
                             .dw = s->dw,
                             .x = x,
                             .y = y,
                             .dy = d,
                             .dx = d,
                             .input = tokens,
                             .target = tokens,
                             .loss = &s->loss,
                             .loss_scale = 1};
}

static void step_close(struct step *s)
{
    for (int i = 0; i < MAX_PARAMS; i++) {
        free(s->w[i].p);
        free(s->dw[i].p);
    }
    free(s->a.x.p);
    free(s->a.y.p);
    free(s->a.dy.p);
    free(s->save.base);
}

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

/* Runs all jobs in turn, again and again: model and bare products see the same
 * neighbours on the machine.  Prints the median over the rounds. */
static void compare(struct job *job, int n)
{
    double ratio[ROUNDS], rate[ROUNDS], bare[ROUNDS];

    for (int r = 0; r < ROUNDS; r++) {
        double s[2] = {0}, flops[2] = {0};

        for (int i = 0; i < n; i++) {
            job_run(&job[i]);
            s[job[i].product] += job[i].times * job[i].last_s;
            flops[job[i].product] += job[i].times * job[i].flops;
        }
        rate[r] = flops[0] / s[0];
        bare[r] = flops[1] / s[1];
        ratio[r] = rate[r] / bare[r];
    }
    for (int i = 0; i < n; i++)
        job_show(&job[i]);
    qsort(ratio, ROUNDS, sizeof(*ratio), ascending);
    qsort(rate, ROUNDS, sizeof(*rate), ascending);
    qsort(bare, ROUNDS, sizeof(*bare), ascending);
    printf("  model %.1f GFLOP/s, its bare products %.1f: %.1f %% (%.1f to "
           "%.1f)\n",
           1e-9 * rate[ROUNDS / 2], 1e-9 * bare[ROUNDS / 2],
           100 * ratio[ROUNDS / 2], 100 * ratio[0], 100 * ratio[ROUNDS - 1]);
}

static void bench_model(int vocab)
{
    struct iz_gpt2_config c = {LAYERS, HEADS, C, SEQ, vocab};
    int64_t most = vocab > 4 * C ? vocab : 4 * C;
    struct iz_view a = view_new(M, 4 * C), y = view_new(M, most);
    struct iz_view w = view_new(4 * C, most);
    struct products p[] = {{M, C, 3 * C, false, a.p, y.p, w.p},
                           {M, C, C, false, a.p, y.p, w.p},
                           {M, C, 4 * C, false, a.p, y.p, w.p},
                           {M, 4 * C, C, false, a.p, y.p, w.p},
                           {M, C, vocab, true, a.p, y.p, w.p}};
    static const char *name[] = {"c_attn", "attn.c_proj", "c_fc", "mlp.c_proj",
                                 "logits"};
    int32_t *tokens = calloc(M, sizeof(*tokens));
    struct step step[3];
    struct iz_model *m;
    struct job job[10];
    int n = 0;

    for (int i = 0; i < M; i++)
        tokens[i] = fixture_below(vocab);
    assert_int_equal(iz_gpt2_open(&m, &c), 0);
    printf("GPT 6 x 384, vocabulary %d, 2 x 256 tokens\n", vocab);
    for (int i = 0; i < 3; i++) {
        step_open(&step[i], m, i < 2 ? i : LAYERS + 1, tokens);
        if (step[i].u->forward)
            job[n++] = job_new(i ? "block forward" : "embed forward", forward,
                               &step[i], i == 1 ? LAYERS : 1);
        job[n++] = job_new(i == 0   ? "embed backward"
                           : i == 1 ? "block backward"
                                    : "head backward",
                           backward, &step[i], i == 1 ? LAYERS : 1);
    }
    for (int i = 0; i < 5; i++) {
        job[n] = job_new(name[i], products, &p[i], i < 4 ? LAYERS : 1);
        job[n++].product = true;
    }
    compare(job, n);
    for (int i = 0; i < n; i++)
        free(job[i].x.work.base);
    for (int i = 0; i < 3; i++)
        step_close(&step[i]);
    free(a.p);
    free(y.p);
    free(w.p);
    free(tokens);
    iz_model_close(&m);
}

int ops_bench(void)
{
    fixture_seed();
    bench_ops();
    bench_model(256);
    bench_model(50304);
    return 0;
}
