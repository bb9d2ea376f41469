/* SPDX-License-Identifier: Apache-2.0 */
/* The file format only: nothing here knows directories, ranks' shares or the
 * run. Whatever comes from a file is checked before it is used as a size or an
 * offset. */
#include "runtime/ckpt/rank_file.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "codelets/base/build.h"
#include "runtime/base/hash.h"
#include "runtime/base/json.h"

#define FORMAT "1"
#define PREFIX 8               /* bytes of the length field */
#define HEADER_MAX (100 << 20) /* bytes; the limit of other readers, too */
#define HASH_DIGITS 16

static_assert(sizeof(float) == 4, "tensors are fp32");

int64_t iz_piece_blocks(const struct iz_piece *p)
{
    return p->count / IZ_BLOCK + (p->count % IZ_BLOCK != 0);
}

int64_t iz_piece_block_elems(const struct iz_piece *p, int64_t b)
{
    int64_t left = p->count - b * IZ_BLOCK;

    return left < IZ_BLOCK ? left : IZ_BLOCK;
}

/* ---- writing ---- */

static void header_metadata(FILE *f, const struct iz_piece *piece, int n,
                            int64_t step, int rank, int ranks)
{
    fprintf(f,
            "{\"__metadata__\":{\"izar\":\"" FORMAT "\",\"step\":\"%" PRId64
            "\",\"rank\":\"%d\",\"ranks\":\"%d\"",
            step, rank, ranks);
    for (int i = 0; i < n; i++) {
        fprintf(f, ",\"%s\":\"%" PRId64 " %" PRId64 " ", piece[i].name,
                piece[i].first, piece[i].total);
        for (int64_t b = 0; b < iz_piece_blocks(&piece[i]); b++)
            fprintf(f, "%016" PRIx64, piece[i].hash[b]);
        fputc('"', f);
    }
    fputc('}', f);
}

static void header_tensors(FILE *f, const struct iz_piece *piece, int n)
{
    for (int i = 0; i < n; i++)
        fprintf(f,
                ",\"%s\":{\"dtype\":\"F32\",\"shape\":[%" PRId64
                "],\"data_offsets\":[%" PRId64 ",%" PRId64 "]}",
                piece[i].name, piece[i].count, piece[i].offset,
                piece[i].offset + 4 * piece[i].count);
    fputc('}', f);
}

char *iz_safetensors_header(const struct iz_piece *piece, int n, int64_t step,
                            int rank, int ranks, int64_t *bytes)
{
    char *text = NULL;
    size_t size = 0;
    uint64_t length;
    FILE *f = open_memstream(&text, &size);

    if (!f)
        return NULL;
    fwrite("\0\0\0\0\0\0\0", 1, PREFIX, f);
    header_metadata(f, piece, n, step, rank, ranks);
    header_tensors(f, piece, n);
    while (ftello(f) % 64) /* aligned data; the format allows trailing spaces */
        fputc(' ', f);
    if (ferror(f) | (fclose(f) != 0)) {
        free(text);
        return NULL;
    }
    length = size - PREFIX;
    memcpy(text, &length, PREFIX);
    *bytes = (int64_t)size;
    return text;
}

/* ---- reading ---- */

static int fault(const struct iz_safetensors *s, const char *fmt, ...)
    IZ_PRINTF(2, 3);

static int fault(const struct iz_safetensors *s, const char *fmt, ...)
{
    va_list args;

    fprintf(stderr, "izar: checkpoint: %s: ", s->path);
    va_start(args, fmt);
    vfprintf(stderr, fmt, args);
    va_end(args);
    fputc('\n', stderr);
    return -EINVAL;
}

static int read_whole(const struct iz_safetensors *s, void *out, int64_t bytes,
                      int64_t offset)
{
    char *to = out;

    while (bytes > 0) {
        ssize_t n = pread(s->fd, to, (size_t)bytes, offset);

        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0) {
            int err = errno;

            fault(s, "reading at offset %" PRId64 ": %s", offset,
                  strerror(err));
            return -err;
        }
        if (n == 0)
            return fault(
                s, "ends at offset %" PRId64 ", %" PRId64 " bytes too early",
                offset, bytes);
        to += n;
        offset += n;
        bytes -= n;
    }
    return 0;
}

/* Decimal without sign; -1 if it is anything else or does not fit. */
static int64_t number(const char **text)
{
    int64_t v = 0;
    const char *p = *text;

    while (*p >= '0' && *p <= '9') {
        if (v > (INT64_MAX - 9) / 10)
            return -1;
        v = 10 * v + (*p++ - '0');
    }
    if (p == *text)
        return -1;
    *text = p;
    return v;
}

static int metadata_number(const struct iz_safetensors *s,
                           const struct iz_json *meta, const char *key,
                           int64_t max, int64_t *out)
{
    const char *text = iz_json_text(iz_json_member(meta, key));

    *out = text ? number(&text) : -1;
    if (*out < 0 || *out > max || *text)
        return fault(
            s, "__metadata__.%s is missing or not a number up to %" PRId64, key,
            max);
    return 0;
}

static int hashes_parse(struct iz_piece *p, const char *text)
{
    int64_t n = iz_piece_blocks(p);

    if (strlen(text) != (size_t)n * HASH_DIGITS ||
        strspn(text, "0123456789abcdef") != (size_t)n * HASH_DIGITS)
        return -EINVAL;
    p->hash = malloc((size_t)(n + 1) * sizeof *p->hash);
    if (!p->hash)
        return -ENOMEM;
    for (int64_t b = 0; b < n; b++) {
        char digits[HASH_DIGITS + 1] = {0};

        memcpy(digits, text + b * HASH_DIGITS, HASH_DIGITS);
        p->hash[b] = strtoull(digits, NULL, 16);
    }
    return 0;
}

/* "first total hashes": where the piece lies, and its checksums. */
static int piece_place(const struct iz_safetensors *s, struct iz_piece *p,
                       const char *text)
{
    p->first = text ? number(&text) : -1;
    if (p->first < 0 || *text++ != ' ')
        return fault(s, "tensor %s has no place in __metadata__", p->name);
    p->total = number(&text);
    if (p->total < 0 || *text++ != ' ')
        return fault(s, "tensor %s has no total in __metadata__", p->name);
    if (p->first > p->total || p->count > p->total - p->first)
        return fault(s,
                     "tensor %s: elements %" PRId64 " + %" PRId64
                     " lie outside its array of %" PRId64,
                     p->name, p->first, p->count, p->total);
    if (hashes_parse(p, text))
        return fault(
            s, "tensor %s has no checksum for each of its %" PRId64 " blocks",
            p->name, iz_piece_blocks(p));
    return 0;
}

static int piece_parse(const struct iz_safetensors *s, struct iz_piece *p,
                       const char *name, const struct iz_json *v,
                       const struct iz_json *meta)
{
    int64_t data = s->bytes - s->data_offset, end;
    const struct iz_json *shape = iz_json_member(v, "shape");
    const struct iz_json *span = iz_json_member(v, "data_offsets");
    const char *dtype = iz_json_text(iz_json_member(v, "dtype"));

    if (strlen(name) >= sizeof p->name)
        return fault(s, "tensor name %.80s... is too long", name);
    memcpy(p->name, name, strlen(name) + 1);
    if (!dtype || strcmp(dtype, "F32") != 0)
        return fault(s, "tensor %s has type %s, not F32", name,
                     dtype ? dtype : "(none)");
    p->count = iz_json_number(iz_json_item(shape, 0), INT64_MAX / 8);
    if (iz_json_count(shape) != 1 || p->count < 0)
        return fault(s, "tensor %s: shape is not [count]", name);
    p->offset = iz_json_number(iz_json_item(span, 0), data);
    end = iz_json_number(iz_json_item(span, 1), data);
    if (iz_json_count(span) != 2 || p->offset < 0 || end < p->offset)
        return fault(s,
                     "tensor %s: data_offsets do not lie in the %" PRId64
                     " bytes of data that the file has (truncated?)",
                     name, data);
    if (end - p->offset != 4 * p->count)
        return fault(s, "tensor %s: %" PRId64 " elements in %" PRId64 " bytes",
                     name, p->count, end - p->offset);
    return piece_place(s, p, iz_json_text(iz_json_member(meta, name)));
}

/* Data bytes of all tensors must be those of the file. */
static int pieces_parse(struct iz_safetensors *s, const struct iz_json *header,
                        const struct iz_json *meta)
{
    int64_t bytes = 0;
    const char *name = NULL;

    s->piece = calloc((size_t)iz_json_count(header), sizeof *s->piece);
    if (!s->piece)
        return -ENOMEM;
    while ((name = iz_json_key(header, name))) {
        const struct iz_json *v = iz_json_member(header, name);
        struct iz_piece *p = &s->piece[s->n_pieces];
        int err;

        if (v == meta)
            continue;
        s->n_pieces++;
        err = piece_parse(s, p, name, v, meta);
        if (err)
            return err;
        bytes += 4 * p->count; /* each at most the file's: no overflow below */
        if (bytes > s->bytes)
            return fault(s, "tensors overlap");
    }
    if (bytes == s->bytes - s->data_offset)
        return 0;
    return fault(s, "tensors have %" PRId64 " bytes, the file's data %" PRId64,
                 bytes, s->bytes - s->data_offset);
}

static int header_parse(struct iz_safetensors *s, const struct iz_json *header)
{
    const struct iz_json *meta = iz_json_member(header, "__metadata__");
    const char *format = iz_json_text(iz_json_member(meta, "izar"));
    int64_t rank = 0, ranks = 0;
    int err;

    if (!format || strcmp(format, FORMAT) != 0)
        return fault(s,
                     "not a checkpoint of this program, version " FORMAT
                     " (__metadata__.izar is %s)",
                     format ? format : "missing");
    err = metadata_number(s, meta, "step", INT64_MAX, &s->step);
    if (!err)
        err = metadata_number(s, meta, "rank", INT_MAX, &rank);
    if (!err)
        err = metadata_number(s, meta, "ranks", INT_MAX, &ranks);
    s->rank = (int)rank;
    s->ranks = (int)ranks;
    return err ? err : pieces_parse(s, header, meta);
}

static int header_read(struct iz_safetensors *s, char **text)
{
    uint64_t length = 0;
    int err = 0;

    if (s->bytes >= PREFIX)
        err = read_whole(s, &length, PREFIX, 0);
    if (err)
        return err;
    if (length < 2 || length > HEADER_MAX ||
        length > (uint64_t)(s->bytes - PREFIX))
        return fault(s,
                     "a header of %" PRIu64 " bytes in a file of %" PRId64
                     ": not safetensors, or truncated",
                     length, s->bytes);
    s->data_offset = PREFIX + (int64_t)length;
    *text = malloc((size_t)s->data_offset);
    if (!*text)
        return -ENOMEM;
    err = read_whole(s, *text, s->data_offset, 0);
    if (!err)
        s->header_hash = iz_hash(*text, s->data_offset);
    return err;
}

static int contents_open(struct iz_safetensors *s)
{
    char *text = NULL;
    struct iz_json *header = NULL;
    int err = header_read(s, &text);

    if (!err) {
        header = iz_json_open(text + PREFIX, s->data_offset - PREFIX);
        err = iz_json_is_object(header) ? header_parse(s, header)
                                        : fault(s, "the header is not JSON");
    }
    iz_json_close(&header);
    free(text);
    return err;
}

static int file_open(struct iz_safetensors *s)
{
    struct stat st;

    s->fd = open(s->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (s->fd < 0 || fstat(s->fd, &st) != 0) {
        int err = errno;

        fault(s, "%s", strerror(err));
        return -err;
    }
    if (!S_ISREG(st.st_mode))
        return fault(s, "not a regular file");
    s->bytes = st.st_size;
    return contents_open(s);
}

int iz_safetensors_open(struct iz_safetensors **out, const char *path)
{
    struct iz_safetensors *s = calloc(1, sizeof *s);
    int err = -ENOMEM;

    *out = NULL;
    if (!s)
        return err;
    s->fd = -1;
    s->path = strdup(path);
    if (s->path)
        err = file_open(s);
    if (err)
        iz_safetensors_close(&s);
    *out = s;
    return err;
}

void iz_safetensors_close(struct iz_safetensors **out)
{
    struct iz_safetensors *s = *out;

    if (!s)
        return;
    for (int i = 0; i < s->n_pieces; i++)
        free(s->piece[i].hash);
    free(s->piece);
    if (s->fd >= 0)
        close(s->fd);
    free(s->path);
    free(s);
    *out = NULL;
}

const struct iz_piece *iz_safetensors_find(const struct iz_safetensors *s,
                                           const char *name)
{
    for (int i = 0; i < s->n_pieces; i++)
        if (strcmp(s->piece[i].name, name) == 0)
            return &s->piece[i];
    return NULL;
}

int iz_safetensors_read(const struct iz_safetensors *s,
                        const struct iz_piece *p, int64_t b, float *out)
{
    int64_t from = b * IZ_BLOCK;
    int64_t n = iz_piece_block_elems(p, b);
    int err;

    assert(b >= 0 && n > 0);
    err = read_whole(s, out, 4 * n, s->data_offset + p->offset + 4 * from);
    if (!err && iz_hash(out, 4 * n) != p->hash[b])
        err = fault(s,
                    "damaged: tensor %s, elements %" PRId64 " to %" PRId64
                    " do not have their checksum",
                    p->name, from, from + n - 1);
    return err;
}
