/* SPDX-License-Identifier: Apache-2.0 */
/* The metadata of a rank's file, and its data by blocks; nothing here knows
 * directories, ranks' shares or the run. */
#include "runtime/ckpt/rank_file.h"

#include <assert.h>
#include <inttypes.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "codelets/base/take.h"
#include "runtime/base/hash.h"
#include "runtime/base/text.h"

#define FORMAT "1"
#define HASH_DIGITS 16

static_assert(sizeof(float) == 4, "tensors are fp32");

int64_t iz_rank_range_blocks(const struct iz_rank_range *p)
{
    return p->count / IZ_CKPT_BLOCK + (p->count % IZ_CKPT_BLOCK != 0);
}

int64_t iz_rank_range_block_elems(const struct iz_rank_range *p, int64_t b)
{
    int64_t left = p->count - b * IZ_CKPT_BLOCK;
    return left < IZ_CKPT_BLOCK ? left : IZ_CKPT_BLOCK;
}

/* ---- writing ---- */

/* malloc'ed. */
static char *metadata_text(const struct iz_rank_range *range, int n,
                           int64_t step, int rank, int ranks)
{
    struct iz_text text;
    FILE *f = iz_text_open(&text);
    fprintf(f,
            "{\"izar\":\"" FORMAT "\",\"step\":\"%" PRId64
            "\",\"rank\":\"%d\",\"ranks\":\"%d\"",
            step, rank, ranks);
    for (const struct iz_rank_range *p = range; p < range + n; p++) {
        fprintf(f, ",\"%s\":\"%" PRId64 " %" PRId64 " ", p->name, p->first,
                p->total);
        for (int64_t b = 0; b < iz_rank_range_blocks(p); b++)
            fprintf(f, "%016" PRIx64, p->hash[b]);
        fputc('"', f);
    }
    fputc('}', f);
    return iz_text_close(&text);
}

char *iz_rank_file_header(const struct iz_rank_range *range, int n,
                          int64_t step, int rank, int ranks, int64_t *bytes)
{
    char *metadata = metadata_text(range, n, step, rank, ranks);
    struct iz_st_tensor *t = iz_take(n, sizeof(*t), "a header");
    for (int i = 0; i < n; i++)
        t[i] = (struct iz_st_tensor){.name = range[i].name,
                                     .dtype = iz_st_dtype_text(IZ_F32),
                                     .shape = {range[i].count},
                                     .dims = 1,
                                     .offset = range[i].offset,
                                     .bytes = 4 * range[i].count};
    char *text = iz_st_header(metadata, t, n, bytes);
    free(metadata);
    free(t);
    return text;
}

/* ---- reading ---- */

static int metadata_number(const struct iz_st *s, const char *key, int64_t max,
                           int64_t *out)
{
    const char *text = json_string_value(json_object_get(s->metadata, key));
    *out = text ? iz_text_decimal(&text) : -1;
    if (*out < 0 || *out > max || *text)
        return iz_st_fault(
            s, "__metadata__.%s is missing or not a number up to %" PRId64, key,
            max);
    return 0;
}

static bool hashes_parse(struct iz_rank_range *p, const char *text)
{
    int64_t n = iz_rank_range_blocks(p);
    if (strlen(text) != (size_t)n * HASH_DIGITS ||
        strspn(text, "0123456789abcdef") != (size_t)n * HASH_DIGITS)
        return false;
    p->hash = iz_take(n, sizeof(*p->hash), "hashes");
    for (int64_t b = 0; b < n; b++) {
        char digits[HASH_DIGITS + 1] = {0};
        memcpy(digits, text + b * HASH_DIGITS, HASH_DIGITS);
        p->hash[b] = strtoull(digits, NULL, 16);
    }
    return true;
}

/* "first total hashes": where the range lies, and its checksums. */
static int range_place(const struct iz_st *s, struct iz_rank_range *p,
                       const char *text)
{
    p->first = text ? iz_text_decimal(&text) : -1;
    if (p->first < 0 || *text++ != ' ')
        return iz_st_fault(s, "tensor %s has no place in __metadata__",
                           p->name);
    p->total = iz_text_decimal(&text);
    if (p->total < 0 || *text++ != ' ')
        return iz_st_fault(s, "tensor %s has no total in __metadata__",
                           p->name);
    if (p->first > p->total || p->count > p->total - p->first)
        return iz_st_fault(s,
                           "tensor %s: elements %" PRId64 " + %" PRId64
                           " lie outside its array of %" PRId64,
                           p->name, p->first, p->count, p->total);
    if (!hashes_parse(p, text))
        return iz_st_fault(
            s, "tensor %s has no checksum for each of its %" PRId64 " blocks",
            p->name, iz_rank_range_blocks(p));
    return 0;
}

static int range_parse(const struct iz_st *s, struct iz_rank_range *p,
                       const struct iz_st_tensor *t)
{
    if (strlen(t->name) >= sizeof(p->name))
        return iz_st_fault(s, "tensor name %.80s... is too long", t->name);
    memcpy(p->name, t->name, strlen(t->name) + 1);
    if (strcmp(t->dtype, iz_st_dtype_text(IZ_F32)) != 0)
        return iz_st_fault(s, "tensor %s has type %s, not F32", t->name,
                           t->dtype);
    if (t->dims != 1)
        return iz_st_fault(s, "tensor %s: shape is not [count]", t->name);
    p->count = t->shape[0];
    p->offset = t->offset;
    return range_place(
        s, p, json_string_value(json_object_get(s->metadata, t->name)));
}

static int contents_parse(struct iz_rank_file *s)
{
    const char *format =
        json_string_value(json_object_get(s->st.metadata, "izar"));
    int64_t rank = 0, ranks = 0;
    if (!format || strcmp(format, FORMAT) != 0)
        return iz_st_fault(&s->st,
                           "not a checkpoint of this program, version " FORMAT
                           " (__metadata__.izar is %s)",
                           format ? format : "missing");
    int err = metadata_number(&s->st, "step", INT64_MAX, &s->step);
    if (!err)
        err = metadata_number(&s->st, "rank", INT_MAX, &rank);
    if (!err)
        err = metadata_number(&s->st, "ranks", INT_MAX, &ranks);
    s->rank = (int)rank;
    s->ranks = (int)ranks;
    s->range = iz_take(s->st.n, sizeof(*s->range), "ranges");
    for (int i = 0; i < s->st.n && !err; i++)
        err = range_parse(&s->st, &s->range[s->n_ranges++], &s->st.tensor[i]);
    return err;
}

int iz_rank_file_open(struct iz_rank_file **out, const char *path)
{
    struct iz_rank_file *s = *out = iz_take(1, sizeof(*s), "a file");
    int err = iz_st_open(&s->st, "checkpoint: ", path, stderr);
    if (!err)
        err = contents_parse(s);
    if (err)
        iz_rank_file_close(out);
    return err;
}

void iz_rank_file_close(struct iz_rank_file **out)
{
    struct iz_rank_file *s = *out;
    if (!s)
        return;
    for (int i = 0; i < s->n_ranges; i++)
        free(s->range[i].hash);
    free(s->range);
    iz_st_close(&s->st);
    free(s);
    *out = NULL;
}

const struct iz_rank_range *iz_rank_file_find(const struct iz_rank_file *s,
                                              const char *name)
{
    const struct iz_st_tensor *t = iz_st_find(&s->st, name);
    return t ? &s->range[t - s->st.tensor] : NULL;
}

int iz_rank_file_read(const struct iz_rank_file *s,
                      const struct iz_rank_range *p, int64_t b, float *out)
{
    int64_t from = b * IZ_CKPT_BLOCK;
    int64_t n = iz_rank_range_block_elems(p, b);
    assert(b >= 0 && n > 0);
    int err = iz_st_read(&s->st, out, 4 * n, p->offset + 4 * from);
    if (!err && iz_hash(out, 4 * n) != p->hash[b])
        err = iz_st_fault(&s->st,
                          "damaged: tensor %s, elements %" PRId64 " to %" PRId64
                          " do not have their checksum",
                          p->name, from, from + n - 1);
    return err;
}
