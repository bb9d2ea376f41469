/* SPDX-License-Identifier: Apache-2.0 */
/* Every key of the tables, and the page generated from them.
 * `test_keys PAGE` compares another page. */
#include "tests/runtime/config/reading.h"

#include "runtime/config/keys.h"
#include "runtime/run/run.h"

static const char *page = "docs/config.md";

/* This value of a key is refused, with these words. */
static void key_refuses(const struct iz_key *k, const char *value,
                        const char *words)
{
    assert_int_equal(read_override(k->name, value), -EINVAL);
    assert_said(words);
}

static void every_key_checks_its_type_and_range(void **state)
{
    char value[64], found[128];
    for (const struct iz_key *k = iz_config_keys; k->name; k++) {
        bool pair = k->type == IZ_KEY_PAIR;
        if (iz_key_is_text(k))
            continue; /* an override is always text */
        snprintf(found, sizeof(found), "%s: expected ", k->name);
        key_refuses(k, "{\"a\": 1}", found);
        if (k->type == IZ_KEY_BOOL || k->type == IZ_KEY_ENUM)
            continue;
        assert_true(k->min < k->max);
        snprintf(value, sizeof(value), pair ? "[%.17g, 0.5]" : "%.17g",
                 k->min - 1);
        snprintf(found, sizeof(found), "%s: %.15g is ", k->name, k->min - 1);
        key_refuses(k, value, found);
        snprintf(value, sizeof(value), pair ? "[0.5, %.17g]" : "%.17g",
                 k->max > 9e18 ? 1e19 : k->max * 2 + 1);
        key_refuses(k, value, k->name);
    }
}

/* Misspelt by a letter, every key finds itself. */
static void every_key_is_its_own_nearest(void **state)
{
    char name[IZ_KEY_NAME_MAX], found[IZ_KEY_NAME_MAX + 32];
    for (const struct iz_key *k = iz_config_keys; k->name; k++) {
        size_t n = strlen(k->name);
        snprintf(name, sizeof(name), "%.*s~%c", (int)n - 1, k->name,
                 k->name[n - 1]);
        snprintf(found, sizeof(found), "did you mean %s?", k->name);
        assert_int_equal(read_override(name, "1"), -EINVAL);
        assert_said(found);
    }
}

static void auto_is_resolved_or_refused(void **state)
{
    for (const struct iz_key *k = iz_config_keys; k->name; k++) {
        bool own_word = k->words && strstr(k->words, "auto");
        if (iz_key_is_text(k) || own_word)
            continue;
        read_override(k->name, "auto");
        if (k->automatic)
            assert_null(strstr(said, "cannot be resolved"));
        else
            assert_said("\"auto\" cannot be resolved here; write a value");
    }
}

/* A value of each kind of foreign key that asks for nothing, and whether every
 * refusal has the key's words. */
static const struct {
    const char *accept, *good;
    bool words;
} foreign_values[] = {
    {"bool", "true", false},
    {"number", "5e8", false},
    {"string", "\"x\"", false},
    {"off", "{\"enabled\": false, \"more\": 3}", true},
    {"any", "[1]", true},
    {NULL, "", true}, /* the first of the words that it accepts */
};

static void every_foreign_key_is_accepted_or_refused_by_name(void **state)
{
    for (const struct iz_foreign_key *k = iz_foreign_keys; k->name; k++) {
        char good[64], name[128];
        int i = 0;
        assert_true(strlen(k->doc) > 5);
        while (foreign_values[i].accept &&
               strcmp(k->accept, foreign_values[i].accept) != 0)
            i++;
        snprintf(good, sizeof(good), "%s", foreign_values[i].good);
        if (!foreign_values[i].accept)
            assert_true(iz_text_word(good, sizeof(good), k->accept, 0));
        if (k->accept[0] != '\0' && read_override(k->name, good) != 0)
            fail_msg("%s", said);
        if (strcmp(k->accept, "any") == 0)
            continue;
        snprintf(name, sizeof(name), "%s: ", k->name);
        assert_int_equal(read_override(k->name, "{\"enabled\": true}"),
                         -EINVAL);
        assert_said(name);
        if (foreign_values[i].words)
            assert_said(k->doc);
    }
    assert_int_equal(read_override("fp32_allreduce", "true"), -EINVAL);
    assert_int_equal(read_override("sequence_parallel_size", "1.0"), 0);
    assert_int_equal(read_override("sequence_parallel_size", "2"), -EINVAL);
}

/* docs/config.md is what this program prints with --help-markdown. */
extern const struct iz_program iz_program;

static void the_page_is_the_generators(void **state)
{
    static char want[131072];
    char *got = contents(page, NULL);
    FILE *out = fmemopen(want, sizeof(want), "w");
    iz_config_doc(&iz_program.section, true, out);
    fclose(out);
    assert_string_equal(got, want);
    free(got);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_key_checks_its_type_and_range),
        cmocka_unit_test(every_key_is_its_own_nearest),
        cmocka_unit_test(auto_is_resolved_or_refused),
        cmocka_unit_test(every_foreign_key_is_accepted_or_refused_by_name),
        cmocka_unit_test(the_page_is_the_generators),
    };
    if (argc > 1)
        page = argv[1];
    return cmocka_run_group_tests(tests, NULL, NULL);
}
