/* SPDX-License-Identifier: Apache-2.0 */
/* Checkpoints from the command line: lists them, checks every byte of them, and
 * writes their weights as a Hugging Face model.  Never changes one. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/json.h"
#include "runtime/base/progress.h"
#include "runtime/base/text.h"
#include "runtime/ckpt/engine_parts.h"
#include "runtime/config/imported.h"
#include "runtime/config/published.h"
#include "runtime/hf/tensors.h"
#include "runtime/run/run.h"

#include "codelets/base/units.h"
#include "programs.h" /* of all models; the build writes it */

enum { PROGRAMS = sizeof(programs) / sizeof(programs[0]) };

struct options {
    const struct command *command;
    const char *dir, *out;
    int64_t step; /* -1: the newest */
    int dtype;    /* -1: that of the run */
    int64_t file_bytes;
};

struct command {
    const char *name;
    int (*run)(const struct options *o, struct iz_coll *coll);
    int (*one)(const char *dir, int64_t step, struct iz_coll *coll);
};

/* A checkpoint as its own index describes it. */
struct checkpoint {
    int64_t step;
    char path[IZ_CKPT_PATH];
    struct iz_ckpt_index *index;
    struct iz_ckpt k;
    char *model_text;
};

/* ---- opening ---- */

static void checkpoint_close(struct checkpoint *c)
{
    free(c->k.part);
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
static void describe_parts(struct checkpoint *c, struct iz_ckpt_name *n)
{
    const json_t *arrays = json_object_get(c->index->root, "arrays");
    const json_t *names = json_object_get(c->index->root, "parameters");
    const json_t *scalars = json_object_get(c->index->root, "scalars");
    const char *scalar = NULL;
    for (int i = 0; i < c->k.n_parts; i++) {
        const json_t *v = json_array_get(arrays, (size_t)i);
        struct iz_ckpt_part *p = &c->k.part[i];
        copy_text(p->name, sizeof(p->name), v, "name");
        p->total = p->count = iz_json_count_of(v, "total");
        p->put = ckpt_forget;
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

static int ckpt_describe(struct checkpoint *c, const char *dir)
{
    int parts = (int)iz_json_count(json_object_get(c->index->root, "arrays"));
    int names =
        (int)iz_json_count(json_object_get(c->index->root, "parameters"));
    int scalars =
        (int)iz_json_count(json_object_get(c->index->root, "scalars"));
    struct iz_ckpt_name *name = calloc((size_t)names + 1, sizeof(*name));
    c->k = (struct iz_ckpt){
        .dir = dir,
        .part = calloc((size_t)parts + 1, sizeof(*c->k.part)),
        .n_parts = parts,
        .names = name,
        .n_names = names,
        .scalar = calloc((size_t)scalars + 1, sizeof(*c->k.scalar)),
        .n_scalars = scalars};
    c->model_text = iz_json_dump(json_object_get(c->index->root, "model"));
    c->k.model_text = c->model_text;
    c->k.optimizer = iz_json_text_of(c->index->root, "optimizer");
    if (!name || !c->k.part || !c->k.scalar || !c->model_text)
        return -ENOMEM;
    describe_parts(c, name);
    return 0;
}

/* Negative errno with the reason printed. */
static int checkpoint_open(struct checkpoint *c, const char *dir, int64_t step)
{
    char path[IZ_CKPT_FILE_PATH];
    *c = (struct checkpoint){.step = step};
    int err = iz_ckpt_dir_find(dir, step, c->path);
    if (err) {
        fprintf(stderr, "ckpt: %s has no checkpoint of step %" PRId64 "\n", dir,
                step);
        return err;
    }
    snprintf(path, sizeof(path), "%s/index.json", c->path);
    err = iz_ckpt_index_open(&c->index, path, false);
    if (!err)
        err = ckpt_describe(c, dir);
    if (err)
        checkpoint_close(c);
    return err;
}

/* The step that was asked for, or the newest.  -ENOENT with the reason printed
 * if there is none. */
static int64_t first_step(const struct options *o)
{
    int64_t step =
        o->step >= 0 ? o->step : iz_ckpt_dir_newest(o->dir, INT64_MAX);
    if (step < 0)
        fprintf(stderr, "ckpt: no checkpoint in %s/checkpoints\n", o->dir);
    return step;
}

/* Calls the command's one() for the step that was asked for, or for all from
 * the newest on; the first error. */
static int for_each(const struct options *o, struct iz_coll *coll)
{
    int64_t step = first_step(o);
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
    for (int i = 0; i < c->k.n_parts; i++) {
        const char *name = strrchr(c->k.part[i].name, '/');
        bool seen = !name;
        for (int j = 0; j < i && !seen; j++) {
            const char *before = strrchr(c->k.part[j].name, '/');
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
    int64_t bytes = iz_ckpt_index_bytes(c.index, c.path, stderr);
    if (bytes < 0) {
        printf("step %-8" PRId64 "  incomplete\n", step);
    } else {
        printf("step %-8" PRId64 "  %d file%s  %.1f MiB  ", step, ranks,
               ranks > 1 ? "s" : "", iz_mib(bytes));
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
        err = iz_ckpt_load(&c.k, step, coll);
        checkpoint_close(&c);
    }
    printf("step %-8" PRId64 "  %s\n", step, err ? "damaged" : "intact");
    return err;
}

/* ---- export ---- */

/* The weights of a unit on their way out: those of an array, which in the
 * unit's parameters end to end begin at `at`. */
struct stream {
    struct iz_hf_writer *w;
    int unit;
    int64_t at;
};

static void pass_on(void *arg, int64_t from, const float *in, int64_t n)
{
    const struct stream *s = arg;
    iz_hf_write(s->w, s->unit, s->at + from, in, n);
}

/* Only the master weights are read; s[2 * units]. */
static void set_streams(struct checkpoint *c, const struct iz_model *m,
                        struct iz_hf_writer *w, struct stream *s)
{
    for (int i = 0; i < c->k.n_parts; i++)
        c->k.part[i].count = 0;
    for (int n = 0; n < 2 * m->n_units; n++) {
        const struct iz_unit *unit = &m->unit[n / 2];
        bool frozen = n % 2;
        char name[64];
        s[n] =
            (struct stream){w, n / 2, frozen ? iz_unit_elems(unit, false) : 0};
        snprintf(name, sizeof(name), "%s%s/master", unit->name,
                 frozen ? ".frozen" : "");
        for (int i = 0; i < c->k.n_parts; i++)
            if (strcmp(c->k.part[i].name, name) == 0) {
                c->k.part[i].count = c->k.part[i].total;
                c->k.part[i].put = pass_on;
                c->k.part[i].arg = &s[n];
            }
    }
}

/* What the index says of a parameter: whether it was frozen. */
static bool was_frozen(const struct iz_ckpt *k, const char *unit,
                       const char *param)
{
    int i = 0;
    while (i < k->n_names && strcmp(k->names[i].name, param) != 0)
        i++;
    return i < k->n_names && strcmp(k->names[i].array, unit) != 0;
}

/* The parameters that the model has, in place of those of the index: the load
 * compares them. */
static int set_names(struct checkpoint *c, struct iz_model *m)
{
    for (int u = 0; u < m->n_units; u++)
        for (int i = 0; i < m->unit[u].n_params; i++) {
            struct iz_param *p = &m->unit[u].param[i];
            p->frozen = was_frozen(&c->k, m->unit[u].name, p->name);
        }
    free((void *)(uintptr_t)c->k.names);
    c->k.names = iz_parts_names(m, &c->k.n_names);
    return c->k.names ? 0 : -ENOMEM;
}

static const struct iz_program *find_program(const struct checkpoint *c)
{
    const char *name =
        iz_json_text_of(json_object_get(c->index->root, "model"), "name");
    if (json_object_get(json_object_get(c->index->root, "model"),
                        "lora_rank")) {
        fprintf(stderr,
                "ckpt: %s has adapters: export it with run.export of a run "
                "with --resume\n",
                c->path);
        return NULL;
    }
    for (int i = 0; i < PROGRAMS; i++)
        if (strcmp(programs[i]->name, name) == 0 && programs[i]->section.hf)
            return programs[i];
    fprintf(stderr, "ckpt: %s: a model \"%s\" cannot be exported\n", c->path,
            name);
    return NULL;
}

/* The section "model" of the index as overrides of a config. */
static int read_shape(const struct checkpoint *c, const struct iz_program *p)
{
    const json_t *model = json_object_get(c->index->root, "model");
    char **set = calloc((size_t)iz_json_count(model) + 1, sizeof(*set));
    char batch[] = "train_batch_size=1";
    const char *key = NULL;
    struct iz_config config;
    int n = 0, err;
    if (!set)
        return -ENOMEM;
    set[n++] = batch;
    while ((key = iz_json_key(model, key))) {
        char *value = iz_json_dump(json_object_get(model, key));
        size_t bytes = strlen(key) + (value ? strlen(value) : 0) + 16;
        if (value && strcmp(key, "name") != 0 && (set[n] = malloc(bytes)))
            snprintf(set[n++], bytes, "model.%s=%s", key, value);
        free(value);
    }
    err = iz_config_read(&config, &p->section, NULL, set, n, 1, NULL, stderr);
    while (--n > 0)
        free(set[n]);
    free(set);
    return err;
}

static bool is_enabled(const json_t *config, const char *section)
{
    return json_is_true(
        json_object_get(json_object_get(config, section), "enabled"));
}

/* The type of the parameters of the run that wrote `config`. */
static enum iz_dtype run_dtype(const json_t *config)
{
    if (is_enabled(config, "fp16"))
        return IZ_F16;
    return is_enabled(config, "bf16") ? IZ_BF16 : IZ_F32;
}

static int export_model(const struct options *o, struct checkpoint *c,
                        const struct iz_program *p, struct iz_model *m,
                        struct iz_coll *coll)
{
    char path[IZ_PATH_MAX + 32], like[IZ_PATH_MAX + 32];
    json_t *config; /* the run's effective one; NULL: not there */
    struct iz_hf_map map = {0};
    struct iz_hf_order order = {.folder = o->out,
                                .map = &map,
                                .file_bytes = o->file_bytes,
                                .file = IZ_HF_SINGLE,
                                .config_file = IZ_PUBLISHED_CONFIG,
                                .like = like};
    char *text = NULL;
    struct stream *s = calloc(2 * (size_t)m->n_units, sizeof(*s));
    struct iz_hf_writer *w;
    int err = s ? set_names(c, m) : -ENOMEM;
    snprintf(path, sizeof(path), "%s/config.json", o->dir);
    config = iz_json_read(path, NULL);
    order.type = o->dtype >= 0 ? (enum iz_dtype)o->dtype : run_dtype(config);
    if (!err)
        err = iz_imported_find(
            like, sizeof(like), o->dir,
            iz_json_text_of(json_object_get(config, "model"), "import"));
    if (!err)
        err = iz_hf_map_open(&map, p->section.hf, m);
    if (!err) {
        order.config = text =
            iz_published_text(&p->section, m->self, order.type, like);
        err = text ? 0 : -EINVAL;
    }
    if (!err)
        err = iz_hf_write_open(&w, &order, coll);
    if (!err) {
        set_streams(c, m, w, s);
        err = iz_ckpt_load(&c->k, c->step, coll);
        err = iz_hf_write_close(&w, err);
    }
    free(s);
    free(text);
    iz_hf_map_close(&map);
    json_decref(config);
    if (err)
        return err;
    printf("step %" PRId64 " is in %s as %s\n", c->step, o->out,
           iz_dtype_name(order.type));
    iz_imported_tell(o->out);
    return 0;
}

static int export(const struct options *o, struct iz_coll *coll)
{
    int64_t step = first_step(o);
    struct iz_model *m = NULL;
    struct checkpoint c;
    int err = step < 0 ? (int)step : checkpoint_open(&c, o->dir, step);
    if (err)
        return err;
    const struct iz_program *p = find_program(&c);
    err = p ? read_shape(&c, p) : -EINVAL;
    if (!err)
        err = p->open(&m, p->section.target);
    if (!err)
        err = export_model(o, &c, p, m, coll);
    iz_model_close(&m);
    checkpoint_close(&c);
    return err;
}

/* ---- the command line ---- */

static const struct command commands[] = {{"list", for_each, list_one},
                                          {"verify", for_each, verify_one},
                                          {"export", export, NULL}};

enum { COMMANDS = sizeof(commands) / sizeof(commands[0]) };

static void usage(FILE *out)
{
    fputs("usage: ckpt list DIR\n"
          "       ckpt verify DIR [--step N]\n"
          "       ckpt export DIR --out FOLDER [--step N] "
          "[--dtype fp32|bf16|fp16]\n"
          "                       [--shard-bytes N]\n\n"
          "DIR is a run's output.  list prints its checkpoints, newest first; "
          "verify reads\nall of them (or one) and compares every checksum; "
          "export writes the weights of\nthe newest one (or of step N) as a "
          "Hugging Face model, in the run's type unless\nanother is given.\n"
          "Exit status: 0 all is well, 1 it is not, 2 usage.\n",
          out);
}

/* -1: not a whole number >= 0. */
static int64_t whole(const char *text)
{
    int64_t v = iz_decimal(&text);
    return *text ? -1 : v;
}

static int read_dtype(const char *text)
{
    for (int t = IZ_F32; t <= IZ_F16; t++)
        if (strcmp(iz_dtype_name((enum iz_dtype)t), text) == 0)
            return t;
    return -1;
}

static bool read_option(struct options *o, const char *name, const char *value)
{
    bool is_export = o->command->run == export;
    if (strcmp(name, "--step") == 0 && o->command->one != list_one)
        return (o->step = whole(value)) >= 0;
    if (strcmp(name, "--out") == 0 && is_export)
        return *(o->out = value) != '\0';
    if (strcmp(name, "--dtype") == 0 && is_export)
        return (o->dtype = read_dtype(value)) >= 0;
    if (strcmp(name, "--shard-bytes") == 0 && is_export)
        return (o->file_bytes = whole(value)) > 0;
    return false;
}

static bool read_options(struct options *o, int argc, char **argv)
{
    *o = (struct options){.step = -1, .dtype = -1, .file_bytes = 5000000000};
    if (argc < 3 || argv[2][0] == '-')
        return false;
    o->dir = argv[2];
    for (int i = 0; i < COMMANDS; i++)
        if (strcmp(commands[i].name, argv[1]) == 0)
            o->command = &commands[i];
    for (int i = 3; o->command && i < argc; i += 2)
        if (i + 1 == argc || !read_option(o, argv[i], argv[i + 1])) {
            fprintf(stderr, "ckpt: %s %s: not understood\n", argv[i],
                    i + 1 < argc ? argv[i + 1] : "");
            return false;
        }
    return o->command && (o->out || o->command->run != export);
}

int main(int argc, char **argv)
{
    struct options o;
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
    iz_coll_close(&coll);
    return err ? 1 : 0;
}
