/* SPDX-License-Identifier: Apache-2.0 */
/* Mapping and checking the files of a folder; see folder.h. */
#include "runtime/hf/folder.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "codelets/base/build.h"

#define PREFIX 8                           /* bytes of the header's length */
#define HEADER_MAX ((int64_t)100 << 20)    /* bytes; the format's own limit */

static int fault(FILE *err, const char *path, const char *fmt, ...)
    IZ_PRINTF(3, 4);

static int fault(FILE *err, const char *path, const char *fmt, ...)
{
    va_list args;

    if (!err)
        return -EINVAL;
    fprintf(err, "izar: %s: ", path);
    va_start(args, fmt);
    vfprintf(err, fmt, args);
    va_end(args);
    fputc('\n', err);
    return -EINVAL;
}

static int refuse(FILE *err, const char *path, int why)
{
    fault(err, path, "%s", strerror(why));
    return -why;
}

/* ---- types ---- */

static const struct {
    const char *text;
    enum iz_dtype type;
} dtypes[] = {{"F32", IZ_F32}, {"BF16", IZ_BF16}, {"F16", IZ_F16}};

enum { DTYPES = sizeof dtypes / sizeof dtypes[0] };

bool iz_hf_dtype_read(const char *text, enum iz_dtype *t)
{
    for (int i = 0; i < DTYPES; i++)
        if (strcmp(text, dtypes[i].text) == 0) {
            *t = dtypes[i].type;
            return true;
        }
    return false;
}

const char *iz_hf_dtype_text(enum iz_dtype t)
{
    int i = 0;

    while (i < DTYPES - 1 && dtypes[i].type != t)
        i++;
    return dtypes[i].text;
}

/* ---- one file ---- */

/* -1 if the product does not fit. */
static int64_t elements(const struct iz_hf_entry *e)
{
    int64_t n = 1;

    for (int i = 0; i < e->dims; i++) {
        if (e->shape[i] && n > INT64_MAX / 8 / e->shape[i])
            return -1;
        n *= e->shape[i];
    }
    return n;
}

static int shape_parse(struct iz_hf_entry *e, const struct iz_json *shape)
{
    int64_t n = iz_json_count(shape);

    if (!shape || iz_json_is_object(shape) || n > IZ_HF_DIMS)
        return -EINVAL;
    e->dims = (int)n;
    for (int i = 0; i < e->dims; i++) {
        e->shape[i] = iz_json_number(iz_json_item(shape, i), INT64_MAX / 8);
        if (e->shape[i] < 0)
            return -EINVAL;
    }
    return 0;
}

/* Types of which this program knows nothing may have any size. */
static bool size_fits(const struct iz_hf_entry *e)
{
    enum iz_dtype t;

    return !iz_hf_dtype_read(e->dtype, &t) ||
           (elements(e) >= 0 && elements(e) * iz_dtype_bytes(t) == e->bytes);
}

static int entry_parse(struct iz_hf_entry *e, const struct iz_hf_file *f,
                       int64_t data, const struct iz_json *v, FILE *err)
{
    const struct iz_json *span = iz_json_member(v, "data_offsets");
    const char *dtype = iz_json_text(iz_json_member(v, "dtype"));
    int64_t room = f->bytes - data, from, to;

    if (!dtype || strlen(dtype) >= sizeof e->dtype)
        return fault(err, f->path, "tensor %s has no dtype", e->name);
    memcpy(e->dtype, dtype, strlen(dtype) + 1);
    if (shape_parse(e, iz_json_member(v, "shape")))
        return fault(err, f->path,
                     "tensor %s: shape is not a list of up to %d sizes",
                     e->name, IZ_HF_DIMS);
    from = iz_json_number(iz_json_item(span, 0), room);
    to = iz_json_number(iz_json_item(span, 1), room);
    if (iz_json_count(span) != 2 || from < 0 || to < from)
        return fault(err, f->path,
                     "tensor %s: data_offsets do not lie in the %" PRId64
                     " bytes of data that the file has (truncated?)",
                     e->name, room);
    e->data = f->map + data + from;
    e->bytes = to - from;
    if (!size_fits(e))
        return fault(err, f->path,
                     "tensor %s: %" PRId64 " bytes are not those of its shape",
                     e->name, e->bytes);
    return 0;
}

static int entries_parse(struct iz_hf_file *f, int64_t data,
                         const struct iz_json *header, FILE *err)
{
    const char *name = NULL;
    int fault = 0;

    f->entry = calloc((size_t)iz_json_count(header) + 1, sizeof *f->entry);
    if (!f->entry)
        return -ENOMEM;
    while (!fault && (name = iz_json_key(header, name))) {
        struct iz_hf_entry *e = &f->entry[f->n_entries];

        if (strcmp(name, "__metadata__") == 0)
            continue;
        e->name = strdup(name);
        if (!e->name)
            return -ENOMEM;
        f->n_entries++;
        fault = entry_parse(e, f, data, iz_json_member(header, name), err);
    }
    return fault;
}

int iz_hf_file_parse(struct iz_hf_file *f, FILE *err)
{
    uint64_t length = 0;
    struct iz_json *header;
    int why;

    if (f->bytes >= PREFIX)
        memcpy(&length, f->map, PREFIX);
    if (length < 2 || length > (uint64_t)HEADER_MAX ||
        length > (uint64_t)(f->bytes - PREFIX))
        return fault(err, f->path,
                     "a header of %" PRIu64 " bytes in a file of %" PRId64
                     ": not safetensors, or truncated",
                     length, f->bytes);
    header = iz_json_open((const char *)f->map + PREFIX, (int64_t)length);
    why = iz_json_is_object(header)
              ? entries_parse(f, PREFIX + (int64_t)length, header, err)
              : fault(err, f->path, "the header is not a JSON object");
    iz_json_close(&header);
    return why;
}

void iz_hf_file_clear(struct iz_hf_file *f)
{
    for (int i = 0; i < f->n_entries; i++)
        free(f->entry[i].name);
    free(f->entry);
    f->entry = NULL;
    f->n_entries = 0;
}

static int file_map(struct iz_hf_file *f, FILE *err)
{
    int fd = open(f->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK), why = 0;
    struct stat st;
    void *p = NULL;

    if (fd < 0 || fstat(fd, &st) != 0)
        why = errno;
    else if (!S_ISREG(st.st_mode) || st.st_size < PREFIX)
        why = EINVAL;
    if (!why) {
        p = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_SHARED, fd, 0);
        why = p == MAP_FAILED ? errno : 0;
    }
    if (fd >= 0)
        close(fd);
    if (why == EINVAL)
        return fault(err, f->path, "not a safetensors file");
    if (why)
        return refuse(err, f->path, why);
    f->map = p;
    f->bytes = st.st_size;
    return iz_hf_file_parse(f, err);
}

/* ---- the folder ---- */

/* Maps one more file; room is for it. */
static int add_file(struct iz_hf_folder *f, const char *name)
{
    struct iz_hf_file *file = &f->file[f->n_files];
    size_t n = strlen(f->path) + strlen(name) + 2;

    *file = (struct iz_hf_file){.path = malloc(n)};
    if (!file->path)
        return -ENOMEM;
    snprintf(file->path, n, "%s/%s", f->path, name);
    f->n_files++;
    return file_map(file, f->err);
}

/* The file of that name in the folder; -1: not there yet. */
static int find_file(const struct iz_hf_folder *f, const char *name)
{
    size_t skip = strlen(f->path) + 1;

    for (int i = 0; i < f->n_files; i++)
        if (strcmp(f->file[i].path + skip, name) == 0)
            return i;
    return -1;
}

static bool has_entry(const struct iz_hf_file *f, const char *name)
{
    for (int i = 0; i < f->n_entries; i++)
        if (strcmp(f->entry[i].name, name) == 0)
            return true;
    return false;
}

/* Opens the files that the index names; each tensor must be where it says. */
static int map_files(struct iz_hf_folder *f, const char *path,
                     const struct iz_json *map)
{
    const char *name = NULL;
    int why = 0;

    f->file = calloc((size_t)iz_json_count(map) + 1, sizeof *f->file);
    if (!f->file)
        return -ENOMEM;
    while (!why && (name = iz_json_key(map, name))) {
        const char *file = iz_json_text(iz_json_member(map, name));
        int i = file ? find_file(f, file) : -1;

        if (!file || !*file || strchr(file, '/'))
            return fault(f->err, path,
                         "tensor %s lies in no file of the folder", name);
        if (i < 0) {
            i = f->n_files;
            why = add_file(f, file);
        }
        if (!why && !has_entry(&f->file[i], name))
            why = fault(f->err, path, "tensor %s is not in %s", name, file);
    }
    return why;
}

static int open_index(struct iz_hf_folder *f, const char *path)
{
    struct iz_json *root = iz_json_read(path, f->err);
    const struct iz_json *map = iz_json_member(root, "weight_map");
    int why = -EINVAL;

    if (root && !iz_json_is_object(map))
        fault(f->err, path, "has no weight_map");
    else if (root)
        why = map_files(f, path, map);
    iz_json_close(&root);
    return why;
}

static int open_single(struct iz_hf_folder *f)
{
    f->file = calloc(1, sizeof *f->file);
    return f->file ? add_file(f, IZ_HF_SINGLE) : -ENOMEM;
}

/* No name may be in two files. */
static int check_unique(const struct iz_hf_folder *f)
{
    for (int i = 0; i < f->n_files; i++)
        for (int k = 0; k < f->file[i].n_entries; k++)
            for (int j = 0; j < i; j++)
                if (has_entry(&f->file[j], f->file[i].entry[k].name))
                    return fault(f->err, f->path, "tensor %s is in two files",
                                 f->file[i].entry[k].name);
    return 0;
}

static int folder_open(struct iz_hf_folder *f)
{
    char index[4096], single[4096];
    int n = snprintf(index, sizeof index, "%s/" IZ_HF_INDEX, f->path);

    snprintf(single, sizeof single, "%s/" IZ_HF_SINGLE, f->path);
    if (n >= (int)sizeof index)
        return refuse(f->err, f->path, ENAMETOOLONG);
    if (access(single, F_OK) == 0)
        return open_single(f);
    if (access(index, F_OK) == 0)
        return open_index(f, index);
    fault(f->err, f->path, "has neither " IZ_HF_SINGLE " nor " IZ_HF_INDEX);
    return -ENOENT;
}

int iz_hf_folder_open(struct iz_hf_folder *f, const char *path, FILE *err)
{
    int why;

    *f = (struct iz_hf_folder){.path = path, .err = err};
    why = folder_open(f);
    if (!why)
        why = check_unique(f);
    if (why)
        iz_hf_folder_close(f);
    return why;
}

void iz_hf_folder_close(struct iz_hf_folder *f)
{
    for (int i = 0; i < f->n_files; i++) {
        iz_hf_file_clear(&f->file[i]);
        if (f->file[i].map)
            munmap((void *)(uintptr_t)f->file[i].map, (size_t)f->file[i].bytes);
        free(f->file[i].path);
    }
    free(f->file);
    *f = (struct iz_hf_folder){0};
}
