/* SPDX-License-Identifier: Apache-2.0 */
/* Every refusal and what it says. */
#include "tests/runtime/config/reading.h"

static void every_refusal_says_why(void **state)
{
    each_case("tests/runtime/config/refusals.txt", assert_refused);
}

static void all_faults_are_told_at_once(void **state)
{
    assert_int_equal(
        read_text("{'train_batch_size': 0, 'lr': 3, 'amp': {'enabled': true}, "
                  "'zero_optimization': {'stage': 9, 'reduce_scatter': "
                  "2}, 'run': {'steps': 'auto'}, 'model': {'layers': "
                  "0}}"),
        -EINVAL);
    assert_said("train_batch_size: 0 is less than 1");
    assert_said("lr: unknown key; did you mean optimizer.params.lr?");
    assert_said("amp: not supported. Use bf16 or fp16.");
    assert_said("zero_optimization.stage: 9 is not in 0..3");
    assert_said("zero_optimization.reduce_scatter: expected a boolean");
    assert_said("run.steps: \"auto\" cannot be resolved here");
    assert_said("model.layers: 0 is not in 1..1000");
    assert_int_equal(lines_of(said), 7);
}

/* It is blamed on no key that would follow from it. */
static void adapters_that_cannot_be_read_are_one_fault(void **state)
{
    assert_int_equal(
        read_text("{'train_batch_size': 8, 'lora': {'import': '/none', "
                  "'targets': 'q_proj', 'export': 'adapter'}}"),
        -EINVAL);
    assert_said("lora.import: /none cannot be imported");
    assert_int_equal(lines_of(said), 2); /* and the file */
}

static void bad_json_has_line_and_column(void **state)
{
    static const char *const cases[][2] = {
        {"{\n  'train_batch_size': 8,\n  }\n",
         "config.json: line 3, column 3: "},
        {"{'run': {}, 'run': {}}", "duplicate object key"},
        {"[]", "expected an object in braces"},
        {"3", ""},
        {"", "line 1, column 0"},
        {"{} x", ""},
    };
    for (int i = 0; i < N_OF(cases); i++)
        read_refused(cases[i][0], NULL, 1, cases[i][1]);
}

static void a_file_that_cannot_be_read_says_why(void **state)
{
    assert_int_equal(read_file("/nonexistent/a.json", NULL, 0, 1), -ENOENT);
    assert_said("/nonexistent/a.json: cannot be read: No such file");
    assert_true(read_file("/", NULL, 0, 1) < 0);
    assert_said("/: cannot be read: Is a directory");
    read_refused(NULL, NULL, 1, "config: train_batch_size: missing");
    assert_int_equal(iz_config_read(&config, NULL, "/", NULL, 0, 1, NULL, NULL),
                     -EINVAL);
}

static void a_program_without_a_model_has_no_model_section(void **state)
{
    const char *path = write_text(in_folder("config.json"),
                                  json("{'train_batch_size': 8, 'model': {}}"));
    assert_fails(iz_config_read(&config, NULL, path, NULL, 0, 1, NULL, stderr),
                 -EINVAL, "model: unknown key");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_refusal_says_why),
        cmocka_unit_test(all_faults_are_told_at_once),
        cmocka_unit_test(adapters_that_cannot_be_read_are_one_fault),
        cmocka_unit_test(bad_json_has_line_and_column),
        cmocka_unit_test(a_file_that_cannot_be_read_says_why),
        cmocka_unit_test(a_program_without_a_model_has_no_model_section),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_configs);
}
