/* SPDX-License-Identifier: Apache-2.0 */
/* Files of fixed-size records without a header.  What a record holds only the
 * model knows; it judges each of them before the run. */
#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "runtime/base/text.h"
#include "runtime/data/shard.h"

static int length_check(const struct iz_shard *s, const struct iz_model *m)
{
    if (s->tokens.bytes % m->record.bytes == 0)
        return 0;
    return iz_refuse(stderr,
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
        return iz_refuse(stderr, "data: %s: record %" PRId64 ": %s", s->path, i,
                         why);
    }
    posix_madvise(s->tokens.at, (size_t)s->tokens.bytes, POSIX_MADV_NORMAL);
    return 0;
}

int iz_shard_open_records(struct iz_shard *s, const char *path,
                          const struct iz_model *m)
{
    assert(m->record.bytes > 0 && m->record.bytes <= INT_MAX);
    *s = (struct iz_shard){.path = strdup(path)};
    if (!s->path)
        return -ENOMEM;
    int err = iz_mapping_open(&s->tokens, path);
    if (!err)
        err = length_check(s, m);
    if (err)
        return err;
    s->token_bytes = (int)m->record.bytes;
    s->count = s->tokens.bytes / m->record.bytes;
    return records_check(s, m);
}

const void *iz_shard_record(const struct iz_shard *s, int64_t at)
{
    assert(at >= 0 && at < s->count);
    return s->tokens.at + at * s->token_bytes;
}
