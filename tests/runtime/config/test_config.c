/* SPDX-License-Identifier: Apache-2.0 */
/* What a config file and overrides give. */
#include "tests/runtime/config/reading.h"

#define BATCH(t, m, g)                                                         \
    "{'train_batch_size': " t ", 'train_micro_batch_size_per_gpu': " m         \
    ", 'gradient_accumulation_steps': " g "}"
static void check_given(const char *body, const char *gives)
{
    bool file = !strchr(body, '"'), whole = file || *body == '{';
    const char *path = in_folder("config.json");
    if (!whole)
        assert_accepted(body);
    else if (read_file(file ? body : write_text(path, body), NULL, 0, 3))
        fail_msg("%s\n%s", body, said);
    assert_settings(gives);
    assert_round_trip(whole ? 3 : 1);
}

static void keys_have_the_values_that_they_should(void **state)
{
    each_case("tests/runtime/config/given.txt", check_given);
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
    assert_settings("zero_optimization.overlap_comm true;"
                    "zero_optimization.sub_group_size 1000000000");
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
    assert_accepted("'optimizer': null, "
                    "'zero_optimization': {'param_persistence_threshold': 5}");
    assert_string_equal(
        notes,
        "config: no optimizer is given: optimizer.type \"AdamW\", "
        "optimizer.params.lr 0.001, optimizer.params.betas [0.9, 0.999], "
        "optimizer.params.eps 1e-08, optimizer.params.weight_decay 0.0\n"
        "config: without effect here: "
        "zero_optimization.stage3_param_persistence_threshold\n");
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

/* Of 12 samples of each rank. */
static void a_cut_is_kept_if_slices_divide_it(void **state)
{
    const char *path = write_text(in_folder("config.json"),
                                  json(BATCH("36", "'auto'", "null")));
    for (int slices = 0; slices <= 3; slices++) {
        char set[] = "run.slices=0", *sets[] = {set};
        set[strlen(set) - 1] += (char)slices;
        assert_int_equal(read_file(path, sets, 1, 3), 0);
        iz_config_keep(&config,
                       "\ngradient_accumulation_steps 4\ntrain_batch_size 36\n"
                       "train_micro_batch_size_per_gpu 3\nranks 3\n",
                       3);
        assert_int_equal(config.micro_batch, slices == 2 ? 12 : 3);
        assert_int_equal(config.cut_auto, slices == 2);
    }
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
                 "train_batch_size: 1000000000000: "
                 "train_micro_batch_size_per_gpu would be 1000000000000, more "
                 "than 1000000");
    read_refused("{'train_batch_size': 2000002, "
                 "'train_micro_batch_size_per_gpu': 2}",
                 NULL, 1, "gradient_accumulation_steps would be 1000001, more");
    read_refused("{'gradient_accumulation_steps': 4}", NULL, 1,
                 "train_batch_size: missing: give it or "
                 "train_micro_batch_size_per_gpu");
    read_refused("{}", NULL, 1, "train_batch_size: missing");
}

static void overrides_win_over_the_file(void **state)
{
    char *set[] = {
        "zero_optimization.stage=2",    "data.path=123",
        "model.preset=toy-small",       "optimizer.params.betas=[0.5,0.6]",
        "run.recompute=full",           "run.sample_prompt=\"a=b\"",
        "zero_optimization.stage=1",    "data.val_path=a b=c",
        "lora.targets=[\"a\", \"b\"]",  "lora.modules_to_save=[ab]*",
        "run.seed=9223372036854775807", "lora.rank=1"};
    const char *path = write_text(
        in_folder("config.json"),
        json("{'train_batch_size': 8, 'zero_optimization': {'stage': 3}, "
             "'model': {'preset': 'toy-large'}}"));
    if (read_file(path, set, N_OF(set), 1) != 0)
        fail_msg("%s", said);
    assert_settings("zero_optimization.stage 1;data.path '123';"
                    "data.val_path 'a b=c';run.sample_prompt 'a=b';"
                    "model.layers 3;model.act 'gelu';run.recompute 'full';"
                    "lora.targets 'a,b';lora.modules_to_save '[ab]*';"
                    "run.seed 9223372036854775807;"
                    "optimizer.params.betas [0.5, 0.6]");
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
        {".run.steps=3", "--set .run.steps=3: expected key=value"},
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
        cmocka_unit_test(keys_have_the_values_that_they_should),
        cmocka_unit_test(auto_is_what_the_trainer_takes_and_is_told),
        cmocka_unit_test(the_plan_may_cut_a_batch),
        cmocka_unit_test(a_cut_is_kept_if_slices_divide_it),
        cmocka_unit_test(batch_sizes_that_do_not_multiply_are_refused),
        cmocka_unit_test(overrides_win_over_the_file),
        cmocka_unit_test(faults_of_overrides_name_them),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_configs);
}
