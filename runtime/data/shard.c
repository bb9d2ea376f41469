/* SPDX-License-Identifier: Apache-2.0 */
/* A token shard and its mask, or records: every length in a file is checked
 * against the file before it is used; see shard.h. */
#include "runtime/data/shard.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "codelets/base/build.h"
#include "codelets/base/int64.h"
#include "codelets/base/take.h"
#include "runtime/base/progress.h"
#include "runtime/base/text.h"

#define HEADER_INTS 256 /* int32 */
/* A byte of a mask: context, learnt; in a packed shard also: context with which
 * a document begins. */
enum { MASK_LEARNT = 1, MASK_BEGINS = 2 };

static int mask_version(const struct iz_shard *s)
{
    return s->sample ? 2 : 1;
}

/* The layouts of a token shard: tokens of 16 and of 32 bits. */
static const struct shard_format {
    int32_t magic, version;
    int token_bytes;
} formats[] = {
    {20240520, 1, 2}, /* vocabularies up to 65536 */
    {20240801, 7, 4},
};

/* ---- files ---- */

static int data_shard_refuse(FILE *err, const char *path, int why)
{
    iz_text_refuse(err, "data: %s: %s", path, strerror(why));
    return -why;
}

static int map(struct iz_mapping *m, int fd, const char *path, FILE *err)
{
    struct stat st;
    if (fstat(fd, &st) != 0)
        return data_shard_refuse(err, path, errno);
    if (!S_ISREG(st.st_mode))
        return iz_text_refuse(err, "data: %s is not a regular file", path);
    if (st.st_size == 0)
        return iz_text_refuse(err, "data: %s is empty", path);
    m->bytes = st.st_size;
    m->at = mmap(NULL, (size_t)m->bytes, PROT_READ, MAP_SHARED, fd, 0);
    if (m->at == MAP_FAILED) {
        m->at = NULL;
        return data_shard_refuse(err, path, errno);
    }
    if (iz_text_is_pointer(m->at, m->bytes))
        return iz_text_refuse(err, "data: %s " IZ_TEXT_POINTER, path);
    return 0;
}

/* Nothing but a regular file with something in it. */
static int mapping_open(struct iz_mapping *m, const char *path, FILE *err)
{
    /* Not blocking: a named pipe is refused, not waited for. */
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK), why;
    *m = (struct iz_mapping){0};
    if (fd < 0)
        return data_shard_refuse(err, path, errno);
    why = map(m, fd, path, err);
    close(fd);
    return why;
}

static void mapping_close(struct iz_mapping *m)
{
    if (m->at)
        munmap(m->at, (size_t)m->bytes);
    m->at = NULL;
}

/* ---- headers ---- */

enum { HEADER_READ = 5 };

/* The first integers; refuses a file that ends within the header. */
static int header_read(int32_t h[HEADER_READ], const struct iz_mapping *m,
                       const char *path, FILE *err)
{
    int64_t need = HEADER_INTS * (int64_t)sizeof(int32_t);
    if (m->bytes < need)
        return iz_text_refuse(
            err,
            "data: %s has %" PRId64 " bytes, fewer than the %" PRId64
            " of a token shard's header (data.bytes = true reads raw text)",
            path, m->bytes, need);
    memcpy(h, m->at, HEADER_READ * sizeof(*h));
    return 0;
}

static int length_check(const struct iz_mapping *m, const char *path,
                        int64_t count, int64_t token_bytes, FILE *err)
{
    int64_t want = HEADER_INTS * (int64_t)sizeof(int32_t);
    want += count * token_bytes;
    if (count > 0 && want == m->bytes)
        return 0;
    return iz_text_refuse(err,
                          "data: %s: the header says %" PRId64
                          " tokens, that is %" PRId64
                          " bytes, but the file has %" PRId64 " bytes (%s)",
                          path, count, want, m->bytes,
                          want > m->bytes ? "truncated" : "oversized");
}

static const struct shard_format *format_find(int32_t magic, int32_t version)
{
    for (int i = 0; i < 2; i++)
        if (formats[i].magic == magic && formats[i].version == version)
            return &formats[i];
    return NULL;
}

static int header_check(struct iz_shard *s)
{
    int32_t h[HEADER_READ];
    int err = header_read(h, &s->tokens, s->path, s->err);
    if (err)
        return err;
    const struct shard_format *f = format_find(h[0], h[1]);
    if (!f)
        return iz_text_refuse(
            s->err,
            "data: %s begins with magic %" PRId32 " version %" PRId32
            "; a token shard has 20240520 version 1 or 20240801 version 7"
            " (data.bytes = true reads raw text)",
            s->path, h[0], h[1]);
    s->header_bytes = HEADER_INTS * (int64_t)sizeof(int32_t);
    s->count = h[2];
    s->text = h[3];
    s->sample = h[4];
    s->token_bytes = f->token_bytes;
    return length_check(&s->tokens, s->path, s->count, s->token_bytes, s->err);
}

/* ---- tokens ---- */

/* Of n numbers of 1, 2 or 4 bytes. */
static IZ_SIMD uint32_t largest(const void *p, int64_t n, int bytes)
{
    const uint8_t *t8 = p;
    const uint16_t *t16 = p;
    const uint32_t *t32 = p;
    uint32_t m32 = 0;
    uint16_t m16 = 0;
    uint8_t m8 = 0;
    if (bytes == 1)
        for (int64_t i = 0; i < n; i++)
            m8 = t8[i] > m8 ? t8[i] : m8;
    else if (bytes == 2)
        for (int64_t i = 0; i < n; i++)
            m16 = t16[i] > m16 ? t16[i] : m16;
    else
        for (int64_t i = 0; i < n; i++)
            m32 = t32[i] > m32 ? t32[i] : m32;
    return m32 | m16 | m8;
}

/* The tokens from position `at`; the map is page-aligned and the header a
 * multiple of the token size. */
static const void *tokens_at(const struct iz_shard *s, int64_t at)
{
    return s->tokens.at + s->header_bytes + at * s->token_bytes;
}

static uint32_t tokens_max(const struct iz_shard *s, int64_t at, int64_t n)
{
    return largest(tokens_at(s, at), n, s->token_bytes);
}

/* Of the tokens in order, the first that is not below `vocab`; the number of
 * tokens if there is none. */
static int64_t tokens_first_bad(const struct iz_shard *s, int vocab)
{
    const int64_t block = 1 << 16;
    struct iz_progress progress;
    int64_t i = 0;
    iz_progress_begin(&progress, "checking the tokens",
                      s->count * s->token_bytes);
    for (; i < s->count; i += block) {
        int64_t n = min64(s->count - i, block);
        if (tokens_max(s, i, n) >= (uint32_t)vocab)
            break;
        iz_progress_add(&progress, n * s->token_bytes);
    }
    iz_progress_end(&progress);
    while (i < s->count && tokens_max(s, i, 1) < (uint32_t)vocab)
        i++;
    return min64(i, s->count);
}

/* Reads the whole file once, so that a fault in the middle of a run (a token
 * outside the embedding) is a fault before it. */
static int tokens_check(const struct iz_shard *s, int vocab)
{
    if (s->token_bytes == 1 && vocab >= 256)
        return 0;
    posix_madvise(s->tokens.at, (size_t)s->tokens.bytes, POSIX_MADV_SEQUENTIAL);
    int64_t bad = tokens_first_bad(s, vocab);
    posix_madvise(s->tokens.at, (size_t)s->tokens.bytes, POSIX_MADV_NORMAL);
    if (bad == s->count)
        return 0;
    return iz_text_refuse(s->err,
                          "data: %s: token %" PRId64 " is %" PRIu32
                          ", outside the vocabulary of %d",
                          s->path, bad, tokens_max(s, bad, 1), vocab);
}

/* ---- masks ---- */

/* "X.mask" of "X.bin" (of any other name: with .mask appended), malloc'ed. */
static char *mask_path(const char *path)
{
    size_t n = strlen(path);
    struct iz_text t;
    if (n > 4 && strcmp(path + n - 4, ".bin") == 0)
        n -= 4;
    fprintf(iz_text_open(&t), "%.*s.mask", (int)n, path);
    return iz_text_close(&t);
}

static int mask_check(const struct iz_shard *s, const char *path)
{
    int32_t h[HEADER_READ];
    const unsigned char *mask = s->mask.at + HEADER_INTS * sizeof(int32_t);
    int err = header_read(h, &s->mask, path, s->err);
    if (err)
        return err;
    if (h[0] != IZ_MASK_MAGIC || h[1] != mask_version(s) || h[2] != s->count)
        return iz_text_refuse(s->err,
                              "data: %s begins with magic %" PRId32
                              " version %" PRId32 " and %" PRId32
                              " tokens; the mask of %s has %d version %d and "
                              "%" PRId64 " tokens",
                              path, h[0], h[1], h[2], s->path, IZ_MASK_MAGIC,
                              mask_version(s), s->count);
    err = length_check(&s->mask, path, s->count, 1, s->err);
    if (err || largest(mask, s->count, 1) <= (uint32_t)mask_version(s))
        return err;
    return iz_text_refuse(s->err, "data: %s: a byte is neither 0 nor 1%s", path,
                          s->sample ? " nor 2" : "");
}

/* No file is no mask; any other fault of it is one. */
static int mask_open(struct iz_shard *s)
{
    char *path = mask_path(s->path);
    int err = 0;
    if (access(path, F_OK) == 0 || errno != ENOENT) {
        err = mapping_open(&s->mask, path, s->err);
        if (!err)
            err = mask_check(s, path);
    }
    free(path);
    return err;
}

/* ---- shards ---- */

int iz_shard_open(struct iz_shard *s, const char *path, bool bytes, int vocab,
                  FILE *err)
{
    assert(vocab > 0);
    *s = (struct iz_shard){.path = iz_take_text(path, (int64_t)strlen(path)),
                           .err = err};
    int why = mapping_open(&s->tokens, path, err);
    if (why)
        return why;
    s->count = s->tokens.bytes;
    s->token_bytes = 1;
    if (!bytes)
        why = header_check(s);
    if (!why)
        why = tokens_check(s, vocab);
    return why || bytes ? why : mask_open(s);
}

/* ---- records ---- */

/* What a record holds only the model knows; it judges each of them before the
 * run. */
static int records_length(const struct iz_shard *s, const struct iz_model *m)
{
    if (s->tokens.bytes % m->record.bytes == 0)
        return 0;
    return iz_text_refuse(s->err,
                          "data: %s has %" PRId64
                          " bytes, which is no multiple of the %" PRId64
                          " of a record of %s",
                          s->path, s->tokens.bytes, m->record.bytes, m->name);
}

static int records_check(const struct iz_shard *s, const struct iz_model *m)
{
    posix_madvise(s->tokens.at, (size_t)s->tokens.bytes, POSIX_MADV_SEQUENTIAL);
    for (int64_t i = 0; i < s->count; i++) {
        const char *why = m->record.check(m->self, iz_shard_record(s, i));
        if (!why)
            continue;
        return iz_text_refuse(s->err, "data: %s: record %" PRId64 ": %s",
                              s->path, i, why);
    }
    posix_madvise(s->tokens.at, (size_t)s->tokens.bytes, POSIX_MADV_NORMAL);
    return 0;
}

int iz_shard_open_records(struct iz_shard *s, const char *path,
                          const struct iz_model *m, FILE *err)
{
    assert(m->record.bytes > 0 && m->record.bytes <= INT_MAX);
    *s = (struct iz_shard){.path = iz_take_text(path, (int64_t)strlen(path)),
                           .err = err};
    int why = mapping_open(&s->tokens, path, err);
    if (!why)
        why = records_length(s, m);
    if (why)
        return why;
    s->token_bytes = (int)m->record.bytes;
    s->count = s->tokens.bytes / m->record.bytes;
    return records_check(s, m);
}

const void *iz_shard_record(const struct iz_shard *s, int64_t at)
{
    assert(at >= 0 && at < s->count);
    return s->tokens.at + at * s->token_bytes;
}

/* ---- reading ---- */

void iz_shard_close(struct iz_shard *s)
{
    mapping_close(&s->tokens);
    mapping_close(&s->mask);
    free(s->path);
    s->path = NULL;
}

void iz_shard_tokens(const struct iz_shard *s, int64_t at, int32_t *out,
                     int64_t n)
{
    const uint8_t *t8 = tokens_at(s, at);
    const uint16_t *t16 = tokens_at(s, at);
    assert(at >= 0 && n >= 0 && n <= s->count - at);
    if (s->token_bytes == 4)
        memcpy(out, t8, (size_t)n * sizeof(*out));
    else if (s->token_bytes == 2)
        for (int64_t i = 0; i < n; i++)
            out[i] = t16[i];
    else
        for (int64_t i = 0; i < n; i++)
            out[i] = t8[i];
}

static const unsigned char *mask_at(const struct iz_shard *s, int64_t at)
{
    return s->mask.at + HEADER_INTS * sizeof(int32_t) + at;
}

void iz_shard_ignore(const struct iz_shard *s, int64_t at, int32_t *target,
                     int64_t n)
{
    for (int64_t i = 0; s->mask.at && i < n; i++)
        if (mask_at(s, at)[i] != MASK_LEARNT)
            target[i] = -1;
}

bool iz_shard_begins(const struct iz_shard *s, int64_t at)
{
    return *mask_at(s, at) == MASK_BEGINS;
}

int iz_shard_sample(const char *path)
{
    int32_t h[HEADER_READ] = {0};
    FILE *f = fopen(path, "rb");
    bool read = f && fread(h, sizeof(h), 1, f) == 1;
    if (f)
        fclose(f);
    return read && format_find(h[0], h[1]) ? h[4] : 0;
}
