/* SPDX-License-Identifier: Apache-2.0 */
/* Attention by cuDNN, on the stand-in for that library: what the graphs that we
 * describe compute, where they read and write, and that our own backward
 * understands what the forward leaves, all against double precision.  And which
 * of the library's plans are taken. */
#include <dlfcn.h>
#include <string.h>

#include "codelets/gpu/attention_cudnn.h"
#include "codelets/kernels/cuda_lib.h"
#include "codelets/ops/gpu_ops.h"
#include "tests/codelets/gpu/emulated.h"
#include "tests/codelets/ops/attention_case.h"
#include "tests/fake/cudnn/fake_cudnn.h"

static struct fake_cudnn *fake, as_it_was;

/* The program loads the library as it would the real one. */
static int find_fake(void **state)
{
    void *lib = dlopen("libcudnn.so.9", RTLD_NOW | RTLD_LOCAL);
    fake = lib ? dlsym(lib, "fake_cudnn") : NULL;
    if (!fake) {
        print_error("%s\n", lib ? "this is no stand-in" : dlerror());
        return -1;
    }
    as_it_was = *fake;
    return iz_cudnn_missing() != NULL;
}

static int reset_fake(void **state)
{
    assert_int_equal(fake->alive, 0);
    *fake = as_it_was;
    return fixture_seed(state);
}

/* A scene is run twice; a backward is of one sample. */
static void check(enum iz_dtype type, struct shape s, bool full, bool fwd,
                  bool bwd)
{
    struct attention t = attention_new(type, s, 2);
    t.full = full;
    t.scale = s.samples > 1 ? 0.2f : 0;
    t.cudnn = fwd;
    t.cudnn_bwd = bwd;
    attention_check(&t);
    assert_int_equal(fake->runs, 2 * fwd + 2 * bwd * s.samples);
    fake->runs = 0;
    attention_free(&t);
    iz_cudnn_close(&backend.x.cuda->dnn);
}

/* Widths and groups of the models, and lengths of no round number. */
static const struct shape shape[] = {
    {1, 1, 1, 8, 1},   {3, 5, 2, 16, 2},   {2, 64, 3, 64, 3}, {1, 33, 2, 80, 2},
    {2, 37, 4, 64, 1}, {1, 40, 6, 128, 2}, {1, 20, 2, 256, 1}};

/* The library's forward and our backward; its backward, after our forward and
 * after its own. */
static void both_directions_agree_with_double(void **state)
{
    for (int i = 0; i < 4 * COUNT(shape); i++) {
        enum iz_dtype type = i % 2 ? IZ_F16 : IZ_BF16;
        check(type, shape[i / 4], i / 2 % 2, true, false);
        check(type, shape[i / 4], i / 2 % 2, i % 3 == 0, true);
    }
}

/* As much as is planned, which the stand-in overwrites. */
static void a_backward_has_a_matrix_of_scores_for_each_head(void **state)
{
    int64_t most = iz_gpu_cudnn_bwd_bytes(1, 65, 4, 2, 16) - 256;
    assert_int_equal(iz_gpu_cudnn_bwd_bytes(1, 64, 3, 3, 64),
                     2 * 3 * 64 * 128 + IZ_CUDNN_SCRATCH);
    assert_int_equal(most, 2 * 4 * 128 * 128 + 4 * 4 * 65 * 16 +
                               IZ_CUDNN_SCRATCH - 256);
    fake->config[0].workspace = most;
    check(IZ_BF16, (struct shape){2, 65, 4, 16, 2}, false, false, true);
}

/* In equal parts, with the bits of one after the other. */
static void a_backward_does_as_many_samples_as_scratch_holds(void **state)
{
    const struct shape s = {6, 33, 2, 16, 1};
    const int64_t more = iz_gpu_cudnn_bwd_bytes(2, 33, 2, 1, 16) -
                         iz_gpu_cudnn_bwd_bytes(1, 33, 2, 1, 16);
    const struct {
        int64_t spare;
        bool moody;
        int runs;
    } cases[] = {{0, false, 6},        {more - 64, false, 6},
                 {more, false, 3},     {4 * more, false, 2},
                 {5 * more, false, 1}, {5 * more, true, 6}};
    struct attention t = attention_new(IZ_BF16, s, 2);
    t.cudnn_bwd = true;
    attention_run(&t, false);
    attention_run(&t, true);
    struct tensor want = tensor_copy(&t.s.t[DQKV]);
    for (int i = 0; i < COUNT(cases); i++) {
        iz_cudnn_close(&backend.x.cuda->dnn);
        fake->moody = cases[i].moody;
        fake->runs = 0;
        t.s.spare = cases[i].spare;
        attention_run(&t, true);
        assert_int_equal(fake->runs, 2 * cases[i].runs);
        fixture_same_bits("dqkv", t.s.t[DQKV].v, want.v);
    }
    tensor_free(&want);
    iz_cudnn_close(&backend.x.cuda->dnn);
    attention_free(&t);
}

static void a_plan_is_made_once_per_shape(void **state)
{
    const struct {
        struct shape shape;
        bool full, back;
        int plans;
    } call[] = {
        {{2, 9, 2, 8, 2}, false, false, 1}, {{2, 9, 2, 8, 1}, false, false, 2},
        {{2, 9, 2, 8, 2}, false, false, 2}, {{2, 9, 2, 8, 1}, false, false, 2},
        {{2, 9, 2, 8, 2}, true, false, 3},  {{2, 9, 2, 8, 1}, false, true, 4},
        {{5, 9, 2, 8, 1}, false, true, 4}};
    for (int i = 0; i < COUNT(call); i++) {
        struct attention t = attention_new(IZ_BF16, call[i].shape, 1);
        t.full = call[i].full;
        t.cudnn = !call[i].back;
        t.cudnn_bwd = call[i].back;
        fake->runs = 0;
        attention_run(&t, call[i].back);
        assert_int_equal(fake->plans, call[i].plans);
        assert_int_equal(fake->runs,
                         2 * (call[i].back ? call[i].shape.samples : 1));
        attention_free(&t);
    }
    iz_cudnn_close(&backend.x.cuda->dnn);
}

/* The worker's handle and its stream. */
static bool ask(enum iz_dtype type, bool back, struct iz_refusal *why)
{
    struct iz_cuda cuda = {NULL};
    struct attention t = attention_new(type, (struct shape){2, 9, 4, 16, 2}, 1);
    struct iz_exec x = iz_exec_dry(IZ_CUDA, type);
    struct iz_view v[ATTENTION_TENSORS];
    for (int i = 0; i < ATTENTION_TENSORS; i++)
        v[i] = t.s.t[i].v;
    t.cudnn = !back;
    t.cudnn_bwd = back;
    x.numerics.capability = backend.x.numerics.capability;
    x.cuda = &cuda;
    x.stream = &cuda;
    x.ask = why;
    why->why[0] = 0;
    (back ? attention_backward : attention_forward)(&x, v, &t);
    assert_int_equal(fake->runs, 0);
    if (cuda.dnn)
        assert_ptr_equal(fake->stream, &cuda);
    iz_cudnn_close(&cuda.dnn);
    attention_free(&t);
    return !why->why[0];
}

static void refused(enum iz_dtype type, bool back, const char *reason)
{
    struct iz_refusal why;
    assert_false(ask(type, back, &why));
    if (!strstr(why.why, reason))
        fail_msg("it said: %s", why.why);
}

/* Already when it is asked, which is before the first step. */
static void the_first_plan_that_will_do_is_taken(void **state)
{
    struct iz_refusal why;
    assert_true(ask(IZ_F16, false, &why));
    assert_int_equal(fake->plans, 1);
    fake->configs = 3;
    fake->config[0].varies = true;
    fake->config[1].workspace = IZ_CUDNN_SCRATCH;
    fake->config[2].workspace = 0;
    assert_true(ask(IZ_F16, false, &why));
    fake->config[2].broken = true;
    refused(IZ_F16, false,
            "attention of 2 samples of 9, 4 heads of 16 columns, keys "
            "of 2: its kernel: cuDNN 9.19.0: CUDNN_STATUS_BAD_PARAM: "
            "it does not compile");
}

static void the_chosen_plan_is_run(void **state)
{
    fake->configs = 2;
    fake->config[0].varies = true;
    check(IZ_BF16, (struct shape){1, 7, 1, 8, 1}, false, true, false);
    assert_int_equal(fake->chosen, 1);
}

static void what_cannot_be_is_refused(void **state)
{
    refused(IZ_F32, false, "cuDNN's attention is of bf16 and fp16");
    fake->config[0].workspace = 4 * 2 * 4 * 9 * 9 + IZ_CUDNN_SCRATCH;
    refused(IZ_BF16, false,
            "cuDNN wants 68128 bytes beside the tensors, 65280 are");
    fake->config[0].workspace = iz_gpu_cudnn_bwd_bytes(1, 9, 4, 2, 16);
    refused(IZ_BF16, true,
            "backward of attention of 1 samples of 9, 4 heads of 16 columns, "
            "keys of 2: cuDNN wants 133376 bytes beside the tensors, 133120");
    fake->config[0].varies = true;
    refused(IZ_BF16, false, "a second run of it may give other bits");
    refused(IZ_BF16, true, "a second run of it may give other bits");
    fake->configs = FAKE_CONFIGS;
    for (int i = 0; i < FAKE_CONFIGS; i++)
        fake->config[i].varies = true;
    refused(IZ_BF16, true, "a second run of it may give other bits");
    fake->configs = 0;
    refused(IZ_BF16, false,
            "cuDNN 9.19.0: CUDNN_STATUS_NOT_SUPPORTED: no engine");
}

static void run_it(const void *arg)
{
    struct attention t = *(const struct attention *)arg;
    attention_run(&t, false);
}

static void a_run_without_a_plan_ends(void **state)
{
    struct attention t =
        attention_new(IZ_BF16, (struct shape){1, 4, 1, 8, 1}, 1);
    t.cudnn = true;
    fake->configs = 0;
    scene_dies(run_it, &t, "no engine");
    attention_free(&t);
}

#define TEST(f) cmocka_unit_test_setup(f, reset_fake)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(both_directions_agree_with_double),
        TEST(a_backward_has_a_matrix_of_scores_for_each_head),
        TEST(a_backward_does_as_many_samples_as_scratch_holds),
        TEST(a_plan_is_made_once_per_shape),
        TEST(the_first_plan_that_will_do_is_taken),
        TEST(the_chosen_plan_is_run),
        TEST(what_cannot_be_is_refused),
        TEST(a_run_without_a_plan_ends),
    };
    if (backend_renew(NULL))
        return 1;
    return cmocka_run_group_tests_name("attention_cudnn", tests, find_fake,
                                       NULL);
}
