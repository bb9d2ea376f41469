/* SPDX-License-Identifier: Apache-2.0 */
/* See shards.h. */
#include "tests/runtime/data/shards.h"

struct iz_data_config used;
int32_t text_tokens, sample_tokens;

const char *shard(const char *name, int32_t magic, int32_t version,
                  int32_t count, const void *data, size_t bytes)
{
    int32_t header[256] = {magic, version, count, text_tokens, sample_tokens};
    const char *path = in_folder("%s", name);
    char *all = malloc(sizeof(header) + bytes);
    memcpy(all, header, sizeof(header));
    memcpy(all + sizeof(header), data, bytes);
    replace(path, all, (int64_t)(sizeof(header) + bytes));
    free(all);
    return path;
}

const char *positions_from(const char *name, int first, int n)
{
    uint32_t *t = malloc((size_t)n * sizeof(*t));
    for (int i = 0; i < n; i++)
        t[i] = (uint32_t)(first + i);
    const char *path = shard(name, 20240801, 7, n, t, (size_t)n * sizeof(*t));
    free(t);
    return path;
}

const char *positions(const char *name, int n)
{
    return positions_from(name, 0, n);
}

void use(const char *path, const char *val, double fraction)
{
    used = (struct iz_data_config){.val_fraction = fraction,
                                   .bytes = !val,
                                   .document_end = -1,
                                   .group = 1};
    snprintf(used.path, sizeof(used.path), "%s", path);
    snprintf(used.val_path, sizeof(used.val_path), "%s", val ? val : "");
}

struct iz_data *opened(int seq, uint64_t seed, bool need_val)
{
    struct iz_data *d = NULL;
    assert_int_equal(iz_data_open(&d, &used, seq, MANY, seed, need_val), 0);
    return d;
}

void refused(int seq, int vocab, bool need_val, const char *words)
{
    struct iz_data *d = NULL;
    assert_true(HEARD(iz_data_open(&d, &used, seq, vocab, 1, need_val)) < 0);
    assert_null(d);
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

void assert_same(const struct iz_data *a, const struct iz_data *b,
                 enum iz_split s, int seq, int64_t n)
{
    assert_int_equal(iz_data_windows(a, s), iz_data_windows(b, s));
    for (int64_t i = n; i-- > 0;) /* backwards: no state */
        assert_int_equal(start(a, s, seq, i), start(b, s, seq, i));
}
