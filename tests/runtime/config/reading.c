/* SPDX-License-Identifier: Apache-2.0 */
/* A toy model, and reading configs from text. */
#include "tests/runtime/config/reading.h"

struct toy toy;

#define AT(field) .name = #field, .offset = offsetof(struct toy, field)
const struct iz_key toy_keys[] = {
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

int read_override(const char *key, const char *value)
{
    char text[1024];
    char *set[] = {"train_micro_batch_size_per_gpu=1", text};
    bool same = strcmp(key, "train_micro_batch_size_per_gpu") == 0;
    snprintf(text, sizeof(text), "%s=%s", key, value);
    return read_file(NULL, set + same, 2 - same, 1);
}
