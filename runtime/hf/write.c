/* SPDX-License-Identifier: Apache-2.0 */
/* Laying out, making and filling the files of an export; see tensors.h. */
#include "runtime/hf/tensors.h"

#include <assert.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <libgen.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "runtime/base/durable.h"
#include "runtime/base/text.h"
#include "runtime/formats/imported.h"

#define WHO "export"
#define PATH (IZ_PATH_MAX + 64)
#define TILE 16 /* columns */

struct file {
    char name[64];
    int fd;
    int first, n;  /* of its tensors */
    int64_t bytes; /* of them */
    char *header;  /* with its length */
    int64_t header_bytes;
};

struct iz_hf_writer {
    struct iz_hf_order o;
    struct iz_coll *c;
    struct iz_st_tensor *tensor; /* those of the map but for the tied ones */
    int n_tensors;
    struct file *file;
    int n_files;
    char path[PATH], tmp[PATH + 8];
    float *turned; /* IZ_HF_BUFFER elements each */
    void *cast;
    bool made; /* the folder tmp, by this rank */
    int err;
};

/* ---- folders ---- */

/* The path without slashes at its end. */
static int plain(char path[PATH], const char *folder)
{
    int n = snprintf(path, PATH, "%s", folder);
    if (n < 1 || n >= PATH - 64)
        return iz_durable_refuse(WHO, folder, "is no folder",
                                 n < 1 ? ENOENT : ENAMETOOLONG);
    while (n > 1 && path[n - 1] == '/')
        path[--n] = '\0';
    return 0;
}

bool iz_hf_is_empty(const char *path)
{
    DIR *d = opendir(path);
    struct dirent *e;
    bool empty = d != NULL;
    while (empty && (e = readdir(d)))
        empty = strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0;
    if (d)
        closedir(d);
    return empty;
}

/* An export grows in FOLDER.tmp and has this file in it until it is whole: a
 * folder of that name without it is somebody's. */
#define MARK "izar-unfinished"

static const char *const names[] = {
    MARK, "adapter_config.json", IZ_HF_INDEX, "*.safetensors", IZ_IMPORTED_ALL,
    NULL};

static int check_tmp(const char *folder)
{
    char tmp[PATH + 8], mark[PATH + 32];
    struct stat st;
    snprintf(tmp, sizeof(tmp), "%s.tmp", folder);
    snprintf(mark, sizeof(mark), "%s/" MARK, tmp);
    if (lstat(tmp, &st) != 0 || iz_hf_is_empty(tmp) || lstat(mark, &st) == 0)
        return iz_durable_check_directory(WHO, tmp, names);
    fprintf(stderr,
            "izar: export: %s exists and is no unfinished export: move it "
            "away, or choose another folder\n",
            tmp);
    return -EEXIST;
}

int iz_hf_write_check(const char *folder)
{
    char path[PATH], copy[PATH];
    struct stat st;
    int err = plain(path, folder);
    if (err)
        return err;
    memcpy(copy, path, sizeof(copy));
    const char *above = dirname(copy);
    err = iz_durable_make_directories(WHO, above);
    if (err)
        return err;
    if (access(above, W_OK) != 0)
        return iz_durable_refuse(WHO, path, "cannot be made", errno);
    if (lstat(path, &st) != 0 || iz_hf_is_empty(path))
        return check_tmp(path);
    fprintf(stderr,
            "izar: export: %s exists: move it away, or choose another folder\n",
            path);
    return -EEXIST;
}

/* ---- layout ---- */

/* Tied tensors come last in the map. */
static void describe_tensors(struct iz_hf_writer *w)
{
    const struct iz_hf_map *map = w->o.map;
    int64_t size = iz_dtype_bytes(w->o.type);
    for (int i = 0; i < map->n && !map->tensor[i].tied; i++) {
        const struct iz_hf_tensor *t = &map->tensor[i];
        struct iz_st_tensor *out = &w->tensor[w->n_tensors++];
        out->name = t->name;
        out->dtype = iz_st_dtype_text(w->o.type);
        out->dims = iz_hf_shape(t, out->shape);
        out->bytes = t->rows * t->cols * size;
    }
}

/* A tensor goes into the file of the one before if there is room. */
static void place_tensors(struct iz_hf_writer *w)
{
    struct file *f = w->file;
    int64_t at = 0;
    for (int i = 0; i < w->n_tensors; i++) {
        if (at > 0 && at + w->tensor[i].bytes > w->o.file_bytes) {
            f++;
            f->first = i;
            at = 0;
        }
        w->tensor[i].offset = at;
        f->bytes = at += w->tensor[i].bytes;
        f->n++;
    }
    w->n_files = (int)(f - w->file) + 1;
}

static void make_file(struct iz_hf_writer *w, int i)
{
    struct file *f = &w->file[i];
    f->fd = -1;
    if (w->n_files == 1)
        snprintf(f->name, sizeof(f->name), "%s", w->o.file);
    else
        snprintf(f->name, sizeof(f->name), "model-%05d-of-%05d.safetensors",
                 i + 1, w->n_files);
    f->header = iz_st_header("{\"format\":\"pt\"}", w->tensor + f->first, f->n,
                             &f->header_bytes);
}

static void lay_out(struct iz_hf_writer *w)
{
    int n = w->o.map->n;
    w->tensor = iz_take(n, sizeof(*w->tensor), "tensors");
    w->file = iz_take(n, sizeof(*w->file), "files");
    w->turned = iz_hf_take_buffer();
    w->cast = iz_hf_take_buffer();
    describe_tensors(w);
    place_tensors(w);
    for (int f = 0; f < w->n_files; f++)
        make_file(w, f);
}

/* ---- making the files ---- */

static int hf_write_put(int fd, const char *path, const void *from,
                        int64_t bytes, int64_t at)
{
    int err = iz_durable_put(fd, from, bytes, at);
    return err ? iz_durable_refuse(WHO, path, "cannot write", -err) : 0;
}

static void path_of(char path[2 * PATH], const struct iz_hf_writer *w,
                    const char *name)
{
    snprintf(path, (size_t)2 * PATH, "%s/%s", w->tmp, name);
}

static int put_text(const struct iz_hf_writer *w, const char *name,
                    const char *text)
{
    char path[2 * PATH];
    path_of(path, w, name);
    return iz_durable_create(WHO, path, text);
}

/* Which file holds which tensor; malloc'ed. */
static char *index_text(const struct iz_hf_writer *w)
{
    struct iz_text text;
    int64_t bytes = 0;
    FILE *out = iz_text_open(&text);
    for (int f = 0; f < w->n_files; f++)
        bytes += w->file[f].bytes;
    fprintf(out,
            "{\n  \"metadata\": {\"total_size\": %" PRId64
            "},\n  \"weight_map\": {",
            bytes);
    for (int f = 0; f < w->n_files; f++)
        for (int i = 0; i < w->file[f].n; i++)
            fprintf(out, "%s\n    \"%s\": \"%s\"", f + i ? "," : "",
                    w->tensor[w->file[f].first + i].name, w->file[f].name);
    fputs("\n  }\n}\n", out);
    return iz_text_close(&text);
}

/* The first rank makes it, in its full length. */
static int hf_write_open_file(const struct iz_hf_writer *w, struct file *file)
{
    bool first = w->c->rank == 0;
    char path[2 * PATH];
    path_of(path, w, file->name);
    file->fd =
        open(path, O_WRONLY | O_CLOEXEC | (first ? O_CREAT | O_EXCL : 0), 0666);
    if (file->fd < 0)
        return iz_durable_refuse(WHO, path, "cannot open", errno);
    if (!first)
        return 0;
    int why = EINTR;
    while (why == EINTR) /* a signal that a run goes on behind */
        why = posix_fallocate(file->fd, 0, file->header_bytes + file->bytes);
    if (why)
        return iz_durable_refuse(WHO, path, "no room for it", why);
    return hf_write_put(file->fd, path, file->header, file->header_bytes, 0);
}

static int open_files(struct iz_hf_writer *w)
{
    int err = 0;
    for (int f = 0; f < w->n_files && !err; f++)
        err = hf_write_open_file(w, &w->file[f]);
    return err;
}

static int make_folder(struct iz_hf_writer *w)
{
    int err = iz_hf_write_check(w->path);
    if (err)
        return err;
    err = iz_durable_remove_directory(WHO, w->tmp, names);
    if (err)
        return err;
    if (mkdir(w->tmp, 0777) != 0)
        return iz_durable_refuse(WHO, w->tmp, "cannot make", errno);
    w->made = true;
    err = put_text(w, MARK, "");
    if (!err)
        err = put_text(w, w->o.config_file, w->o.config);
    if (!err)
        err = iz_imported_copy(WHO, w->tmp, w->o.like);
    if (err || w->n_files == 1)
        return err;
    char *text = index_text(w);
    err = put_text(w, IZ_HF_INDEX, text);
    free(text);
    return err;
}

static void discard(struct iz_hf_writer **out)
{
    struct iz_hf_writer *w = *out;
    for (int f = 0; f < w->n_files; f++) {
        if (w->file[f].fd >= 0)
            close(w->file[f].fd);
        free(w->file[f].header);
    }
    free(w->file);
    free(w->tensor);
    free(w->turned);
    free(w->cast);
    free(w);
    *out = NULL;
}

int iz_hf_write_open(struct iz_hf_writer **out, const struct iz_hf_order *o,
                     struct iz_coll *c)
{
    struct iz_hf_writer *w = *out = iz_take(1, sizeof(*w), "an export");
    bool first = c->rank == 0;
    w->o = *o;
    w->c = c;
    int err = plain(w->path, o->folder);
    snprintf(w->tmp, sizeof(w->tmp), "%s.tmp", w->path);
    lay_out(w);
    err = iz_agree(c, err ? err : first ? make_folder(w) : 0);
    if (!err)
        err = iz_agree(c, first ? open_files(w) : 0);
    if (!err)
        err = iz_agree(c, first ? 0 : open_files(w));
    return err ? iz_hf_write_close(out, err) : 0;
}

/* ---- filling them ---- */

/* Elements in the order of the file, n from element `at` of tensor i. */
static void put_elements(struct iz_hf_writer *w, int i, int64_t at,
                         const float *in, int64_t n)
{
    int64_t size = iz_dtype_bytes(w->o.type);
    const struct file *f = w->file;
    while (i >= f->first + f->n)
        f++;
    iz_cast_params(w->cast, w->o.type, in, n);
    w->err = hf_write_put(f->fd, f->name, w->cast, n * size,
                          f->header_bytes + w->tensor[i].offset + at * size);
}

/* Rows of a rectangle lie end to end in the file: it is as wide as the tensor,
 * or has one row. */
static void put_rows(struct iz_hf_writer *w, int i, const struct iz_hf_rect *r,
                     const float *in)
{
    const struct iz_hf_tensor *t = &w->o.map->tensor[i];
    bool partial = r->cols < t->width;
    for (int64_t k = 0; k < r->rows && partial; k++)
        memcpy(w->turned + k * r->cols, in + k * t->width,
               (size_t)r->cols * sizeof(*in));
    put_elements(w, i, iz_hf_place(t, r), partial ? w->turned : in,
                 r->rows * r->cols);
}

/* A row after the other, or an element of a vector: each has a place. */
static void put_heads(struct iz_hf_writer *w, int i, const struct iz_hf_rect *r,
                      const float *in)
{
    const struct iz_hf_tensor *t = &w->o.map->tensor[i];
    int64_t n = t->vector ? r->cols : r->rows, cols = t->vector ? 1 : r->cols;
    for (int64_t k = 0; k < n && !w->err; k++) {
        struct iz_hf_rect at = {r->row + (t->vector ? 0 : k),
                                r->col + (t->vector ? k : 0), 1, cols};
        put_elements(w, i, iz_hf_place(t, &at), in + k * (t->vector ? 1 : cols),
                     cols);
    }
}

/* One run of the file per column of the rectangle.  TILE columns are turned
 * together: they share cache lines. */
static void put_columns(struct iz_hf_writer *w, int i, struct iz_hf_rect r,
                        const float *in)
{
    const struct iz_hf_tensor *t = &w->o.map->tensor[i];
    for (int64_t first = 0; first < r.cols; first += TILE) {
        int64_t cols = r.cols - first < TILE ? r.cols - first : TILE;
        for (int64_t k = 0; k < r.rows; k++)
            for (int64_t c = 0; c < cols; c++)
                w->turned[c * r.rows + k] = in[k * t->width + first + c];
        for (int64_t c = 0; c < cols && !w->err; c++) {
            struct iz_hf_rect at = {r.row, r.col + first + c, r.rows, 1};
            put_elements(w, i, iz_hf_place(t, &at), w->turned + c * r.rows,
                         r.rows);
        }
    }
}

void iz_hf_write(struct iz_hf_writer *w, int unit, int64_t from,
                 const float *in, int64_t n)
{
    assert(n <= IZ_HF_BUFFER);
    for (int i = 0; i < w->n_tensors; i++) {
        const struct iz_hf_tensor *t = &w->o.map->tensor[i];
        struct iz_hf_rect rect[3];
        int rects = t->unit == unit ? iz_hf_rects(t, from, from + n, rect) : 0;
        for (int k = 0; k < rects && !w->err; k++) {
            const float *p = in + (iz_hf_flat(t, &rect[k]) - from);
            struct iz_hf_rect left = rect[k], part;
            while (t->transposed && iz_hf_next(t, &left, &part))
                put_columns(w, i, part,
                            p + (part.row - rect[k].row) * t->width);
            if (t->head)
                put_heads(w, i, &rect[k], p);
            else if (!t->transposed)
                put_rows(w, i, &rect[k], p);
        }
    }
}

/* ---- the end ---- */

static int sync_files(struct iz_hf_writer *w)
{
    int err = w->err;
    for (int f = 0; f < w->n_files; f++) {
        err = iz_durable_close(WHO, w->file[f].name, w->file[f].fd, err);
        w->file[f].fd = -1;
    }
    return err;
}

static int remove_mark(const struct iz_hf_writer *w)
{
    char path[2 * PATH];
    path_of(path, w, MARK);
    return unlink(path) ? iz_durable_refuse(WHO, path, "cannot remove", errno)
                        : 0;
}

int iz_hf_write_close(struct iz_hf_writer **out, int err)
{
    struct iz_hf_writer *w = *out;
    bool first = w->c->rank == 0, looked = false;
    if (!err)
        err = sync_files(w);
    err = iz_agree(w->c, err);
    if (!err && w->o.check) {
        looked = true;
        err = iz_agree(w->c, w->o.check(w->o.arg, w->tmp));
        if (err && first)
            fprintf(stderr, "izar: export: %s keeps this name\n", w->tmp);
    }
    if (!err && first)
        err = remove_mark(w);
    if (!err && first)
        err = iz_durable_sync_directory(WHO, w->tmp);
    if (!err && first)
        err = iz_durable_rename(WHO, w->tmp, w->path);
    err = iz_agree(w->c, err);
    if (err && w->made && !looked)
        iz_durable_remove_directory(WHO, w->tmp, names);
    discard(out);
    return err;
}
