/* SPDX-License-Identifier: Apache-2.0 */
/* The ops of a GPU for the stand-in: each enqueues a call of the CPU's op
 * (call.h). */
#include "codelets/ops/gpu_ops.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "codelets/base/die.h"
#include "codelets/flat/flat.h"
#include "codelets/ops/gemm_rate.h"
#include "tests/fake/standin/call.h"

/* ---- products ----------------------------------------------------------- */

static void linear_reach(struct call *c)
{
    standin_reach_view(&c->linear.w);
    standin_reach_view(&c->linear.b);
    standin_reach_view(&c->linear.dw);
    standin_reach_view(&c->linear.db);
}

static void matmul_fwd_op(struct iz_exec *x, const struct call *c)
{
    iz_matmul_fwd(x, c->v[0], c->v[1], c->v[2], &c->linear);
}

void iz_matmul_fwd_cuda(struct iz_exec *x, struct iz_view y, struct iz_view r,
                        struct iz_view a, const struct iz_linear *l,
                        struct iz_view scratch)
{
    standin_submit(x, &(struct call){.op = matmul_fwd_op,
                                     .reach = linear_reach,
                                     .v = {y, r, a},
                                     .scratch = scratch,
                                     .linear = *l});
}

static void matmul_da_op(struct iz_exec *x, const struct call *c)
{
    iz_matmul_da(x, c->v[0], c->v[1], &c->linear);
}

void iz_matmul_da_cuda(struct iz_exec *x, struct iz_view da, struct iz_view dy,
                       const struct iz_linear *l, struct iz_view scratch)
{
    standin_submit(x, &(struct call){.op = matmul_da_op,
                                     .reach = linear_reach,
                                     .v = {da, dy},
                                     .scratch = scratch,
                                     .linear = *l});
}

static void matmul_dw_op(struct iz_exec *x, const struct call *c)
{
    iz_matmul_dw(x, c->v[0], c->v[1], &c->linear);
}

void iz_matmul_dw_cuda(struct iz_exec *x, struct iz_view dy, struct iz_view a,
                       const struct iz_linear *l, struct iz_view scratch)
{
    standin_submit(x, &(struct call){.op = matmul_dw_op,
                                     .reach = linear_reach,
                                     .v = {dy, a},
                                     .scratch = scratch,
                                     .linear = *l});
}

/* ---- attention ---------------------------------------------------------- */

static void attention_reach(struct call *c)
{
    standin_reach_view(&c->attention.qkv);
    standin_reach_view(&c->attention.o);
    standin_reach_view(&c->attention.lse);
}

static void attention_fwd_op(struct iz_exec *x, const struct call *c)
{
    iz_attention_fwd(x, &c->attention);
}

void iz_attention_fwd_cuda(struct iz_exec *x, const struct iz_attention *a,
                           struct iz_view scratch)
{
    standin_submit(x, &(struct call){.op = attention_fwd_op,
                                     .reach = attention_reach,
                                     .scratch = scratch,
                                     .attention = *a});
}

static void attention_bwd_op(struct iz_exec *x, const struct call *c)
{
    iz_attention_bwd(x, c->v[0], c->v[1], &c->attention);
}

void iz_attention_bwd_cuda(struct iz_exec *x, struct iz_view dqkv,
                           struct iz_view dy, const struct iz_attention *a,
                           struct iz_view scratch)
{
    standin_submit(x, &(struct call){.op = attention_bwd_op,
                                     .reach = attention_reach,
                                     .v = {dqkv, dy},
                                     .scratch = scratch,
                                     .attention = *a});
}

/* What a test wants the library to be: "gone", or without any plan: "none". */
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

bool iz_attention_ask_cudnn(struct iz_exec *x, const struct iz_attention *a)
{
    if (cudnn_is("none"))
        snprintf(x->ask->why, sizeof(x->ask->why), "no plan for %lld tokens",
                 (long long)a->seq);
    return !cudnn_is("none");
}

/* ---- tokens ------------------------------------------------------------- */

/* count: tokens. */
static void token_reach(struct call *c)
{
    c->token = standin_reach(c->token, c->count * (int64_t)sizeof(*c->token));
}

static void embedding_fwd_op(struct iz_exec *x, const struct call *c)
{
    iz_embedding_fwd(x, c->v[0], c->token, c->v[1], c->v[2]);
}

void iz_embedding_fwd_cuda(struct iz_exec *x, struct iz_view y,
                           const int32_t *token, struct iz_view wte,
                           struct iz_view wpe)
{
    standin_submit(x, &(struct call){.op = embedding_fwd_op,
                                     .reach = token_reach,
                                     .v = {y, wte, wpe},
                                     .token = token,
                                     .count = y.rows});
}

static void embedding_bwd_op(struct iz_exec *x, const struct call *c)
{
    iz_embedding_bwd(x, c->v[0], c->v[1], c->v[2], c->token);
}

void iz_embedding_bwd_cuda(struct iz_exec *x, struct iz_view dwte,
                           struct iz_view dwpe, struct iz_view dy,
                           const int32_t *token, struct iz_view scratch)
{
    standin_submit(x, &(struct call){.op = embedding_bwd_op,
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

    standin_reach_view(&t->w);
    standin_reach_view(&t->dw);
    t->row = standin_reach(t->row, c->count * (int64_t)sizeof(*t->row));
}

static void table_fwd_op(struct iz_exec *x, const struct call *c)
{
    iz_table_fwd(x, c->v[0], c->v[1], &c->table);
}

void iz_table_fwd_cuda(struct iz_exec *x, struct iz_view y, struct iz_view r,
                       const struct iz_table *t)
{
    standin_submit(x, &(struct call){.op = table_fwd_op,
                                     .reach = table_reach,
                                     .v = {y, r},
                                     .table = *t,
                                     .count = y.rows});
}

static void table_bwd_op(struct iz_exec *x, const struct call *c)
{
    iz_table_bwd(x, c->v[0], &c->table);
}

void iz_table_bwd_cuda(struct iz_exec *x, struct iz_view dy,
                       const struct iz_table *t, struct iz_view scratch)
{
    standin_submit(x, &(struct call){.op = table_bwd_op,
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

void iz_interact_fwd_cuda(struct iz_exec *x, struct iz_view y, struct iz_view z,
                          struct iz_view e)
{
    standin_submit(x, &(struct call){.op = interact_fwd_op, .v = {y, z, e}});
}

static void interact_bwd_op(struct iz_exec *x, const struct call *c)
{
    iz_interact_bwd(x, c->v[0], c->v[1], c->v[2], c->v[3], c->v[4]);
}

void iz_interact_bwd_cuda(struct iz_exec *x, struct iz_view dz,
                          struct iz_view de, struct iz_view dy,
                          struct iz_view z, struct iz_view e)
{
    standin_submit(
        x, &(struct call){.op = interact_bwd_op, .v = {dz, de, dy, z, e}});
}

/* Also holds the count that the caller has formed against the targets. */
static void classifier_reach(struct call *c)
{
    struct iz_classifier *k = &c->classifier;
    int64_t n = 0;

    standin_reach_view(&k->a);
    standin_reach_view(&k->w);
    standin_reach_view(&k->da);
    standin_reach_view(&k->dw);
    k->loss = standin_reach(k->loss, sizeof(*k->loss));
    k->target =
        standin_reach(k->target, k->a.rows * (int64_t)sizeof(*k->target));
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

void iz_classifier_fwd_cuda(struct iz_exec *x, const struct iz_classifier *k,
                            int64_t count, struct iz_view scratch)
{
    standin_submit(x, &(struct call){.op = classifier_fwd_op,
                                     .reach = classifier_reach,
                                     .scratch = scratch,
                                     .classifier = *k,
                                     .count = count});
}

static void classifier_bwd_op(struct iz_exec *x, const struct call *c)
{
    iz_classifier_bwd(x, &c->classifier);
}

void iz_classifier_bwd_cuda(struct iz_exec *x, const struct iz_classifier *k,
                            int64_t count, struct iz_view scratch)
{
    standin_submit(x, &(struct call){.op = classifier_bwd_op,
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

    f->out = standin_reach(f->out, f->n * iz_dtype_bytes(f->out_type));
    f->g = standin_reach(f->g, in);
    f->norm2 = standin_reach(f->norm2, f->sums * (int64_t)sizeof(*f->norm2));
    for (int i = 0; i < f->n_in; i++)
        c->in[i] = standin_reach(c->in[i], in);
}

static void sum_op(struct iz_exec *x, const struct call *c)
{
    const struct flat *f = &c->flat;

    if (!x->dry)
        iz_flat_sum(f->out, f->out_type, f->accumulate, c->in, f->n_in,
                    f->in_type, f->n);
}

void iz_flat_sum_cuda(struct iz_exec *x, void *out, enum iz_dtype out_type,
                      bool accumulate, const void *const *in, int n_in,
                      enum iz_dtype in_type, int64_t n)
{
    standin_submit_more(x,
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

void iz_flat_norm2_cuda(struct iz_exec *x, double *result, const void *p,
                        enum iz_dtype type, int64_t n, struct iz_view scratch)
{
    standin_submit(
        x,
        &(struct call){
            .op = norm2_op,
            .reach = flat_reach,
            .scratch = scratch,
            .flat = {
                .n = n, .g = p, .norm2 = result, .sums = 1, .in_type = type}});
}

static void squares_op(struct iz_exec *x, const struct call *c)
{
    const struct flat *f = &c->flat;

    if (!x->dry)
        iz_flat_squares(f->norm2, f->g, f->in_type, f->n);
}

void iz_flat_squares_cuda(struct iz_exec *x, double *sum, const void *p,
                          enum iz_dtype type, int64_t n)
{
    standin_submit(x, &(struct call){.op = squares_op,
                                     .reach = flat_reach,
                                     .flat = {.n = n,
                                              .g = p,
                                              .norm2 = sum,
                                              .sums = iz_norm_blocks(n),
                                              .in_type = type}});
}

static void update_reach(struct call *c)
{
    struct iz_update *u = &c->update;

    u->span = c->span;
    u->p = standin_reach(u->p, u->n * iz_dtype_bytes(IZ_F32));
    u->g = standin_reach(u->g, u->n * iz_dtype_bytes(u->g_type));
    u->out = standin_reach(u->out, u->n * iz_dtype_bytes(u->out_type));
    for (int i = 0; i < iz_optimizer(u->optimizer)->states; i++)
        u->state[i] =
            standin_reach(u->state[i], iz_moment_bytes(u->type, u->room));
}

static void update_op(struct iz_exec *x, const struct call *c)
{
    if (!x->dry)
        iz_update(&c->update);
}

void iz_update_cuda(struct iz_exec *x, const struct iz_update *u)
{
    struct call c = {.op = update_op, .reach = update_reach, .update = *u};

    memcpy(c.span, u->span, (size_t)u->spans * sizeof(*u->span));
    standin_submit(x, &c);
}

/* ---- the rest ----------------------------------------------------------- */

/* One small product: the rate of a CPU stands for that of the GPU. */
double iz_gemm_rate_cuda(struct iz_exec *x, int64_t m, int64_t n, int64_t k,
                         double seconds)
{
    return iz_blas_rate(512, 512, 512, 0);
}

/* No library has a handle here, but who opens one closes it. */
int iz_cuda_open(struct iz_cuda **out)
{
    *out = calloc(1, 1);
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
enum iz_dtype iz_cuda_act(enum iz_dtype param)
{
    return IZ_F32;
}
