/* SPDX-License-Identifier: Apache-2.0 */
/* The table of CUDA ops for the stand-in.  An op enqueues a function that, when
 * its turn in the stream comes, reaches device memory through the stand-in and
 * calls the op of the CPU with scratch of its own: the bits are those of a run
 * on a CPU.  The scratch of the GPU is overwritten before and after, because
 * nothing may rely on what is in it. */
#include "codelets/cuda.h"

#include <assert.h>
#include <cuda_runtime_api.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "codelets/die.h"
#include "codelets/flat.h"
#include "codelets/rate.h"
#include "tests/standin/standin.h"

#define ALIGN 64
#define POISON 0xff /* NaN in every type */
#define POISONED 65536

struct iz_cuda {
    void *stream;
};

/* Arguments of a kernel on flat buffers of n elements. */
struct flat {
    int64_t n;
    void *out;
    float *p, *m, *v;
    const void *g;
    double *norm2;
    enum iz_dtype in_type, out_type;
    bool accumulate;
    int n_in;
};

/* An op with its arguments: device pointers until it runs. */
struct call {
    void (*op)(struct iz_exec *x, const struct call *c);
    void (*reach)(struct call *c); /* makes them pointers of the host */
    struct iz_view v[5], scratch;
    union {
        struct iz_linear linear;
        struct iz_norm norm;
        struct iz_rmsnorm rmsnorm;
        struct iz_rope rope;
        struct iz_attention attention;
        struct iz_classifier classifier;
        struct iz_adam adam;
        struct iz_table table;
    };
    struct flat flat;
    const int32_t *token;
    int64_t count; /* of tokens, or the first column of heads */
    bool back;
    const void *in[]; /* flat.n_in of them */
};

/* ---- running ------------------------------------------------------------ */

static void *reach(const void *p, int64_t bytes)
{
    if (!p || bytes == 0)
        return (void *)(uintptr_t)p;
    return iz_standin_kernel(p, (size_t)bytes);
}

static void reach_view(struct iz_view *v)
{
    v->p = reach(v->p, iz_view_bytes(*v));
}

/* Enough of it to be noticed: some scratch is large. */
static void poison(struct iz_view v)
{
    int64_t bytes = iz_view_bytes(v);
    if (v.p)
        memset(v.p, POISON, (size_t)(bytes < POISONED ? bytes : POISONED));
}

/* Memory for an arena of so many bytes, not empty. */
static char *arena_take(int64_t bytes)
{
    size_t whole = ((size_t)bytes / ALIGN + 1) * ALIGN;
    char *p = aligned_alloc(ALIGN, whole);

    if (!p)
        iz_die("no memory for %lld bytes of scratch", (long long)bytes);
    return p;
}

/* In the thread of the stream. */
static void run(void *arg)
{
    struct call *c = arg;
    struct iz_exec x = iz_exec_dry(IZ_CPU, IZ_F32);

    c->op(&x, c);
    x.dry = false;
    x.work.size = x.work.peak;
    x.work.base = arena_take(x.work.size);
    for (int i = 0; i < 5; i++)
        reach_view(&c->v[i]);
    reach_view(&c->scratch);
    if (c->reach)
        c->reach(c);
    poison(c->scratch);
    c->op(&x, c);
    poison(c->scratch);
    free(x.work.base);
    free(c);
}

static void submit_more(struct iz_exec *x, const struct call *c,
                        const void *const *in)
{
    size_t more = (size_t)c->flat.n_in * sizeof *in;
    struct call *copy = malloc(sizeof *copy + more);

    assert(x->backend == IZ_CUDA && !x->dry);
    if (!copy)
        iz_die("no memory for a call");
    *copy = *c;
    if (in)
        memcpy(copy->in, in, more);
    if (cudaLaunchHostFunc(x->stream, run, copy))
        iz_die("the stand-in refuses a call: is %p a stream?", x->stream);
}

static void submit(struct iz_exec *x, const struct call *c)
{
    submit_more(x, c, NULL);
}

/* ---- products ----------------------------------------------------------- */

static void linear_reach(struct call *c)
{
    reach_view(&c->linear.w);
    reach_view(&c->linear.b);
    reach_view(&c->linear.dw);
    reach_view(&c->linear.db);
}

static void matmul_fwd_op(struct iz_exec *x, const struct call *c)
{
    iz_matmul_fwd(x, c->v[0], c->v[1], c->v[2], &c->linear);
}

static void matmul_fwd(struct iz_exec *x, struct iz_view y, struct iz_view r,
                       struct iz_view a, const struct iz_linear *l,
                       struct iz_view scratch)
{
    submit(x, &(struct call){.op = matmul_fwd_op,
                             .reach = linear_reach,
                             .v = {y, r, a},
                             .scratch = scratch,
                             .linear = *l});
}

static void matmul_da_op(struct iz_exec *x, const struct call *c)
{
    iz_matmul_da(x, c->v[0], c->v[1], &c->linear);
}

static void matmul_da(struct iz_exec *x, struct iz_view da, struct iz_view dy,
                      const struct iz_linear *l, struct iz_view scratch)
{
    submit(x, &(struct call){.op = matmul_da_op,
                             .reach = linear_reach,
                             .v = {da, dy},
                             .scratch = scratch,
                             .linear = *l});
}

static void matmul_dw_op(struct iz_exec *x, const struct call *c)
{
    iz_matmul_dw(x, c->v[0], c->v[1], &c->linear);
}

static void matmul_dw(struct iz_exec *x, struct iz_view dy, struct iz_view a,
                      const struct iz_linear *l, struct iz_view scratch)
{
    submit(x, &(struct call){.op = matmul_dw_op,
                             .reach = linear_reach,
                             .v = {dy, a},
                             .scratch = scratch,
                             .linear = *l});
}

/* ---- row by row --------------------------------------------------------- */

static void norm_reach(struct call *c)
{
    reach_view(&c->norm.w);
    reach_view(&c->norm.b);
    reach_view(&c->norm.dw);
    reach_view(&c->norm.db);
    reach_view(&c->norm.mean);
    reach_view(&c->norm.rstd);
}

static void layernorm_fwd_op(struct iz_exec *x, const struct call *c)
{
    iz_layernorm_fwd(x, c->v[0], c->v[1], &c->norm);
}

static void layernorm_fwd(struct iz_exec *x, struct iz_view y, struct iz_view a,
                          const struct iz_norm *n)
{
    submit(x, &(struct call){.op = layernorm_fwd_op,
                             .reach = norm_reach,
                             .v = {y, a},
                             .norm = *n});
}

static void layernorm_again_op(struct iz_exec *x, const struct call *c)
{
    iz_layernorm_again(x, c->v[0], c->v[1], &c->norm);
}

static void layernorm_again(struct iz_exec *x, struct iz_view y,
                            struct iz_view a, const struct iz_norm *n)
{
    submit(x, &(struct call){.op = layernorm_again_op,
                             .reach = norm_reach,
                             .v = {y, a},
                             .norm = *n});
}

static void layernorm_bwd_op(struct iz_exec *x, const struct call *c)
{
    iz_layernorm_bwd(x, c->v[0], c->v[1], c->v[2], c->v[3], &c->norm);
}

static void layernorm_bwd(struct iz_exec *x, struct iz_view dx,
                          struct iz_view r, struct iz_view dy, struct iz_view a,
                          const struct iz_norm *n, struct iz_view scratch)
{
    submit(x, &(struct call){.op = layernorm_bwd_op,
                             .reach = norm_reach,
                             .v = {dx, r, dy, a},
                             .scratch = scratch,
                             .norm = *n});
}

static void gelu_fwd_op(struct iz_exec *x, const struct call *c)
{
    iz_gelu_fwd(x, c->v[0], c->v[1]);
}

static void gelu_fwd(struct iz_exec *x, struct iz_view y, struct iz_view a)
{
    submit(x, &(struct call){.op = gelu_fwd_op, .v = {y, a}});
}

static void gelu_bwd_op(struct iz_exec *x, const struct call *c)
{
    iz_gelu_bwd(x, c->v[0], c->v[1], c->v[2], c->v[3]);
}

static void gelu_bwd(struct iz_exec *x, struct iz_view du, struct iz_view y,
                     struct iz_view dy, struct iz_view a)
{
    submit(x, &(struct call){.op = gelu_bwd_op, .v = {du, y, dy, a}});
}

static void rmsnorm_reach(struct call *c)
{
    reach_view(&c->rmsnorm.w);
    reach_view(&c->rmsnorm.dw);
    reach_view(&c->rmsnorm.rstd);
}

static void rmsnorm_fwd_op(struct iz_exec *x, const struct call *c)
{
    iz_rmsnorm_fwd(x, c->v[0], c->v[1], &c->rmsnorm);
}

static void rmsnorm_fwd(struct iz_exec *x, struct iz_view y, struct iz_view a,
                        const struct iz_rmsnorm *n)
{
    submit(x, &(struct call){.op = rmsnorm_fwd_op,
                             .reach = rmsnorm_reach,
                             .v = {y, a},
                             .rmsnorm = *n});
}

static void rmsnorm_again_op(struct iz_exec *x, const struct call *c)
{
    iz_rmsnorm_again(x, c->v[0], c->v[1], &c->rmsnorm);
}

static void rmsnorm_again(struct iz_exec *x, struct iz_view y, struct iz_view a,
                          const struct iz_rmsnorm *n)
{
    submit(x, &(struct call){.op = rmsnorm_again_op,
                             .reach = rmsnorm_reach,
                             .v = {y, a},
                             .rmsnorm = *n});
}

static void rmsnorm_bwd_op(struct iz_exec *x, const struct call *c)
{
    iz_rmsnorm_bwd(x, c->v[0], c->v[1], c->v[2], c->v[3], &c->rmsnorm);
}

static void rmsnorm_bwd(struct iz_exec *x, struct iz_view dx, struct iz_view r,
                        struct iz_view dy, struct iz_view a,
                        const struct iz_rmsnorm *n, struct iz_view scratch)
{
    submit(x, &(struct call){.op = rmsnorm_bwd_op,
                             .reach = rmsnorm_reach,
                             .v = {dx, r, dy, a},
                             .scratch = scratch,
                             .rmsnorm = *n});
}

static void headnorm_fwd_op(struct iz_exec *x, const struct call *c)
{
    iz_headnorm_fwd(x, c->v[0], c->v[1], &c->rmsnorm, c->count);
}

static void headnorm_fwd(struct iz_exec *x, struct iz_view a,
                         struct iz_view kept, const struct iz_rmsnorm *n,
                         int64_t first)
{
    submit(x, &(struct call){.op = headnorm_fwd_op,
                             .reach = rmsnorm_reach,
                             .v = {a, kept},
                             .rmsnorm = *n,
                             .count = first});
}

static void headnorm_bwd_op(struct iz_exec *x, const struct call *c)
{
    iz_headnorm_bwd(x, c->v[0], c->v[1], &c->rmsnorm, c->count);
}

static void headnorm_bwd(struct iz_exec *x, struct iz_view da,
                         struct iz_view kept, const struct iz_rmsnorm *n,
                         int64_t first, struct iz_view scratch)
{
    submit(x, &(struct call){.op = headnorm_bwd_op,
                             .reach = rmsnorm_reach,
                             .v = {da, kept},
                             .scratch = scratch,
                             .rmsnorm = *n,
                             .count = first});
}

static void rope_op(struct iz_exec *x, const struct call *c)
{
    iz_rope(x, c->v[0], &c->rope, c->back);
}

static void rope(struct iz_exec *x, struct iz_view a, const struct iz_rope *r,
                 bool back)
{
    submit(x,
           &(struct call){.op = rope_op, .v = {a}, .rope = *r, .back = back});
}

static void swiglu_fwd_op(struct iz_exec *x, const struct call *c)
{
    iz_swiglu_fwd(x, c->v[0], c->v[1]);
}

static void swiglu_fwd(struct iz_exec *x, struct iz_view y, struct iz_view a)
{
    submit(x, &(struct call){.op = swiglu_fwd_op, .v = {y, a}});
}

static void swiglu_bwd_op(struct iz_exec *x, const struct call *c)
{
    iz_swiglu_bwd(x, c->v[0], c->v[1], c->v[2], c->v[3]);
}

static void swiglu_bwd(struct iz_exec *x, struct iz_view da, struct iz_view y,
                       struct iz_view dy, struct iz_view a)
{
    submit(x, &(struct call){.op = swiglu_bwd_op, .v = {da, y, dy, a}});
}

/* ---- attention ---------------------------------------------------------- */

static void attention_reach(struct call *c)
{
    reach_view(&c->attention.qkv);
    reach_view(&c->attention.o);
    reach_view(&c->attention.lse);
}

static void attention_fwd_op(struct iz_exec *x, const struct call *c)
{
    iz_attention_fwd(x, &c->attention);
}

static void attention_fwd(struct iz_exec *x, const struct iz_attention *a,
                          struct iz_view scratch)
{
    submit(x, &(struct call){.op = attention_fwd_op,
                             .reach = attention_reach,
                             .scratch = scratch,
                             .attention = *a});
}

static void attention_bwd_op(struct iz_exec *x, const struct call *c)
{
    iz_attention_bwd(x, c->v[0], c->v[1], &c->attention);
}

static void attention_bwd(struct iz_exec *x, struct iz_view dqkv,
                          struct iz_view dy, const struct iz_attention *a,
                          struct iz_view scratch)
{
    submit(x, &(struct call){.op = attention_bwd_op,
                             .reach = attention_reach,
                             .v = {dqkv, dy},
                             .scratch = scratch,
                             .attention = *a});
}

/* ---- tokens ------------------------------------------------------------- */

/* count: tokens. */
static void token_reach(struct call *c)
{
    c->token = reach(c->token, c->count * (int64_t)sizeof *c->token);
}

static void embedding_fwd_op(struct iz_exec *x, const struct call *c)
{
    iz_embedding_fwd(x, c->v[0], c->token, c->v[1], c->v[2]);
}

static void embedding_fwd(struct iz_exec *x, struct iz_view y,
                          const int32_t *token, struct iz_view wte,
                          struct iz_view wpe)
{
    submit(x, &(struct call){.op = embedding_fwd_op,
                             .reach = token_reach,
                             .v = {y, wte, wpe},
                             .token = token,
                             .count = y.rows});
}

static void embedding_bwd_op(struct iz_exec *x, const struct call *c)
{
    iz_embedding_bwd(x, c->v[0], c->v[1], c->v[2], c->token);
}

static void embedding_bwd(struct iz_exec *x, struct iz_view dwte,
                          struct iz_view dwpe, struct iz_view dy,
                          const int32_t *token, struct iz_view scratch)
{
    submit(x, &(struct call){.op = embedding_bwd_op,
                             .reach = token_reach,
                             .v = {dwte, dwpe, dy},
                             .scratch = scratch,
                             .token = token,
                             .count = dy.rows});
}

/* count: rows of y. */
static void table_reach(struct call *c)
{
    struct iz_table *t = &c->table;

    reach_view(&t->w);
    reach_view(&t->dw);
    t->row = reach(t->row, c->count * (int64_t)sizeof *t->row);
}

static void table_fwd_op(struct iz_exec *x, const struct call *c)
{
    iz_table_fwd(x, c->v[0], c->v[1], &c->table);
}

static void table_fwd(struct iz_exec *x, struct iz_view y, struct iz_view r,
                      const struct iz_table *t)
{
    submit(x, &(struct call){.op = table_fwd_op,
                             .reach = table_reach,
                             .v = {y, r},
                             .table = *t,
                             .count = y.rows});
}

static void table_bwd_op(struct iz_exec *x, const struct call *c)
{
    iz_table_bwd(x, c->v[0], &c->table);
}

static void table_bwd(struct iz_exec *x, struct iz_view dy,
                      const struct iz_table *t, struct iz_view scratch)
{
    submit(x, &(struct call){.op = table_bwd_op,
                             .reach = table_reach,
                             .v = {dy},
                             .scratch = scratch,
                             .table = *t,
                             .count = dy.rows});
}

static void interact_fwd_op(struct iz_exec *x, const struct call *c)
{
    iz_interact_fwd(x, c->v[0], c->v[1], c->v[2]);
}

static void interact_fwd(struct iz_exec *x, struct iz_view y, struct iz_view z,
                         struct iz_view e)
{
    submit(x, &(struct call){.op = interact_fwd_op, .v = {y, z, e}});
}

static void interact_bwd_op(struct iz_exec *x, const struct call *c)
{
    iz_interact_bwd(x, c->v[0], c->v[1], c->v[2], c->v[3], c->v[4]);
}

static void interact_bwd(struct iz_exec *x, struct iz_view dz,
                         struct iz_view de, struct iz_view dy, struct iz_view z,
                         struct iz_view e)
{
    submit(x, &(struct call){.op = interact_bwd_op, .v = {dz, de, dy, z, e}});
}

/* Also holds the count that the caller has formed against the targets. */
static void classifier_reach(struct call *c)
{
    struct iz_classifier *k = &c->classifier;
    int64_t n = 0;

    reach_view(&k->a);
    reach_view(&k->w);
    reach_view(&k->da);
    reach_view(&k->dw);
    k->loss = reach(k->loss, sizeof *k->loss);
    k->target = reach(k->target, k->a.rows * (int64_t)sizeof *k->target);
    for (int64_t i = 0; i < k->a.rows; i++)
        n += k->target[i] != -1;
    if (n != c->count)
        iz_die("classifier: %lld targets, but a count of %lld", (long long)n,
               (long long)c->count);
}

static void classifier_fwd_op(struct iz_exec *x, const struct call *c)
{
    iz_classifier_fwd(x, &c->classifier);
}

static void classifier_fwd(struct iz_exec *x, const struct iz_classifier *k,
                           int64_t count, struct iz_view scratch)
{
    submit(x, &(struct call){.op = classifier_fwd_op,
                             .reach = classifier_reach,
                             .scratch = scratch,
                             .classifier = *k,
                             .count = count});
}

static void classifier_bwd_op(struct iz_exec *x, const struct call *c)
{
    iz_classifier_bwd(x, &c->classifier);
}

static void classifier_bwd(struct iz_exec *x, const struct iz_classifier *k,
                           int64_t count, struct iz_view scratch)
{
    submit(x, &(struct call){.op = classifier_bwd_op,
                             .reach = classifier_reach,
                             .scratch = scratch,
                             .classifier = *k,
                             .count = count});
}

/* ---- flat buffers ------------------------------------------------------- */

static void flat_reach(struct call *c)
{
    struct flat *f = &c->flat;
    int64_t in = f->n * iz_dtype_bytes(f->in_type);
    int64_t fp32 = f->n * iz_dtype_bytes(IZ_F32);

    f->out = reach(f->out, f->n * iz_dtype_bytes(f->out_type));
    f->p = reach(f->p, fp32);
    f->m = reach(f->m, fp32);
    f->v = reach(f->v, fp32);
    f->g = reach(f->g, in);
    f->norm2 = reach(f->norm2, sizeof *f->norm2);
    for (int i = 0; i < f->n_in; i++)
        c->in[i] = reach(c->in[i], in);
}

static void sum_op(struct iz_exec *x, const struct call *c)
{
    const struct flat *f = &c->flat;

    if (!x->dry)
        iz_flat_sum(f->out, f->out_type, f->accumulate, c->in, f->n_in,
                    f->in_type, f->n);
}

static void sum(struct iz_exec *x, void *out, enum iz_dtype out_type,
                bool accumulate, const void *const *in, int n_in,
                enum iz_dtype in_type, int64_t n)
{
    submit_more(x,
                &(struct call){.op = sum_op,
                               .reach = flat_reach,
                               .flat = {.n = n,
                                        .out = out,
                                        .in_type = in_type,
                                        .out_type = out_type,
                                        .accumulate = accumulate,
                                        .n_in = n_in}},
                in);
}

static void norm2_op(struct iz_exec *x, const struct call *c)
{
    const struct flat *f = &c->flat;

    if (!x->dry)
        *f->norm2 = iz_flat_norm2(f->g, f->in_type, f->n);
}

static void norm2(struct iz_exec *x, double *result, const void *p,
                  enum iz_dtype type, int64_t n, struct iz_view scratch)
{
    submit(x, &(struct call){
                  .op = norm2_op,
                  .reach = flat_reach,
                  .scratch = scratch,
                  .flat = {.n = n, .g = p, .norm2 = result, .in_type = type}});
}

static void adam_op(struct iz_exec *x, const struct call *c)
{
    const struct flat *f = &c->flat;

    if (!x->dry)
        iz_adam_chunk(&c->adam, f->n, f->p, f->m, f->v, f->g, f->in_type,
                      f->out, f->out_type);
}

static void adam(struct iz_exec *x, const struct iz_adam *a, int64_t n,
                 float *p, float *m, float *v, const void *g,
                 enum iz_dtype g_type, void *out, enum iz_dtype out_type)
{
    submit(x, &(struct call){.op = adam_op,
                             .reach = flat_reach,
                             .adam = *a,
                             .flat = {.n = n,
                                      .out = out,
                                      .p = p,
                                      .m = m,
                                      .v = v,
                                      .g = g,
                                      .in_type = g_type,
                                      .out_type = out_type}});
}

/* ---- the rest ----------------------------------------------------------- */

/* One small product: the rate of a CPU stands for that of the GPU. */
static double gemm_rate(struct iz_exec *x, int64_t m, int64_t n, int64_t k,
                        double seconds)
{
    (void)x;
    (void)m;
    (void)n;
    (void)k;
    (void)seconds;
    return iz_blas_rate(512, 512, 512, 0);
}

static int cuda_open(struct iz_cuda **out, void *stream)
{
    *out = calloc(1, sizeof **out);
    if (!*out) {
        fprintf(stderr, "izar: no memory\n");
        return -ENOMEM;
    }
    (*out)->stream = stream;
    return 0;
}

static void cuda_close(struct iz_cuda **c)
{
    free(*c);
    *c = NULL;
}

static enum iz_dtype act(enum iz_dtype param)
{
    (void)param;
    return IZ_F32;
}

static const struct iz_cuda_ops table = {.matmul_fwd = matmul_fwd,
                                         .matmul_da = matmul_da,
                                         .matmul_dw = matmul_dw,
                                         .layernorm_fwd = layernorm_fwd,
                                         .layernorm_again = layernorm_again,
                                         .layernorm_bwd = layernorm_bwd,
                                         .gelu_fwd = gelu_fwd,
                                         .gelu_bwd = gelu_bwd,
                                         .rmsnorm_fwd = rmsnorm_fwd,
                                         .rmsnorm_again = rmsnorm_again,
                                         .rmsnorm_bwd = rmsnorm_bwd,
                                         .headnorm_fwd = headnorm_fwd,
                                         .headnorm_bwd = headnorm_bwd,
                                         .rope = rope,
                                         .swiglu_fwd = swiglu_fwd,
                                         .swiglu_bwd = swiglu_bwd,
                                         .attention_fwd = attention_fwd,
                                         .attention_bwd = attention_bwd,
                                         .embedding_fwd = embedding_fwd,
                                         .embedding_bwd = embedding_bwd,
                                         .table_fwd = table_fwd,
                                         .table_bwd = table_bwd,
                                         .interact_fwd = interact_fwd,
                                         .interact_bwd = interact_bwd,
                                         .classifier_fwd = classifier_fwd,
                                         .classifier_bwd = classifier_bwd,
                                         .sum = sum,
                                         .norm2 = norm2,
                                         .adam = adam,
                                         .gemm_rate = gemm_rate,
                                         .open = cuda_open,
                                         .close = cuda_close,
                                         .act = act};

const struct iz_cuda_ops *const iz_cuda_ops = &table;
