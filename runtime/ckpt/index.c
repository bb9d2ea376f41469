/* SPDX-License-Identifier: Apache-2.0 */
/* Writing, reading and comparing index.json.  Its last member is a hash of the
 * text before it, so that a damaged index is told from a foreign one. */
#include "runtime/ckpt/index.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "codelets/base/build.h"
#include "runtime/base/durable.h"
#include "runtime/base/hash.h"
#include "runtime/base/json.h"

#define FORMAT 1
#define SEAL ",\n\"seal\": \"%016" PRIx64 "\"\n}\n"
#define SEAL_BYTES 32

struct iz_ckpt_index {
    char *path;
    bool quiet;
    struct iz_json *root;
    int64_t step;
    int ranks;
    struct iz_ckpt_file *file;
};

/* ---- writing ---- */

static void put_files(FILE *f, int ranks, const struct iz_ckpt_file *file)
{
    fputs(",\n\"files\": [", f);
    for (int i = 0; i < ranks; i++)
        fprintf(f,
                "%s\n  {\"name\": \"" IZ_CKPT_FILE "\", \"bytes\": %" PRId64
                ", \"header\": \"%016" PRIx64 "\"}",
                i ? "," : "", i, ranks, file[i].bytes, file[i].header_hash);
    fputs("]", f);
}

static void put_arrays(FILE *f, const struct iz_ckpt *k)
{
    fputs(",\n\"arrays\": [", f);
    for (int i = 0; i < k->n_parts; i++) {
        fprintf(f, "%s\n  {\"name\": ", i ? "," : "");
        iz_json_print(f, k->part[i].name);
        fprintf(f, ", \"total\": %" PRId64 "}", k->part[i].total);
    }
    fputs("]", f);
}

static void put_parameters(FILE *f, const struct iz_ckpt *k)
{
    fputs(",\n\"parameters\": [", f);
    for (int i = 0; i < k->n_names; i++) {
        const struct iz_ckpt_name *p = &k->names[i];

        fprintf(f, "%s\n  {\"name\": ", i ? "," : "");
        iz_json_print(f, p->name);
        fputs(", \"array\": ", f);
        iz_json_print(f, p->array);
        fprintf(f,
                ", \"offset\": %" PRId64 ", \"shape\": [%" PRId64 ", %" PRId64
                "]}",
                p->offset, p->rows, p->cols);
    }
    fputs("]", f);
}

/* The hex text is what counts; the decimal one is for people. */
static void put_scalars(FILE *f, const struct iz_ckpt *k)
{
    fputs(",\n\"scalars\": {", f);
    for (int i = 0; i < k->n_scalars; i++) {
        double v = k->scalar[i].value;

        fprintf(f, "%s\n  ", i ? "," : "");
        iz_json_print(f, k->scalar[i].name);
        fprintf(f, ": {\"hex\": \"%a\", \"decimal\": \"%.17g\"}", v, v);
    }
    fputs("}", f);
}

static const char *model_of(const struct iz_ckpt *k)
{
    return k->model_text ? k->model_text : "null";
}

/* malloc'ed; NULL: no memory. */
static char *index_text(const struct iz_ckpt *k, int64_t step, int ranks,
                        const struct iz_ckpt_file *file)
{
    char *text = NULL;
    size_t bytes = 0;
    FILE *f = open_memstream(&text, &bytes);

    if (!f)
        return NULL;
    fprintf(f, "{\n\"izar\": %d,\n\"step\": %" PRId64 ",\n\"ranks\": %d",
            FORMAT, step, ranks);
    fprintf(f, ",\n\"model\": %s", model_of(k));
    fprintf(f, ",\n\"optimizer\": \"%s\"", k->optimizer);
    put_scalars(f, k);
    put_files(f, ranks, file);
    put_arrays(f, k);
    put_parameters(f, k);
    if (fflush(f) == 0)
        fprintf(f, SEAL, iz_hash(text, (int64_t)bytes));
    if (ferror(f) | (fclose(f) != 0)) {
        free(text);
        return NULL;
    }
    return text;
}

static struct iz_json *model_json(const struct iz_ckpt *k)
{
    return iz_json_open(model_of(k), (int64_t)strlen(model_of(k)));
}

int iz_ckpt_index_write(const char *path, const struct iz_ckpt *k, int64_t step,
                        int ranks, const struct iz_ckpt_file *file)
{
    struct iz_json *model = model_json(k);
    char *text;
    int err;

    if (!model) {
        fprintf(stderr, "izar: checkpoint: the model section is not JSON\n");
        return -EINVAL;
    }
    iz_json_close(&model);
    text = index_text(k, step, ranks, file);
    err = text ? iz_durable_create("checkpoint", path, text) : -ENOMEM;
    free(text);
    return err;
}

/* ---- reading ---- */

static int ckpt_index_fault(const struct iz_ckpt_index *x, const char *fmt, ...)
    IZ_PRINTF(2, 3);

static int ckpt_index_fault(const struct iz_ckpt_index *x, const char *fmt, ...)
{
    va_list args;

    if (x->quiet)
        return -EINVAL;
    fprintf(stderr, "izar: checkpoint: %s: ", x->path);
    va_start(args, fmt);
    vfprintf(stderr, fmt, args);
    va_end(args);
    fputc('\n', stderr);
    return -EINVAL;
}

static bool sealed(const char *text, int64_t bytes)
{
    char seal[SEAL_BYTES + 1];
    int64_t body;
    int n = snprintf(seal, sizeof(seal), SEAL, (uint64_t)0);

    assert(n < (int)sizeof(seal));
    if (bytes < n)
        return false;
    body = bytes - n;
    snprintf(seal, sizeof(seal), SEAL, iz_hash(text, body));
    return memcmp(text + body, seal, (size_t)n) == 0;
}

/* -1 if there is no such number. */
static int64_t ckpt_index_number(const struct iz_json *object, const char *key,
                                 int64_t max)
{
    return iz_json_number(iz_json_member(object, key), max);
}

static const char *text_of(const struct iz_json *object, const char *key)
{
    const char *s = iz_json_text(iz_json_member(object, key));

    return s ? s : "";
}

static int files_parse(struct iz_ckpt_index *x)
{
    const struct iz_json *files = iz_json_member(x->root, "files");

    if (x->ranks < 1 || iz_json_count(files) != x->ranks)
        return -EINVAL;
    x->file = calloc((size_t)x->ranks, sizeof(*x->file));
    if (!x->file)
        return -ENOMEM;
    for (int i = 0; i < x->ranks; i++) {
        const struct iz_json *v = iz_json_item(files, i);

        x->file[i].bytes = ckpt_index_number(v, "bytes", INT64_MAX);
        x->file[i].header_hash = strtoull(text_of(v, "header"), NULL, 16);
    }
    return 0;
}

static int index_parse(struct iz_ckpt_index *x, const char *text, int64_t bytes)
{
    int64_t format;

    if (!sealed(text, bytes))
        return ckpt_index_fault(
            x, "damaged or truncated: the text does not have its hash");
    x->root = iz_json_open(text, bytes);
    format = ckpt_index_number(x->root, "izar", INT_MAX);
    if (format != FORMAT)
        return ckpt_index_fault(x, "version %" PRId64 ", this program reads %d",
                                format, FORMAT);
    x->step = ckpt_index_number(x->root, "step", INT64_MAX);
    x->ranks = (int)ckpt_index_number(x->root, "ranks", INT_MAX);
    if (x->step < 0 || files_parse(x))
        return ckpt_index_fault(x, "has no step, ranks or files");
    return 0;
}

static int index_read(struct iz_ckpt_index *x)
{
    int64_t bytes = 0;
    char *text = iz_durable_read(x->path, &bytes);
    int err = text ? 0 : -errno;

    if (!text)
        ckpt_index_fault(x, "%s", strerror(-err));
    else
        err = index_parse(x, text, bytes);
    free(text);
    return err;
}

int iz_ckpt_index_open(struct iz_ckpt_index **out, const char *path, bool quiet)
{
    struct iz_ckpt_index *x = calloc(1, sizeof(*x));
    int err = -ENOMEM;

    *out = NULL;
    if (!x)
        return err;
    x->quiet = quiet;
    x->path = strdup(path);
    if (x->path)
        err = index_read(x);
    if (err)
        iz_ckpt_index_close(&x);
    *out = x;
    return err;
}

void iz_ckpt_index_close(struct iz_ckpt_index **x)
{
    if (!*x)
        return;
    iz_json_close(&(*x)->root);
    free((*x)->file);
    free((*x)->path);
    free(*x);
    *x = NULL;
}

int64_t iz_ckpt_index_step(const struct iz_ckpt_index *x)
{
    return x->step;
}

int iz_ckpt_index_ranks(const struct iz_ckpt_index *x)
{
    return x->ranks;
}

struct iz_ckpt_file iz_ckpt_index_file(const struct iz_ckpt_index *x, int rank)
{
    return x->file[rank];
}

/* ---- comparing ---- */

/* The value as text on a few lines of a message; "nothing" where there is none.
 */
static void ckpt_index_show(const char *who, const struct iz_json *v)
{
    char *text = v ? iz_json_dump(v) : NULL;

    fprintf(stderr, "%s %.200s", who, text ? text : "nothing");
    free(text);
}

static int model_differs(const struct iz_ckpt_index *x, const char *key,
                         const struct iz_json *saved, const struct iz_json *run)
{
    fprintf(stderr, "izar: checkpoint: %s: model%s%s differs: ", x->path,
            *key ? "." : "", key);
    ckpt_index_show("the checkpoint has", saved);
    ckpt_index_show(", the run", run);
    fputc('\n', stderr);
    return -EINVAL;
}

/* The first member of the model section that is not the same in both. */
static int model_compare(const struct iz_ckpt_index *x,
                         const struct iz_json *saved, const struct iz_json *run)
{
    const char *key = NULL;

    if (iz_json_equal(saved, run))
        return 0;
    while ((key = iz_json_key(saved, key))) {
        const struct iz_json *a = iz_json_member(saved, key);
        const struct iz_json *b = iz_json_member(run, key);

        if (!iz_json_equal(a, b))
            return model_differs(x, key, a, b);
    }
    while ((key = iz_json_key(run, key)))
        if (!iz_json_member(saved, key))
            return model_differs(x, key, NULL, iz_json_member(run, key));
    return model_differs(x, "", saved, run);
}

static int model_check(const struct iz_ckpt_index *x, const struct iz_ckpt *k)
{
    struct iz_json *run = model_json(k);
    int err = model_compare(x, iz_json_member(x->root, "model"), run);

    iz_json_close(&run);
    return err;
}

/* Checkpoints of before it was written have none; their arrays tell. */
static int optimizer_check(const struct iz_ckpt_index *x,
                           const struct iz_ckpt *k)
{
    const char *saved = text_of(x->root, "optimizer");

    if (!*saved || strcmp(saved, k->optimizer) == 0)
        return 0;
    return ckpt_index_fault(
        x,
        "has the states of optimizer %s, in this run optimizer.type "
        "has those of %s",
        saved, k->optimizer);
}

static const struct iz_ckpt_part *part_find(const struct iz_ckpt *k,
                                            const char *name)
{
    for (int i = 0; i < k->n_parts; i++)
        if (strcmp(k->part[i].name, name) == 0)
            return &k->part[i];
    return NULL;
}

static int same_count(const struct iz_ckpt_index *x, const char *what,
                      int64_t saved, int64_t run)
{
    return saved == run
               ? 0
               : ckpt_index_fault(x, "%" PRId64 " %s, this run has %" PRId64,
                                  saved, what, run);
}

static int arrays_check(const struct iz_ckpt_index *x, const struct iz_ckpt *k)
{
    const struct iz_json *arrays = iz_json_member(x->root, "arrays");

    for (int64_t i = 0; i < iz_json_count(arrays); i++) {
        const struct iz_json *v = iz_json_item(arrays, i);
        const char *name = text_of(v, "name");
        const struct iz_ckpt_part *p = part_find(k, name);
        int64_t total = ckpt_index_number(v, "total", INT64_MAX);

        if (!p)
            return ckpt_index_fault(x, "array %s is not part of this run",
                                    name);
        if (p->total != total)
            return ckpt_index_fault(
                x, "array %s has %" PRId64 " elements, in this run %" PRId64,
                name, total, p->total);
    }
    /* All saved ones are in the run: if the numbers agree, so do the sets. */
    return same_count(x, "arrays", iz_json_count(arrays), k->n_parts);
}

static bool name_equal(const struct iz_json *v, const struct iz_ckpt_name *p)
{
    const struct iz_json *shape = iz_json_member(v, "shape");

    return strcmp(text_of(v, "name"), p->name) == 0 &&
           strcmp(text_of(v, "array"), p->array) == 0 &&
           ckpt_index_number(v, "offset", INT64_MAX) == p->offset &&
           iz_json_number(iz_json_item(shape, 0), INT64_MAX) == p->rows &&
           iz_json_number(iz_json_item(shape, 1), INT64_MAX) == p->cols;
}

/* The same tensors, trained or frozen alike: a difference is one of the config
 * and not of the model. */
static int places_check(const struct iz_ckpt_index *x, const struct iz_ckpt *k)
{
    const struct iz_json *names = iz_json_member(x->root, "parameters");

    for (int i = 0; i < k->n_names; i++) {
        const struct iz_json *v = iz_json_item(names, i);
        const char *array = text_of(v, "array"), *name = k->names[i].name;

        if (strcmp(text_of(v, "name"), name) == 0 &&
            strcmp(array, k->names[i].array) != 0)
            return ckpt_index_fault(
                x,
                "%s is part of %s, in this run of %s: other tensors "
                "are frozen",
                name, array, k->names[i].array);
    }
    return 0;
}

static int names_check(const struct iz_ckpt_index *x, const struct iz_ckpt *k)
{
    const struct iz_json *names = iz_json_member(x->root, "parameters");

    for (int i = 0; i < k->n_names; i++)
        if (!name_equal(iz_json_item(names, i), &k->names[i]))
            return ckpt_index_fault(x,
                                    "parameter %d (%s, [%" PRId64 ", %" PRId64
                                    "] in %s) "
                                    "has another name, shape or place",
                                    i, k->names[i].name, k->names[i].rows,
                                    k->names[i].cols, k->names[i].array);
    return same_count(x, "parameters", iz_json_count(names), k->n_names);
}

static bool scalar_get(const struct iz_ckpt_index *x, const char *name,
                       double *out)
{
    const struct iz_json *v =
        iz_json_member(iz_json_member(x->root, "scalars"), name);
    const char *text = text_of(v, "hex");
    char *end;

    *out = strtod(text, &end);
    return *text && !*end;
}

static int scalars_check(const struct iz_ckpt_index *x, const struct iz_ckpt *k)
{
    int64_t n = iz_json_count(iz_json_member(x->root, "scalars"));
    double v;

    for (int i = 0; i < k->n_scalars; i++)
        if (!scalar_get(x, k->scalar[i].name, &v))
            return ckpt_index_fault(x, "scalar %s is missing",
                                    k->scalar[i].name);
    return same_count(x, "scalars", n, k->n_scalars);
}

int iz_ckpt_index_check(const struct iz_ckpt_index *x, const struct iz_ckpt *k)
{
    int err = model_check(x, k);

    if (!err)
        err = optimizer_check(x, k);
    if (!err)
        err = places_check(x, k);
    if (!err)
        err = arrays_check(x, k);
    if (!err)
        err = names_check(x, k);
    return err ? err : scalars_check(x, k);
}

void iz_ckpt_index_scalars(const struct iz_ckpt_index *x, struct iz_ckpt *k)
{
    for (int i = 0; i < k->n_scalars; i++)
        scalar_get(x, k->scalar[i].name, &k->scalar[i].value);
}
