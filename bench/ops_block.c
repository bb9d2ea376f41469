/* SPDX-License-Identifier: Apache-2.0 */
/* The ops of a transformer block, with embedding and head, in the shapes of
 * three models on a GPU and of a small one on the CPU. */
#include "bench/ops.h"

#include <stddef.h>

#include "codelets/base/int64.h"
#include "codelets/base/mix.h"
#include "codelets/base/units.h"
#include "codelets/gpu/device.h"

#define ROTATE_BYTES (INT64_C(512) << 20) /* of the smallest tensor */

/* ---- a block ------------------------------------------------------------ */

struct model {
    const char *name;
    int64_t width, heads, seq, vocab;
};

/* The tensors of a block with M tokens: [M,C], [M,4C], [M,3C], ... */
struct tensors {
    struct iz_view y, a, dy, u, du, qkv, dqkv, lse, mean, rstd;
    struct iz_view w, dw, b, db; /* [C,4C], or what an op makes of it */
    struct iz_view wte, dwte, wpe, dwpe;
};

/* All that one op needs. */
struct job {
    const struct bench *bench;
    const struct model *model;
    struct iz_exec x;
    struct tensors t[BENCH_SETS];
    int sets;
    const struct op *op; /* under way */
    int32_t *token;      /* pinned */
    double *loss;        /* pinned */
};

/* A [rows,cols] view of memory that may belong to a larger matrix. */
static struct iz_view as(struct iz_view v, int64_t rows, int64_t cols)
{
    v.rows = rows;
    v.cols = cols;
    return v;
}

static struct iz_attention attention_of(const struct job *j,
                                        const struct tensors *t)
{
    return (struct iz_attention){.qkv = t->qkv,
                                 .o = t->y,
                                 .lse = t->lse,
                                 .seq = j->model->seq,
                                 .heads = (int)j->model->heads};
}

enum call {
    NORM,
    NORM_AGAIN,
    NORM_BWD,
    PRODUCT,
    PRODUCT_DA,
    PRODUCT_DW,
    ATTENTION,
    ATTENTION_BWD,
    GELU,
    GELU_BWD,
    EMBEDDING,
    EMBEDDING_BWD,
    CLASSIFIER
};

/* in and out: sides of a matrix in units of the width. */
static const struct op {
    const char *name;
    enum call call;
    int in, out;
    /* On a GPU alone: db by the library's epilogue, not by a kernel of ours;
     * attention by cuDNN, its backward with scratch for so many samples more.
     */
    bool fused_db, cudnn;
    int more;
} ops[] = {
    {"layernorm", .call = NORM},
    {"layernorm again", .call = NORM_AGAIN},
    {"layernorm backward", .call = NORM_BWD},
    {"c_attn [C,3C]", PRODUCT, .in = 1, .out = 3},
    {"c_attn da", PRODUCT_DA, .in = 1, .out = 3},
    {"c_attn dw", PRODUCT_DW, .in = 1, .out = 3},
    {"c_attn dw, fused db", PRODUCT_DW, .in = 1, .out = 3, .fused_db = true},
    {"attention", .call = ATTENTION},
    {"attention by cuDNN", ATTENTION, .cudnn = true},
    {"attention backward", .call = ATTENTION_BWD},
    {"attn backward by cuDNN", ATTENTION_BWD, .cudnn = true},
    {"the same, 4 at once", ATTENTION_BWD, .cudnn = true, .more = 3},
    {"the same, 16 at once", ATTENTION_BWD, .cudnn = true, .more = 15},
    {"c_proj [C,C]", PRODUCT, .in = 1, .out = 1},
    {"c_proj da", PRODUCT_DA, .in = 1, .out = 1},
    {"c_proj dw", PRODUCT_DW, .in = 1, .out = 1},
    {"c_proj dw, fused db", PRODUCT_DW, .in = 1, .out = 1, .fused_db = true},
    {"c_fc [C,4C]", PRODUCT, .in = 1, .out = 4},
    {"c_fc da", PRODUCT_DA, .in = 1, .out = 4},
    {"c_fc dw", PRODUCT_DW, .in = 1, .out = 4},
    {"c_fc dw, fused db", PRODUCT_DW, .in = 1, .out = 4, .fused_db = true},
    {"gelu", .call = GELU},
    {"gelu backward", .call = GELU_BWD},
    {"mlp c_proj [4C,C]", PRODUCT, .in = 4, .out = 1},
    {"mlp c_proj da", PRODUCT_DA, .in = 4, .out = 1},
    {"mlp c_proj dw", PRODUCT_DW, .in = 4, .out = 1},
    {"mlp c_proj dw, fused db", PRODUCT_DW, .in = 4, .out = 1,
     .fused_db = true},
    {"embedding", .call = EMBEDDING},
    {"embedding backward", .call = EMBEDDING_BWD},
    {"head: loss, da, dw", .call = CLASSIFIER},
};
enum { OPS = sizeof(ops) / sizeof(ops[0]) };

/* As a block calls it: products back to the width add the residual, and the
 * gradient of gelu overwrites the one that it comes from. */
static void call_op(struct job *j, const struct op *op, const struct tensors *t)
{
    struct iz_exec *x = &j->x;
    int64_t m = t->a.rows, c = j->model->width, in = op->in * c;
    int64_t out = op->out * c;
    struct iz_view input = op->in == 1 ? t->a : as(t->u, m, in);
    struct iz_view dy = op->out == 1 ? t->dy : as(t->du, m, out);
    struct iz_linear l = {.w = as(t->w, in, out),
                          .b = as(t->b, 1, out),
                          .dw = as(t->dw, in, out),
                          .db = as(t->db, 1, out)};
    struct iz_view b = as(t->b, 1, c);
    struct iz_norm_layer n = {
        b, b, as(t->db, 1, c), as(t->dw, 1, c), t->mean, t->rstd, 1e-5f};
    struct iz_attention attention = attention_of(j, t);
    switch (op->call) {
    case NORM:
    case NORM_AGAIN:
        iz_norm_layer_fwd(x, t->y, t->a, &n, op->call == NORM_AGAIN);
        break;
    case NORM_BWD:
        iz_norm_layer_bwd(x, t->y, as(t->dqkv, m, c), t->dy, t->a, &n);
        break;
    case PRODUCT:
        iz_matmul_fwd(x, op->out == 1 ? t->y : dy,
                      op->out == 1 ? t->dy : IZ_NONE, input, &l);
        break;
    case PRODUCT_DA:
        iz_matmul_da(x, op->in == 1 ? t->y : input, dy, &l);
        break;
    case PRODUCT_DW:
        iz_matmul_dw(x, dy, input, &l);
        break;
    case ATTENTION:
        iz_attention_fwd(x, &attention);
        break;
    case ATTENTION_BWD:
        iz_attention_bwd(x, t->dqkv, t->dy, &attention);
        break;
    case GELU:
        iz_gelu_fwd(x, t->du, t->u);
        break;
    case GELU_BWD:
        iz_gelu_bwd(x, t->du, t->u, t->du, t->u);
        break;
    case EMBEDDING:
        iz_embedding_fwd(x, t->y, j->token, t->wte, t->wpe);
        break;
    case EMBEDDING_BWD:
        iz_embedding_bwd(x, t->dwte, t->dwpe, t->dy, j->token);
        break;
    case CLASSIFIER:
        iz_classifier(x, &(struct iz_classifier){.a = t->a,
                                                 .w = t->wte,
                                                 .target = j->token,
                                                 .da = t->y,
                                                 .dw = t->dwte,
                                                 .loss_scale = 1,
                                                 .loss = j->loss});
    }
}

/* ---- the run of a shape ------------------------------------------------- */

/* Takes a matrix from the pool at *used; base NULL: only counts. */
static struct iz_view take_view(char *base, int64_t *used, enum iz_dtype t,
                                int64_t rows, int64_t cols)
{
    struct iz_view v = {.dtype = t, .rows = rows, .cols = cols};
    v.p = base ? base + *used : NULL;
    *used += (iz_view_bytes(v) + 511) / 512 * 512;
    return v;
}

/* Takes the tensors of all sets for m tokens, and returns their bytes.  Weights
 * are shared: only activations rotate. */
static int64_t take_all(struct job *j, int64_t m, char *base)
{
    const struct model *is = j->model;
    enum iz_dtype type = j->x.act;
    int64_t c = is->width, rows = m / is->seq * is->heads, used = 0;
    enum { WEIGHTS = 8, TENSORS = 18 };
    const struct {
        size_t at;
        enum iz_dtype type;
        int64_t rows, cols;
    } tensor[TENSORS] = {{offsetof(struct tensors, w), type, c, 4 * c},
                         {offsetof(struct tensors, dw), type, c, 4 * c},
                         {offsetof(struct tensors, b), type, 1, 4 * c},
                         {offsetof(struct tensors, db), type, 1, 4 * c},
                         {offsetof(struct tensors, wte), type, is->vocab, c},
                         {offsetof(struct tensors, dwte), type, is->vocab, c},
                         {offsetof(struct tensors, wpe), type, is->seq, c},
                         {offsetof(struct tensors, dwpe), type, is->seq, c},
                         {offsetof(struct tensors, y), type, m, c},
                         {offsetof(struct tensors, a), type, m, c},
                         {offsetof(struct tensors, dy), type, m, c},
                         {offsetof(struct tensors, u), type, m, 4 * c},
                         {offsetof(struct tensors, du), type, m, 4 * c},
                         {offsetof(struct tensors, qkv), type, m, 3 * c},
                         {offsetof(struct tensors, dqkv), type, m, 3 * c},
                         {offsetof(struct tensors, lse), IZ_F32, rows, is->seq},
                         {offsetof(struct tensors, mean), IZ_F32, m, 1},
                         {offsetof(struct tensors, rstd), IZ_F32, m, 1}};
    for (int i = 0; i < j->sets; i++) {
        j->t[i] = j->t[0];
        for (int k = i ? WEIGHTS : 0; k < TENSORS; k++)
            *(struct iz_view *)((char *)&j->t[i] + tensor[k].at) = take_view(
                base, &used, tensor[k].type, tensor[k].rows, tensor[k].cols);
    }
    return used;
}

static void run_op(void *arg, int i)
{
    struct job *j = arg;
    j->x.fused_db = j->op->fused_db;
    j->x.numerics.cudnn = j->x.numerics.cudnn_bwd = j->op->cudnn;
    call_op(j, j->op, &j->t[i % j->sets]);
}

/* Scratch of j->op, from a dry run. */
static int64_t scratch_bytes(struct job j)
{
    struct iz_attention a = attention_of(&j, &j.t[0]);
    j.x = iz_exec_dry(j.bench->backend, j.bench->act);
    j.x.numerics.capability = j.bench->capability;
    j.x.numerics.logits_bytes = BENCH_LOGITS_BYTES;
    run_op(&j, 0);
    return j.x.work.peak +
           (j.op->more ? iz_gpu_cudnn_bwd_bytes(j.op->more, a.seq, a.heads,
                                                a.heads, a.o.cols / a.heads)
                       : 0);
}

static int64_t scratch_most(struct job *j)
{
    int64_t most = 0;
    for (j->op = ops; j->op < ops + OPS; j->op++)
        most = max64(most, scratch_bytes(*j));
    return most;
}

static void op_show(struct bench *b, const struct job *j, int64_t m, double s)
{
    double bytes = j->x.bytes / s, flops = j->x.flops / s;
    double copy = 100 * bytes / b->copy, gemm = 100 * flops / b->gemm;
    printf("  %-23s %10.1f us %8.1f GB/s %5.1f %%  %8.3f TFLOP/s %5.1f %%\n",
           j->op->name, 1e6 * s, 1e-9 * bytes, copy, 1e-12 * flops, gemm);
    if (b->json)
        fprintf(b->json,
                "%s\n    {\"model\": \"%s\", \"tokens\": %lld, \"op\": \"%s\", "
                "\"us\": %.3f, \"gb_per_s\": %.2f, \"copy_percent\": %.2f, "
                "\"tflop_per_s\": %.4f, \"gemm_percent\": %.2f}",
                b->lines ? "," : "", j->model->name, (long long)m, j->op->name,
                1e6 * s, 1e-9 * bytes, copy, 1e-12 * flops, gemm);
    b->lines++;
    if (b->json)
        fflush(b->json); /* this may be ended from outside */
    fflush(stdout);
}

/* Random inputs, and what the forward of a backward has to leave. */
static void prepare(struct job *j, char *mem, int64_t bytes)
{
    bench_fill(j->bench, mem, bytes, j->bench->pattern);
    for (int i = 0; i < j->sets; i++) {
        call_op(j, &(struct op){.call = NORM}, &j->t[i]);
        call_op(j, &(struct op){.call = ATTENTION}, &j->t[i]);
    }
    bench_wait(j->bench->stream);
}

/* What cuDNN cannot do here is left out, and said. */
static bool left_out(struct job *j, int64_t scratch)
{
    if (j->bench->backend == IZ_CPU)
        return j->op->cudnn || j->op->fused_db;
    struct iz_attention a = attention_of(j, &j->t[0]);
    struct iz_refusal why = {""};
    struct iz_exec asking = j->x;
    if (!j->op->cudnn)
        return false;
    asking.ask = &why;
    if (!iz_cudnn_missing() &&
        iz_attention_ask_cudnn(&asking, &a, j->op->call == ATTENTION_BWD,
                               scratch))
        return false;
    if (why.why[0])
        fprintf(stderr, "left out: %s: %s\n", j->op->name, why.why);
    return true;
}

static void time_ops(struct bench *b, struct job *j, int64_t m, char *mem,
                     int64_t bytes)
{
    struct iz_exec x = j->x;
    for (int i = 0; i < OPS; i++) {
        j->op = &ops[i];
        int64_t scratch = scratch_bytes(*j);
        if (left_out(j, scratch) || b->skip-- > 0)
            continue;
        prepare(j, mem, bytes);
        j->x.work.size = scratch;
        double s = bench_time(b, run_op, j);
        j->x = x; /* one call's counts */
        j->x.work.size = scratch;
        run_op(j, 0);
        bench_wait(b->stream);
        op_show(b, j, m, s);
        j->x = x;
    }
}

static int sets_of(const struct bench *b, int64_t m, int64_t width)
{
    int64_t bytes = m * width * iz_dtype_bytes(b->act);
    int64_t sets = (ROTATE_BYTES + bytes - 1) / bytes; /* 1 at least */
    return b->tiny ? 2 : (int)min64(sets, BENCH_SETS);
}

static void bench_shape(struct bench *b, const struct model *model, int64_t m)
{
    struct job j = {.bench = b,
                    .model = model,
                    .x = iz_exec_dry(b->backend, b->act),
                    .sets = sets_of(b, m, model->width),
                    .loss = (double *)bench_pinned(b, 8)};
    int64_t bytes = take_all(&j, m, NULL), scratch = scratch_most(&j);
    char *mem = bench_device(b, bytes + scratch);
    printf("%s, %lld tokens, %d sets of tensors, %.1f MiB\n", model->name,
           (long long)m, j.sets, iz_units_mib(bytes + scratch));
    j.token = (int32_t *)bench_pinned(b, m * 4);
    for (int64_t i = 0; i < m; i++)
        j.token[i] = (int32_t)(iz_mix((uint64_t)i) % (uint64_t)model->vocab);
    j.x = bench_exec(b, mem + bytes, scratch);
    take_all(&j, m, mem);
    time_ops(b, &j, m, mem, bytes);
    bench_unpin(b, (char *)j.token);
    bench_unpin(b, (char *)j.loss);
    bench_device_give(b, mem);
}

void bench_models(struct bench *b)
{
    static const struct model model[] = {{"1.5B", 1600, 25, 1024, 50257},
                                         {"7B", 4096, 32, 2048, 50257},
                                         {"14B", 5120, 40, 2048, 50257}};
    static const struct model tiny = {"tiny", 48, 3, 16, 256};
    static const struct model small = {"GPT 6 x 384", 384, 6, 256, 50304};
    if (b->tiny)
        bench_shape(b, &tiny, 64);
    else if (b->backend == IZ_CPU)
        bench_shape(b, &small, 512);
    for (int i = 0; i < 3 && !b->tiny && b->backend == IZ_CUDA; i++)
        for (int64_t m = 8192; m <= 16384; m *= 2)
            bench_shape(b, &model[i], m);
}
