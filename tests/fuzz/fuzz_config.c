/* SPDX-License-Identifier: Apache-2.0 */
/* libFuzzer: any bytes as a config file and up to three overrides: lines after
 * a NUL byte.  What is accepted is written, read and written again: both
 * effective configs must be the same text. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/config/config.h"

#define SETS 3

struct shape {
    int layers, heads, width, seq, vocab;
    double dropout;
    char name[16];
};

static struct shape shape;

static const struct iz_key keys[] = {
    {"layers", IZ_KEY_INT, offsetof(struct shape, layers), 0, 1, 1000, NULL,
     "2", "Blocks."},
    {"heads", IZ_KEY_INT, offsetof(struct shape, heads), 0, 1, 1000, NULL, "4",
     "Heads."},
    {"width", IZ_KEY_INT, offsetof(struct shape, width), 0, 1, 1e6, NULL, "64",
     "Columns."},
    {"seq", IZ_KEY_INT, offsetof(struct shape, seq), 0, 1, 1e6, NULL, "64",
     "Tokens."},
    {"vocab", IZ_KEY_INT, offsetof(struct shape, vocab), 0, 1, 1e6, NULL, "256",
     "Words."},
    {"dropout", IZ_KEY_DOUBLE, offsetof(struct shape, dropout), 0, 0, 1, NULL,
     "0.0", "Share."},
    {"name", IZ_KEY_STRING, offsetof(struct shape, name), sizeof(shape.name), 0,
     0, NULL, "\"none\"", "Name."},
    {.name = NULL},
};

static const struct iz_preset presets[] = {
    {"big", "{\"layers\": 48, \"width\": 1600}", "Large."},
    {.name = NULL},
};

static const struct iz_section section = {
    .keys = keys, .target = &shape, .presets = presets};

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void put(const char *path, const char *text, size_t size)
{
    FILE *f = fopen(path, "wb");
    if (!f || fwrite(text, 1, size, f) != size || fclose(f) != 0)
        abort();
}

static size_t get(const char *path, char *text, size_t size)
{
    FILE *f = fopen(path, "rb");
    if (!f)
        abort();
    size_t n = fread(text, 1, size, f);
    fclose(f);
    return n;
}

/* What was accepted can be written and read back unchanged. */
static void same_again(const struct iz_config *c, const char *path, FILE *null)
{
    static char one[1 << 17], two[1 << 17];
    struct iz_config again;
    if (iz_config_write(c, &section, path) != 0)
        abort();
    size_t n = get(path, one, sizeof(one));
    if (n == sizeof(one) ||
        iz_config_read(&again, &section, path, NULL, 0, 1, null, null) != 0 ||
        iz_config_write(&again, &section, path) != 0)
        abort();
    size_t m = get(path, two, sizeof(two));
    if (n != m || memcmp(one, two, n) != 0)
        abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static FILE *null;
    char path[64], *text = malloc(size + 1), *set[SETS], *at;
    struct iz_config c;
    int n = 0;
    if (!null && !(null = fopen("/dev/null", "w")))
        abort();
    if (!text)
        abort();
    memcpy(text, data, size);
    text[size] = '\0';
    size_t file = strlen(text);
    for (at = text + file; at < text + size && n < SETS; at += strlen(at))
        set[n++] = ++at;
    snprintf(path, sizeof(path), "/dev/shm/izar-fuzz-%d.json", (int)getpid());
    put(path, text, file);
    if (iz_config_read(&c, &section, path, set, n, 1, null, null) == 0)
        same_again(&c, path, null);
    unlink(path);
    free(text);
    return 0;
}
