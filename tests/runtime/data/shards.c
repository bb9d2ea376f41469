/* SPDX-License-Identifier: Apache-2.0 */
/* See shards.h. */
#include "tests/runtime/data/shards.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct iz_data_config config;

const char *shard(const char *name, int32_t magic, int32_t version,
                  int32_t count, const void *data, size_t bytes)
{
    int32_t header[256] = {magic, version, count};
    const char *path = in_folder(name);
    FILE *f = fopen(path, "wb");

    assert_non_null(f);
    assert_int_equal(fwrite(header, sizeof(header), 1, f), 1);
    assert_int_equal(fwrite(data, 1, bytes, f), bytes);
    fclose(f);
    return path;
}

const char *positions_from(const char *name, int first, int n)
{
    uint32_t *t = malloc((size_t)n * sizeof(*t));
    const char *path;

    for (int i = 0; i < n; i++)
        t[i] = (uint32_t)(first + i);
    path = shard(name, 20240801, 7, n, t, (size_t)n * sizeof(*t));
    free(t);
    return path;
}

const char *positions(const char *name, int n)
{
    return positions_from(name, 0, n);
}

const char *raw(const char *name, const char *text)
{
    const char *path = in_folder(name);
    FILE *f = fopen(path, "wb");

    fwrite(text, 1, strlen(text), f);
    fclose(f);
    return path;
}

void use(const char *path, const char *val, double fraction, bool bytes)
{
    config = (struct iz_data_config){.val_fraction = fraction, .bytes = bytes};
    snprintf(config.path, sizeof(config.path), "%s", path);
    snprintf(config.val_path, sizeof(config.val_path), "%s", val);
}

struct iz_data *opened(int seq, int vocab, uint64_t seed, bool need_val)
{
    struct iz_data *d = NULL;

    assert_int_equal(iz_data_open(&d, &config, seq, vocab, seed, need_val), 0);
    return d;
}

void refused(int seq, int vocab, bool need_val, const char *words)
{
    struct iz_data *d = NULL;
    int err;

    listen_begin();
    err = iz_data_open(&d, &config, seq, vocab, 1, need_val);
    listen_end();
    assert_true(err < 0);
    assert_null(d);
    assert_said(config.path);
    assert_said(words);
}

int start(const struct iz_data *d, enum iz_split s, int seq, int64_t i)
{
    static int32_t input[4096], target[4096];

    iz_data_sample(d, s, i, input, target);
    for (int j = 0; j < seq; j++) {
        assert_int_equal(input[j], input[0] + j);
        assert_int_equal(target[j], input[j] + 1);
    }
    return input[0];
}
