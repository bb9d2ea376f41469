/* SPDX-License-Identifier: Apache-2.0 */
/* What a config file and overrides give. */
#include "tests/runtime/config/reading.h"

static void defaults_are_deepspeeds(void **state)
{
    const struct iz_hyper *o = &config.optimizer;
    assert_accepted("");
    assert_int_equal(config.micro_batch, 8);
    assert_int_equal(config.grad_accum, 1);
    assert_true(config.gradient_clipping == 1);
    assert_int_equal(config.dtype, IZ_F32);
    assert_true(config.grad_accum_fp32);
    assert_true(o->adamw && o->bias_correction && o->weight_decay == 0);
    assert_true(o->lr == 1e-3 && o->eps == 1e-8);
    assert_true(o->beta1 == 0.9 && o->beta2 == 0.999);
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

/* The configs of axolotl, LLaMA-Factory and accelerate are of this kind. */
static void auto_is_what_the_trainer_takes_and_is_told(void **state)
{
    const char *path = write_text(
        in_folder("config.json"),
        json(
            "{'train_batch_size': 'auto', 'train_micro_batch_size_per_gpu': "
            "'auto', 'gradient_accumulation_steps': 'auto', "
            "'gradient_clipping': 'auto', 'bf16': {'enabled': 'auto'}, 'fp16': "
            "{'enabled': 'auto', 'loss_scale': 0}, 'optimizer': {'type': "
            "'AdamW', 'params': {'lr': 'auto', 'betas': 'auto', 'eps': 'auto', "
            "'weight_decay': 'auto'}}, 'scheduler': {'type': 'WarmupDecayLR', "
            "'params': {'warmup_min_lr': 'auto', 'warmup_max_lr': 'auto', "
            "'warmup_num_steps': 'auto', 'total_num_steps': 'auto'}}, "
            "'zero_optimization': {'stage': 2, 'overlap_comm': null, "
            "'contiguous_gradients': false, 'reduce_bucket_size': 'auto', "
            "'sub_group_size': 0}, 'run': {'steps': 70}}"));
    if (read_file(path, NULL, 0, 3))
        fail_msg("%s", said);
    assert_int_equal(config.train_batch_size, 24);
    assert_int_equal(config.micro_batch, 8);
    assert_int_equal(config.dtype, IZ_F32);
    assert_true(config.optimizer.lr == 5e-5 && config.lr.warmup_max_lr == 5e-5);
    assert_int_equal(config.lr.warmup_num_steps, 1);
    assert_int_equal(config.lr.total_num_steps, 70);
    assert_true(config.zero.overlap_comm);
    assert_int_equal(config.zero.sub_group_size, 1000000000);
    assert_string_equal(
        notes,
        json("config: 'auto' stands for train_batch_size 24, "
             "train_micro_batch_size_per_gpu 8, gradient_accumulation_steps 1, "
             "gradient_clipping 1.0, optimizer.params.lr 5e-05, "
             "optimizer.params.betas [0.9, 0.999], optimizer.params.eps 1e-08, "
             "optimizer.params.weight_decay 0.0, "
             "scheduler.params.warmup_min_lr 0.0, "
             "scheduler.params.warmup_max_lr 5e-05, "
             "scheduler.params.warmup_num_steps 1, "
             "scheduler.params.total_num_steps 70, bf16.enabled false, "
             "fp16.enabled false\n"
             "config: without effect here: "
             "zero_optimization.contiguous_gradients, "
             "zero_optimization.reduce_bucket_size\n"));
    assert_false(config.zero.optimizer.ratio_auto);
    effective();
    if (read_file(in_folder("effective.json"), NULL, 0, 3))
        fail_msg("%s", said);
    assert_string_equal(notes, "");
}

static void other_names_of_deepspeed_mean_the_same(void **state)
{
    assert_accepted(
        "'bfloat16': {'enabled': true}, 'zero_optimization': "
        "{'stage': 3, 'cpu_offload': true, 'cpu_offload_param': "
        "true, 'prefetch_bucket_size': 7, 'max_live_parameters': 8, "
        "'max_reuse_distance': 9, 'param_persistence_threshold': 5}");
    assert_int_equal(config.dtype, IZ_BF16);
    assert_int_equal(config.zero.optimizer.home, IZ_HOME_CPU);
    assert_int_equal(config.zero.param.home, IZ_HOME_CPU);
    assert_int_equal(config.zero.prefetch_bucket_size, 7);
    assert_int_equal(config.zero.max_live_parameters, 8);
    assert_int_equal(config.zero.max_reuse_distance, 9);
    assert_string_equal(
        notes,
        "config: no optimizer is given: optimizer.type \"AdamW\", "
        "optimizer.params.lr 0.001, optimizer.params.betas [0.9, 0.999], "
        "optimizer.params.eps 1e-08, optimizer.params.weight_decay 0.0\n"
        "config: without effect here: "
        "zero_optimization.stage3_param_persistence_threshold\n");
    assert_accepted("'zero_optimization': {'cpu_offload': false}");
    assert_int_equal(config.zero.optimizer.home, IZ_HOME_NONE);
}

static void a_deepspeed_users_file_works(void **state)
{
    if (read_file(USERS_FILE, NULL, 0, 3) != 0)
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

#define BATCH(t, m, g)                                                         \
    "{'train_batch_size': " t ", 'train_micro_batch_size_per_gpu': " m         \
    ", 'gradient_accumulation_steps': " g "}"

static void two_batch_sizes_give_the_third(void **state)
{
    static const struct {
        const char *text;
        int batch, micro, accum;
    } cases[] = {
        {BATCH("24", "4", "2"), 24, 4, 2},
        {BATCH("24", "4", "null"), 24, 4, 2},
        {BATCH("24", "null", "2"), 24, 4, 2},
        {BATCH("null", "4", "2"), 24, 4, 2},
        {BATCH("24", "null", "null"), 24, 8, 1},
        {BATCH("null", "4", "null"), 12, 4, 1},
    };
    for (int i = 0; i < N_OF(cases); i++) {
        const char *path = in_folder("config.json");
        if (read_file(write_text(path, json(cases[i].text)), NULL, 0, 3) != 0)
            fail_msg("%s\n%s", cases[i].text, said);
        assert_int_equal(config.train_batch_size, cases[i].batch);
        assert_int_equal(config.micro_batch, cases[i].micro);
        assert_int_equal(config.grad_accum, cases[i].accum);
    }
}

/* Of a batch that is given; overrides of both factors replace it. */
static void the_plan_may_cut_a_batch(void **state)
{
    char *both[] = {"train_micro_batch_size_per_gpu=4",
                    "gradient_accumulation_steps=5"};
    const char *path = write_text(in_folder("config.json"),
                                  json(BATCH("24", "'auto'", "'auto'")));
    assert_int_equal(read_file(path, NULL, 0, 3), 0);
    assert_true(config.cut_auto);
    assert_int_equal(config.micro_batch, 8);
    assert_null(strstr(notes, "micro_batch"));
    assert_int_equal(read_file(path, both, 1, 3), 0);
    assert_false(config.cut_auto);
    assert_int_equal(config.grad_accum, 2);
    assert_int_equal(read_file(path, both, 2, 3), 0);
    assert_int_equal(config.train_batch_size, 60);
    path = write_text(path, json(BATCH("24", "'auto'", "2")));
    assert_int_equal(read_file(path, NULL, 0, 3), 0);
    assert_false(config.cut_auto);
    assert_int_equal(config.micro_batch, 4);
}

static void batch_sizes_that_do_not_multiply_are_refused(void **state)
{
    read_refused(BATCH("25", "4", "2"), NULL, 3,
                 "train_batch_size: 25 is not train_micro_batch_size_per_gpu 4 "
                 "x gradient_accumulation_steps 2 x 3 ranks");
    read_refused("{'train_batch_size': 2}", NULL, 4,
                 "2 is not train_micro_batch_size_per_gpu 0 x "
                 "gradient_accumulation_steps 1 x 4 ranks");
    read_refused(BATCH("9", "2", "null"), NULL, 1,
                 "9 is not train_micro_batch_size_per_gpu 2 x "
                 "gradient_accumulation_steps 4 x 1 rank\n");
    read_refused(BATCH("4", "null", "3"), NULL, 1,
                 "train_batch_size: 4 is not");
    read_refused("{'train_batch_size': 1000000000000}", NULL, 1,
                 "train_micro_batch_size_per_gpu 1000000000000 x");
    read_refused("{'gradient_accumulation_steps': 4}", NULL, 1,
                 "train_batch_size: missing: give it or "
                 "train_micro_batch_size_per_gpu");
    read_refused("{}", NULL, 1, "train_batch_size: missing");
}

static void adam_is_adamw_unless_told(void **state)
{
    assert_accepted("'optimizer': {'type': 'Adam'}");
    assert_true(config.optimizer.adamw);
    assert_accepted("'optimizer': {'type': 'adamw'}");
    assert_true(config.optimizer.adamw);
    assert_accepted("'optimizer': {'type': 'Adam', 'params': {'adam_w_mode': "
                    "false}}");
    assert_false(config.optimizer.adamw);
}

static void an_optimizer_has_its_own_defaults(void **state)
{
    const struct iz_hyper *o = &config.optimizer;
    assert_accepted("'optimizer': {'type': 'Lion'}");
    assert_int_equal(o->type, IZ_OPTIMIZER_LION);
    assert_true(o->lr == 1e-3 && o->beta1 == 0.9 && o->beta2 == 0.99);
    assert_accepted("'optimizer': {'type': 'Lion', 'params': {'betas': [0.95, "
                    "0.98], 'weight_decay': 0.3}}");
    assert_true(o->beta1 == 0.95 && o->beta2 == 0.98 && o->weight_decay == 0.3);
}

static void warmup_max_lr_has_its_defaults(void **state)
{
    assert_accepted("'optimizer': {'params': {'lr': 0.5}}, 'scheduler': "
                    "{'type': 'WarmupLR'}");
    assert_true(config.lr.warmup_max_lr == 0.5);
    assert_true(config.lr.log_warmup);
    assert_int_equal(config.lr.warmup_num_steps, 1000);
    assert_accepted("'optimizer': {'params': {'lr': 0.5}}, 'scheduler': "
                    "{'type': 'WarmupDecayLR', 'params': {'total_num_steps': "
                    "9}}");
    assert_true(config.lr.warmup_max_lr == 0.001);
    assert_accepted("'scheduler': {'type': 'WarmupCosineLR', 'params': "
                    "{'total_num_steps': 9, 'warmup_min_ratio': 0.5}}");
    assert_true(config.lr.warmup_min_ratio == 0.5);
    assert_true(config.lr.cos_min_ratio == 0.0001);
}

static void accumulators_are_fp32_when_they_matter(void **state)
{
    static const struct {
        const char *more;
        bool fp32;
    } cases[] = {
        {"", false},
        {", 'gradient_accumulation_steps': 2", true},
        {", 'data_types': {'grad_accum_dtype': 'bf16'}, "
         "'gradient_accumulation_steps': 2",
         false},
        {", 'data_types': {'grad_accum_dtype': 'fp32'}", true},
    };
    for (int i = 0; i < N_OF(cases); i++) {
        char body[256];
        snprintf(body, sizeof(body), "'bf16': {'enabled': true}%s",
                 cases[i].more);
        assert_accepted(body);
        assert_int_equal(config.grad_accum_fp32, cases[i].fp32);
    }
}

static void overrides_win_over_the_file(void **state)
{
    char *set[] = {
        "zero_optimization.stage=2", "data.path=123",
        "model.preset=toy-small",    "optimizer.params.betas=[0.5,0.6]",
        "run.recompute=full",        "run.sample_prompt=\"a=b\"",
        "zero_optimization.stage=1", "data.val_path=a b=c"};
    const char *path = write_text(
        in_folder("config.json"),
        json("{'train_batch_size': 8, 'zero_optimization': {'stage': 3}, "
             "'model': {'preset': 'toy-large'}}"));
    if (read_file(path, set, N_OF(set), 1) != 0)
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
        {"zero_optimization.stge=2",
         "--set zero_optimization.stge=2: zero_optimization.stge: unknown key; "
         "did you mean zero_optimization.stage?"},
        {"zero_optimization.stage=7", "--set zero_optimization.stage=7: "
                                      "zero_optimization.stage: 7 is not in "
                                      "0..3"},
        {"run.steps.x=7", "run.steps: expected an integer, found an object"},
        {"optimizer={\"params\": {\"lr\": -1}}", "optimizer.params.lr: -1 is"},
        {"tensorboard.enabled=true",
         ", --set tensorboard.enabled=true: tensorboard: not supported"},
        {"run.steps", "--set run.steps: expected key=value"},
        {"=3", "--set =3: expected key=value"},
        {"a\xff=3", "not UTF-8"},
        {"run.output=\xff", "not UTF-8"},
        {"a..b=3", "a: unknown key"},
    };
    for (int i = 0; i < N_OF(cases); i++)
        read_refused("{'train_batch_size': 8}", cases[i][0], 1, cases[i][1]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(defaults_are_deepspeeds),
        cmocka_unit_test(a_deepspeed_users_file_works),
        cmocka_unit_test(auto_is_what_the_trainer_takes_and_is_told),
        cmocka_unit_test(other_names_of_deepspeed_mean_the_same),
        cmocka_unit_test(two_batch_sizes_give_the_third),
        cmocka_unit_test(the_plan_may_cut_a_batch),
        cmocka_unit_test(batch_sizes_that_do_not_multiply_are_refused),
        cmocka_unit_test(adam_is_adamw_unless_told),
        cmocka_unit_test(an_optimizer_has_its_own_defaults),
        cmocka_unit_test(warmup_max_lr_has_its_defaults),
        cmocka_unit_test(accumulators_are_fp32_when_they_matter),
        cmocka_unit_test(overrides_win_over_the_file),
        cmocka_unit_test(faults_of_overrides_name_them),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_configs);
}
