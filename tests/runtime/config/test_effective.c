/* SPDX-License-Identifier: Apache-2.0 */
/* The effective config, also after random damage to what was read. */
#include "tests/runtime/config/reading.h"

#include "tests/runtime/disk.h"

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

static void the_effective_config_takes_overrides(void **state)
{
    char *set[] = {"run.log_interval=3", "bf16.enabled=true"};
    assert_accepted("'steps_per_print': 7");
    effective();
    if (read_file(in_folder("effective.json"), set, N_OF(set), 1) != 0)
        fail_msg("%s", said);
    assert_settings("run.log_interval 3");
}

static int write_effective(int i)
{
    return iz_config_write(&config, &toy_section, in_folder("effective%d", i));
}

static void the_effective_config_is_on_the_disk(void **state)
{
    assert_accepted("");
    assert_durable_or_refused(write_effective, "effective%d");
    for (int i = 0; i < 10; i++)
        unlink(in_folder("effective%d", i));
    assert_int_equal(
        iz_config_write(&config, &toy_section, "/nonexistent/a.json"), -ENOENT);
}

/* Changes, removes, repeats or swaps a piece of the text. */
static void damage(char *text, size_t size)
{
    static const char letters[] = "{}[]\",:0159.-eEtfn \\u\n\x01\xff";
    size_t n = strlen(text);
    size_t at = random_next() % n, length = 1 + random_next() % 20;
    length = length < n - at ? length : n - at;
    switch (random_next() % 4) {
    case 0:
        text[at] = letters[random_next() % (sizeof(letters) - 1)];
        break;
    case 1:
        memmove(text + at, text + at + length, n - at - length + 1);
        break;
    case 2:
        if (n + length + 1 < size)
            memmove(text + at + length, text + at, n - at + 1);
        break;
    default:
        memmove(text + at, text + random_next() % (n - length + 1), length);
        break;
    }
}

static void random_damage_never_crashes(void **state)
{
    char *whole = contents(USERS_FILE, NULL);
    static char text[16384];
    int accepted = 0;
    for (int i = 0; i < 500; i++) {
        snprintf(text, sizeof(text), "%s", whole);
        for (int64_t k = 1 + random_below(3); k > 0 && text[0] != '\0'; k--)
            damage(text, sizeof(text));
        int rc =
            read_file(write_text(in_folder("config.json"), text), NULL, 0, 3);
        assert_true(rc == 0 || rc == -EINVAL);
        assert_true((rc == 0) == (said[0] == '\0'));
        accepted += rc == 0;
        if (rc == 0)
            assert_round_trip(3);
    }
    assert_in_range(accepted, 1, 400);
    free(whole);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_effective_config_is_nested_and_in_order),
        cmocka_unit_test(the_effective_config_takes_overrides),
        cmocka_unit_test(the_effective_config_is_on_the_disk),
        cmocka_unit_test(random_damage_never_crashes),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_configs);
}
