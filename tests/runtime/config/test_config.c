/* SPDX-License-Identifier: Apache-2.0 */
/* What a config file and overrides give, what is refused of them, and the
 * effective config, also after random damage to what was read. */
#include "tests/runtime/config/reading.h"

#include "tests/runtime/disk.h"

/* As DeepSpeed's own pages show files, with every kind of key; for 3 ranks. */
#define USERS_FILE "tests/runtime/config/users.json"

static int ranks = 1; /* of what is read */

static int read_text(const char *text)
{
    return read_file(write_text(in_folder("config.json"), json(text)), NULL, 0,
                     ranks);
}

/* A whole file or its name, for 3 ranks; or for one rank an override, or what
 * stands in a file beside a batch size. */
static int read_body(const char *body)
{
    char text[4096];
    ranks = *body == '{' || *body == 't' ? 3 : 1;
    snprintf(text, sizeof(text), "%s", body);
    if (*body == 't')
        return read_file(body, NULL, 0, ranks);
    if (*body == '-') {
        char *set[] = {text + strlen("--set ")};
        write_text(in_folder("config.json"), "{\"train_batch_size\": 8}");
        return read_file(in_folder("config.json"), set, 1, ranks);
    }
    if (*body != '{')
        snprintf(text, sizeof(text), "{'train_batch_size': 8, %s}", body);
    return read_text(text);
}

static void assert_accepted(const char *body)
{
    if (read_body(body) != 0)
        fail_msg("refused: %s\n%s", body, said);
    assert_string_equal(said, "");
}

static int lines_of(const char *s)
{
    int n = 0;
    for (; *s != '\0'; s++)
        n += *s == '\n';
    return n;
}

/* With one fault, and `words` in it. */
static void assert_refused(int result, const char *words)
{
    if (result != -EINVAL)
        fail_msg("accepted, without \"%s\"", words);
    assert_said(words);
    if (lines_of(said) != 1)
        fail_msg("one line expected:\n%s", said);
}

/* Calls check for each case of a file: a line, with each of the indented ones
 * behind it, in which $ stands for the end of a line.  # begins a comment. */
static void each_case(const char *path,
                      void (*check)(const char *body, const char *words))
{
    char *text = contents(path, NULL), *rest = text, *body = NULL;
    for (char *line; (line = strtok_r(rest, "\n", &rest));) {
        char *end = line + strlen(line) - 1;
        if (*line == ' ') {
            *end = *end == '$' ? '\n' : *end;
            check(body, line + strspn(line, " "));
        } else if (*line != '#') {
            body = line;
        }
    }
    free(text);
}

/* ---- refusals ---- */

static void check_refused(const char *body, const char *words)
{
    assert_refused(read_body(body), words);
    assert_said(*body == '-' ? "" : "config.json: ");
}

static void every_refusal_says_why(void **state)
{
    each_case("tests/runtime/config/refusals.txt", check_refused);
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

static void what_is_no_json_is_told_with_its_place(void **state)
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
        assert_refused(read_text(cases[i][0]), cases[i][1]);
    assert_int_equal(read_text("\xef\xbb\xbf{'train_batch_size': 8}\r\n"), 0);
    assert_refused(read_body("--set a\xff=3"), "not UTF-8");
    assert_refused(read_body("--set run.output=\xff"), "not UTF-8");
}

static void a_file_that_cannot_be_read_says_why(void **state)
{
    assert_int_equal(read_file("/nonexistent/a.json", NULL, 0, 1), -ENOENT);
    assert_said("/nonexistent/a.json: cannot be read: No such file");
    assert_true(read_file("/", NULL, 0, 1) < 0);
    assert_said("/: cannot be read: Is a directory");
    assert_refused(read_file(NULL, NULL, 0, 1),
                   "config: train_batch_size: missing");
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

/* ---- what is given ---- */

#define BATCH(t, m, g)                                                         \
    "{'train_batch_size': " t ", 'train_micro_batch_size_per_gpu': " m         \
    ", 'gradient_accumulation_steps': " g "}"

/* As iz_config_write writes it; valid until the next call. */
static const char *effective(void)
{
    static char *text;
    assert_int_equal(
        iz_config_write(&config, &toy_section, in_folder("effective.json")), 0);
    free(text);
    return text = contents(in_folder("effective.json"), NULL);
}

/* Every key with a meaning here, as "key value;". */
static const char *settings(void)
{
    static char text[32768];
    struct iz_config_file file;
    FILE *out = fmemopen(text, sizeof(text), "w");
    iz_config_unresolve(&file, &config);
    for (int i = 0; iz_config_keys[i].name; i++)
        if (file.given[i] == IZ_GIVEN_VALUE) {
            fprintf(out, "%s ", iz_config_keys[i].name);
            iz_key_print(out, &iz_config_keys[i], &file);
            fputc(';', out);
        }
    for (const struct iz_key *k = toy_keys; k->name; k++) {
        fprintf(out, "model.%s ", k->name);
        iz_key_print(out, k, &toy);
        fputc(';', out);
    }
    fclose(out);
    return text;
}

/* The config has these values of keys: "key value;key value", in which ' stands
 * for ". */
static void assert_settings(const char *gives)
{
    char want[4096], *rest = want;
    const char *all = settings();
    snprintf(want, sizeof(want), "%s", json(gives));
    for (char *one; (one = strtok_r(rest, ";", &rest));) {
        char line[256];
        snprintf(line, sizeof(line), "%s;", one);
        if (!strstr(all, line))
            fail_msg("not %s in %s", line, all);
    }
}

/* What was just read, written and read again, is the same, byte for byte. */
static void assert_round_trip(void)
{
    struct iz_config first = config;
    struct toy first_toy = toy;
    effective();
    memset(&toy, 0, sizeof(toy));
    if (read_file(in_folder("effective.json"), NULL, 0, ranks) != 0)
        fail_msg("%s", said);
    memset(config.given, 0, sizeof(config.given)); /* it gives all */
    memset(first.given, 0, sizeof(first.given));
    first.grad_accum_open = false; /* it has a type */
    memset(config.model_given, 0, sizeof(config.model_given));
    memset(first.model_given, 0, sizeof(first.model_given));
    assert_memory_equal(&config, &first, sizeof(config));
    assert_memory_equal(&toy, &first_toy, sizeof(toy));
}

static void check_given(const char *body, const char *gives)
{
    assert_accepted(body);
    assert_settings(gives);
    assert_round_trip();
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

/* ---- the effective config ---- */

/* With what has a meaning only: WarmupDecayLR has no ratio, Lion no eps. */
static void the_effective_config_is_nested_and_in_order(void **state)
{
    assert_int_equal(read_file(USERS_FILE, NULL, 0, 3), 0);
    const char *text = effective();
    assert_non_null(strstr(text, "{\n    \"train_batch_size\": 24,\n"
                                 "    \"train_micro_batch_size_per_gpu\": 4,"));
    assert_non_null(strstr(text, "        \"params\": {\n"
                                 "            \"lr\": 3e-05,\n"
                                 "            \"betas\": [0.8, 0.95],"));
    assert_true(strstr(text, "\"run\": {") > strstr(text, "\"data\": {"));
    assert_null(strstr(text, "warmup_min_ratio"));
    assert_non_null(strstr(text, "\"eps\""));
    assert_accepted("'optimizer': {'type': 'Lion'}");
    assert_null(strstr(effective(), "\"eps\""));
}

static int write_effective(int i)
{
    return iz_config_write(&config, &toy_section, in_folder("effective%d", i));
}

static void the_effective_config_is_on_the_disk(void **state)
{
    assert_accepted("'run': {}");
    assert_durable_or_refused(write_effective, "effective%d");
    for (int i = 0; i < 10; i++)
        unlink(in_folder("effective%d", i));
    assert_int_equal(
        iz_config_write(&config, &toy_section, "/nonexistent/a.json"), -ENOENT);
}

static void random_damage_never_crashes(void **state)
{
    char *whole = contents(USERS_FILE, NULL);
    static char text[16384];
    int accepted = 0;
    ranks = 3;
    for (int i = 0; i < 500; i++) {
        snprintf(text, sizeof(text), "%s", whole);
        for (int64_t k = random_below(3); k >= 0 && *text != '\0'; k--)
            damage(text, (int64_t)strlen(text));
        int rc = read_file(write_text(in_folder("config.json"), text), NULL, 0,
                           ranks);
        assert_true(rc == 0 || rc == -EINVAL);
        assert_true((rc == 0) == (said[0] == '\0'));
        accepted += rc == 0;
        if (rc == 0)
            assert_round_trip();
    }
    assert_in_range(accepted, 1, 400);
    free(whole);
}

/* Fails when a temporary file was left. */
static int remove_configs(void **state)
{
    remove(in_folder("config.json"));
    remove(in_folder("effective.json"));
    return rmdir(folder);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_refusal_says_why),
        cmocka_unit_test(all_faults_are_told_at_once),
        cmocka_unit_test(adapters_that_cannot_be_read_are_one_fault),
        cmocka_unit_test(what_is_no_json_is_told_with_its_place),
        cmocka_unit_test(a_file_that_cannot_be_read_says_why),
        cmocka_unit_test(a_program_without_a_model_has_no_model_section),
        cmocka_unit_test(keys_have_the_values_that_they_should),
        cmocka_unit_test(auto_is_what_the_trainer_takes_and_is_told),
        cmocka_unit_test(the_plan_may_cut_a_batch),
        cmocka_unit_test(a_cut_is_kept_if_slices_divide_it),
        cmocka_unit_test(overrides_win_over_the_file),
        cmocka_unit_test(the_effective_config_is_nested_and_in_order),
        cmocka_unit_test(the_effective_config_is_on_the_disk),
        cmocka_unit_test(random_damage_never_crashes),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_configs);
}
