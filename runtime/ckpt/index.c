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
    for (int i = 0; i < k->n_arrays; i++) {
        put_string(
            f, i ? ",\n  {\"name\": " : "\n  {\"name\": ", k->array[i].name);
        fprintf(f, ", \"total\": %" PRId64 "}", k->array[i].total);
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

int iz_ckpt_index_write(const char *path, const struct iz_ckpt *k, int64_t step,
                        int ranks, const struct iz_ckpt_file *file)
{
    char *text = index_text(k, step, ranks, file);
    json_t *v = iz_json_open(text, (int64_t)strlen(text));
    int err =
        v ? iz_durable_create("checkpoint", path, text)
          : iz_text_refuse(stderr, "checkpoint: the model section is not JSON");
    json_decref(v);
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

/* ---- comparing ---- */

/* Refuses the first value below `path` that is not the same in both.  NULL: it
 * has none. */
static int differs(const struct iz_ckpt_index *x, const char *path,
                   const json_t *saved, const json_t *run)
{
    const json_t *both[2] = {saved, run};
    bool objects = json_is_object(saved) && json_is_object(run);
    const char *key = NULL, *dot = strrchr(path, '.');
    char member[256];
    int err = 0;
    for (int i = 0; i < 2 && objects; i++)
        while (!err && (key = iz_json_key(both[i], key))) {
            const json_t *v = json_object_get(saved, key);
            snprintf(member, sizeof(member), "%s.%s", path, key);
            if (i == 0 || !v)
                err = differs(x, member, v, json_object_get(run, key));
        }
    if (objects || iz_json_same(saved, run))
        return err;
    char *a = saved ? iz_json_dump(saved) : NULL;
    char *b = run ? iz_json_dump(run) : NULL;
    /* Of a tensor that is trained here and frozen there: a difference is one of
     * the config and not of the model. */
    index_fault(x, "%s differs: the checkpoint has %.200s, the run %.200s%s",
                path, a ? a : "nothing", b ? b : "nothing",
                dot && !strcmp(dot, ".array") ? ": other tensors are frozen"
                                              : "");
    free(a);
    free(b);
    return -EINVAL;
}

/* A member of the index; a list of what has names as an object of these, as its
 * order is free.  The caller gives it back. */
static json_t *named_members(const json_t *root, const char *key)
{
    json_t *v = json_object_get(root, key);
    if (!json_is_array(v))
        return json_incref(v);
    json_t *names = json_object();
    for (size_t i = 0; i < json_array_size(v); i++) {
        json_t *item = json_array_get(v, i);
        json_object_set(names, iz_json_text_of(item, "name"), item);
    }
    return names;
}

/* Keys of the model that are younger than the checkpoint are in it what they
 * were then; the scalars only have to be the same ones. */
static int values_check(const struct iz_ckpt_index *x, const struct iz_ckpt *k)
{
    static const char *const keys[] = {"model", "parameters", "arrays",
                                       "scalars"};
    char *text = index_text(k, x->step, 0, NULL);
    json_t *run = iz_json_open(text, (int64_t)strlen(text)), *before = NULL;
    if (k->of.before)
        before = iz_json_open(k->of.before, (int64_t)strlen(k->of.before));
    json_object_update_missing(json_object_get(x->root, "model"), before);
    json_object_update_existing(json_object_get(run, "scalars"),
                                json_object_get(x->root, "scalars"));
    int err = 0;
    for (size_t i = 0; i < sizeof(keys) / sizeof(keys[0]) && !err; i++) {
        json_t *a = named_members(x->root, keys[i]),
               *b = named_members(run, keys[i]);
        err = differs(x, keys[i], a, b);
        json_decref(a);
        json_decref(b);
    }
    json_decref(before);
    json_decref(run);
    free(text);
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

int iz_ckpt_index_check(const struct iz_ckpt_index *x, const struct iz_ckpt *k)
{
    static int (*const checks[])(const struct iz_ckpt_index *,
                                 const struct iz_ckpt *) = {
        optimizer_check, rounding_check, values_check};
    int err = 0;
    for (size_t i = 0; i < sizeof(checks) / sizeof(checks[0]) && !err; i++)
        err = checks[i](x, k);
    return err;
}

void iz_ckpt_index_scalars(const struct iz_ckpt_index *x, struct iz_ckpt *k)
{
    const json_t *scalars = json_object_get(x->root, "scalars");
    for (struct iz_ckpt_scalar *s = k->scalar; s < k->scalar + k->n_scalars;
         s++) {
        const char *hex =
            iz_json_text_of(json_object_get(scalars, s->name), "hex");
        char *end;
        s->value = strtod(hex, &end);
        assert(*hex && !*end); /* the seal says that a run wrote it */
    }
}
