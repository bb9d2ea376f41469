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

/* Every tensor an op may want, of the largest shape. */
enum { Y, A, DY, U, DU, QKV, DQKV, LSE, MEAN, RSTD, W, DW, B, DB, BUFFERS };

static const int64_t shape[BUFFERS][2] = {
    [Y] = {M, C},        [A] = {M, C},
    [DY] = {M, C},       [U] = {M, 4 * C},
    [DU] = {M, 4 * C},   [QKV] = {M, 3 * C},
    [DQKV] = {M, 3 * C}, [LSE] = {SAMPLES * HEADS, SEQ},
    [MEAN] = {M, 1},     [RSTD] = {M, 1},
    [W] = {C, 4 * C},    [DW] = {C, 4 * C},
    [B] = {1, C},        [DB] = {1, C}};

enum op {
    MATMUL,
    MATMUL_BACKWARD,
    BIAS_BACKWARD,
    ATTENTION,
    ATTENTION_BACKWARD,
    GELU,
    GELU_BACKWARD,
    NORM,
    NORM_BACKWARD,
    OPS
};

static const char *const op_names[OPS] = {"matmul [512,384,1536]",
                                          "matmul backward",
                                          "bias backward [512,1536]",
                                          "attention",
                                          "attention backward",
                                          "gelu [512,1536]",
                                          "gelu backward",
                                          "layernorm [512,384]",
                                          "layernorm backward"};

/* One unit on buffers of its own; saved activations are kept. */
struct step {
    struct iz_layer a;
    const struct iz_unit *u;
    struct iz_arena save;
    struct iz_view w[MAX_PARAMS], dw[MAX_PARAMS];
    double loss;
};

/* What is timed, `times` per step of the model. */
struct job {
    const char *name;
    void (*run)(struct iz_exec *x, struct job *j);
    int times;
    /* The op and its buffers; a unit and its direction; or, for comparison, the
     * three bare products of one weight matrix. */
    enum op op;
    const struct iz_view *v;
    struct step *step;
    bool back, product, out_in;
    int64_t in, out;

    struct iz_exec x;
    double flops, bytes, last_s, best_s;
};

static void job_open(struct job *j)
{
    struct iz_exec dry = iz_exec_dry(IZ_CPU, IZ_F32);
    j->run(&dry, j);
    j->x = (struct iz_exec){
        .backend = IZ_CPU,
        .work = {.base = fixture_take(dry.work.peak), .size = dry.work.peak}};
    j->flops = dry.flops;
    j->bytes = dry.bytes;
    j->best_s = 1e30;
    j->run(&j->x, j); /* touches all memory */
}

static double now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void job_time(struct job *j)
{
    double t = now_s();
    j->run(&j->x, j);
    j->last_s = now_s() - t;
    j->best_s = j->last_s < j->best_s ? j->last_s : j->best_s;
}

/* The last line of a job. */
static void job_close(struct job *j)
{
    printf("  %-26s %9.0f us  %6.1f GFLOP/s  %6.1f GB/s\n", j->name,
           1e6 * j->best_s, 1e-9 * j->flops / j->best_s,
           1e-9 * j->bytes / j->best_s);
    free(j->x.work.base);
}

static struct iz_view view_new(int64_t rows, int64_t cols)
{
    struct tensor t = tensor_new(IZ_F32, rows, cols, 0.5);
    free(t.d);
    return t.v;
}

static void run_op(struct iz_exec *x, struct job *j)
{
    const struct iz_view *v = j->v;
    struct iz_attention a = {v[QKV], v[Y], v[LSE], SEQ, HEADS, 0, false};
    struct iz_norm_layer n = {v[B], v[B], v[DB], v[DB], v[MEAN], v[RSTD]};
    struct iz_linear l = {.w = v[W], .dw = v[DW]};
    switch (j->op) {
    case MATMUL:
        iz_matmul_fwd(x, v[DU], IZ_NONE, v[A], &l);
        break;
    case MATMUL_BACKWARD:
        iz_matmul_dw(x, v[U], v[A], &l);
        iz_matmul_da(x, v[Y], v[U], &l);
        break;
    case BIAS_BACKWARD:
        l = (struct iz_linear){.db = {v[W].p, IZ_F32, 1, 4 * C}};
        iz_matmul_dw(x, v[U], v[A], &l);
        break;
    case ATTENTION:
        iz_attention_fwd(x, &a);
        break;
    case ATTENTION_BACKWARD:
        iz_attention_bwd(x, v[DQKV], v[DY], &a);
        break;
    case GELU:
        iz_gelu_fwd(x, v[DU], v[U]);
        break;
    case GELU_BACKWARD:
        iz_gelu_bwd(x, v[DU], v[U], v[DU], v[U]);
        break;
    case NORM:
        iz_layernorm_fwd(x, v[Y], v[A], &n, false);
        break;
    default:
        iz_layernorm_bwd(x, v[Y], v[Y], v[DY], v[A], &n);
    }
}

static void bench_ops(void)
{
    struct iz_view v[BUFFERS];
    for (int i = 0; i < BUFFERS; i++)
        v[i] = view_new(shape[i][0], shape[i][1]);
    printf("ops\n");
    for (int i = 0; i < OPS; i++) {
        struct job j = {.name = op_names[i],
                        .run = run_op,
                        .times = 1,
                        .op = (enum op)i,
                        .v = v};
        job_open(&j);
        for (int r = 0; r < ROUNDS; r++)
            job_time(&j);
        job_close(&j);
    }
    for (int i = 0; i < BUFFERS; i++)
        free(v[i].p);
}

/* v: a, y and w of the largest product. */
static void run_products(struct iz_exec *x, struct job *j)
{
    int64_t in = j->in, out = j->out, ldw = j->out_in ? in : out;
    float *a = j->v[0].p, *y = j->v[1].p, *w = j->v[2].p;
    struct iz_gemm g[3] = {
        {M, out, in, a, in, false, w, ldw, j->out_in, y, out, 1, 0},
        {M, in, out, y, out, false, w, ldw, !j->out_in, a, in, 1, 0},
        {in, out, M, a, in, true, y, out, false, w, out, 1, 0}};
    if (j->out_in)
        g[2] = (struct iz_gemm){out, in,    M, y,  out, true, a,
                                in,  false, w, in, 1,   0};
    iz_count(x, 6. * (double)(M * in * out), 0);
    for (int i = 0; x->backend == IZ_CPU && !x->dry && i < 3; i++)
        iz_gemm_cpu(&g[i]);
}

static void run_unit(struct iz_exec *x, struct job *j)
{
    struct step *s = j->step;
    if (!x->dry)
        x->save = s->save;
    (j->back ? s->u->backward : s->u->forward)(x, &s->a);
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
            job_time(&job[i]);
            s[job[i].product] += job[i].times * job[i].last_s;
            flops[job[i].product] += job[i].times * job[i].flops;
        }
        rate[r] = flops[0] / s[0];
        bare[r] = flops[1] / s[1];
        ratio[r] = rate[r] / bare[r];
    }
    for (int i = 0; i < n; i++)
        job_close(&job[i]);
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
    static const struct {
        const char *name;
        int64_t in, out; /* 0: the vocabulary */
    } product[] = {{"c_attn", C, 3 * C},
                   {"attn.c_proj", C, C},
                   {"c_fc", C, 4 * C},
                   {"mlp.c_proj", 4 * C, C},
                   {"logits", C, 0}};
    static const char *const name[3][2] = {{"embed forward", "embed backward"},
                                           {"block forward", "block backward"},
                                           {"", "head backward"}};
    struct iz_gpt2_config c = {LAYERS, HEADS, C, SEQ, vocab};
    int64_t most = vocab > 4 * C ? vocab : 4 * C;
    struct iz_view v[] = {view_new(M, 4 * C), view_new(M, most),
                          view_new(4 * C, most)};
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
        for (int back = !step[i].u->forward; back < 2; back++)
            job[n++] = (struct job){.name = name[i][back],
                                    .run = run_unit,
                                    .times = i == 1 ? LAYERS : 1,
                                    .step = &step[i],
                                    .back = back};
    }
    for (int i = 0; i < 5; i++)
        job[n++] = (struct job){.name = product[i].name,
                                .run = run_products,
                                .times = i < 4 ? LAYERS : 1,
                                .v = v,
                                .product = true,
                                .out_in = i == 4,
                                .in = product[i].in,
                                .out = i < 4 ? product[i].out : vocab};
    for (int i = 0; i < n; i++)
        job_open(&job[i]);
    compare(job, n);
    for (int i = 0; i < 3; i++) {
        step_close(&step[i]);
        free(v[i].p);
    }
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
