/* SPDX-License-Identifier: Apache-2.0 */
/* The whole model, as the program runs it unit by unit, against a
 * double-precision model of its own: gradients, training, and what the planner
 * relies on. */
#include "tests/ops/fixture.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "codelets/adamw.h"
#include "codelets/gemm.h"
#include "models/llama.h"
#include "tests/model/llama_double.h"

enum { MAX_PARAMS = 16, MOST = 64 };

/* A model with its parameters, gradients and boundary tensors. */
struct run {
    struct iz_llama_config c;
    struct iz_model *m;
    enum iz_dtype type;
    int samples, n;        /* n: parameters */
    struct tensor *w, *dw; /* own parameters of all units, one after another */
    struct tensor tied;    /* the head's part of the embedding's gradient */
    struct tensor *y, d;   /* boundaries; gradient, in and out in one place */
    struct iz_exec *saved; /* of each unit, when activations are kept */
    int32_t *input, *target;
    double loss;
};

static int first_param(const struct iz_model *m, int unit)
{
    int n = 0;

    for (int u = 0; u < unit; u++)
        n += m->unit[u].n_params;
    return n;
}

static void fill_params(struct run *r)
{
    for (int u = 0, k = 0; u < r->m->n_units; u++)
        for (int i = 0; i < r->m->unit[u].n_params; i++, k++) {
            const struct iz_param *p = &r->m->unit[u].param[i];
            /* Large enough that every path of the gradient counts. */
            double scale = p->rows == 1 ? 0.5 : 0.6;

            r->w[k] = tensor_new(r->type, p->rows, p->cols, scale);
            for (int64_t j = 0; p->init == IZ_INIT_ONE && j < p->cols; j++)
                r->w[k].d[j] += 1;
            tensor_store(&r->w[k]);
            r->dw[k] = tensor_new(r->type, p->rows, p->cols, 1);
        }
}

static struct run run_new(struct iz_llama_config c, enum iz_dtype type,
                          int samples)
{
    struct run r = {.c = c, .type = type, .samples = samples};
    int m = samples * c.seq;

    assert_int_equal(iz_llama_open(&r.m, &c), 0);
    r.n = first_param(r.m, r.m->n_units);
    assert_true(r.n <= MOST);
    r.w = calloc((size_t)r.n, sizeof *r.w);
    r.dw = calloc((size_t)r.n, sizeof *r.dw);
    fill_params(&r);
    r.tied = tensor_new(type, c.vocab, c.width, 1);
    r.y = calloc((size_t)r.m->n_units, sizeof *r.y);
    r.saved = calloc((size_t)r.m->n_units, sizeof *r.saved);
    for (int u = 0; u < r.m->n_units; u++)
        r.y[u] = tensor_new(IZ_F32, samples, r.m->unit[u].out_elems, 1);
    r.d = tensor_new(IZ_F32, samples, (int64_t)c.seq * c.width, 1);
    r.input = calloc((size_t)m, sizeof *r.input);
    r.target = calloc((size_t)m, sizeof *r.target);
    for (int i = 0; i < m; i++) {
        r.input[i] = fixture_below(c.vocab);
        r.target[i] = i % 4 == 2 ? -1 : fixture_below(c.vocab);
    }
    return r;
}

static void run_free(struct run *r)
{
    for (int i = 0; i < r->n; i++) {
        tensor_free(&r->w[i]);
        tensor_free(&r->dw[i]);
    }
    for (int u = 0; u < r->m->n_units; u++)
        tensor_free(&r->y[u]);
    tensor_free(&r->tied);
    tensor_free(&r->d);
    free(r->w);
    free(r->dw);
    free(r->y);
    free(r->saved);
    free(r->input);
    free(r->target);
    iz_model_close(&r->m);
}

typedef void call_fn(struct iz_exec *x, const struct iz_layer *a);

static struct iz_view view_of(struct iz_view v, bool dry)
{
    if (dry)
        v.p = NULL;
    return v;
}

/* Calls a layer function of unit u, dry (every pointer NULL) or not. */
static void call(struct run *r, int u, call_fn *f, struct iz_exec *x,
                 float *logits)
{
    const struct iz_unit *unit = &r->m->unit[u];
    bool dry = x->dry;
    struct iz_view w[MAX_PARAMS], dw[MAX_PARAMS];
    int at = first_param(r->m, u), n = unit->n_params;
    struct iz_layer a = {.self = r->m->self,
                         .unit = u,
                         .samples = r->samples,
                         .w = w,
                         .dw = dw,
                         .x = u ? view_of(r->y[u - 1].v, dry) : IZ_NONE,
                         .y = view_of(r->y[u].v, dry),
                         .dy = view_of(r->d.v, dry),
                         .dx = view_of(r->d.v, dry),
                         .input = dry ? NULL : r->input,
                         .target = dry ? NULL : r->target,
                         .loss = dry ? NULL : &r->loss,
                         .loss_scale = 1,
                         .row = r->c.seq - 1,
                         .logits = logits};

    for (int i = 0; i < n; i++) {
        w[i] = view_of(r->w[at + i].v, dry);
        dw[i] = view_of(r->dw[at + i].v, dry);
    }
    if (unit->tied_unit >= 0) {
        int t = first_param(r->m, unit->tied_unit) + unit->tied_param;

        w[n] = view_of(r->w[t].v, dry);
        dw[n] = view_of(r->tied.v, dry);
    }
    f(x, &a);
}

/* Calls f with work of exactly the size that a dry run asks for.  x->save is
 * the caller's. */
static void call_exact(struct run *r, int u, call_fn *f, struct iz_exec *x,
                       float *logits)
{
    struct iz_exec dry = iz_exec_dry(IZ_CPU, IZ_F32);

    call(r, u, f, &dry, logits);
    x->backend = IZ_CPU;
    x->dry = false;
    x->act = IZ_F32;
    x->flops = x->bytes = 0;
    x->work = (struct iz_arena){.base = fixture_take(dry.work.peak),
                                .size = dry.work.peak};
    x->save.used = 0;
    if (!x->save.base && dry.save.peak) {
        x->save.base = fixture_take(dry.save.peak);
        x->save.size = dry.save.peak;
    }
    call(r, u, f, x, logits);
    assert_int_equal(x->work.used, 0);
    assert_int_equal(x->work.peak, dry.work.peak);
    assert_int_equal(x->save.used, dry.save.peak);
    assert_true(x->flops == dry.flops && x->bytes == dry.bytes);
    free(x->work.base);
    x->work = (struct iz_arena){0};
}

static void forget(struct iz_exec *x)
{
    free(x->save.base);
    x->save = (struct iz_arena){0};
}

/* Forward and backward of all units; `keep` the saved activations or compute
 * them again right before each backward. */
static void train(struct run *r, bool keep)
{
    int last = r->m->n_units - 1;

    for (int u = 0; u < last; u++) {
        call_exact(r, u, r->m->unit[u].forward, &r->saved[u], NULL);
        if (!keep)
            forget(&r->saved[u]);
    }
    for (int u = last; u >= 0; u--) {
        struct iz_exec *x = &r->saved[u];

        if (!keep && u < last)
            call_exact(r, u, r->m->unit[u].forward, x, NULL);
        call_exact(r, u, r->m->unit[u].backward, x, NULL);
        forget(x);
    }
}

/* With the values of the run's parameters. */
static struct llama_double double_of(const struct run *r, double **param)
{
    const struct iz_llama_config *c = &r->c;

    for (int i = 0; i < r->n; i++)
        param[i] = r->w[i].d;
    return (struct llama_double){
        .layers = c->layers,
        .heads = c->heads,
        .kv_heads = c->kv_heads ? c->kv_heads : c->heads,
        .head_dim = c->head_dim ? c->head_dim : c->width / c->heads,
        .width = c->width,
        .ffn = c->ffn,
        .seq = c->seq,
        .vocab = c->vocab,
        .theta = c->rope_theta,
        .eps = c->norm_eps,
        .factor = c->rope_scaling_factor,
        .low_freq = c->rope_scaling_low_freq_factor,
        .high_freq = c->rope_scaling_high_freq_factor,
        .original_seq = c->rope_scaling_original_seq,
        .tied = c->tie_embeddings,
        .qkv_bias = c->qkv_bias,
        .qk_norm = c->qk_norm,
        .param = param,
    };
}

static double loss_of(const struct run *r, const struct llama_double *g)
{
    return llama_double_loss(g, r->input, r->target, r->samples, 0, NULL);
}

/* By central differences. */
static double slope(const struct run *r, const struct llama_double *g, int i,
                    int64_t k)
{
    double *p = g->param[i], was = p[k], up;

    p[k] = was + 1e-5;
    up = loss_of(r, g);
    p[k] = was - 1e-5;
    up -= loss_of(r, g);
    p[k] = was;
    return up / 2e-5;
}

static double gradient_at(const struct run *r, int i, int64_t k)
{
    bool tied = i == 0 && r->c.tie_embeddings;

    return r->dw[i].d[k] + (tied ? r->tied.d[k] : 0);
}

/* Tensor i against central differences in double, every step-th element; the
 * error is measured against the norm of the tensor. */
static void check_tensor(struct run *r, const struct llama_double *g, int i,
                         const char *name, int step, double tol)
{
    double error = 0, norm = 0;

    tensor_load(&r->dw[i]);
    tensor_load(&r->tied);
    for (int64_t k = 0; k < iz_view_len(r->dw[i].v); k += step) {
        double want = slope(r, g, i, k);

        norm += want * want;
        error += pow(gradient_at(r, i, k) - want, 2);
    }
    if (!(sqrt(error) <= tol * sqrt(norm) + 1e-8))
        fail_msg("%s: gradient off by %.3g of its norm %.3g", name,
                 sqrt(error / norm), sqrt(norm));
}

static void check_gradients(struct iz_llama_config c, enum iz_dtype type,
                            int samples, int step)
{
    double *param[MOST], tol = 2e-5;
    struct run r = run_new(c, type, samples);
    struct llama_double g = double_of(&r, param);

    if (type != IZ_F32)
        tol = type == IZ_BF16 ? 0x1p-8 : 0x1p-11;
    train(&r, true);
    double want = loss_of(&r, &g);
    assert_true(fabs(r.loss - want) <= 1e-5 * fmax(1, want));
    for (int u = 0, i = 0; u < r.m->n_units; u++)
        for (int k = 0; k < r.m->unit[u].n_params; k++, i++)
            check_tensor(&r, &g, i, r.m->unit[u].param[k].name, step, tol);
    run_free(&r);
}

static const struct iz_llama_config tiny = {.layers = 2,
                                            .heads = 2,
                                            .width = 8,
                                            .ffn = 7,
                                            .seq = 5,
                                            .vocab = 7,
                                            .norm_eps = 1e-5,
                                            .rope_theta = 100,
                                            .rope_scaling_factor = 1};

/* All options at once, each size another odd one. */
static struct iz_llama_config all_options(void)
{
    struct iz_llama_config c = tiny;

    c.heads = 6;
    c.kv_heads = 3;
    c.head_dim = 4;
    c.width = 9;
    c.seq = 11;
    c.norm_eps = 1e-6;
    c.rope_scaling_factor = 8;
    c.rope_scaling_low_freq_factor = 1;
    c.rope_scaling_high_freq_factor = 4;
    c.rope_scaling_original_seq = 64;
    c.tie_embeddings = true;
    c.qkv_bias = true;
    c.qk_norm = true;
    return c;
}

static struct iz_llama_config longer(void)
{
    struct iz_llama_config c = tiny;

    c.layers = 1;
    c.heads = 3;
    c.kv_heads = 1;
    c.width = 12;
    c.seq = 67;
    return c;
}

static void gradients_agree_with_central_differences(void **state)
{
    struct iz_llama_config c = tiny;

    (void)state;
    fixture_seed();
    check_gradients(tiny, IZ_F32, 2, 1);
    check_gradients(all_options(), IZ_F32, 2, 1);
    check_gradients(longer(), IZ_F32, 2, 3);
    c.kv_heads = 1;
    c.tie_embeddings = true;
    check_gradients(c, IZ_F32, 1, 1);
    c.tie_embeddings = false;
    c.qk_norm = true;
    c.norm_eps = 0.1; /* not lost beside the squares */
    check_gradients(c, IZ_F32, 3, 1);
}

static void gradients_of_16_bit_weights_agree(void **state)
{
    (void)state;
    fixture_seed();
    check_gradients(all_options(), IZ_BF16, 2, 1);
    check_gradients(all_options(), IZ_F16, 2, 1);
}

/* AdamW in double, by the book. */
static void step_in_double(double *p, double *m, double *v, double g,
                           const struct iz_adam *a)
{
    *m = a->beta1 * *m + (1 - a->beta1) * g;
    *v = a->beta2 * *v + (1 - a->beta2) * g * g;
    *p -= a->lr * a->weight_decay * *p;
    *p -= a->lr * (*m / (1 - pow(a->beta1, (double)a->t))) /
          (sqrt(*v / (1 - pow(a->beta2, (double)a->t))) + a->eps);
}

/* A model that is trained twice, here and in double. */
struct twins {
    struct run r;
    double *param[MOST], *m[MOST], *v[MOST], *g[MOST];
    float *low_m[MOST], *low_v[MOST];
    struct llama_double d;
};

/* In place, because d points into t. */
static void twins_make(struct twins *t, struct iz_llama_config c)
{
    t->r = run_new(c, IZ_F32, 2);
    t->d = double_of(&t->r, t->param);
    for (int i = 0; i < t->r.n; i++) {
        size_t n = (size_t)iz_view_len(t->r.w[i].v);

        t->m[i] = calloc(n, sizeof(double));
        t->v[i] = calloc(n, sizeof(double));
        t->g[i] = calloc(n, sizeof(double));
        t->low_m[i] = calloc(n, sizeof(float));
        t->low_v[i] = calloc(n, sizeof(float));
    }
}

static void twins_free(struct twins *t)
{
    for (int i = 0; i < t->r.n; i++) {
        free(t->m[i]);
        free(t->v[i]);
        free(t->g[i]);
        free(t->low_m[i]);
        free(t->low_v[i]);
    }
    run_free(&t->r);
}

static void step_double(struct twins *t, const struct iz_adam *a)
{
    for (int i = 0; i < t->r.n; i++)
        for (int64_t k = 0; k < iz_view_len(t->r.w[i].v); k++)
            t->g[i][k] = slope(&t->r, &t->d, i, k);
    for (int i = 0; i < t->r.n; i++)
        for (int64_t k = 0; k < iz_view_len(t->r.w[i].v); k++)
            step_in_double(&t->param[i][k], &t->m[i][k], &t->v[i][k],
                           t->g[i][k], a);
}

static void step_program(struct twins *t, const struct iz_adam *a)
{
    struct run *r = &t->r;

    train(r, true);
    for (int i = 0; i < r->n; i++) {
        int64_t n = iz_view_len(r->w[i].v);
        float *dw = r->dw[i].v.p, *tied = r->tied.v.p;

        for (int64_t k = 0; i == 0 && r->c.tie_embeddings && k < n; k++)
            dw[k] += tied[k];
        iz_adam_chunk(a, n, r->w[i].v.p, t->low_m[i], t->low_v[i], dw, IZ_F32,
                      NULL, IZ_F32);
    }
}

/* eps is far above the error of a gradient, which a small gradient would
 * otherwise make a step of. */
static void ten_steps_agree_with_double(void **state)
{
    struct iz_adam a = {.lr = 0.02,
                        .beta1 = 0.9,
                        .beta2 = 0.95,
                        .eps = 1e-3,
                        .weight_decay = 0.1,
                        .adamw = true,
                        .bias_correction = true,
                        .grad_scale = 1};
    struct twins t;
    double first = 0, loss = 0;

    (void)state;
    fixture_seed();
    twins_make(&t, all_options());
    for (a.t = 1; a.t <= 10; a.t++) {
        loss = loss_of(&t.r, &t.d);
        first = a.t == 1 ? loss : first;
        step_program(&t, &a);
        assert_true(fabs(t.r.loss - loss) <= 1e-5 * loss);
        step_double(&t, &a);
    }
    assert_true(loss < first - 0.1);
    for (int i = 0; i < t.r.n; i++)
        for (int64_t k = 0; k < iz_view_len(t.r.w[i].v); k++) {
            double got = (double)((float *)t.r.w[i].v.p)[k];

            if (!(fabs(got - t.param[i][k]) <= 2e-5))
                fail_msg("parameter %d, element %d: %.9g, not %.9g", i, (int)k,
                         got, t.param[i][k]);
        }
    twins_free(&t);
}

static struct run seeded(struct iz_llama_config c, enum iz_dtype type)
{
    fixture_seed();
    return run_new(c, type, 2);
}

static void recomputed_activations_give_the_same_bits(void **state)
{
    (void)state;
    for (int t = 0; t < 3; t++) {
        struct run a = seeded(all_options(), fixture_types[t]);
        struct run b = seeded(all_options(), fixture_types[t]);

        train(&a, true);
        train(&b, false);
        for (int i = 0; i < a.n; i++)
            fixture_same_bits("gradient", a.dw[i].v, b.dw[i].v);
        fixture_same_bits("tied gradient", a.tied.v, b.tied.v);
        assert_memory_equal(&a.loss, &b.loss, sizeof a.loss);
        run_free(&a);
        run_free(&b);
    }
}

static void evaluate_and_generate_agree(void **state)
{
    struct run r = seeded(all_options(), IZ_F32);
    int head = r.m->n_units - 1;
    float logits[7];
    double want[7], *param[MOST], loss;
    struct llama_double g = double_of(&r, param);
    struct iz_exec x = {0};

    (void)state;
    train(&r, true);
    loss = r.loss;
    r.loss = -1;
    call_exact(&r, head, r.m->unit[head].evaluate, &x, NULL);
    assert_true(r.loss == loss);
    call_exact(&r, head, r.m->unit[head].generate, &x, logits);
    llama_double_loss(&g, r.input, r.target, 1, r.c.seq - 1, want);
    for (int v = 0; v < 7; v++)
        assert_true(fabs((double)logits[v] - want[v]) < 1e-5);
    run_free(&r);
}

static void nan_reaches_the_loss(void **state)
{
    struct iz_llama_config c = all_options();

    (void)state;
    fixture_seed();
    for (int i = 0; i < 9; i++) {
        struct run r = run_new(c, IZ_F32, 1);

        r.w[1 + i].d[0] = NAN;
        tensor_store(&r.w[1 + i]);
        train(&r, true);
        assert_true(isnan(r.loss));
        run_free(&r);
    }
}

static int64_t parameters(struct iz_llama_config c)
{
    struct iz_model *m;
    int64_t n = 0;

    c.seq = 1;
    c.rope_theta = c.rope_scaling_factor = 1;
    assert_int_equal(iz_llama_open(&m, &c), 0);
    for (int u = 0; u < m->n_units; u++)
        for (int i = 0; i < m->unit[u].n_params; i++)
            n += m->unit[u].param[i].rows * m->unit[u].param[i].cols;
    iz_model_close(&m);
    return n;
}

/* Numbers of parameters of the published models. */
static void sizes_are_those_of_the_published_models(void **state)
{
    static const struct {
        struct iz_llama_config c;
        int64_t n;
    } model[] = {
        {{.layers = 16,
          .heads = 32,
          .kv_heads = 8,
          .width = 2048,
          .ffn = 8192,
          .vocab = 128256,
          .tie_embeddings = true},
         1235814400},
        {{.layers = 32,
          .heads = 32,
          .kv_heads = 8,
          .width = 4096,
          .ffn = 14336,
          .vocab = 128256},
         8030261248},
        {{.layers = 24,
          .heads = 14,
          .kv_heads = 2,
          .width = 896,
          .ffn = 4864,
          .vocab = 151936,
          .tie_embeddings = true,
          .qkv_bias = true},
         494032768},
        {{.layers = 28,
          .heads = 28,
          .kv_heads = 4,
          .width = 3584,
          .ffn = 18944,
          .vocab = 152064,
          .qkv_bias = true},
         7615616512},
        {{.layers = 28,
          .heads = 16,
          .kv_heads = 8,
          .head_dim = 128,
          .width = 1024,
          .ffn = 3072,
          .vocab = 151936,
          .tie_embeddings = true,
          .qk_norm = true},
         596049920},
        {{.layers = 36,
          .heads = 32,
          .kv_heads = 8,
          .head_dim = 128,
          .width = 4096,
          .ffn = 12288,
          .vocab = 151936,
          .qk_norm = true},
         8190735360},
        {{.layers = 32,
          .heads = 32,
          .kv_heads = 8,
          .width = 4096,
          .ffn = 14336,
          .vocab = 32768},
         7248023552},
    };

    (void)state;
    for (size_t i = 0; i < sizeof model / sizeof model[0]; i++)
        assert_int_equal(parameters(model[i].c), model[i].n);
}

/* 6 N per token for what is multiplied, and attention of all query heads. */
static void flops_follow_the_closed_form(void **state)
{
    struct run r = seeded(all_options(), IZ_F32);
    double flops = 0, c = r.c.width, t = r.c.seq, o = 6 * 4, kv = 3 * 4;
    double weights =
        2 * (c * (o + 2 * kv) + o * c + 3 * c * r.c.ffn) + c * r.c.vocab;
    double attention = 6 * o * (t + 1) * 2;

    (void)state;
    for (int u = 0; u < r.m->n_units; u++) {
        struct iz_exec x = iz_exec_dry(IZ_CPU, IZ_F32);

        if (r.m->unit[u].forward)
            call(&r, u, r.m->unit[u].forward, &x, NULL);
        call(&r, u, r.m->unit[u].backward, &x, NULL);
        flops += x.flops;
    }
    assert_true(flops == 2 * t * (6 * weights + attention));
    run_free(&r);
}

static void names_are_those_of_checkpoints(void **state)
{
    static const char *const name[] = {
        "layers.1.input_layernorm.weight",
        "layers.1.self_attn.qkv_proj.weight",
        "layers.1.self_attn.o_proj.weight",
        "layers.1.post_attention_layernorm.weight",
        "layers.1.mlp.gate_up_proj.weight",
        "layers.1.mlp.down_proj.weight",
        "layers.1.self_attn.qkv_proj.bias",
        "layers.1.self_attn.q_norm.weight",
        "layers.1.self_attn.k_norm.weight"};
    struct iz_llama_config c = all_options();
    struct iz_model *m;

    (void)state;
    assert_int_equal(iz_llama_open(&m, &c), 0);
    assert_int_equal(m->unit[2].n_params, 9);
    for (int i = 0; i < 9; i++)
        assert_string_equal(m->unit[2].param[i].name, name[i]);
    assert_string_equal(m->unit[0].param[0].name, "embed_tokens.weight");
    assert_string_equal(m->unit[3].param[0].name, "norm.weight");
    assert_int_equal(m->unit[3].tied_unit, 0);
    iz_model_close(&m);
    c.tie_embeddings = false;
    assert_int_equal(iz_llama_open(&m, &c), 0);
    assert_string_equal(m->unit[3].param[1].name, "lm_head.weight");
    assert_int_equal(m->unit[3].tied_unit, -1);
    iz_model_close(&m);
}

static void refuses(struct iz_llama_config c)
{
    struct iz_model *m;

    assert_true(iz_llama_open(&m, &c) < 0);
    assert_null(m);
}

static void impossible_models_are_refused(void **state)
{
    struct iz_llama_config c = tiny;

    (void)state;
    c.layers = 0;
    refuses(c);
    c = tiny;
    c.heads = 3; /* width 8 */
    refuses(c);
    c = tiny;
    c.kv_heads = 3;
    refuses(c);
    c = tiny;
    c.head_dim = 5;
    refuses(c);
    c = tiny;
    c.head_dim = 258;
    refuses(c);
    c = tiny;
    c.rope_theta = 0;
    refuses(c);
    c = all_options();
    c.rope_scaling_high_freq_factor = c.rope_scaling_low_freq_factor;
    refuses(c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gradients_agree_with_central_differences),
        cmocka_unit_test(gradients_of_16_bit_weights_agree),
        cmocka_unit_test(ten_steps_agree_with_double),
        cmocka_unit_test(recomputed_activations_give_the_same_bits),
        cmocka_unit_test(evaluate_and_generate_agree),
        cmocka_unit_test(nan_reaches_the_loss),
        cmocka_unit_test(sizes_are_those_of_the_published_models),
        cmocka_unit_test(flops_follow_the_closed_form),
        cmocka_unit_test(names_are_those_of_checkpoints),
        cmocka_unit_test(impossible_models_are_refused),
    };

    iz_gemm_open();
    return cmocka_run_group_tests_name("llama", tests, NULL, NULL);
}
