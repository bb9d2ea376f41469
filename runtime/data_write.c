/* SPDX-License-Identifier: Apache-2.0 */
/* A shard has a temporary name until its header has its length: what has the
 * right name is complete.  See data_write.h. */
#include "runtime/data_write.h"

#include <assert.h>
#include <errno.h>
#include <glob.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/config/config.h"
#include "runtime/data/shard.h"

#define NAME_MAX_BYTES (IZ_PATH_MAX + 32)
#define PIECE 4096 /* tokens narrowed at a time */

/* A file under its temporary name. */
struct part {
    FILE *f;
    char path[NAME_MAX_BYTES], final[NAME_MAX_BYTES];
};

struct iz_shards {
    char prefix[IZ_PATH_MAX];
    const struct iz_shard_format *format;
    struct part tokens, masks;
    bool mask;
    int64_t shard_tokens, here; /* of the open shard */
    int count;                  /* complete ones */
};

static int refuse(const char *path, int err)
{
    fprintf(stderr, "izar: data: %s: %s\n", path, strerror(err));
    return -err;
}

/* A pattern that ends as shards do would take those of an earlier run in. */
static int check_none(const char *prefix)
{
    static const char *const endings[] = {"_[0-9]*.bin", "_[0-9]*.mask"};
    char pattern[NAME_MAX_BYTES];
    glob_t g = {0};
    int err = 0;

    for (int i = 0; !err && i < 2; i++) {
        snprintf(pattern, sizeof pattern, "%s%s", prefix, endings[i]);
        if (glob(pattern, 0, NULL, &g) == 0 && g.gl_pathc > 0) {
            fprintf(stderr,
                    "izar: data: %s is there already: remove it or choose "
                    "another name\n",
                    g.gl_pathv[0]);
            err = -EEXIST;
        }
        globfree(&g);
    }
    return err;
}

int iz_shards_open(struct iz_shards **out, const char *prefix, int64_t vocab,
                   int64_t shard_tokens, bool mask)
{
    struct iz_shards *s;

    assert(shard_tokens > 0 && shard_tokens <= INT32_MAX);
    *out = NULL;
    if (strlen(prefix) >= IZ_PATH_MAX)
        return refuse(prefix, ENAMETOOLONG);
    if (strpbrk(prefix, "*?[,\\")) {
        fprintf(stderr,
                "izar: data: %s: data.path could not name it: no * ? [ , or "
                "backslash\n",
                prefix);
        return -EINVAL;
    }
    if (check_none(prefix))
        return -EEXIST;
    s = calloc(1, sizeof *s);
    if (!s)
        return refuse(prefix, ENOMEM);
    strcpy(s->prefix, prefix);
    s->format = &iz_shard_formats[vocab > 65536];
    s->shard_tokens = shard_tokens;
    s->mask = mask;
    *out = s;
    return 0;
}

/* ---- one file ---- */

static int part_open(struct part *p, const struct iz_shards *s,
                     const char *ending)
{
    static const int32_t header[IZ_SHARD_HEADER];

    snprintf(p->final, sizeof p->final, "%s_%06d.%s", s->prefix, s->count,
             ending);
    snprintf(p->path, sizeof p->path, "%s_%06d.%s.tmp", s->prefix, s->count,
             ending);
    p->f = fopen(p->path, "wb");
    if (!p->f)
        return refuse(p->path, errno);
    if (fwrite(header, sizeof header, 1, p->f) != 1)
        return refuse(p->path, errno);
    return 0;
}

static int part_finish(struct part *p, int32_t magic, int32_t version,
                       int32_t count)
{
    int32_t h[3] = {magic, version, count};
    bool good = fseek(p->f, 0, SEEK_SET) == 0 &&
                fwrite(h, sizeof h, 1, p->f) == 1 && fflush(p->f) == 0 &&
                fsync(fileno(p->f)) == 0;
    int err = good ? 0 : errno;

    if (fclose(p->f) != 0 && !err)
        err = errno;
    p->f = NULL;
    if (!err && rename(p->path, p->final) != 0)
        err = errno;
    if (err)
        remove(p->path);
    return err ? refuse(p->path, err) : 0;
}

static void part_drop(struct part *p)
{
    if (!p->f)
        return;
    fclose(p->f);
    remove(p->path);
    p->f = NULL;
}

/* ---- shards ---- */

/* The mask first: a shard is never without its mask. */
int iz_shards_finish(struct iz_shards *s)
{
    int32_t n = (int32_t)s->here;
    int err = 0;

    if (!s->tokens.f)
        return 0;
    if (s->mask)
        err = part_finish(&s->masks, IZ_MASK_MAGIC, IZ_MASK_VERSION, n);
    if (!err)
        err = part_finish(&s->tokens, s->format->magic, s->format->version, n);
    s->here = 0;
    s->count++;
    return err;
}

static int shard_begin(struct iz_shards *s)
{
    int err = 0;

    if (s->count > 999999) {
        fprintf(stderr, "izar: data: %s: more than a million shards\n",
                s->prefix);
        return -E2BIG;
    }
    if (s->mask)
        err = part_open(&s->masks, s, "mask");
    return err ? err : part_open(&s->tokens, s, "bin");
}

/* At most PIECE tokens. */
static int write_tokens(struct iz_shards *s, const int32_t *id, int64_t n)
{
    uint16_t narrow[PIECE];
    const void *from = id;

    if (s->format->token_bytes == 2) {
        for (int64_t i = 0; i < n; i++) {
            assert(id[i] >= 0 && id[i] <= UINT16_MAX);
            narrow[i] = (uint16_t)id[i];
        }
        from = narrow;
    }
    if (fwrite(from, (size_t)s->format->token_bytes, (size_t)n, s->tokens.f) !=
        (size_t)n)
        return refuse(s->tokens.path, errno);
    return 0;
}

int iz_shards_put(struct iz_shards *s, const int32_t *id, const uint8_t *learn,
                  int64_t n)
{
    assert(!learn == !s->mask);
    for (int64_t at = 0, here; at < n; at += here) {
        int err = s->tokens.f ? 0 : shard_begin(s);

        here = n - at < PIECE ? n - at : PIECE;
        if (s->shard_tokens - s->here < here)
            here = s->shard_tokens - s->here;
        if (!err)
            err = write_tokens(s, id + at, here);
        if (!err && learn &&
            fwrite(learn + at, 1, (size_t)here, s->masks.f) != (size_t)here)
            err = refuse(s->masks.path, errno);
        s->here += here;
        if (!err && s->here == s->shard_tokens)
            err = iz_shards_finish(s);
        if (err)
            return err;
    }
    return 0;
}

void iz_shards_close(struct iz_shards **s)
{
    if (!*s)
        return;
    part_drop(&(*s)->tokens);
    part_drop(&(*s)->masks);
    free(*s);
    *s = NULL;
}

int64_t iz_shards_count(const struct iz_shards *s)
{
    return s->count;
}
