/* SPDX-License-Identifier: Apache-2.0 */
/* What a config file and overrides give. */
#include "tests/runtime/config/reading.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

static void defaults_are_deepspeeds(void **state)
{
    assert_accepted("");
    assert_int_equal(config.micro_batch, 8);
    assert_int_equal(config.grad_accum, 1);
    assert_true(config.gradient_clipping == 1);
    assert_int_equal(config.dtype, IZ_F32);
    assert_true(config.grad_accum_fp32);
    assert_true(config.optimizer.adamw && config.optimizer.bias_correction);
    assert_true(config.optimizer.lr == 1e-3 && config.optimizer.eps == 1e-8);
    assert_true(config.optimizer.beta1 == 0.9 &&
                config.optimizer.beta2 == 0.999);
    assert_true(config.optimizer.weight_decay == 0);
    assert_int_equal(config.lr.kind, IZ_LR_CONST);
    assert_int_equal(config.fp16.initial_scale_power, 16);
    assert_int_equal(config.fp16.loss_scale_window, 1000);
    assert_int_equal(config.fp16.hysteresis, 2);
    assert_true(config.fp16.min_loss_scale == 1 && config.fp16.loss_scale == 0);
    assert_int_equal(config.zero.stage, 0);
    assert_int_equal(config.zero.optimizer.buffer_count, 12); /* theirs: 4 */
    assert_int_equal(config.zero.param.buffer_count, 5);
    assert_int_equal(config.zero.sub_group_size, 1000000000);
    assert_int_equal(config.zero.prefetch_bucket_size, 50000000);
    assert_int_equal(toy.layers, 2);
}

static void a_deepspeed_users_file_works(void **state)
{
    if (read_set(users_file, NULL, 0, 3) != 0)
        fail_msg("%s", said);
    assert_int_equal(config.train_batch_size, 24);
    assert_int_equal(config.run.log_interval, 20);
    assert_true(config.gradient_clipping == 0.5);
    assert_int_equal(config.dtype, IZ_F16);
    assert_false(config.grad_accum_fp32);
    assert_false(config.optimizer.adamw);
    assert_true(config.optimizer.beta1 == 0.8 &&
                config.optimizer.beta2 == 0.95);
    assert_true(config.optimizer.weight_decay == 3e-7);
    assert_int_equal(config.lr.kind, IZ_LR_DECAY);
    assert_false(config.lr.log_warmup);
    assert_true(config.lr.warmup_max_lr == 3e-5);
    assert_int_equal(config.lr.warmup_num_steps, 30);
    assert_int_equal(config.lr.total_num_steps, 70); /* "auto": run.steps */
    assert_int_equal(config.fp16.initial_scale_power, 12);
    assert_int_equal(config.fp16.hysteresis, 3);
    assert_true(config.fp16.consecutive_hysteresis);
    assert_int_equal(config.zero.stage, 3);
    assert_int_equal(config.zero.optimizer.home, IZ_HOME_CPU);
    assert_int_equal(config.zero.optimizer.buffer_count, 6);
    assert_false(config.zero.optimizer.pin_memory);
    assert_int_equal(config.zero.param.home, IZ_HOME_NVME);
    assert_string_equal(config.zero.param.nvme_path, "/nvme");
    assert_int_equal(config.zero.sub_group_size, 1000000);
    assert_false(config.zero.overlap_comm);
    assert_int_equal(config.zero.prefetch_bucket_size, 50000000);
    assert_int_equal(config.zero.max_live_parameters, 500000000);
    assert_int_equal(config.zero.max_reuse_distance, 0);
    assert_int_equal(config.run.schedule, IZ_BREADTH_FIRST);
    assert_int_equal(toy.layers, 5);
    assert_int_equal(toy.width, 1024);
    assert_int_equal(toy.act, TOY_RELU);
}

/* 0: not in the file. */
static void assert_batch(int t, int m, int g, int ranks, int want_t, int want_m,
                         int want_g)
{
    char json[256], one[3][16] = {"null", "null", "null"};

    if (t != 0)
        snprintf(one[0], sizeof(one[0]), "%d", t);
    if (m != 0)
        snprintf(one[1], sizeof(one[1]), "%d", m);
    if (g != 0)
        snprintf(one[2], sizeof(one[2]), "%d", g);
    snprintf(json, sizeof(json),
             "{\"train_batch_size\": %s, \"train_micro_batch_size_per_gpu\": "
             "%s, \"gradient_accumulation_steps\": %s}",
             one[0], one[1], one[2]);
    if (read_set(json, NULL, 0, ranks) != 0)
        fail_msg("%s\n%s", json, said);
    assert_int_equal(config.train_batch_size, want_t);
    assert_int_equal(config.micro_batch, want_m);
    assert_int_equal(config.grad_accum, want_g);
}

static void two_batch_sizes_give_the_third(void **state)
{
    assert_batch(24, 4, 2, 3, 24, 4, 2);
    assert_batch(24, 4, 0, 3, 24, 4, 2);
    assert_batch(24, 0, 2, 3, 24, 4, 2);
    assert_batch(0, 4, 2, 3, 24, 4, 2);
    assert_batch(24, 0, 0, 3, 24, 8, 1);
    assert_batch(0, 4, 0, 3, 12, 4, 1);
}

static void batch_sizes_that_do_not_multiply_are_refused(void **state)
{
    static const struct {
        const char *json;
        int ranks;
        const char *text;
    } cases[] = {
        {"{\"train_batch_size\": 25, \"train_micro_batch_size_per_gpu\": 4, "
         "\"gradient_accumulation_steps\": 2}",
         3,
         "train_batch_size: 25 is not train_micro_batch_size_per_gpu 4 x "
         "gradient_accumulation_steps 2 x 3 ranks"},
        {"{\"train_batch_size\": 2}", 4,
         "2 is not train_micro_batch_size_per_gpu 0 x "
         "gradient_accumulation_steps 1 x 4 ranks"},
        {"{\"train_batch_size\": 9, \"train_micro_batch_size_per_gpu\": 2}", 1,
         "9 is not train_micro_batch_size_per_gpu 2 x "
         "gradient_accumulation_steps 4 x 1 rank\n"},
        {"{\"train_batch_size\": 1000000000000}", 1,
         "train_micro_batch_size_per_gpu 1000000000000 x"},
        {"{\"gradient_accumulation_steps\": 4}", 1,
         "train_batch_size: missing: give it or "
         "train_micro_batch_size_per_gpu"},
        {"{}", 1, "train_batch_size: missing"},
    };

    for (int i = 0; i < N_OF(cases); i++) {
        assert_int_equal(read_set(cases[i].json, NULL, 0, cases[i].ranks),
                         -EINVAL);
        assert_said(cases[i].text);
        assert_int_equal(lines_of(said), 1);
    }
}

static void adam_is_adamw_unless_told(void **state)
{
    assert_accepted("\"optimizer\": {\"type\": \"Adam\"}");
    assert_true(config.optimizer.adamw);
    assert_accepted("\"optimizer\": {\"type\": \"adamw\"}");
    assert_true(config.optimizer.adamw);
    assert_accepted("\"optimizer\": {\"type\": \"Adam\", \"params\": "
                    "{\"adam_w_mode\": false}}");
    assert_false(config.optimizer.adamw);
}

static void an_optimizer_has_its_own_defaults(void **state)
{
    assert_accepted("\"optimizer\": {\"type\": \"Lion\"}");
    assert_int_equal(config.optimizer.type, IZ_OPTIMIZER_LION);
    assert_true(config.optimizer.lr == 1e-3);
    assert_true(config.optimizer.beta1 == 0.9 &&
                config.optimizer.beta2 == 0.99);
    assert_accepted("\"optimizer\": {\"type\": \"Lion\", \"params\": "
                    "{\"betas\": [0.95, 0.98], \"weight_decay\": 0.3}}");
    assert_true(config.optimizer.beta1 == 0.95 &&
                config.optimizer.beta2 == 0.98);
    assert_true(config.optimizer.weight_decay == 0.3);
}

static void warmup_max_lr_has_its_defaults(void **state)
{
    assert_accepted("\"optimizer\": {\"params\": {\"lr\": 0.5}}, "
                    "\"scheduler\": {\"type\": \"WarmupLR\"}");
    assert_true(config.lr.warmup_max_lr == 0.5);
    assert_true(config.lr.log_warmup);
    assert_int_equal(config.lr.warmup_num_steps, 1000);
    assert_accepted("\"optimizer\": {\"params\": {\"lr\": 0.5}}, "
                    "\"scheduler\": {\"type\": \"WarmupDecayLR\", \"params\": "
                    "{\"total_num_steps\": 9}}");
    assert_true(config.lr.warmup_max_lr == 0.001);
    assert_accepted(
        "\"scheduler\": {\"type\": \"WarmupCosineLR\", "
        "\"params\": {\"total_num_steps\": 9, \"warmup_min_ratio\": "
        "0.5}}");
    assert_true(config.lr.warmup_min_ratio == 0.5);
    assert_true(config.lr.cos_min_ratio == 0.0001);
}

static void accumulators_are_fp32_when_they_matter(void **state)
{
    assert_accepted("\"bf16\": {\"enabled\": true}");
    assert_false(config.grad_accum_fp32);
    assert_accepted("\"bf16\": {\"enabled\": true}, "
                    "\"gradient_accumulation_steps\": 2");
    assert_true(config.grad_accum_fp32);
    assert_accepted("\"bf16\": {\"enabled\": true}, \"data_types\": "
                    "{\"grad_accum_dtype\": \"bf16\"}, "
                    "\"gradient_accumulation_steps\": 2");
    assert_false(config.grad_accum_fp32);
    assert_accepted("\"bf16\": {\"enabled\": true}, \"data_types\": "
                    "{\"grad_accum_dtype\": \"fp32\"}");
    assert_true(config.grad_accum_fp32);
}

static void overrides_win_over_the_file(void **state)
{
    char *set[] = {
        "zero_optimization.stage=2", "data.path=123",
        "model.preset=toy-small",    "optimizer.params.betas=[0.5,0.6]",
        "run.recompute=full",        "run.sample_prompt=\"a=b\"",
        "zero_optimization.stage=1", "data.val_path=a b=c"};

    if (read_set("{\"train_batch_size\": 8, \"zero_optimization\": {\"stage\": "
                 "3}, \"model\": {\"preset\": \"toy-large\"}}",
                 set, N_OF(set), 1) != 0)
        fail_msg("%s", said);
    assert_int_equal(config.zero.stage, 1);
    assert_string_equal(config.data.path, "123");
    assert_string_equal(config.data.val_path, "a b=c");
    assert_string_equal(config.run.sample_prompt, "a=b");
    assert_int_equal(toy.layers, 3);
    assert_int_equal(toy.act, TOY_GELU);
    assert_true(config.optimizer.beta1 == 0.5 && config.optimizer.beta2 == 0.6);
    assert_int_equal(config.run.recompute, IZ_RECOMPUTE_FULL);
}

static void faults_of_overrides_name_them(void **state)
{
    static const char *const cases[][2] = {
        {"zero_optimization.stge=2", "--set zero_optimization.stge=2: "
                                     "zero_optimization.stge: unknown key; did "
                                     "you mean zero_optimization.stage?"},
        {"zero_optimization.stage=7", "--set zero_optimization.stage=7: "
                                      "zero_optimization.stage: 7 is not in "
                                      "0..3"},
        {"run.steps.x=7", "run.steps: expected an integer, found an object"},
        {"optimizer={\"params\": {\"lr\": -1}}", "optimizer.params.lr: -1 is"},
        {"run.steps", "--set run.steps: expected key=value"},
        {"=3", "--set =3: expected key=value"},
        {"a\xff=3", "not UTF-8"},
        {"run.output=\xff", "not UTF-8"},
        {"a..b=3", "a: unknown key"},
    };

    for (int i = 0; i < N_OF(cases); i++) {
        char text[128], *set[] = {text};
        snprintf(text, sizeof(text), "%s", cases[i][0]);
        assert_int_equal(read_set("{\"train_batch_size\": 8}", set, 1, 1),
                         -EINVAL);
        assert_said(cases[i][1]);
        assert_int_equal(lines_of(said), 1);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(defaults_are_deepspeeds),
        cmocka_unit_test(a_deepspeed_users_file_works),
        cmocka_unit_test(two_batch_sizes_give_the_third),
        cmocka_unit_test(batch_sizes_that_do_not_multiply_are_refused),
        cmocka_unit_test(adam_is_adamw_unless_told),
        cmocka_unit_test(an_optimizer_has_its_own_defaults),
        cmocka_unit_test(warmup_max_lr_has_its_defaults),
        cmocka_unit_test(accumulators_are_fp32_when_they_matter),
        cmocka_unit_test(overrides_win_over_the_file),
        cmocka_unit_test(faults_of_overrides_name_them),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
