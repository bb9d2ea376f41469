/* SPDX-License-Identifier: Apache-2.0 */
/* A toy model, and reading configs from text. */
#include "tests/runtime/config/reading.h"

#include "runtime/config/keys.h"

struct toy toy;

#define AT(field) .name = #field, .offset = offsetof(struct toy, field)
static const struct iz_key toy_keys[] = {
    {AT(layers), .type = IZ_KEY_INT, .min = 1, .max = 1000, .fallback = "2",
     .doc = "Blocks."},
    {AT(width), .type = IZ_KEY_INT, .fallback = "64", .doc = "Channels."},
    {AT(dropout), .type = IZ_KEY_DOUBLE, .min = 0, .max = 1, .fallback = "0.1",
     .doc = "Share of zeros."},
    {AT(bias), .type = IZ_KEY_BOOL, .fallback = "true",
     .doc = "Linear layers have one."},
    {AT(act), .type = IZ_KEY_ENUM, .words = "gelu|relu", .fallback = "\"gelu\"",
     .doc = "Activation."},
    {AT(name), .type = IZ_KEY_STRING, .size = sizeof(toy.name),
     .fallback = "\"\"", .doc = "Name."},
    {AT(blocks), .type = IZ_KEY_INTS, .size = sizeof(toy.blocks),
     .fallback = "[]", .doc = "Numbers of blocks."},
    {.name = NULL},
};

static const struct iz_preset toy_presets[] = {
    {"toy-small", "{\"layers\": 3, \"width\": 128}", "Small."},
    {"toy-large", "{\"layers\": 30, \"width\": 1024, \"act\": \"relu\"}",
     "Large."},
    {NULL, NULL, NULL},
};

const struct iz_section toy_section = {
    .keys = toy_keys, .target = &toy, .presets = toy_presets};

struct iz_config config;
char notes[4096];

int remove_configs(void **state)
{
    remove(in_folder("config.json"));
    remove(in_folder("effective.json"));
    return rmdir(folder);
}

int read_file(const char *path, char *const *set, int n_set, int ranks)
{
    FILE *out = fmemopen(notes, sizeof(notes), "w");
    assert_non_null(out);
    memset(notes, 0, sizeof(notes));
    int rc = (int)HEARD(iz_config_read(&config, &toy_section, path, set, n_set,
                                       ranks, out, stderr));
    fclose(out);
    return rc;
}

int read_text(const char *text)
{
    return read_file(write_text(in_folder("config.json"), json(text)), NULL, 0,
                     1);
}

int read_override(const char *key, const char *value)
{
    char text[1024];
    char *set[] = {"train_micro_batch_size_per_gpu=1", text};
    bool same = strcmp(key, "train_micro_batch_size_per_gpu") == 0;
    snprintf(text, sizeof(text), "%s=%s", key, value);
    return read_file(NULL, set + same, 2 - same, 1);
}

const char *effective(void)
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

void assert_settings(const char *gives)
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

void assert_round_trip(int ranks)
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

int lines_of(const char *s)
{
    int n = 0;
    for (; *s != '\0'; s++)
        n += *s == '\n';
    return n;
}

void read_refused(const char *text, const char *set, int ranks,
                  const char *words)
{
    char override[256], *sets[] = {override};
    snprintf(override, sizeof(override), "%s", set ? set : "");
    if (text)
        text = write_text(in_folder("config.json"), json(text));
    if (read_file(text, sets, set != NULL, ranks) != -EINVAL)
        fail_msg("accepted, without \"%s\"", words);
    assert_said(json(words));
    if (lines_of(said) != 1)
        fail_msg("one line expected:\n%s", said);
}

static const char *beside_a_batch(const char *body)
{
    static char text[4096];
    snprintf(text, sizeof(text), "{'train_batch_size': 8%s%s}",
             body[0] != '\0' ? ", " : "", body);
    return text;
}

void assert_refused(const char *body, const char *words)
{
    read_refused(beside_a_batch(body), NULL, 1, words);
    assert_said("config.json: ");
}

void assert_accepted(const char *body)
{
    if (read_text(beside_a_batch(body)) != 0)
        fail_msg("refused: %s\n%s", body, said);
    assert_string_equal(said, "");
}

void each_case(const char *path,
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
