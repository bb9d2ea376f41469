/* SPDX-License-Identifier: Apache-2.0 */
/* Reading parameters through the map; see tensors.h. */
#define _DEFAULT_SOURCE /* madvise: the one of POSIX does nothing here */

#include "runtime/hf/tensors.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "codelets/base/int64.h"
#include "runtime/base/json.h"
#include "runtime/base/text.h"
#include "runtime/formats/published.h"

enum { RUN = 512 }; /* elements converted at a time */
/* Of a transposition: runs of 64 bytes and more on both sides. */
enum { TILE_ROWS = 64, TILE_COLS = 16 };

struct iz_hf_reader {
    struct iz_hf_folder folder;
    struct iz_hf_map map;
    struct iz_coded *entry; /* per tensor of the map; without codes: none */
    int64_t block[2];       /* of FP8 */
    bool bits4;             /* some are in 4 bits */
    const struct iz_model *model;
    int64_t rows; /* of tensors whose first rows are read; 0: there are none */
    int64_t tokens;    /* rows of tensors that grow; 0: the model's */
    float **mean;      /* per tensor of the map: that of its rows, once made */
    const char *key;   /* of the config: whose folder it is */
    _Atomic int last;  /* tensor that a group was asked of */
    _Atomic bool told; /* that a value is not finite, by one of all threads */
    FILE *err;
};

/* ---- comparing with the model ---- */

static void tell(const struct iz_hf_reader *r, const char *name,
                 const char *what)
{
    iz_text_refuse(r->err, "%s: %s: %s", r->key, name, what);
}

static void shape_text(char *out, size_t size, const int64_t *shape, int dims)
{
    size_t n = (size_t)snprintf(out, size, "[");
    for (int i = 0; i < dims && n < size; i++)
        n += (size_t)snprintf(out + n, size - n, "%s%" PRId64, i ? ", " : "",
                              shape[i]);
    if (n < size)
        snprintf(out + n, size - n, "]");
}

/* 1 if the entry cannot be the tensor, after saying so. */
static int check_entry(const struct iz_hf_reader *r,
                       const struct iz_hf_tensor *t,
                       const struct iz_st_tensor *e)
{
    char have[256], need[64];
    int64_t want[IZ_HF_DIMS];
    int dims = iz_hf_shape(t, want);
    bool same = e->dims == dims;
    enum iz_dtype type;
    bool known = iz_st_dtype_read(e->dtype, &type);
    if (t->first && r->rows)
        want[0] = r->rows;
    if (t->grows && r->tokens)
        want[0] = r->tokens;
    for (int i = 0; i < dims && same; i++)
        same = e->shape[i] == want[i];
    if (known && same)
        return 0;
    shape_text(have, sizeof(have), e->shape, e->dims);
    shape_text(need, sizeof(need), want, dims);
    if (known)
        iz_text_refuse(r->err, "%s: %s: has shape %s, the model needs %s",
                       r->key, e->name, have, need);
    else
        iz_text_refuse(
            r->err,
            "%s: %s: has type %s; only F32, BF16 and F16 can be imported",
            r->key, e->name, e->dtype);
    return 1;
}

/* Whether the entry belongs to a tensor in few bits; then it has its place. */
static bool take_part(struct iz_hf_reader *r, const struct iz_st_tensor *e)
{
    struct iz_coded_name name;
    const struct iz_hf_tensor *t =
        iz_coded_name(e->name, &name) ? iz_hf_map_find(&r->map, name.of) : NULL;
    struct iz_coded *c = t ? &r->entry[t - r->map.tensor] : NULL;
    if (!t || (c->kind && c->kind != name.kind) || c->tensor[name.tensor])
        return false;
    c->kind = name.kind;
    c->tensor[name.tensor] = e;
    return true;
}

/* Whether the parameter of a tensor is in 4 bits in this run. */
static bool is_nf4(const struct iz_hf_reader *r, const struct iz_hf_tensor *t)
{
    return r->model &&
           r->model->unit[t->unit].param[t->param].quant == IZ_QUANT_NF4;
}

/* Weights of a tensor before the first one of a matrix of the model; below
 * zero: it has none of that. */
static int64_t matrix_at(const struct iz_hf_reader *r,
                         const struct iz_hf_tensor *t,
                         const struct iz_quant_matrix *m)
{
    const struct iz_unit *u = &r->model->unit[t->unit];
    int64_t at = iz_unit_elems(u, IZ_PART_TRAINED) +
                 iz_unit_elems(u, IZ_PART_FROZEN) + m->first - t->offset -
                 t->row * t->width;
    return m->param == t->param && at < t->rows * t->cols ? at : -1;
}

/* Whether its groups are those of one matrix of the model, or of several. */
static bool has_groups(const struct iz_hf_reader *r,
                       const struct iz_hf_tensor *t)
{
    struct iz_quant_matrix m = {0};
    int64_t n = 0, at;
    while (iz_unit_next_quant(&r->model->unit[t->unit], &m))
        if ((at = matrix_at(r, t, &m)) >= 0) {
            if (at % IZ_QUANT_GROUP)
                return false;
            n += m.n;
        }
    return n == t->rows * t->cols && t->cols == t->width && !t->transposed &&
           !t->head;
}

/* 1 if a tensor in few bits cannot be taken, after saying so.  A matrix lies
 * there with a row for each output, and in this run it may be in the same 4
 * bits, not in others. */
static int check_coded(struct iz_hf_reader *r, int i)
{
    struct iz_hf_tensor *t = &r->map.tensor[i];
    struct iz_coded *c = &r->entry[i];
    const struct iz_param *p =
        r->model ? &r->model->unit[t->unit].param[t->param] : NULL;
    if (p && p->outputs[0])
        t->transposed = !p->out_rows;
    c->rows = t->transposed ? t->cols : t->rows;
    c->cols = t->transposed ? t->rows : t->cols;
    const char *why = t->vector || t->first ? "is not read from codes"
                                            : iz_coded_check(c, r->block);
    if (!why && is_nf4(r, t) && c->kind == IZ_CODED_BITS4)
        why = has_groups(r, t)
                  ? iz_coded_nf4(c)
                  : "is in 4 bits, but not by groups of this run, and would be "
                    "quantised again: set model.base_dtype: null";
    if (why)
        tell(r, t->name, why);
    return why != NULL;
}

/* 1, told, for a matrix that would be in 4 bits here, of a folder that has such
 * and has left it out of them. */
static int check_left_out(const struct iz_hf_reader *r, int i)
{
    const struct iz_hf_tensor *t = &r->map.tensor[i];
    if (!is_nf4(r, t))
        return 0;
    tell(r, t->name,
         "is not in 4 bits there, as others are, and would be in this run, "
         "which has one model.base_dtype for all");
    return 1;
}

static bool has_entry(const struct iz_hf_reader *r, int i)
{
    return r->entry[i].tensor[IZ_CODED_CODES] != NULL;
}

/* Gives the entry its place in the map; the number of faults. */
static int take_entry(struct iz_hf_reader *r, const struct iz_st_tensor *e)
{
    const struct iz_hf_tensor *t = iz_hf_map_find(&r->map, e->name);
    ptrdiff_t i = t ? t - r->map.tensor : 0;
    if (!t && take_part(r, e))
        return 0;
    if (!t && iz_hf_map_ignores(&r->map, e->name))
        return 0;
    if (!t || has_entry(r, (int)i)) {
        tell(r, e->name,
             t ? "is there twice, with and without prefix"
               : "is no tensor of this model");
        return 1;
    }
    r->entry[i].tensor[IZ_CODED_CODES] = e;
    return 0;
}

/* The blocks of FP8: those that are usual where the config has none. */
static void read_block(struct iz_hf_reader *r)
{
    char path[IZ_PATH_MAX + 32];
    snprintf(path, sizeof(path), "%s/" IZ_PUBLISHED_CONFIG, r->folder.path);
    json_t *root = iz_json_read(path, NULL);
    const json_t *block =
        iz_json_at(root, "quantization_config.weight_block_size");
    for (size_t i = 0; i < 2; i++) {
        int64_t n = iz_json_number(json_array_get(block, i), 1 << 20);
        r->block[i] = n > 0 ? n : 128;
    }
    json_decref(root);
}

static int compare(struct iz_hf_reader *r)
{
    int faults = 0;
    r->entry = iz_take(r->map.n, sizeof(*r->entry), "tensors");
    r->mean = iz_take(r->map.n, sizeof(*r->mean), "means of rows");
    read_block(r);
    for (int i = 0; i < r->folder.n_files; i++)
        for (int k = 0; k < r->folder.file[i].n; k++)
            faults += take_entry(r, &r->folder.file[i].tensor[k]);
    for (int i = 0; i < r->map.n; i++)
        r->bits4 |= r->entry[i].kind == IZ_CODED_BITS4;
    for (int i = 0; i < r->map.n; i++)
        if (r->entry[i].kind) {
            faults += check_coded(r, i);
        } else if (has_entry(r, i)) {
            faults += check_entry(r, &r->map.tensor[i],
                                  r->entry[i].tensor[IZ_CODED_CODES]);
            faults += r->bits4 ? check_left_out(r, i) : 0;
        } else if (!r->map.tensor[i].tied || r->map.tensor[i].needed) {
            tell(r, r->map.tensor[i].name, "is missing");
            faults++;
        }
    if (faults && r->err)
        fprintf(r->err, "izar: %s: %s does not fit the model: %d fault%s\n",
                r->key, r->folder.path, faults, faults > 1 ? "s" : "");
    return faults ? -EINVAL : 0;
}

/* What the folder says of the key that may be set to less, or to more. */
static int64_t published_rows(const struct iz_hf *hf, const char *path,
                              bool more)
{
    char *text = iz_published_read(hf, path, NULL, NULL);
    json_t *root = text ? json_loads(text, 0, NULL) : NULL;
    int64_t rows = json_integer_value(
        json_object_get(root, iz_published_resized(hf, more)));
    json_decref(root);
    free(text);
    return rows;
}

int iz_hf_read_open_map(struct iz_hf_reader **out, struct iz_hf_map *map,
                        const struct iz_hf_source *from, FILE *err)
{
    struct iz_hf_reader *r = *out = iz_take(1, sizeof(*r), "a reader");
    r->err = err;
    r->key = from->key;
    r->rows = from->rows;
    r->tokens = from->tokens;
    r->model = from->model;
    r->map = *map;
    *map = (struct iz_hf_map){0};
    if (!r->map.by_name)
        iz_hf_map_sort(&r->map);
    int why = iz_hf_folder_open(&r->folder, from->path, from->file, err);
    if (!why)
        why = compare(r);
    if (why)
        iz_hf_read_close(out);
    return why;
}

int iz_hf_read_open(struct iz_hf_reader **out, const struct iz_hf *hf,
                    const struct iz_model *model, const char *key,
                    const char *path, FILE *err)
{
    struct iz_hf_source from = {.key = key,
                                .path = path,
                                .rows = published_rows(hf, path, false),
                                .tokens = published_rows(hf, path, true),
                                .model = model};
    struct iz_hf_map map;
    int why = iz_hf_map_open(&map, hf, model);
    *out = NULL;
    return why ? why : iz_hf_read_open_map(out, &map, &from, err);
}

void iz_hf_read_close(struct iz_hf_reader **r)
{
    if (!*r)
        return;
    iz_hf_folder_close(&(*r)->folder);
    for (int i = 0; (*r)->mean && i < (*r)->map.n; i++)
        free((*r)->mean[i]);
    free((*r)->mean);
    iz_hf_map_close(&(*r)->map);
    free((*r)->entry);
    free(*r);
    *r = NULL;
}

/* ---- reading ---- */

/* Theirs has columns where ours has rows: tile by tile. */
static void load_transposed(const struct iz_hf_tensor *t,
                            const struct iz_coded *e,
                            const struct iz_hf_rect *r, float *out)
{
    float tile[TILE_COLS][TILE_ROWS];
    for (int64_t row = 0; row < r->rows; row += TILE_ROWS)
        for (int64_t col = 0; col < r->cols; col += TILE_COLS) {
            int64_t rows = min64(r->rows - row, TILE_ROWS);
            int64_t cols = min64(r->cols - col, TILE_COLS);
            float *to = out + row * t->width + col;
            for (int64_t c = 0; c < cols; c++) {
                struct iz_hf_rect at = {r->row + row, r->col + col + c, rows,
                                        1};
                iz_coded_load(e, iz_hf_place(t, &at), tile[c], rows);
            }
            for (int64_t i = 0; i < rows; i++)
                for (int64_t c = 0; c < cols; c++)
                    to[i * t->width + c] = tile[c][i];
        }
}

/* Theirs has columns of several experts, or parts of heads, in turns. */
static void load_in_turns(const struct iz_hf_tensor *t,
                          const struct iz_coded *e, const struct iz_hf_rect *r,
                          float *out)
{
    for (int64_t i = 0; i < r->rows; i++)
        for (int64_t c = 0; c < r->cols; c++) {
            struct iz_hf_rect at = {r->row + i, r->col + c, 1, 1};
            iz_coded_load(e, iz_hf_place(t, &at), out + i * t->width + c, 1);
        }
}

/* The pages are clean and can be read again, but count as this process's. */
static void hf_read_forget(const struct iz_st_tensor *e)
{
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    uintptr_t from = ((uintptr_t)e->data + page - 1) / page * page;
    uintptr_t to = ((uintptr_t)e->data + (uintptr_t)e->bytes) / page * page;
    if (to > from)
        madvise((void *)from, to - from, MADV_DONTNEED);
}

static int same_values(const struct iz_hf_reader *r,
                       const struct iz_hf_tensor *t,
                       const struct iz_hf_rect *rect, const float *a,
                       const float *b)
{
    for (int64_t i = 0; i < rect->rows; i++)
        if (memcmp(a + i * t->width, b + i * t->width,
                   (size_t)rect->cols * sizeof(*a)) != 0) {
            tell(r, t->name,
                 "is not equal to the tensor that the model uses in its "
                 "place");
            return -EINVAL;
        }
    return 0;
}

static void hf_read_take(const struct iz_hf_tensor *t, const struct iz_coded *e,
                         const struct iz_hf_rect *rect, float *out)
{
    struct iz_hf_rect left = *rect, part;
    while (t->transposed && iz_hf_next(t, &left, &part))
        load_transposed(t, e, &part, out + (part.row - rect->row) * t->width);
    bool turns = t->experts || (t->head && t->vector);
    if (turns)
        load_in_turns(t, e, rect, out);
    for (int64_t i = 0; i < rect->rows && !t->transposed && !turns; i++) {
        struct iz_hf_rect at = {rect->row + i, rect->col, 1, rect->cols};
        iz_coded_load(e, iz_hf_place(t, &at), out + i * t->width, rect->cols);
    }
}

/* The mean of the rows of entry i, which those that it lacks have. */
static const float *mean_row(const struct iz_hf_reader *r, int i)
{
    const struct iz_coded *e = &r->entry[i];
    const int64_t *shape = e->tensor[IZ_CODED_CODES]->shape;
    int64_t rows = shape[0], cols = shape[1];
    double *sum = iz_take(cols, sizeof(*sum), "a mean row");
    float *row = iz_take(cols, sizeof(*row), "a mean row");
    for (int64_t k = 0; k < rows; k++) {
        iz_coded_load(e, k * cols, row, cols);
        for (int64_t j = 0; j < cols; j++)
            sum[j] += row[j];
    }
    for (int64_t j = 0; j < cols; j++)
        row[j] = (float)(sum[j] / (double)rows);
    free(sum);
    return r->mean[i] = row;
}

/* What the rectangle has behind the rows of entry i; cut off there. */
static void take_more(const struct iz_hf_reader *r, int i,
                      struct iz_hf_rect *rect, float *out)
{
    const struct iz_hf_tensor *t = &r->map.tensor[i];
    const struct iz_st_tensor *e = r->entry[i].tensor[IZ_CODED_CODES];
    int64_t own = max64(0, min64(rect->rows, e->shape[0] - rect->row));
    if (!t->grows || r->entry[i].kind || own == rect->rows)
        return;
    const float *mean = r->mean[i] ? r->mean[i] : mean_row(r, i);
    for (int64_t k = own; k < rect->rows; k++)
        memcpy(out + k * t->width, mean + rect->col,
               (size_t)rect->cols * sizeof(*out));
    rect->rows = own;
}

/* A file that is damaged, or of a training that failed. */
static int check_finite(struct iz_hf_reader *r, const struct iz_hf_tensor *t,
                        const struct iz_hf_rect *rect, const float *v)
{
    for (int64_t i = 0; i < rect->rows; i++)
        for (int64_t k = 0; k < rect->cols; k++)
            if (!isfinite(v[i * t->width + k])) {
                if (!atomic_exchange(&r->told, true))
                    tell(r, t->name, "has a value that is not finite");
                return -EINVAL;
            }
    return 0;
}

/* What tensor i has of the range. */
static int read_tensor(struct iz_hf_reader *r, int i, int64_t from, int64_t n,
                       float *out, float *second)
{
    const struct iz_hf_tensor *t = &r->map.tensor[i];
    struct iz_hf_rect rect[3];
    int rects = iz_hf_rects(t, from, from + n, rect), err = 0;
    int64_t end = t->offset + (t->row + t->rows) * t->width;
    for (int k = 0; k < rects && !err; k++) {
        int64_t at = iz_hf_flat(t, &rect[k]) - from;
        float *to = (t->tied ? second : out) + at;
        struct iz_hf_rect own = rect[k];
        take_more(r, i, &own, to);
        hf_read_take(t, &r->entry[i], &own, to);
        err = check_finite(r, t, &rect[k], to);
        if (t->tied && !err)
            err = same_values(r, t, &rect[k], out + at, to);
    }
    /* One that lies the other way round is needed whole again and again. */
    if (rects && (!t->transposed || from + n >= end))
        hf_read_forget(r->entry[i].tensor[IZ_CODED_CODES]);
    return err;
}

static bool has_second_names(const struct iz_hf_reader *r, int unit)
{
    for (int i = 0; i < r->map.n; i++)
        if (r->map.tensor[i].tied && r->map.tensor[i].unit == unit &&
            has_entry(r, i))
            return true;
    return false;
}

int iz_hf_read(struct iz_hf_reader *r, int unit, int64_t from, int64_t n,
               float *out)
{
    int err = 0;
    float *second = has_second_names(r, unit)
                        ? iz_take(n, sizeof(*second), "a buffer of parameters")
                        : NULL;
    /* Tied tensors come last in the map: what they are compared with is there.
     */
    for (int i = 0; i < r->map.n && !err; i++)
        if (r->map.tensor[i].unit == unit && has_entry(r, i))
            err = read_tensor(r, i, from, n, out, second);
    free(second);
    return err;
}

/* Tells which tensor has another value at an element than was written. */
static int other_value(const struct iz_hf_reader *r, int unit, int64_t at,
                       float found, float want)
{
    struct iz_hf_rect rect[3];
    for (int i = 0; i < r->map.n; i++) {
        const struct iz_hf_tensor *t = &r->map.tensor[i];
        if (t->unit == unit && iz_hf_rects(t, at, at + 1, rect)) {
            iz_text_refuse(r->err, "%s: %s: %s has %.9g where %.9g was written",
                           r->key, r->folder.path, t->name, found, want);
            break;
        }
    }
    return -EBADMSG;
}

int iz_hf_read_equal(struct iz_hf_reader *r, int unit, int64_t from, int64_t n,
                     const float *want, enum iz_dtype type, float *out)
{
    float cast[RUN], rounded[RUN];
    memcpy(out, want, (size_t)n * sizeof(*out));
    int err = iz_hf_read(r, unit, from, n, out);
    for (int64_t i = 0, k; i < n && !err; i += k) {
        k = min64(n - i, RUN);
        iz_cast_params(cast, type, want + i, k);
        iz_cast(rounded, IZ_F32, cast, type, k);
        for (int64_t j = 0; j < k && !err; j++)
            if (out[i + j] != rounded[j] && out[i + j] != want[i + j])
                err =
                    other_value(r, unit, from + i + j, out[i + j], rounded[j]);
    }
    return err;
}

bool iz_hf_read_nf4(struct iz_hf_reader *r, int unit,
                    const struct iz_quant_matrix *m, int64_t g,
                    struct iz_nf4_group *out)
{
    int last = r->last; /* mostly this one */
    for (int k = 0; r->bits4 && k < r->map.n; k++) {
        int i = (last + k) % r->map.n;
        const struct iz_hf_tensor *t = &r->map.tensor[i];
        int64_t at = t->unit == unit ? matrix_at(r, t, m) : -1;
        if (r->entry[i].kind != IZ_CODED_BITS4 || at < 0)
            continue;
        r->last = i;
        iz_coded_nf4_group(&r->entry[i], at / IZ_QUANT_GROUP + g, out);
        return true;
    }
    return false;
}
