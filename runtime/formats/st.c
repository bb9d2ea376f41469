/* SPDX-License-Identifier: Apache-2.0 */
/* Reading and writing headers; see st_format.h. */
#include "runtime/formats/st.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "codelets/base/take.h"
#include "runtime/base/durable.h"
#include "runtime/base/hash.h"
#include "runtime/base/text.h"

#define PREFIX 8                        /* bytes of the header's length */
#define HEADER_MAX ((int64_t)100 << 20) /* bytes; the format's own limit */
#define ALIGN 64                        /* bytes: where the data begin */

/* ---- types ---- */

static const char *const dtypes[] = {
    [IZ_F32] = "F32", [IZ_BF16] = "BF16", [IZ_F16] = "F16"};

enum { DTYPES = sizeof(dtypes) / sizeof(dtypes[0]) };

bool iz_st_dtype_read(const char *text, enum iz_dtype *t)
{
    for (int i = 0; i < DTYPES; i++)
        if (!strcmp(text, dtypes[i])) {
            *t = (enum iz_dtype)i;
            return true;
        }
    return false;
}

const char *iz_st_dtype_text(enum iz_dtype t)
{
    return dtypes[t];
}

/* ---- writing ---- */

static void put_tensor(FILE *f, const struct iz_st_tensor *t)
{
    fprintf(f, ",\"%s\":{\"dtype\":\"%s\",\"shape\":[", t->name, t->dtype);
    for (int i = 0; i < t->dims; i++)
        fprintf(f, "%s%" PRId64, i ? "," : "", t->shape[i]);
    fprintf(f, "],\"data_offsets\":[%" PRId64 ",%" PRId64 "]}", t->offset,
            t->offset + t->bytes);
}

char *iz_st_header(const char *metadata, const struct iz_st_tensor *t, int n,
                   int64_t *bytes)
{
    struct iz_text header;
    FILE *f = iz_text_open(&header);
    fwrite("\0\0\0\0\0\0\0", 1, PREFIX, f);
    fprintf(f, "{\"__metadata__\":%s", metadata);
    for (int i = 0; i < n; i++)
        put_tensor(f, &t[i]);
    fputc('}', f);
    while (ftello(f) % ALIGN) /* the format allows spaces behind the header */
        fputc(' ', f);
    char *text = iz_text_close(&header);
    uint64_t length = header.bytes - PREFIX;
    memcpy(text, &length, PREFIX);
    *bytes = (int64_t)header.bytes;
    return text;
}

/* ---- reading ---- */

int iz_st_fault(const struct iz_st *s, const char *fmt, ...)
{
    struct iz_text t;
    va_list args;
    va_start(args, fmt);
    vfprintf(iz_text_open(&t), fmt, args);
    va_end(args);
    char *text = iz_text_close(&t);
    iz_text_refuse(s->err, "%s%s: %s", s->who, s->path, text);
    free(text);
    return -EINVAL;
}

static int fault_of_system(const struct iz_st *s, int err)
{
    iz_st_fault(s, "%s", strerror(err));
    return -err;
}

/* -1 if the product does not fit. */
static int64_t elements(const struct iz_st_tensor *t)
{
    int64_t n = 1;
    for (int i = 0; i < t->dims; i++) {
        if (t->shape[i] && n > INT64_MAX / 8 / t->shape[i])
            return -1;
        n *= t->shape[i];
    }
    return n;
}

static bool parse_shape(struct iz_st_tensor *t, const json_t *shape)
{
    int64_t n = iz_json_count(shape);
    if (!shape || json_is_object(shape) || n > IZ_ST_DIMS)
        return false;
    t->dims = (int)n;
    for (int i = 0; i < t->dims; i++) {
        t->shape[i] =
            iz_json_number(json_array_get(shape, (size_t)i), INT64_MAX / 8);
        if (t->shape[i] < 0)
            return false;
    }
    return true;
}

/* A type that this program does not know may have any size. */
static bool size_fits(const struct iz_st_tensor *t)
{
    enum iz_dtype type;
    return !iz_st_dtype_read(t->dtype, &type) ||
           (elements(t) >= 0 && elements(t) * iz_dtype_bytes(type) == t->bytes);
}

static int parse_tensor(const struct iz_st *s, struct iz_st_tensor *t,
                        const json_t *v)
{
    const json_t *span = json_object_get(v, "data_offsets");
    int64_t room = s->bytes - s->data;
    t->dtype = json_string_value(json_object_get(v, "dtype"));
    if (!t->dtype)
        return iz_st_fault(s, "tensor %s has no dtype", t->name);
    if (!parse_shape(t, json_object_get(v, "shape")))
        return iz_st_fault(s,
                           "tensor %s: shape is not a list of up to %d sizes",
                           t->name, IZ_ST_DIMS);
    int64_t from = iz_json_number(json_array_get(span, 0), room);
    int64_t to = iz_json_number(json_array_get(span, 1), room);
    if (iz_json_count(span) != 2 || from < 0 || to < from)
        return iz_st_fault(s,
                           "tensor %s: data_offsets do not lie in the %" PRId64
                           " bytes of data that the file has (truncated?)",
                           t->name, room);
    t->offset = from;
    t->bytes = to - from;
    if (!size_fits(t))
        return iz_st_fault(
            s, "tensor %s: %" PRId64 " bytes are not those of its shape",
            t->name, t->bytes);
    return 0;
}

static int by_offset(const void *a, const void *b)
{
    const struct iz_st_tensor *const *x = a, *const *y = b;
    int64_t d = (*x)->offset - (*y)->offset;
    if (!d)
        d = (*x)->bytes - (*y)->bytes; /* empty ones first */
    return (d > 0) - (d < 0);
}

/* Each byte of the data belongs to one tensor. */
static int check_tiling(const struct iz_st *s)
{
    const struct iz_st_tensor **sorted =
        iz_take(s->n, sizeof(*sorted), "tensors");
    int64_t end = 0;
    for (int i = 0; i < s->n; i++)
        sorted[i] = &s->tensor[i];
    qsort(sorted, (size_t)s->n, sizeof(*sorted), by_offset);
    int i = 0;
    for (; i < s->n && sorted[i]->offset == end; i++)
        end += sorted[i]->bytes;
    int err = 0;
    if (i < s->n)
        err = iz_st_fault(s,
                          "tensor %s begins at byte %" PRId64
                          " of the data, the one before ends at %" PRId64,
                          sorted[i]->name, sorted[i]->offset, end);
    else if (end != s->bytes - s->data)
        err = iz_st_fault(
            s, "tensors have %" PRId64 " bytes, the file's data %" PRId64, end,
            s->bytes - s->data);
    free(sorted);
    return err;
}

static int by_name(const void *a, const void *b)
{
    const struct iz_st_tensor *const *x = a, *const *y = b;
    return strcmp((*x)->name, (*y)->name);
}

static int parse_tensors(struct iz_st *s)
{
    const char *name = NULL;
    int err = 0;
    s->metadata = json_object_get(s->header, "__metadata__");
    int64_t n = iz_json_count(s->header);
    s->tensor = iz_take(n, sizeof(*s->tensor), "tensors");
    s->by_name = iz_take(n, sizeof(*s->by_name), "names of tensors");
    while (!err && (name = iz_json_key(s->header, name))) {
        const json_t *v = json_object_get(s->header, name);
        if (strcmp(name, "__metadata__") == 0)
            continue;
        struct iz_st_tensor *t = &s->tensor[s->n++];
        t->name = name;
        s->by_name[s->n - 1] = t;
        err = parse_tensor(s, t, v);
    }
    qsort(s->by_name, (size_t)s->n, sizeof(*s->by_name), by_name);
    return err ? err : check_tiling(s);
}

static int read_at(const struct iz_st *s, void *out, int64_t bytes, int64_t at)
{
    int err = iz_durable_get(s->fd, out, bytes, at);
    if (err == -ENODATA)
        return iz_st_fault(s, "ends before byte %" PRId64, at + bytes);
    return err ? fault_of_system(s, -err) : 0;
}

static int read_header(struct iz_st *s)
{
    uint64_t length = 0;
    int err = s->bytes < PREFIX ? 0 : read_at(s, &length, PREFIX, 0);
    if (err)
        return err;
    char begin[64];
    int64_t some = s->bytes < 64 ? s->bytes : 64;
    if (!read_at(s, begin, some, 0) && iz_text_is_pointer(begin, some))
        return iz_st_fault(s, IZ_TEXT_POINTER);
    if (length < 2 || length > (uint64_t)HEADER_MAX ||
        length > (uint64_t)(s->bytes - PREFIX))
        return iz_st_fault(s,
                           "a header of %" PRIu64 " bytes in a file of %" PRId64
                           ": not safetensors, or truncated",
                           length, s->bytes);
    s->data = PREFIX + (int64_t)length;
    char *text = iz_take(s->data, 1, "the header of %s", s->path);
    err = read_at(s, text, s->data, 0);
    if (!err) {
        s->header_hash = iz_hash(text, s->data);
        s->header = iz_json_open(text + PREFIX, (int64_t)length);
        if (!json_is_object(s->header))
            err = iz_st_fault(s, "the header is not a JSON object");
    }
    free(text);
    return err;
}

int iz_st_open(struct iz_st *s, const char *who, const char *path, FILE *err)
{
    struct stat st;
    *s = (struct iz_st){.who = who, .err = err, .fd = -1};
    s->path = iz_take_text(path, (int64_t)strlen(path));
    s->fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (s->fd < 0 || fstat(s->fd, &st))
        return fault_of_system(s, errno);
    if (!S_ISREG(st.st_mode))
        return iz_st_fault(s, "not a regular file");
    s->bytes = st.st_size;
    int why = read_header(s);
    return why ? why : parse_tensors(s);
}

void iz_st_close(struct iz_st *s)
{
    if (s->map)
        munmap(s->map, (size_t)s->bytes);
    if (s->path && s->fd >= 0)
        close(s->fd);
    json_decref(s->header);
    free(s->tensor);
    free(s->by_name);
    free(s->path);
    *s = (struct iz_st){.fd = -1};
}

const struct iz_st_tensor *iz_st_find(const struct iz_st *s, const char *name)
{
    struct iz_st_tensor t = {.name = name}, *key = &t;
    const struct iz_st_tensor **found =
        bsearch(&key, s->by_name, (size_t)s->n, sizeof(*s->by_name), by_name);
    return found ? *found : NULL;
}

int iz_st_read(const struct iz_st *s, void *out, int64_t bytes, int64_t at)
{
    return read_at(s, out, bytes, s->data + at);
}

int iz_st_map(struct iz_st *s)
{
    void *p = mmap(NULL, (size_t)s->bytes, PROT_READ, MAP_SHARED, s->fd, 0);
    if (p == MAP_FAILED)
        return fault_of_system(s, errno);
    s->map = p;
    close(s->fd); /* there may be hundreds of files */
    s->fd = -1;
    for (int i = 0; i < s->n; i++)
        s->tensor[i].data = s->map + s->data + s->tensor[i].offset;
    return 0;
}
