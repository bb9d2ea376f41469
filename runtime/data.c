/* SPDX-License-Identifier: Apache-2.0 */
/* Token files and the order of samples.  A split is cut into windows of seq
 * tokens; epoch e visits them in a permutation that is computed, not stored: a
 * Feistel network over the window numbers, keyed by seed and e. */
#include "runtime/data.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "codelets/build.h"
#include "codelets/mix.h"

#define HEADER_INTS 256

/* The two layouts of llm.c's token shards. */
static const struct format {
    int32_t magic, version;
    int token_bytes;
} formats[] = {
    {20240520, 1, 2}, /* vocabularies up to 65536 */
    {20240801, 7, 4},
};

struct tokens {
    const char
        *path; /* of the caller's config; only for messages while opening */
    unsigned char *map;
    int64_t map_bytes, header_bytes;
    int64_t count;
    int token_bytes; /* 1, 2, 4 */
};

/* Tokens [first, first + count) of a file. */
struct split {
    const struct tokens *tokens;
    int64_t first, count, windows;
};

struct iz_data {
    struct tokens train, val;
    struct split split[2];
    int seq;
    uint64_t seed;
};

/* ---- files ---- */

static int refuse(const struct tokens *t, int err)
{
    fprintf(stderr, "izar: data: %s: %s\n", t->path, strerror(err));
    return -err;
}

static int tokens_map(struct tokens *t, int fd)
{
    struct stat st;

    if (fstat(fd, &st) != 0)
        return refuse(t, errno);
    if (!S_ISREG(st.st_mode)) {
        fprintf(stderr, "izar: data: %s is not a regular file\n", t->path);
        return -EINVAL;
    }
    t->map_bytes = st.st_size;
    if (t->map_bytes == 0) {
        fprintf(stderr, "izar: data: %s is empty\n", t->path);
        return -EINVAL;
    }
    t->map = mmap(NULL, (size_t)t->map_bytes, PROT_READ, MAP_SHARED, fd, 0);
    if (t->map == MAP_FAILED) {
        t->map = NULL;
        return refuse(t, errno);
    }
    return 0;
}

static const struct format *format_find(int32_t magic, int32_t version)
{
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++)
        if (formats[i].magic == magic && formats[i].version == version)
            return &formats[i];
    return NULL;
}

static int header_check(struct tokens *t)
{
    int32_t h[3];
    const struct format *f;
    int64_t want;

    assert(t->map);
    t->header_bytes = HEADER_INTS * (int64_t)sizeof(int32_t);
    if (t->map_bytes < t->header_bytes) {
        fprintf(
            stderr,
            "izar: data: %s has %" PRId64 " bytes, fewer than the %" PRId64
            " of a token shard's header (data.bytes = true reads raw text)\n",
            t->path, t->map_bytes, t->header_bytes);
        return -EINVAL;
    }
    memcpy(h, t->map, sizeof h);
    f = format_find(h[0], h[1]);
    if (!f) {
        fprintf(stderr,
                "izar: data: %s begins with magic %" PRId32 " version %" PRId32
                "; a token shard has 20240520 version 1 or 20240801 version 7"
                " (data.bytes = true reads raw text)\n",
                t->path, h[0], h[1]);
        return -EINVAL;
    }
    t->count = h[2];
    t->token_bytes = f->token_bytes;
    want = t->header_bytes + t->count * t->token_bytes;
    if (t->count <= 0 || want != t->map_bytes) {
        fprintf(stderr,
                "izar: data: %s: the header says %" PRId64
                " tokens, that is %" PRId64 " bytes, but the file has %" PRId64
                " bytes (%s)\n",
                t->path, t->count, want, t->map_bytes,
                want > t->map_bytes ? "truncated" : "oversized");
        return -EINVAL;
    }
    return 0;
}

static IZ_SIMD uint32_t max_u8(const uint8_t *t, int64_t n)
{
    uint8_t m = 0;

    for (int64_t i = 0; i < n; i++)
        m = t[i] > m ? t[i] : m;
    return m;
}

static IZ_SIMD uint32_t max_u16(const uint16_t *t, int64_t n)
{
    uint16_t m = 0;

    for (int64_t i = 0; i < n; i++)
        m = t[i] > m ? t[i] : m;
    return m;
}

static IZ_SIMD uint32_t max_u32(const uint32_t *t, int64_t n)
{
    uint32_t m = 0;

    for (int64_t i = 0; i < n; i++)
        m = t[i] > m ? t[i] : m;
    return m;
}

/* The tokens from position `at`; the map is page-aligned and the header a
 * multiple of the token size. */
static const void *tokens_at(const struct tokens *t, int64_t at)
{
    return t->map + t->header_bytes + at * t->token_bytes;
}

static uint32_t tokens_max(const struct tokens *t, int64_t at, int64_t n)
{
    const void *p = tokens_at(t, at);

    if (t->token_bytes == 1)
        return max_u8(p, n);
    return t->token_bytes == 2 ? max_u16(p, n) : max_u32(p, n);
}

/* Reads the whole file once, in blocks, so that a fault in the middle of a run
 * (a token outside the embedding) is a fault before it. */
static int tokens_check(const struct tokens *t, int vocab)
{
    const int64_t block = 1 << 16;

    if (t->token_bytes == 1 && vocab >= 256)
        return 0;
    posix_madvise(t->map, (size_t)t->map_bytes, POSIX_MADV_SEQUENTIAL);
    for (int64_t i = 0; i < t->count; i += block) {
        int64_t n = t->count - i < block ? t->count - i : block;

        if (tokens_max(t, i, n) < (uint32_t)vocab)
            continue;
        while (tokens_max(t, i, 1) < (uint32_t)vocab)
            i++;
        fprintf(stderr,
                "izar: data: %s: token %" PRId64 " is %" PRIu32
                ", outside the vocabulary of %d\n",
                t->path, i, tokens_max(t, i, 1), vocab);
        return -EINVAL;
    }
    posix_madvise(t->map, (size_t)t->map_bytes, POSIX_MADV_NORMAL);
    return 0;
}

static int tokens_open(struct tokens *t, const char *path, bool bytes,
                       int vocab)
{
    /* Not blocking: a named pipe is refused, not waited for. */
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK), err;

    t->path = path;
    if (fd < 0)
        return refuse(t, errno);
    err = tokens_map(t, fd);
    close(fd);
    if (err)
        return err;
    t->count = t->map_bytes;
    t->token_bytes = 1;
    if (!bytes)
        err = header_check(t);
    return err ? err : tokens_check(t, vocab);
}

static void tokens_close(struct tokens *t)
{
    if (t->map)
        munmap(t->map, (size_t)t->map_bytes);
    t->map = NULL;
}

/* ---- splits ---- */

static void split_set(struct split *s, const struct tokens *t, int64_t first,
                      int64_t count, int seq)
{
    s->tokens = t;
    s->first = first;
    s->count = count;
    s->windows = count > 0 ? (count - 1) / seq : 0;
}

/* The last windows of one file are for validation.  Its first input is the last
 * target of training: no target belongs to both.  The cut does not ask whether
 * validation is wanted, or switching it on would change the training. */
static void split_one_file(struct iz_data *d, double fraction)
{
    const struct tokens *t = &d->train;
    int64_t windows = (t->count - 1) / d->seq, held, cut;

    held = (int64_t)(fraction * (double)windows + 0.5);
    if (fraction > 0 && held < 1)
        held = 1;
    if (held >= windows) /* training comes first */
        held = windows > 0 ? windows - 1 : 0;
    cut = t->count - 1 - held * d->seq;
    split_set(&d->split[IZ_TRAIN], t, 0, cut + 1, d->seq);
    split_set(&d->split[IZ_VAL], t, cut, held > 0 ? t->count - cut : 0, d->seq);
}

static int split_check(const struct iz_data *d, enum iz_split s,
                       const char *path)
{
    if (d->split[s].windows > 0)
        return 0;
    fprintf(stderr,
            "izar: data: %s: %" PRId64
            " tokens for %s, but one window needs %" PRId64
            " (sequence length %d + 1)%s\n",
            path, d->split[s].count, s == IZ_TRAIN ? "training" : "validation",
            (int64_t)d->seq + 1, d->seq,
            s == IZ_VAL ? "; see data.val_path, data.val_fraction" : "");
    return -EINVAL;
}

static int splits_open(struct iz_data *d, const struct iz_data_config *c,
                       int vocab, bool need_val)
{
    bool own_val = c->val_path[0] != '\0';
    int err = tokens_open(&d->train, c->path, c->bytes, vocab);

    if (!err && own_val)
        err = tokens_open(&d->val, c->val_path, c->bytes, vocab);
    if (err)
        return err;
    split_one_file(d, own_val ? 0 : c->val_fraction);
    if (own_val)
        split_set(&d->split[IZ_VAL], &d->val, 0, d->val.count, d->seq);
    err = split_check(d, IZ_TRAIN, c->path);
    if (!err && need_val)
        err = split_check(d, IZ_VAL, own_val ? c->val_path : c->path);
    return err;
}

int iz_data_open(struct iz_data **out, const struct iz_data_config *c, int seq,
                 int vocab, uint64_t seed, bool need_val)
{
    struct iz_data *d = calloc(1, sizeof *d);
    int err;

    assert(seq > 0 && vocab > 0);
    *out = NULL;
    if (!d)
        return -ENOMEM;
    d->seq = seq;
    d->seed = seed;
    err = splits_open(d, c, vocab, need_val);
    d->train.path = d->val.path = NULL; /* borrowed until here */
    if (err) {
        iz_data_close(&d);
        return err;
    }
    *out = d;
    return 0;
}

void iz_data_close(struct iz_data **d)
{
    if (!*d)
        return;
    tokens_close(&(*d)->train);
    tokens_close(&(*d)->val);
    free(*d);
    *d = NULL;
}

int64_t iz_data_windows(const struct iz_data *d, enum iz_split s)
{
    return d->split[s].windows;
}

int64_t iz_data_tokens(const struct iz_data *d, enum iz_split s)
{
    return d->split[s].count;
}

/* ---- order ---- */

/* A bijection of [0, 4^half): eight rounds of a balanced Feistel network. */
static uint64_t feistel(uint64_t x, int half, uint64_t key)
{
    const uint64_t mask = ((uint64_t)1 << half) - 1;
    uint64_t left = x >> half, right = x & mask;

    for (uint64_t round = 0; round < 8; round++) {
        uint64_t f = iz_mix(key + iz_mix((round << 56) ^ right));
        uint64_t next = left ^ (f & mask);

        left = right;
        right = next;
    }
    return left << half | right;
}

/* Image of i under a permutation of [0, n): a bijection of a power of four that
 * is below 4n is applied until the value falls below n again (cycle walking).
 */
static int64_t permute(int64_t i, int64_t n, uint64_t key)
{
    int half = 1;
    uint64_t x = (uint64_t)i;

    while ((uint64_t)1 << (2 * half) < (uint64_t)n)
        half++;
    do
        x = feistel(x, half, key);
    while (x >= (uint64_t)n);
    return (int64_t)x;
}

/* First input token of a training sample.  Windows do not fill a split: the
 * rest (less than one window) falls on either side, by epoch, so that every
 * token is seen in time and windows are not cut at the same places for ever. */
static int64_t train_start(const struct iz_data *d, int64_t index)
{
    const struct split *s = &d->split[IZ_TRAIN];
    int64_t epoch = index / s->windows,
            rest = s->count - 1 - s->windows * d->seq;
    uint64_t key = iz_mix(d->seed + iz_mix((uint64_t)epoch + 1));
    int64_t shift = (int64_t)(iz_mix(key ^ 1) % (uint64_t)(rest + 1));

    return shift + d->seq * permute(index % s->windows, s->windows, key);
}

static void widen(const struct tokens *t, int64_t at, int32_t *out, int64_t n)
{
    const uint8_t *t8 = tokens_at(t, at);
    const uint16_t *t16 = tokens_at(t, at);

    if (t->token_bytes == 4)
        memcpy(out, t8, (size_t)n * sizeof *out);
    else if (t->token_bytes == 2)
        for (int64_t i = 0; i < n; i++)
            out[i] = t16[i];
    else
        for (int64_t i = 0; i < n; i++)
            out[i] = t8[i];
}

void iz_data_sample(const struct iz_data *d, enum iz_split which, int64_t index,
                    int32_t *input, int32_t *target)
{
    const struct split *s = &d->split[which];
    int64_t at;

    assert(index >= 0 && s->windows > 0);
    at = s->first + (which == IZ_TRAIN ? train_start(d, index)
                                       : index % s->windows * d->seq);
    widen(s->tokens, at, input, d->seq);
    widen(s->tokens, at + 1, target, d->seq);
}
