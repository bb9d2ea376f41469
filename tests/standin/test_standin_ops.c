/* SPDX-License-Identifier: Apache-2.0 */
/* Every op on a GPU of the stand-in against the same op on the CPU, bit for
 * bit: through the op itself, with tensors and scratch in device memory and the
 * arguments gone before the op runs. */
#include "tests/standin/scene.h"

#include <stdlib.h>
#include <string.h>

#include "codelets/flat/flat.h"
#include "codelets/gpu/flat_buffer.h"
#include "codelets/ops/gpu_ops.h"

/* ---- products ----------------------------------------------------------- */

static void matmul_fwd(struct iz_exec *x, const struct scene *s)
{
    struct iz_linear l = {.w = s->v[3], .b = s->v[4]};

    iz_matmul_fwd(x, s->v[0], s->v[1], s->v[2], &l);
}

static void matmul_da(struct iz_exec *x, const struct scene *s)
{
    struct iz_linear l = {.w = s->v[2], .out_in = true};

    iz_matmul_da(x, s->v[0], s->v[1], &l);
}

static void matmul_dw(struct iz_exec *x, const struct scene *s)
{
    struct iz_linear l = {.dw = s->v[2], .db = s->v[3]};

    iz_matmul_dw(x, s->v[0], s->v[1], &l);
}

static void matmul_db_only(struct iz_exec *x, const struct scene *s)
{
    struct iz_linear l = {.dw = s->v[2], .db = s->v[3]};

    l.dw.p = NULL;
    iz_matmul_dw(x, s->v[0], s->v[1], &l);
}

static void test_products(void **state)
{
    const struct shape dw[VIEWS] = {
        {IZ_F32, M, OUT}, {IZ_F32, M, C}, {IZ_BF16, C, OUT}, {IZ_F16, 1, OUT}};

    (void)state;
    compare(matmul_fwd, (struct shape[VIEWS]){{IZ_F32, M, OUT},
                                              {IZ_F32, M, OUT},
                                              {IZ_F32, M, C},
                                              {IZ_BF16, C, OUT},
                                              {IZ_BF16, 1, OUT}});
    compare(matmul_da, (struct shape[VIEWS]){
                           {IZ_F32, M, C}, {IZ_F32, M, OUT}, {IZ_F16, OUT, C}});
    compare(matmul_dw, dw);
    compare(matmul_db_only, dw);
}

/* ---- row by row --------------------------------------------------------- */

static struct iz_norm norm_of(const struct scene *s)
{
    return (struct iz_norm){.mean = s->v[2],
                            .rstd = s->v[3],
                            .w = s->v[4],
                            .b = s->v[5],
                            .dw = s->v[6],
                            .db = s->v[7]};
}

static void layernorm_fwd(struct iz_exec *x, const struct scene *s)
{
    struct iz_norm n = norm_of(s);

    iz_layernorm_fwd(x, s->v[0], s->v[1], &n);
}

static void layernorm_again(struct iz_exec *x, const struct scene *s)
{
    struct iz_norm n = norm_of(s);

    iz_layernorm_again(x, s->v[0], s->v[1], &n);
}

static void layernorm_bwd(struct iz_exec *x, const struct scene *s)
{
    struct iz_norm n = norm_of(s);

    iz_layernorm_bwd(x, s->v[0], s->v[8], s->v[9], s->v[1], &n);
}

static void gelu_fwd(struct iz_exec *x, const struct scene *s)
{
    iz_gelu_fwd(x, s->v[0], s->v[1]);
}

static void gelu_bwd(struct iz_exec *x, const struct scene *s)
{
    iz_gelu_bwd(x, s->v[0], s->v[1], s->v[2], s->v[3]);
}

static void test_rows(void **state)
{
    const struct shape norm[VIEWS] = {
        {IZ_F32, M, C},  {IZ_F32, M, C}, {IZ_F32, M, 1}, {IZ_F32, M, 1},
        {IZ_BF16, 1, C}, {IZ_F16, 1, C}, {IZ_F32, 1, C}, {IZ_BF16, 1, C},
        {IZ_F32, M, C},  {IZ_F32, M, C}};
    const struct shape gelu[VIEWS] = {
        {IZ_F32, M, C}, {IZ_F32, M, C}, {IZ_F32, M, C}, {IZ_F32, M, C}};

    (void)state;
    compare(layernorm_fwd, norm);
    compare(layernorm_again, norm);
    compare(layernorm_bwd, norm);
    compare(gelu_fwd, gelu);
    compare(gelu_bwd, gelu);
}

/* ---- the Llama family --------------------------------------------------- */

static struct iz_rmsnorm rmsnorm_of(const struct scene *s)
{
    return (struct iz_rmsnorm){
        .w = s->v[2], .dw = s->v[3], .rstd = s->v[4], .eps = 1e-5f};
}

static void rmsnorm_fwd(struct iz_exec *x, const struct scene *s)
{
    struct iz_rmsnorm n = rmsnorm_of(s);

    iz_rmsnorm_fwd(x, s->v[0], s->v[1], &n);
}

static void rmsnorm_again(struct iz_exec *x, const struct scene *s)
{
    struct iz_rmsnorm n = rmsnorm_of(s);

    iz_rmsnorm_again(x, s->v[0], s->v[1], &n);
}

static void rmsnorm_bwd(struct iz_exec *x, const struct scene *s)
{
    struct iz_rmsnorm n = rmsnorm_of(s);

    iz_rmsnorm_bwd(x, s->v[0], s->v[5], s->v[6], s->v[1], &n);
}

/* Two heads of two columns, from the third on. */
static void headnorm_fwd(struct iz_exec *x, const struct scene *s)
{
    struct iz_rmsnorm n = rmsnorm_of(s);

    iz_headnorm_fwd(x, s->v[0], s->v[1], &n, 3);
}

static void headnorm_bwd(struct iz_exec *x, const struct scene *s)
{
    struct iz_rmsnorm n = rmsnorm_of(s);

    iz_headnorm_bwd(x, s->v[0], s->v[1], &n, 3);
}

static void turn(struct iz_exec *x, const struct scene *s, bool back)
{
    struct iz_rope r = {
        .seq = SEQ, .heads = 3, .d = 2, .theta = 10, .factor = 1};

    iz_rope(x, s->v[0], &r, back);
}

static void rope(struct iz_exec *x, const struct scene *s)
{
    turn(x, s, false);
}

static void rope_back(struct iz_exec *x, const struct scene *s)
{
    turn(x, s, true);
}

static void swiglu_fwd(struct iz_exec *x, const struct scene *s)
{
    iz_swiglu_fwd(x, s->v[0], s->v[1]);
}

static void swiglu_bwd(struct iz_exec *x, const struct scene *s)
{
    iz_swiglu_bwd(x, s->v[1], s->v[0], s->v[2], s->v[3]);
}

static void test_llama(void **state)
{
    const struct shape norm[VIEWS] = {
        {IZ_F32, M, C}, {IZ_F32, M, C}, {IZ_BF16, 1, C}, {IZ_F16, 1, C},
        {IZ_F32, M, 1}, {IZ_F32, M, C}, {IZ_F32, M, C}};
    const struct shape heads[VIEWS] = {{IZ_F32, M, C},
                                       {IZ_F32, M, 4},
                                       {IZ_BF16, 1, 2},
                                       {IZ_F16, 1, 2},
                                       {IZ_F32, M, 2}};
    const struct shape swiglu[VIEWS] = {
        {IZ_F32, M, C}, {IZ_F32, M, 2 * C}, {IZ_F32, M, C}, {IZ_F32, M, 2 * C}};

    (void)state;
    compare(rmsnorm_fwd, norm);
    compare(rmsnorm_again, norm);
    compare(rmsnorm_bwd, norm);
    compare(headnorm_fwd, heads);
    compare(headnorm_bwd, heads);
    compare(rope, (struct shape[VIEWS]){{IZ_F32, M, C}});
    compare(rope_back, (struct shape[VIEWS]){{IZ_F32, M, C}});
    compare(swiglu_fwd, swiglu);
    compare(swiglu_bwd, swiglu);
}

/* ---- attention ---------------------------------------------------------- */

static struct iz_attention attention_of(const struct scene *s)
{
    return (struct iz_attention){.qkv = s->v[0],
                                 .o = s->v[1],
                                 .lse = s->v[2],
                                 .seq = SEQ,
                                 .heads = HEADS};
}

static void attention_fwd(struct iz_exec *x, const struct scene *s)
{
    struct iz_attention a = attention_of(s);

    iz_attention_fwd(x, &a);
}

static void attention_bwd(struct iz_exec *x, const struct scene *s)
{
    struct iz_attention a = attention_of(s);

    iz_attention_bwd(x, s->v[3], s->v[4], &a);
}

/* Both heads share a key. */
static void groups_fwd(struct iz_exec *x, const struct scene *s)
{
    struct iz_attention a = attention_of(s);

    a.kv_heads = 1;
    iz_attention_fwd(x, &a);
}

static void groups_bwd(struct iz_exec *x, const struct scene *s)
{
    struct iz_attention a = attention_of(s);

    a.kv_heads = 1;
    iz_attention_bwd(x, s->v[3], s->v[4], &a);
}

/* Every row sees every key. */
static void full_fwd(struct iz_exec *x, const struct scene *s)
{
    struct iz_attention a = attention_of(s);

    a.full = true;
    iz_attention_fwd(x, &a);
}

static void full_bwd(struct iz_exec *x, const struct scene *s)
{
    struct iz_attention a = attention_of(s);

    a.full = true;
    iz_attention_bwd(x, s->v[3], s->v[4], &a);
}

static void test_attention(void **state)
{
    const struct shape groups[VIEWS] = {{IZ_F32, M, 2 * C},
                                        {IZ_F32, M, C},
                                        {IZ_F32, M / SEQ * HEADS, SEQ},
                                        {IZ_F32, M, 2 * C},
                                        {IZ_F32, M, C}};
    const struct shape shapes[VIEWS] = {{IZ_F32, M, 3 * C},
                                        {IZ_F32, M, C},
                                        {IZ_F32, M / SEQ * HEADS, SEQ},
                                        {IZ_F32, M, 3 * C},
                                        {IZ_F32, M, C}};

    (void)state;
    compare(attention_fwd, shapes);
    compare(attention_bwd, shapes);
    compare(full_fwd, shapes);
    compare(full_bwd, shapes);
    compare(groups_fwd, groups);
    compare(groups_bwd, groups);
}

/* ---- tokens ------------------------------------------------------------- */

static void embedding_fwd(struct iz_exec *x, const struct scene *s)
{
    iz_embedding_fwd(x, s->v[0], s->token, s->v[1], s->v[2]);
}

static void embedding_bwd(struct iz_exec *x, const struct scene *s)
{
    iz_embedding_bwd(x, s->v[1], s->v[2], s->v[0], s->token);
}

static struct iz_classifier classifier_of(const struct scene *s)
{
    return (struct iz_classifier){.a = s->v[0],
                                  .w = s->v[1],
                                  .da = s->v[2],
                                  .dw = s->v[3],
                                  .target = s->token,
                                  .loss_scale = 2,
                                  .loss = s->number};
}

static void classifier_fwd(struct iz_exec *x, const struct scene *s)
{
    struct iz_classifier c = classifier_of(s);

    iz_classifier_fwd(x, &c);
}

static void classifier_bwd(struct iz_exec *x, const struct scene *s)
{
    struct iz_classifier c = classifier_of(s);

    iz_classifier_bwd(x, &c);
}

static void test_tokens(void **state)
{
    const struct shape embedding[VIEWS] = {
        {IZ_F32, M, C}, {IZ_BF16, VOCAB, C}, {IZ_BF16, SEQ, C}};
    const struct shape classifier[VIEWS] = {{IZ_F32, M, C},
                                            {IZ_BF16, VOCAB, C},
                                            {IZ_F32, M, C},
                                            {IZ_F32, VOCAB, C}};

    (void)state;
    compare(embedding_fwd, embedding);
    compare(embedding_bwd, embedding);
    compare(classifier_fwd, classifier);
    compare(classifier_bwd, classifier);
}

/* ---- tables ------------------------------------------------------------- */

static struct iz_table table_of(const struct scene *s)
{
    return (struct iz_table){s->v[2], s->v[3], s->token, VOCAB / 4};
}

static void table_fwd(struct iz_exec *x, const struct scene *s)
{
    struct iz_table t = table_of(s);

    iz_table_fwd(x, s->v[0], s->v[1], &t);
}

static void table_bwd(struct iz_exec *x, const struct scene *s)
{
    struct iz_table t = table_of(s);

    iz_table_bwd(x, s->v[0], &t);
}

static void interact_fwd(struct iz_exec *x, const struct scene *s)
{
    iz_interact_fwd(x, s->v[0], s->v[1], s->v[2]);
}

static void interact_bwd(struct iz_exec *x, const struct scene *s)
{
    iz_interact_bwd(x, s->v[3], s->v[4], s->v[0], s->v[1], s->v[2]);
}

static void convert(struct iz_exec *x, const struct scene *s)
{
    iz_convert(x, s->v[0], s->v[1]);
}

static void test_tables(void **state)
{
    const struct shape table[VIEWS] = {{IZ_F32, M, C},
                                       {IZ_F32, M, C},
                                       {IZ_BF16, VOCAB / 2, C},
                                       {IZ_BF16, VOCAB / 2, C}};
    const struct shape pairs[VIEWS] = {{IZ_F32, M, C + 6},
                                       {IZ_F32, M, C},
                                       {IZ_F32, M * 3, C},
                                       {IZ_F32, M, C},
                                       {IZ_F32, M * 3, C}};
    const struct shape types[VIEWS] = {{IZ_BF16, M, C}, {IZ_F32, M, C}};

    (void)state;
    compare(table_fwd, table);
    compare(table_bwd, table);
    compare(interact_fwd, pairs);
    compare(interact_bwd, pairs);
    compare(convert, types);
}

/* ---- flat buffers ------------------------------------------------------- */

/* The list of inputs is gone when the call returns. */
static void sum(struct iz_exec *x, const struct scene *s)
{
    const void *in[] = {s->v[1].p, s->v[2].p, s->v[3].p};

    if (!x->dry)
        iz_buffer_sum(x, s->v[0].p, IZ_F32, true, in, 3, IZ_BF16, N);
    memset(in, 0xff, sizeof in);
}

static void norm2(struct iz_exec *x, const struct scene *s)
{
    if (x->dry)
        iz_work(x, IZ_U8, 1, iz_flat_norm2_scratch_bytes(N));
    else
        iz_buffer_norm2(x, s->number, s->v[0].p, IZ_F16, N);
}

/* Of one block. */
static void squares(struct iz_exec *x, const struct scene *s)
{
    if (!x->dry)
        iz_buffer_squares(x, s->number, s->v[0].p, IZ_BF16, N);
}

static const struct iz_step step = {.hyper = {.type = IZ_OPTIMIZER_ADAMW,
                                              .lr = 1e-2,
                                              .beta1 = 0.9,
                                              .beta2 = 0.999,
                                              .eps = 1e-8,
                                              .weight_decay = 0.1,
                                              .adamw = true,
                                              .bias_correction = true},
                                    .t = 3,
                                    .grad_scale = 0.5f};

/* Two spans, gone when the call returns. */
static void update(struct iz_exec *x, const struct scene *s,
                   enum iz_moment_type type, int64_t n)
{
    struct iz_alike span[2] = {iz_alike_of(&step), iz_alike_of(&step)};

    span[0].end = 10;
    if (!x->dry)
        iz_buffer_update(x, &(struct iz_update){.optimizer = step.hyper.type,
                                                .type = type,
                                                .g_type = IZ_BF16,
                                                .out_type = IZ_F16,
                                                .n = n,
                                                .room = n,
                                                .p = s->v[0].p,
                                                .state = {s->v[1].p, s->v[2].p},
                                                .g = s->v[3].p,
                                                .out = s->v[4].p,
                                                .key = 5,
                                                .span = span,
                                                .spans = 2});
    memset(span, 0xff, sizeof span);
}

static void adam(struct iz_exec *x, const struct scene *s)
{
    update(x, s, IZ_MOMENT_F32, N);
}

static void adam_narrow(struct iz_exec *x, const struct scene *s)
{
    update(x, s, IZ_MOMENT_FP8, N / IZ_MOMENT_BLOCK * IZ_MOMENT_BLOCK);
}

static void test_flat(void **state)
{
    (void)state;
    compare(sum, (struct shape[VIEWS]){{IZ_F32, 1, N},
                                       {IZ_BF16, 1, N},
                                       {IZ_BF16, 1, N},
                                       {IZ_BF16, 1, N}});
    compare(norm2, (struct shape[VIEWS]){{IZ_F16, 1, N}});
    compare(squares, (struct shape[VIEWS]){{IZ_BF16, 1, N}});
    compare(adam, (struct shape[VIEWS]){{IZ_F32, 1, N},
                                        {IZ_F32, 1, N},
                                        {IZ_F32, 1, N},
                                        {IZ_BF16, 1, N},
                                        {IZ_F16, 1, N}});
    compare(adam_narrow, (struct shape[VIEWS]){{IZ_F32, 1, N},
                                               {IZ_F32, 1, N},
                                               {IZ_F32, 1, N},
                                               {IZ_BF16, 1, N},
                                               {IZ_F16, 1, N}});
}

/* ---- the rest ----------------------------------------------------------- */

static void test_handles_and_rate(void **state)
{
    struct iz_exec x = {.backend = IZ_CUDA, .act = IZ_F32, .stream = stream};
    struct iz_cuda *c = NULL;

    (void)state;
    assert_int_equal(iz_cuda_ops->open(&c, stream), 0);
    assert_non_null(c);
    iz_cuda_ops->close(&c);
    assert_null(c);
    assert_int_equal(iz_cuda_ops->act(IZ_BF16), IZ_F32);
    assert_true(iz_cuda_ops->gemm_rate(&x, 32, 32, 32, 0.1) > 0);
}

static int group_setup(void **state)
{
    (void)state;
    fixture_seed();
    return cudaStreamCreate(&stream);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_products),
        cmocka_unit_test(test_rows),
        cmocka_unit_test(test_llama),
        cmocka_unit_test(test_attention),
        cmocka_unit_test(test_tokens),
        cmocka_unit_test(test_tables),
        cmocka_unit_test(test_flat),
        cmocka_unit_test(test_handles_and_rate),
    };

    setenv("IZ_STANDIN_JITTER_US", "500", 1);
    setenv("IZ_STANDIN_PAGEABLE", "abort", 1);
    return cmocka_run_group_tests_name("standin-ops", tests, group_setup, NULL);
}
