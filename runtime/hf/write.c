/* SPDX-License-Identifier: Apache-2.0 */
/* Laying out, making and filling the files of an export; see write.h. */
#include "runtime/hf/write.h"

#include <assert.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "codelets/base/die.h"
#include "runtime/base/durable.h"
#include "runtime/comm/agree.h"
#include "runtime/config/published.h"
#include "runtime/hf/folder.h"
#include "runtime/hf/map.h"

#define WHO "export"
#define PATH (IZ_PATH_MAX + 64)
#define ALIGN 64 /* bytes: where the data of a file begin */
#define PREFIX 8 /* bytes of the header's length */
#define TILE 16  /* columns */

struct file {
    char name[64];
    int fd;
    char *header; /* with its length */
    int64_t header_bytes, bytes;
};

/* Where a tensor goes. */
struct place {
    int file;
    int64_t at; /* bytes behind the header */
};

struct iz_hf_writer {
    struct iz_hf_order o;
    struct iz_coll *c;
    struct iz_hf_map map;
    struct place *place; /* per tensor; not of tied ones, which come last */
    int n_tensors;
    struct file *file;
    int n_files;
    int64_t bytes; /* of all tensors */
    char path[PATH], tmp[PATH + 8];
    float *turned; /* IZ_HF_PIECE elements each */
    void *cast;
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

/* The folder that `path` lies in. */
static void folder_above(char above[PATH], const char *path)
{
    const char *slash = strrchr(path, '/');
    int n = slash ? (int)(slash - path) : 0;

    snprintf(above, PATH, "%.*s", n, path);
    if (n == 0)
        snprintf(above, PATH, "%s", slash ? "/" : ".");
}

static bool is_empty(const char *path)
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

int iz_hf_write_check(const char *folder)
{
    char path[PATH], above[PATH];
    struct stat st;
    int err = plain(path, folder);

    if (err)
        return err;
    folder_above(above, path);
    err = iz_durable_make_directories(WHO, above);
    if (err)
        return err;
    if (access(above, W_OK) != 0)
        return iz_durable_refuse(WHO, path, "cannot be made", errno);
    if (lstat(path, &st) != 0 || is_empty(path))
        return 0;
    fprintf(stderr,
            "izar: export: %s exists: move it away, or choose another folder\n",
            path);
    return -EEXIST;
}

/* ---- layout ---- */

static int64_t tensor_bytes(const struct iz_hf_writer *w, int i)
{
    const struct iz_hf_tensor *t = &w->map.tensor[i];

    return t->rows * t->cols * iz_dtype_bytes(w->o.type);
}

/* A tensor goes into the file of the one before if there is room. */
static void place_tensors(struct iz_hf_writer *w)
{
    int64_t at = 0;
    int file = 0;

    for (int i = 0; i < w->map.n && !w->map.tensor[i].tied; i++) {
        int64_t bytes = tensor_bytes(w, i);

        if (at > 0 && at + bytes > w->o.file_bytes) {
            file++;
            at = 0;
        }
        w->place[i] = (struct place){file, at};
        at += bytes;
        w->bytes += bytes;
        w->n_tensors++;
    }
    w->n_files = file + 1;
}

static void name_files(struct iz_hf_writer *w)
{
    for (int f = 0; f < w->n_files; f++) {
        w->file[f].fd = -1;
        if (w->n_files == 1)
            snprintf(w->file[f].name, sizeof w->file[f].name, IZ_HF_SINGLE);
        else
            snprintf(w->file[f].name, sizeof w->file[f].name,
                     "model-%05d-of-%05d.safetensors", f + 1, w->n_files);
    }
}

static void put_tensor(FILE *out, const struct iz_hf_writer *w, int i)
{
    const struct iz_hf_tensor *t = &w->map.tensor[i];
    int64_t shape[2], at = w->place[i].at;
    int dims = iz_hf_shape(t, shape);

    fprintf(out, ",\"%s\":{\"dtype\":\"%s\",\"shape\":[%" PRId64, t->name,
            iz_hf_dtype_text(w->o.type), shape[0]);
    if (dims > 1)
        fprintf(out, ",%" PRId64, shape[1]);
    fprintf(out, "],\"data_offsets\":[%" PRId64 ",%" PRId64 "]}", at,
            at + tensor_bytes(w, i));
}

static int make_header(struct iz_hf_writer *w, int f)
{
    size_t bytes = 0;
    uint64_t length;
    struct file *file = &w->file[f];
    FILE *out = open_memstream(&file->header, &bytes);

    if (!out)
        return -ENOMEM;
    fwrite("\0\0\0\0\0\0\0", 1, PREFIX, out);
    fputs("{\"__metadata__\":{\"format\":\"pt\"}", out);
    for (int i = 0; i < w->n_tensors; i++)
        if (w->place[i].file == f) {
            put_tensor(out, w, i);
            file->bytes = w->place[i].at + tensor_bytes(w, i);
        }
    fputc('}', out);
    while (ftello(out) % ALIGN)
        fputc(' ', out);
    if (ferror(out) | (fclose(out) != 0))
        return -ENOMEM;
    length = bytes - PREFIX;
    memcpy(file->header, &length, PREFIX);
    file->header_bytes = (int64_t)bytes;
    file->bytes += file->header_bytes;
    return 0;
}

static int lay_out(struct iz_hf_writer *w)
{
    size_t piece = (size_t)IZ_HF_PIECE * sizeof(float);
    int err = iz_hf_map_open(&w->map, w->o.section->hf, w->o.model);

    if (err)
        return err;
    if (!iz_hf_type(w->o.section->hf, w->o.model->self)) {
        fprintf(stderr,
                "izar: export: no published type of model has this shape\n");
        return -EINVAL;
    }
    w->place = calloc((size_t)w->map.n + 1, sizeof *w->place);
    w->turned = malloc(piece);
    w->cast = malloc(piece);
    if (!w->place || !w->turned || !w->cast)
        return -ENOMEM;
    place_tensors(w);
    w->file = calloc((size_t)w->n_files, sizeof *w->file);
    if (!w->file) {
        w->n_files = 0;
        return -ENOMEM;
    }
    name_files(w);
    for (int f = 0; f < w->n_files && !err; f++)
        err = make_header(w, f);
    return err;
}

/* ---- making the files ---- */

static int put(int fd, const char *path, const void *from, int64_t bytes,
               int64_t at)
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
    char *text = NULL;
    size_t bytes = 0;
    FILE *out = open_memstream(&text, &bytes);

    if (!out)
        return NULL;
    fprintf(out,
            "{\n  \"metadata\": {\"total_size\": %" PRId64
            "},\n  \"weight_map\": {",
            w->bytes);
    for (int i = 0; i < w->n_tensors; i++)
        fprintf(out, "%s\n    \"%s\": \"%s\"", i ? "," : "",
                w->map.tensor[i].name, w->file[w->place[i].file].name);
    fputs("\n  }\n}\n", out);
    if (ferror(out) | (fclose(out) != 0)) {
        free(text);
        return NULL;
    }
    return text;
}

/* Opens file f; the first rank makes it, in its full length. */
static int open_file(struct iz_hf_writer *w, int f)
{
    struct file *file = &w->file[f];
    bool first = w->c->rank == 0;
    char path[2 * PATH];
    int why;

    path_of(path, w, file->name);
    file->fd =
        open(path, O_WRONLY | O_CLOEXEC | (first ? O_CREAT | O_EXCL : 0), 0666);
    if (file->fd < 0)
        return iz_durable_refuse(WHO, path, "cannot open", errno);
    if (!first)
        return 0;
    why = posix_fallocate(file->fd, 0, file->bytes);
    if (why)
        return iz_durable_refuse(WHO, path, "no room for it", why);
    return put(file->fd, path, file->header, file->header_bytes, 0);
}

static int open_files(struct iz_hf_writer *w)
{
    int err = 0;

    for (int f = 0; f < w->n_files && !err; f++)
        err = open_file(w, f);
    return err;
}

static int make_folder(struct iz_hf_writer *w)
{
    char *text;
    int err = iz_hf_write_check(w->path);

    if (err)
        return err;
    iz_durable_remove_directory(WHO, w->tmp);
    if (mkdir(w->tmp, 0777) != 0)
        return iz_durable_refuse(WHO, w->tmp, "cannot make", errno);
    text =
        iz_hf_config_text(w->o.section, w->o.model->self, w->o.type, w->o.like);
    if (!text)
        return -EINVAL;
    err = put_text(w, IZ_HF_CONFIG, text);
    free(text);
    if (err || w->n_files == 1)
        return err;
    text = index_text(w);
    if (!text)
        return iz_durable_refuse(WHO, w->tmp, "cannot index", ENOMEM);
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
    free(w->place);
    free(w->turned);
    free(w->cast);
    iz_hf_map_close(&w->map);
    free(w);
    *out = NULL;
}

int iz_hf_write_open(struct iz_hf_writer **out, const struct iz_hf_order *o,
                     struct iz_coll *c)
{
    struct iz_hf_writer *w = calloc(1, sizeof *w);
    bool first = c->rank == 0;
    int err;

    if (!w)
        iz_die("export: no memory");
    *out = w;
    w->o = *o;
    w->c = c;
    err = plain(w->path, o->folder);
    snprintf(w->tmp, sizeof w->tmp, "%s.tmp", w->path);
    err = iz_ckpt_agree(c, err ? err : lay_out(w));
    if (!err)
        err = iz_ckpt_agree(c, first ? make_folder(w) : 0);
    if (!err)
        err = iz_ckpt_agree(c, first ? open_files(w) : 0);
    if (!err)
        err = iz_ckpt_agree(c, first ? 0 : open_files(w));
    return err ? iz_hf_write_close(out, err) : 0;
}

/* ---- filling them ---- */

/* Elements in the order of the file, n from element `at` of tensor i. */
static void put_elements(struct iz_hf_writer *w, int i, int64_t at,
                         const float *in, int64_t n)
{
    int64_t size = iz_dtype_bytes(w->o.type);
    struct file *f = &w->file[w->place[i].file];

    iz_cast(w->cast, w->o.type, in, IZ_F32, n);
    w->err = put(f->fd, f->name, w->cast, n * size,
                 f->header_bytes + w->place[i].at + at * size);
}

/* Rows of a rectangle lie end to end in the file: it is as wide as the tensor,
 * or has one row. */
static void put_rows(struct iz_hf_writer *w, int i, const struct iz_hf_rect *r,
                     const float *in)
{
    const struct iz_hf_tensor *t = &w->map.tensor[i];

    if (r->cols == t->width) {
        put_elements(w, i, iz_hf_place(t, r), in, r->rows * r->cols);
        return;
    }
    for (int64_t k = 0; k < r->rows; k++)
        memcpy(w->turned + k * r->cols, in + k * t->width,
               (size_t)r->cols * sizeof *in);
    put_elements(w, i, iz_hf_place(t, r), w->turned, r->rows * r->cols);
}

/* One run of the file per column of the rectangle.  TILE columns are turned
 * together: they share cache lines. */
static void put_columns(struct iz_hf_writer *w, int i, struct iz_hf_rect r,
                        const float *in)
{
    const struct iz_hf_tensor *t = &w->map.tensor[i];

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
    assert(n <= IZ_HF_PIECE);
    for (int i = 0; i < w->n_tensors; i++) {
        const struct iz_hf_tensor *t = &w->map.tensor[i];
        struct iz_hf_rect rect[3];
        int rects = t->unit == unit ? iz_hf_rects(t, from, from + n, rect) : 0;

        for (int k = 0; k < rects && !w->err; k++) {
            const float *p = in + (iz_hf_flat(t, &rect[k]) - from);

            if (t->transposed)
                put_columns(w, i, rect[k], p);
            else
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

static int commit(const struct iz_hf_writer *w)
{
    int err = iz_durable_sync_directory(WHO, w->tmp);

    return err ? err : iz_durable_rename(WHO, w->tmp, w->path);
}

int iz_hf_write_close(struct iz_hf_writer **out, int err)
{
    struct iz_hf_writer *w = *out;
    bool first = w->c->rank == 0;

    if (!err)
        err = sync_files(w);
    err = iz_ckpt_agree(w->c, err);
    if (!err)
        err = iz_ckpt_agree(w->c, first ? commit(w) : 0);
    if (err && first)
        iz_durable_remove_directory(WHO, w->tmp);
    discard(out);
    return err;
}
