/* SPDX-License-Identifier: Apache-2.0 */
/* The ops of a transformer block, with embedding and head, in the shapes of
 * three models on a GPU and of a small one on the CPU.  Their tensors and calls
 * are those of tests/codelets/ops. */
#include "bench/ops.h"

#include "codelets/base/int64.h"
#include "tests/codelets/ops/timed.h"

#define ROTATE_BYTES (INT64_C(512) << 20) /* of an activation */

/* Ops on the same tensors. */
struct job {
    struct bench *bench;
    const struct timed_shape *shape;
    const struct timed *op; /* under way */
    struct iz_exec x;
    struct iz_view v[BENCH_SETS][SCENE_MOST];
    char *pinned[SCENE_MOST];
    int sets;
};

/* Takes all sets of the tensors from memory at base, and returns their bytes;
 * NULL: only counts.  What the host reads, too, is the same in each. */
static int64_t take_views(struct job *j, const struct scene *s, char *base)
{
    int64_t used = 0;
    for (int k = 0; k < j->sets; k++) {
        struct iz_view *v = j->v[k];
        for (int i = 0; i < s->n; i++) {
            v[i] = s->t[i].v;
            v[i].p = !base ? NULL : j->pinned[i] ? j->pinned[i] : base + used;
            used += round_up(iz_view_bytes(v[i]), 512);
        }
        for (int i = 0; i < s->n_into; i++)
            v[s->into[i][0]].p = v[s->into[i][1]].p;
    }
    return used;
}

static void run_op(void *arg, int i)
{
    struct job *j = arg;
    j->op->op(&j->x, j->v[i % j->sets], j->op->arg);
}

/* From a dry run. */
static int64_t scratch_of(struct job j, const struct timed *op)
{
    j.op = op;
    j.x = iz_exec_dry(backend.x.backend, backend.x.act);
    j.x.numerics = backend.x.numerics;
    run_op(&j, 0);
    return j.x.work.peak + op->more;
}

/* What cuDNN cannot do here is left out, and said. */
static bool left_out(const struct job *j, const struct timed *op)
{
    struct iz_refusal why = {""};
    struct iz_exec x = backend.x;
    if (backend.x.backend == IZ_CPU)
        return op->possible;
    if (!op->possible)
        return false;
    x.ask = &why;
    if (op->possible(&x, j->v[0], op->arg, scratch_of(*j, op)))
        return false;
    if (why.why[0])
        fprintf(stderr, "left out: %s: %s\n", op->name, why.why);
    return true;
}

static void op_show(const struct job *j, double s)
{
    struct bench *b = j->bench;
    double bytes = j->x.cost.bytes / s, flops = j->x.cost.flops / s;
    double copy = 100 * bytes / b->copy, gemm = 100 * flops / b->gemm;
    printf("  %-23s %10.1f us %8.1f GB/s %5.1f %%  %8.3f TFLOP/s %5.1f %%\n",
           j->op->name, 1e6 * s, 1e-9 * bytes, copy, 1e-12 * flops, gemm);
    if (b->json)
        fprintf(b->json,
                "%s\n    {\"model\": \"%s\", \"tokens\": %lld, \"op\": \"%s\", "
                "\"us\": %.3f, \"gb_per_s\": %.2f, \"copy_percent\": %.2f, "
                "\"tflop_per_s\": %.4f, \"gemm_percent\": %.2f}",
                b->lines ? "," : "", j->shape->model,
                (long long)j->shape->tokens, j->op->name, 1e6 * s, 1e-9 * bytes,
                copy, 1e-12 * flops, gemm);
    b->lines++;
    if (b->json)
        fflush(b->json); /* this may be ended from outside */
    fflush(stdout);
}

/* With random inputs, and what the first op has to leave. */
static void time_op(struct job *j, const struct timed *op,
                    const struct timed *first, char *mem, int64_t bytes)
{
    if (left_out(j, op) || j->bench->skip-- > 0)
        return;
    bench_fill(mem, bytes, j->bench->pattern);
    j->x = bench_exec(mem + bytes, scratch_of(*j, first));
    j->op = first;
    for (int i = 0; i < j->sets; i++)
        run_op(j, i);
    j->op = op;
    struct iz_exec x = bench_exec(mem + bytes, scratch_of(*j, op));
    j->x = x;
    double s = bench_time(j->bench, run_op, j);
    j->x = x; /* one call's counts */
    run_op(j, 0);
    bench_wait(x.stream);
    op_show(j, s);
}

static void time_ops(void *to, const struct scene *s, const struct timed *op,
                     int n)
{
    struct job *j = to;
    int64_t bytes = take_views(j, s, NULL), scratch = 0;
    for (int i = 0; i < n; i++)
        scratch = max64(scratch, scratch_of(*j, &op[i]));
    char *mem = bench_device(bytes + scratch);
    for (int i = 0; i < s->n; i++)
        j->pinned[i] = s->pinned & BIT(i)
                           ? bench_pinned(iz_view_bytes(s->t[i].v), s->t[i].v.p)
                           : NULL;
    take_views(j, s, mem);
    for (int i = 0; i < n; i++)
        time_op(j, &op[i], op, mem, bytes);
    for (int i = 0; i < s->n; i++)
        if (j->pinned[i])
            bench_unpin(j->pinned[i]);
    bench_device_give(mem);
}

static void bench_shape(struct bench *b, struct timed_shape s)
{
    int64_t bytes = s.tokens * s.width * iz_dtype_bytes(backend.x.act);
    struct job j = {.bench = b, .shape = &s};
    j.sets =
        b->tiny ? 2 : (int)min64(1 + (ROTATE_BYTES - 1) / bytes, BENCH_SETS);
    printf("%s, %lld tokens, %d sets of tensors\n", s.model,
           (long long)s.tokens, j.sets);
    norm_timed(&s, time_ops, &j);
    product_timed(&s, 1, 3, "c_attn", "[C,3C]", time_ops, &j);
    attention_timed(&s, time_ops, &j);
    product_timed(&s, 1, 1, "c_proj", "[C,C]", time_ops, &j);
    product_timed(&s, 1, 4, "c_fc", "[C,4C]", time_ops, &j);
    gelu_timed(&s, time_ops, &j);
    product_timed(&s, 4, 1, "mlp c_proj", "[4C,C]", time_ops, &j);
    embedding_timed(&s, time_ops, &j);
    classifier_timed(&s, time_ops, &j);
}

void bench_models(struct bench *b)
{
    static const struct timed_shape tiny = {"tiny", 48, 3, 16, 256, 64};
    static const struct timed_shape small = {"GPT 6 x 384", 384,   6,
                                             256,           50304, 512};
    static const struct timed_shape large[] = {
        {"1.5B", 1600, 25, 1024, 50257, 8192},
        {"1.5B", 1600, 25, 1024, 50257, 16384},
        {"7B", 4096, 32, 2048, 50257, 8192},
        {"7B", 4096, 32, 2048, 50257, 16384},
        {"14B", 5120, 40, 2048, 50257, 8192},
        {"14B", 5120, 40, 2048, 50257, 16384}};
    fixture_bare = true;
    if (b->tiny || backend.x.backend == IZ_CPU)
        bench_shape(b, b->tiny ? tiny : small);
    else
        for (int i = 0; i < COUNT(large); i++)
            bench_shape(b, large[i]);
}
