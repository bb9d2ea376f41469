/* SPDX-License-Identifier: Apache-2.0 */
/* Writing, reading and comparing index.json.  Its last member is a hash of the
 * text before it, so that a damaged index is told from a foreign one. */
#include "runtime/ckpt/ckpt.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "codelets/base/take.h"
#include "runtime/base/durable.h"
#include "runtime/base/hash.h"
#include "runtime/base/text.h"

#define FORMAT 1
#define SEAL ",\n\"seal\": \"%016" PRIx64 "\"\n}\n"
#define SEAL_BYTES 32

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

static void put_string(FILE *f, const char *before, const char *s)
{
    fputs(before, f);
    iz_json_print(f, s);
}

static void put_lines(FILE *f, const char *text)
{
    fputs(",\n\"identity\": [", f);
    for (const char *p = text, *end; *p; p = end + (*end == '\n')) {
        end = p + strcspn(p, "\n");
        char *line = iz_take_text(p, end - p);
        put_string(f, p > text ? ",\n  " : "\n  ", line);
        free(line);
    }
    fputs("]", f);
}

static void put_arrays(FILE *f, const struct iz_ckpt *k)
{
    fputs(",\n\"arrays\": [", f);
    for (int i = 0; i < k->n_parts; i++) {
        put_string(f,
                   i ? ",\n  {\"name\": " : "\n  {\"name\": ", k->part[i].name);
        fprintf(f, ", \"total\": %" PRId64 "}", k->part[i].total);
    }
    fputs("],\n\"parameters\": [", f);
    for (int i = 0; i < k->n_names; i++) {
        const struct iz_ckpt_name *p = &k->names[i];
        put_string(f, i ? ",\n  {\"name\": " : "\n  {\"name\": ", p->name);
        put_string(f, ", \"array\": ", p->array);
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
        put_string(f, i ? ",\n  " : "\n  ", k->scalar[i].name);
        fprintf(f, ": {\"hex\": \"%a\", \"decimal\": \"%.17g\"}", v, v);
    }
    fputs("}", f);
}

/* malloc'ed. */
static char *index_text(const struct iz_ckpt *k, int64_t step, int ranks,
                        const struct iz_ckpt_file *file)
{
    struct iz_text text;
    FILE *f = iz_text_open(&text);
    fprintf(f,
            "{\n\"izar\": %d,\n\"step\": %" PRId64 ",\n\"ranks\": %d"
            ",\n\"model\": %s,\n\"optimizer\": \"%s\"",
            FORMAT, step, ranks, k->of.model ? k->of.model : "null",
            k->optimizer);
    put_string(f, ",\n\"rounding\": ", k->rounding);
    if (k->of.id)
        put_string(f, ",\n\"run\": ", k->of.id);
    if (k->of.identity)
        put_lines(f, k->of.identity);
    put_scalars(f, k);
    put_files(f, ranks, file);
    put_arrays(f, k);
    fflush(f);
    fprintf(f, SEAL, iz_hash(text.text, (int64_t)text.bytes));
    return iz_text_close(&text);
}

static json_t *model_json(const struct iz_ckpt *k)
{
    const char *text = k->of.model ? k->of.model : "null";
    return iz_json_open(text, (int64_t)strlen(text));
}

int iz_ckpt_index_write(const char *path, const struct iz_ckpt *k, int64_t step,
                        int ranks, const struct iz_ckpt_file *file)
{
    json_t *model = model_json(k);
    if (!model)
        return iz_text_refuse(stderr,
                              "checkpoint: the model section is not JSON");
    json_decref(model);
    char *text = index_text(k, step, ranks, file);
    int err = iz_durable_create("checkpoint", path, text);
    free(text);
    return err;
}

/* ---- reading ---- */

/* -EINVAL. */
static int IZ_PRINTF(2, 3)
    index_fault(const struct iz_ckpt_index *x, const char *fmt, ...)
{
    char why[1024];
    va_list args;
    va_start(args, fmt);
    vsnprintf(why, sizeof(why), fmt, args);
    va_end(args);
    return iz_text_refuse(x->err, "checkpoint: %s: %s", x->path, why);
}

static bool sealed(const char *text, int64_t bytes)
{
    char seal[SEAL_BYTES + 1];
    int n = snprintf(seal, sizeof(seal), SEAL, (uint64_t)0);
    assert(n < (int)sizeof(seal));
    if (bytes < n)
        return false;
    int64_t body = bytes - n;
    snprintf(seal, sizeof(seal), SEAL, iz_hash(text, body));
    return memcmp(text + body, seal, (size_t)n) == 0;
}

static int files_parse(struct iz_ckpt_index *x)
{
    const json_t *files = json_object_get(x->root, "files");
    if (x->ranks < 1 || iz_json_count(files) != x->ranks)
        return -EINVAL;
    x->file = iz_take(x->ranks, sizeof(*x->file), "files");
    for (int i = 0; i < x->ranks; i++) {
        const json_t *v = json_array_get(files, (size_t)i);
        x->file[i].bytes = iz_json_count_of(v, "bytes");
        x->file[i].header_hash =
            strtoull(iz_json_text_of(v, "header"), NULL, 16);
    }
    return 0;
}

static int index_parse(struct iz_ckpt_index *x, const char *text, int64_t bytes)
{
    if (!sealed(text, bytes))
        return index_fault(x, "damaged or truncated: the text does "
                              "not have its hash");
    x->root = iz_json_open(text, bytes);
    int64_t format = iz_json_count_of(x->root, "izar");
    if (format != FORMAT)
        return index_fault(x, "version %" PRId64 ", this program reads %d",
                           format, FORMAT);
    x->step = iz_json_count_of(x->root, "step");
    x->ranks = (int)iz_json_number(json_object_get(x->root, "ranks"), INT_MAX);
    if (x->step < 0 || files_parse(x))
        return index_fault(x, "has no step, ranks or files");
    return 0;
}

static int index_read(struct iz_ckpt_index *x)
{
    int64_t bytes;
    char *text = iz_durable_read(x->path, &bytes);
    if (!text) {
        int why = errno;
        index_fault(x, "%s", strerror(why));
        return -why;
    }
    int err = index_parse(x, text, bytes);
    free(text);
    return err;
}

int iz_ckpt_index_open(struct iz_ckpt_index **out, const char *dir, bool quiet)
{
    char path[IZ_CKPT_FILE_PATH];
    struct iz_ckpt_index *x = *out = iz_take(1, sizeof(*x), "an index");
    x->err = quiet ? NULL : stderr;
    snprintf(path, sizeof(path), "%s/index.json", dir);
    x->path = iz_take_text(path, (int64_t)strlen(path));
    int err = index_read(x);
    if (err)
        iz_ckpt_index_close(out);
    return err;
}

void iz_ckpt_index_close(struct iz_ckpt_index **x)
{
    if (!*x)
        return;
    json_decref((*x)->root);
    free((*x)->file);
    free((*x)->path);
    free(*x);
    *x = NULL;
}

int64_t iz_ckpt_files_bytes(const char *dir, int ranks,
                            const struct iz_ckpt_file *file, FILE *err)
{
    int64_t sum = 0;
    for (int q = 0; q < ranks; sum += file[q++].bytes) {
        char path[IZ_CKPT_FILE_PATH];
        struct stat st;
        snprintf(path, sizeof(path), "%s/" IZ_CKPT_FILE, dir, q, ranks);
        if (stat(path, &st) || st.st_size != file[q].bytes)
            return iz_text_refuse(
                err, "checkpoint: %s is missing or not of %" PRId64 " bytes",
                path, file[q].bytes);
    }
    return sum;
}

static char *lines_of(const json_t *lines)
{
    struct iz_text t;
    FILE *f = iz_text_open(&t);
    for (int64_t i = 0; i < iz_json_count(lines); i++)
        fprintf(f, "%s\n", json_string_value(json_array_get(lines, (size_t)i)));
    return iz_text_close(&t);
}

int iz_ckpt_whose(const char *dir, int64_t step, char id[IZ_CKPT_ID],
                  char **identity)
{
    struct iz_ckpt_index *x = NULL;
    char path[IZ_CKPT_PATH];
    int err = iz_ckpt_dir_find(dir, step, path);
    if (!err)
        err = iz_ckpt_index_open(&x, path, true);
    const json_t *root = err ? NULL : x->root;
    const json_t *lines = json_object_get(root, "identity");
    snprintf(id, IZ_CKPT_ID, "%s", iz_json_text_of(root, "run"));
    if (identity)
        *identity = json_is_array(lines) ? lines_of(lines) : NULL;
    iz_ckpt_index_close(&x);
    return err;
}

/* ---- comparing ---- */

static int model_differs(const struct iz_ckpt_index *x, const char *key,
                         const json_t *saved, const json_t *run)
{
    char *a = saved ? iz_json_dump(saved) : NULL;
    char *b = run ? iz_json_dump(run) : NULL;
    index_fault(x,
                "model%s%s differs: the checkpoint has %.200s, the run %.200s",
                *key ? "." : "", key, a ? a : "nothing", b ? b : "nothing");
    free(a);
    free(b);
    return -EINVAL;
}

/* Refuses the first member of the model section that differs. */
static int model_check(const struct iz_ckpt_index *x, const struct iz_ckpt *k)
{
    json_t *run = model_json(k);
    json_t *before =
        k->of.before ? iz_json_open(k->of.before, (int64_t)strlen(k->of.before))
                     : NULL;
    const json_t *saved = json_object_get(x->root, "model");
    const json_t *object[2] = {saved, run}, *member[2];
    const char *key = NULL;
    int err = 0;
    for (int o = 0; o < 2 && !err; o++)
        while (!err && (key = iz_json_key(object[o], key))) {
            for (int i = 0; i < 2; i++)
                member[i] = json_object_get(object[i], key);
            if (!member[0] && saved)
                member[0] = json_object_get(before, key);
            if (!iz_json_same(member[0], member[1]))
                err = model_differs(x, key, member[0], member[1]);
        }
    if (!err && !json_is_object(saved) && !json_equal(saved, run))
        err = model_differs(x, "", saved, run);
    json_decref(run);
    json_decref(before);
    return err;
}

/* Checkpoints of before it was written have none; their arrays tell. */
static int optimizer_check(const struct iz_ckpt_index *x,
                           const struct iz_ckpt *k)
{
    const char *saved = iz_json_text_of(x->root, "optimizer");
    if (!*saved || strcmp(saved, k->optimizer) == 0)
        return 0;
    return index_fault(x,
                       "has the states of optimizer %s, in this "
                       "run optimizer.type has those of %s",
                       saved, k->optimizer);
}

/* States that were rounded in another way are numbers to go on with, but not to
 * where the run would have come.  Those of before it was written are such. */
static int rounding_check(const struct iz_ckpt_index *x,
                          const struct iz_ckpt *k)
{
    const char *saved = iz_json_text_of(x->root, "rounding");
    if (!strcmp(k->rounding, IZ_CKPT_EXACT) || !strcmp(saved, IZ_CKPT_EXACT) ||
        !strcmp(saved, k->rounding))
        return 0;
    return index_fault(x,
                       "its states were rounded by %s, this "
                       "program rounds those of run.state_dtype by %s: the run "
                       "would not end with the same bits; run.state_dtype fp32 "
                       "takes them as they are",
                       *saved ? saved : "an older program", k->rounding);
}

static const struct iz_rank_range *part_find(const struct iz_ckpt *k,
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
               : index_fault(x, "%" PRId64 " %s, this run has %" PRId64, saved,
                             what, run);
}

static int arrays_check(const struct iz_ckpt_index *x, const struct iz_ckpt *k)
{
    const json_t *arrays = json_object_get(x->root, "arrays");
    for (int64_t i = 0; i < iz_json_count(arrays); i++) {
        const json_t *v = json_array_get(arrays, (size_t)i);
        const char *name = iz_json_text_of(v, "name");
        const struct iz_rank_range *p = part_find(k, name);
        int64_t total = iz_json_count_of(v, "total");
        if (!p)
            return index_fault(x, "array %s is not part of this run", name);
        if (p->total != total)
            return index_fault(
                x, "array %s has %" PRId64 " elements, in this run %" PRId64,
                name, total, p->total);
    }
    /* All saved ones are in the run: if the numbers agree, so do the sets. */
    return same_count(x, "arrays", iz_json_count(arrays), k->n_parts);
}

static bool name_equal(const json_t *v, const struct iz_ckpt_name *p)
{
    const json_t *shape = json_object_get(v, "shape");
    return strcmp(iz_json_text_of(v, "name"), p->name) == 0 &&
           strcmp(iz_json_text_of(v, "array"), p->array) == 0 &&
           iz_json_count_of(v, "offset") == p->offset &&
           iz_json_number(json_array_get(shape, 0), INT64_MAX) == p->rows &&
           iz_json_number(json_array_get(shape, 1), INT64_MAX) == p->cols;
}

/* The same tensors, trained or frozen alike: a difference is one of the config
 * and not of the model. */
static int places_check(const struct iz_ckpt_index *x, const struct iz_ckpt *k)
{
    const json_t *names = json_object_get(x->root, "parameters");
    for (int i = 0; i < k->n_names; i++) {
        const json_t *v = json_array_get(names, (size_t)i);
        const char *array = iz_json_text_of(v, "array"),
                   *name = k->names[i].name;
        if (strcmp(iz_json_text_of(v, "name"), name) == 0 &&
            strcmp(array, k->names[i].array) != 0)
            return index_fault(x,
                               "%s is part of %s, in this run of "
                               "%s: other tensors are frozen",
                               name, array, k->names[i].array);
    }
    return 0;
}

static int names_check(const struct iz_ckpt_index *x, const struct iz_ckpt *k)
{
    const json_t *names = json_object_get(x->root, "parameters");
    for (int i = 0; i < k->n_names; i++)
        if (!name_equal(json_array_get(names, (size_t)i), &k->names[i]))
            return index_fault(x,
                               "parameter %d (%s, [%" PRId64 ", %" PRId64
                               "] in %s) has another name, shape or place",
                               i, k->names[i].name, k->names[i].rows,
                               k->names[i].cols, k->names[i].array);
    return same_count(x, "parameters", iz_json_count(names), k->n_names);
}

static bool scalar_get(const struct iz_ckpt_index *x, const char *name,
                       double *out)
{
    const json_t *v =
        json_object_get(json_object_get(x->root, "scalars"), name);
    const char *text = iz_json_text_of(v, "hex");
    char *end;
    *out = strtod(text, &end);
    return *text && !*end;
}

static int scalars_check(const struct iz_ckpt_index *x, const struct iz_ckpt *k)
{
    int64_t n = iz_json_count(json_object_get(x->root, "scalars"));
    double v;
    for (int i = 0; i < k->n_scalars; i++)
        if (!scalar_get(x, k->scalar[i].name, &v))
            return index_fault(x, "scalar %s is missing", k->scalar[i].name);
    return same_count(x, "scalars", n, k->n_scalars);
}

/* Of runs that computed experts on the host: what the next step begins with. */
static int removed_check(const struct iz_ckpt_index *x, const struct iz_ckpt *k)
{
    return json_object_get(x->root, "cold_experts")
               ? index_fault(x, "of a run with "
                                "run.cold_experts, which was removed")
               : 0;
}

int iz_ckpt_index_check(const struct iz_ckpt_index *x, const struct iz_ckpt *k)
{
    static int (*const checks[])(const struct iz_ckpt_index *,
                                 const struct iz_ckpt *) = {
        removed_check, model_check,  optimizer_check, rounding_check,
        places_check,  arrays_check, names_check,     scalars_check};
    int err = 0;
    for (size_t i = 0; i < sizeof(checks) / sizeof(checks[0]) && !err; i++)
        err = checks[i](x, k);
    return err;
}

void iz_ckpt_index_scalars(const struct iz_ckpt_index *x, struct iz_ckpt *k)
{
    for (int i = 0; i < k->n_scalars; i++)
        scalar_get(x, k->scalar[i].name, &k->scalar[i].value);
}
