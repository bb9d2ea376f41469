/* SPDX-License-Identifier: Apache-2.0 */
/* Checkpoints from the command line: lists them, checks every byte of them, and
 * writes their weights as a Hugging Face model; and what such a model of others
 * would be here.  Never changes one. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "codelets/base/take.h"
#include "codelets/base/units.h"
#include "runtime/base/durable.h"
#include "runtime/base/json.h"
#include "runtime/base/progress.h"
#include "runtime/base/text.h"
#include "tools/ckpt.h"

struct command {
    const char *name;
    int (*run)(const struct ckpt_options *o, struct iz_coll *coll);
    int (*one)(const char *dir, int64_t step, struct iz_coll *coll);
};

/* ---- opening ---- */

void checkpoint_close(struct checkpoint *c)
{
    free(c->k.array);
    free(c->k.sink);
    free((void *)(uintptr_t)c->k.names);
    free(c->k.scalar);
    free(c->model_text);
    iz_ckpt_index_close(&c->index);
}

static void ckpt_forget(void *arg, int64_t from, const float *in, int64_t n)
{
}

static void copy_text(char *to, size_t room, const json_t *object,
                      const char *key)
{
    snprintf(to, room, "%s", iz_json_text_of(object, key));
}

/* The index's arrays, parameters and scalars. */
static void describe_arrays(struct checkpoint *c, struct iz_ckpt_name *n)
{
    const json_t *arrays = json_object_get(c->index->root, "arrays");
    const json_t *names = json_object_get(c->index->root, "parameters");
    const json_t *scalars = json_object_get(c->index->root, "scalars");
    const char *scalar = NULL;
    for (int i = 0; i < c->k.n_arrays; i++) {
        const json_t *v = json_array_get(arrays, (size_t)i);
        struct iz_rank_range *p = &c->k.array[i];
        copy_text(p->name, sizeof(p->name), v, "name");
        p->total = p->count = iz_json_count_of(v, "total");
        c->k.sink[i].put = ckpt_forget;
    }
    for (int i = 0; i < c->k.n_names; i++) {
        const json_t *v = json_array_get(names, (size_t)i);
        const json_t *shape = json_object_get(v, "shape");
        copy_text(n[i].name, sizeof(n[i].name), v, "name");
        copy_text(n[i].array, sizeof(n[i].array), v, "array");
        n[i].offset = iz_json_count_of(v, "offset");
        n[i].rows = iz_json_number(json_array_get(shape, 0), INT64_MAX);
        n[i].cols = iz_json_number(json_array_get(shape, 1), INT64_MAX);
    }
    for (int i = 0; i < c->k.n_scalars; i++) {
        scalar = iz_json_key(scalars, scalar);
        snprintf(c->k.scalar[i].name, sizeof(c->k.scalar[i].name), "%s",
                 scalar);
    }
}

static void ckpt_describe(struct checkpoint *c, const char *dir)
{
    int arrays = (int)iz_json_count(json_object_get(c->index->root, "arrays"));
    int names =
        (int)iz_json_count(json_object_get(c->index->root, "parameters"));
    int scalars =
        (int)iz_json_count(json_object_get(c->index->root, "scalars"));
    struct iz_ckpt_name *name = iz_take(names, sizeof(*name), "names");
    c->k = (struct iz_ckpt){
        .dir = dir,
        .array = iz_take(arrays, sizeof(*c->k.array), "arrays"),
        .sink = iz_take(arrays, sizeof(*c->k.sink), "arrays"),
        .n_arrays = arrays,
        .names = name,
        .n_names = names,
        .scalar = iz_take(scalars, sizeof(*c->k.scalar), "scalars"),
        .n_scalars = scalars};
    c->model_text = iz_json_dump(json_object_get(c->index->root, "model"));
    c->k.of.model = c->model_text;
    c->k.optimizer = iz_json_text_of(c->index->root, "optimizer");
    c->k.rounding = iz_json_text_of(c->index->root, "rounding");
    describe_arrays(c, name);
}

int checkpoint_open(struct checkpoint *c, const char *dir, int64_t step)
{
    *c = (struct checkpoint){.step = step};
    int err = iz_ckpt_dir_find(dir, step, c->path);
    if (err) {
        fprintf(stderr, "ckpt: %s has no checkpoint of step %" PRId64 "\n", dir,
                step);
        return err;
    }
    err = iz_ckpt_index_open(&c->index, c->path, false);
    if (!err)
        ckpt_describe(c, dir);
    return err;
}

int64_t checkpoint_step(const struct ckpt_options *o)
{
    int64_t step =
        o->step >= 0 ? o->step : iz_ckpt_dir_newest(o->dir, INT64_MAX);
    if (step < 0)
        fprintf(stderr, "ckpt: no checkpoint in %s/checkpoints\n", o->dir);
    return step;
}

/* Calls the command's one() for the step that was asked for, or for all from
 * the newest on; the first error. */
static int for_each(const struct ckpt_options *o, struct iz_coll *coll)
{
    int64_t step = checkpoint_step(o);
    int err = step < 0 ? (int)step : 0;
    while (step >= 0) {
        int r = o->command->one(o->dir, step, coll);
        err = err ? err : r;
        step = o->step >= 0 ? -1 : iz_ckpt_dir_newest(o->dir, step);
    }
    return err;
}

/* ---- list ---- */

/* "adam: master, m, v": the optimizer, and what there is of a unit. */
static void print_states(const struct checkpoint *c)
{
    printf("%s:", *c->k.optimizer ? c->k.optimizer : "states");
    for (int i = 0; i < c->k.n_arrays; i++) {
        const char *name = strrchr(c->k.array[i].name, '/');
        bool seen = !name;
        for (int j = 0; j < i && !seen; j++) {
            const char *before = strrchr(c->k.array[j].name, '/');
            seen = before && strcmp(before, name) == 0;
        }
        if (!seen)
            printf("%s %s", i ? "," : "", name + 1);
    }
}

static int list_one(const char *dir, int64_t step, struct iz_coll *coll)
{
    struct checkpoint c;
    int ranks, err = checkpoint_open(&c, dir, step);
    if (err) {
        printf("step %-8" PRId64 "  damaged\n", step);
        return err;
    }
    ranks = c.index->ranks;
    int64_t bytes =
        iz_ckpt_files_bytes(c.path, c.index->ranks, c.index->file, stderr);
    if (bytes < 0) {
        printf("step %-8" PRId64 "  incomplete\n", step);
    } else {
        printf("step %-8" PRId64 "  %d file%s  %.1f MiB  ", step, ranks,
               ranks > 1 ? "s" : "", iz_units_mib(bytes));
        print_states(&c);
        printf("  %s\n", c.model_text);
    }
    checkpoint_close(&c);
    return bytes < 0 ? -EINVAL : 0;
}

/* ---- verify ---- */

/* What resuming does before it puts anything, and nothing else: all checksums,
 * and that all elements are there. */
static int verify_one(const char *dir, int64_t step, struct iz_coll *coll)
{
    struct checkpoint c;
    int err = checkpoint_open(&c, dir, step);
    if (!err) {
        free(c.k.sink);
        c.k.sink = NULL;
        err = iz_ckpt_load(&c.k, step, coll);
        checkpoint_close(&c);
    }
    printf("step %-8" PRId64 "  %s\n", step, err ? "damaged" : "intact");
    return err;
}

/* ---- the command line ---- */

static const struct command commands[] = {{"list", for_each, list_one},
                                          {"verify", for_each, verify_one},
                                          {"check", ckpt_check, NULL},
                                          {"export", ckpt_export, NULL}};

enum { COMMANDS = sizeof(commands) / sizeof(commands[0]) };

static void usage(FILE *out)
{
    fputs(
        "usage: ckpt list DIR\n"
        "       ckpt verify DIR [--step N]\n"
        "       ckpt export DIR --out FOLDER [--step N] "
        "[--dtype fp32|bf16|fp16]\n"
        "                       [--shard-bytes N] [--adapter]\n"
        "       ckpt check FOLDER [--data FILE [--set key=value ...]]\n\n"
        "DIR is a run's output.  list prints its checkpoints, newest first; "
        "verify reads\nall of them (or one) and compares every checksum; "
        "export writes the weights of\nthe newest one (or of step N) as a "
        "Hugging Face model, in the run's type unless\nanother is given, "
        "with adapters of LoRA added to them, or with --adapter "
        "these\nalone.\ncheck "
        "says of a Hugging Face model which program reads it, which tensor is\n"
        "what, what is not read, and what contradicts, and with --data, as "
        "data.path has it,\nits loss of that: --set model.seq=N for samples of "
        "N tokens, data.bytes=true for\nbytes.\n"
        "Exit status: 0 all is well, 1 it is not, 2 usage.\n",
        out);
}

/* -1: not a whole number >= 0. */
static int64_t whole(const char *text)
{
    int64_t v = iz_text_decimal(&text);
    return *text ? -1 : v;
}

static int read_dtype(const char *text)
{
    for (int t = IZ_F32; t <= IZ_F16; t++)
        if (strcmp(iz_dtype_name((enum iz_dtype)t), text) == 0)
            return t;
    return -1;
}

static bool read_option(struct ckpt_options *o, const char *name,
                        const char *value)
{
    bool is_check = o->command->run == ckpt_check;
    if (strcmp(name, "--data") == 0 && is_check)
        return *(o->data = value) != '\0';
    if (strcmp(name, "--set") == 0 && is_check &&
        o->n_set + 1 < (int)(sizeof(o->set) / sizeof(*o->set)))
        return strchr(o->set[o->n_set++] = value, '=') != NULL;
    bool is_export = o->command->run == ckpt_export;
    if (strcmp(name, "--step") == 0 && o->command->one != list_one && !is_check)
        return (o->step = whole(value)) >= 0;
    if (strcmp(name, "--out") == 0 && is_export)
        return *(o->out = value) != '\0';
    if (strcmp(name, "--dtype") == 0 && is_export)
        return (o->dtype = read_dtype(value)) >= 0;
    if (strcmp(name, "--shard-bytes") == 0 && is_export)
        return (o->file_bytes = whole(value)) > 0;
    return false;
}

static bool read_options(struct ckpt_options *o, int argc, char **argv)
{
    *o = (struct ckpt_options){
        .step = -1, .dtype = -1, .file_bytes = 5000000000};
    if (argc < 3 || argv[2][0] == '-')
        return false;
    o->dir = argv[2];
    for (int i = 0; i < COMMANDS; i++)
        if (strcmp(commands[i].name, argv[1]) == 0)
            o->command = &commands[i];
    for (int i = 3; o->command && i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : NULL;
        if (strcmp(argv[i], "--adapter") == 0 &&
            o->command->run == ckpt_export) {
            o->adapter = true;
        } else if (value && read_option(o, argv[i], value)) {
            i++;
        } else {
            fprintf(stderr, "ckpt: %s %s: not understood\n", argv[i],
                    value ? value : "");
            return false;
        }
    }
    return o->command && (o->out || o->command->run != ckpt_export);
}

int main(int argc, char **argv)
{
    struct ckpt_options o;
    struct iz_coll *coll = NULL;
    if (argc == 2 && strcmp(argv[1], "--help") == 0) {
        usage(stdout);
        return 0;
    }
    if (!read_options(&o, argc, argv)) {
        usage(stderr);
        return 2;
    }
    int err = iz_coll_open(&coll, &argc, &argv);
    if (!err) {
        iz_progress_rank(coll->rank, coll->size);
        err = o.command->run(&o, coll);
    }
    bool lost = ferror(stdout); /* for a reason that is not known any more */
    if (fflush(stdout) || lost)
        err = iz_durable_refuse("ckpt", "standard output", "cannot write",
                                lost ? EIO : errno);
    iz_coll_close(&coll);
    return err ? 1 : 0;
}
