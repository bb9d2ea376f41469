/* SPDX-License-Identifier: Apache-2.0 */
/* Attention on a GPU against double precision. */
#include "tests/codelets/gpu/ops_gpu.h"

#include <stdio.h>

#include "tests/codelets/gpu/attention_double.h"

enum { QKV, O, LSE, DQKV, DY, TENSORS };

struct shape {
    int64_t samples, seq, heads, d, kv_heads;
};

/* One of them, causal or not, with whose forward. */
struct task {
    struct shape s;
    bool full, cudnn;
};

static struct iz_attention attention_of(const struct iz_view *v,
                                        const struct task *t)
{
    const struct shape *s = &t->s;

    return (struct iz_attention){.qkv = v[QKV],
                                 .o = v[O],
                                 .lse = v[LSE],
                                 .seq = s->seq,
                                 .heads = (int)s->heads,
                                 .kv_heads = (int)s->kv_heads,
                                 .full = t->full};
}

static void forward(struct iz_exec *x, const struct iz_view *v, const void *arg)
{
    const struct task *t = arg;
    struct iz_attention a = attention_of(v, t);

    x->cudnn = t->cudnn;
    iz_attention_fwd(x, &a);
}

static void backward(struct iz_exec *x, const struct iz_view *v,
                     const void *arg)
{
    struct iz_attention a = attention_of(v, arg);

    iz_attention_bwd(x, v[DQKV], v[DY], &a);
}

static void run(struct tensor *t, const struct task *s,
                void (*op)(struct iz_exec *, const struct iz_view *,
                           const void *),
                unsigned reads, unsigned writes)
{
    gpu_run(&(struct gpu_op){.run = op,
                             .arg = s,
                             .t = t,
                             .n = TENSORS,
                             .reads = reads,
                             .writes = writes,
                             .act = t[QKV].v.dtype});
}

/* What attention.c does not refuse on this GPU. */
static bool possible(enum iz_dtype act, const struct shape *s)
{
    int c = gpu_capability();
    bool small = c == 86 || c == 89 || c / 10 == 12;

    return gpu_computes(act) &&
           (s->d <= 128 || (c != 75 && (act == IZ_F32 || !small)));
}

static void check_task(enum iz_dtype act, const struct task *task)
{
    const struct shape *s = &task->s;
    int64_t m = s->samples * s->seq, c = s->heads * s->d;
    int64_t ld = c + 2 * s->kv_heads * s->d;
    struct tensor t[TENSORS] = {
        [QKV] = tensor_new(act, m, ld, 2),
        [O] = tensor_new(act, m, c, 1),
        [LSE] = tensor_new(IZ_F32, s->samples * s->heads, s->seq, 1),
        [DQKV] = tensor_new(act, m, ld, 1),
        [DY] = tensor_new(act, m, c, 1)};
    struct attention_double ref = {s->samples, s->seq,      s->heads,
                                   s->d,       s->kv_heads, act,
                                   t[QKV].d,   t[DY].d,     .full = task->full};

    attention_double_run(&ref);
    run(t, task, forward, 1u << QKV, 1u << O | 1u << LSE);
    attention_double_near(&ref, "o", &t[O], ref.o);
    attention_double_near(&ref, "lse", &t[LSE], ref.lse);
    run(t, task, backward, 1u << QKV | 1u << O | 1u << LSE | 1u << DY,
        1u << DQKV);
    attention_double_near(&ref, "dqkv", &t[DQKV], ref.dqkv);
    attention_double_free(&ref);
    for (int i = 0; i < TENSORS; i++)
        tensor_free(&t[i]);
}

static void check_keys(enum iz_dtype act, const struct shape *s, bool full)
{
    check_task(act, &(struct task){*s, full, false});
}

static void check_shape(enum iz_dtype act, const struct shape *s)
{
    check_keys(act, s, false);
}

/* Every width of a kernel and every length of a tile; the heads of a 1.5B
 * model have 64 columns, those of a 7B and a 14B model 128. */
static void attention_agrees(void **state)
{
    static const struct shape shape[] = {
        {1, 1, 1, 8, 1},     {3, 5, 2, 16, 2},    {2, 64, 2, 40, 2},
        {1, 65, 3, 64, 3},   {1, 257, 1, 32, 1},  {2, 33, 1, 128, 1},
        {1, 130, 1, 80, 1},  {1, 70, 1, 200, 1},  {2, 512, 2, 64, 2},
        {1, 1024, 1, 64, 1}, {1, 1000, 1, 128, 1}};

    (void)state;
    fixture_seed();
    for (int t = 0; t < 3; t++)
        for (size_t i = 0; i < sizeof shape / sizeof shape[0]; i++)
            if (possible(iz_cuda_ops->act(fixture_types[t]), &shape[i]))
                check_shape(iz_cuda_ops->act(fixture_types[t]), &shape[i]);
}

/* The groups of Llama 3.2, Llama 3 and Qwen 2.5. */
static void attention_of_groups_agrees(void **state)
{
    static const struct shape shape[] = {{2, 130, 4, 64, 1},
                                         {1, 513, 8, 128, 2},
                                         {1, 300, 7, 64, 1},
                                         {3, 33, 6, 32, 2}};

    (void)state;
    fixture_seed();
    for (int t = 0; t < 3; t++)
        for (size_t i = 0; i < sizeof shape / sizeof shape[0]; i++)
            if (possible(iz_cuda_ops->act(fixture_types[t]), &shape[i]))
                check_shape(iz_cuda_ops->act(fixture_types[t]), &shape[i]);
}

/* As in an encoder; 197 are the patches of an image of 224 x 224, and one. */
static void attention_of_all_keys_agrees(void **state)
{
    static const struct shape shape[] = {{3, 1, 2, 8, 2},
                                         {2, 65, 3, 64, 3},
                                         {4, 197, 12, 64, 12},
                                         {1, 257, 2, 80, 2},
                                         {2, 130, 4, 128, 2}};

    (void)state;
    fixture_seed();
    for (int t = 0; t < 3; t++)
        for (size_t i = 0; i < sizeof shape / sizeof shape[0]; i++)
            if (possible(iz_cuda_ops->act(fixture_types[t]), &shape[i]))
                check_keys(iz_cuda_ops->act(fixture_types[t]), &shape[i], true);
}

/* cuDNN's forward, whose results our backward takes. */
static void attention_by_cudnn_agrees(void **state)
{
    static const struct shape shape[] = {
        {1, 1, 1, 8, 1},     {3, 5, 2, 16, 2},   {2, 65, 3, 64, 3},
        {2, 33, 1, 128, 1},  {1, 130, 1, 80, 1}, {1, 70, 1, 200, 1},
        {1, 1024, 2, 64, 2}, {2, 130, 4, 64, 1}, {1, 513, 8, 128, 2}};

    (void)state;
    if (iz_cuda_ops->cudnn_missing() || gpu_capability() < 80) {
        print_message("no cuDNN: %s\n", gpu_capability() < 80
                                            ? "it needs 8.0"
                                            : iz_cuda_ops->cudnn_missing());
        skip();
    }
    fixture_seed();
    for (int t = 1; t < 3; t++)
        for (size_t i = 0; i < sizeof shape / sizeof shape[0]; i++)
            if (possible(iz_cuda_ops->act(fixture_types[t]), &shape[i]))
                check_task(iz_cuda_ops->act(fixture_types[t]),
                           &(struct task){shape[i], i % 3 == 1, true});
}

/* In fp32 any width is possible. */
static void attention_of_odd_heads_agrees(void **state)
{
    static const struct shape shape[] = {
        {1, 1, 1, 1, 1}, {3, 5, 2, 7, 2}, {2, 65, 3, 17, 3}, {2, 33, 2, 81, 2}};

    (void)state;
    fixture_seed();
    for (size_t i = 0; i < sizeof shape / sizeof shape[0]; i++)
        check_shape(IZ_F32, &shape[i]);
}

int ops_gpu_attention(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(attention_agrees),
        cmocka_unit_test(attention_of_groups_agrees),
        cmocka_unit_test(attention_of_all_keys_agrees),
        cmocka_unit_test(attention_of_odd_heads_agrees),
        cmocka_unit_test(attention_by_cudnn_agrees),
    };

    return cmocka_run_group_tests_name("gpu attention", tests, NULL, NULL);
}
