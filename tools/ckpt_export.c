/* SPDX-License-Identifier: Apache-2.0 */
/* The weights of a checkpoint, and adapters merged into them or alone, as a
 * folder in the layout of Hugging Face. */
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "codelets/base/int64.h"
#include "codelets/base/take.h"
#include "runtime/base/json.h"
#include "runtime/base/text.h"
#include "runtime/ckpt/engine_arrays.h"
#include "runtime/formats/imported.h"
#include "runtime/formats/published.h"
#include "runtime/hf/adapter.h"
#include "runtime/hf/hf.h"
#include "runtime/hf/proof.h"
#include "runtime/hf/tensors.h"
#include "runtime/model/lora.h"
#include "runtime/model/rules.h"
#include "runtime/run/run.h"
#include "tools/ckpt.h"

#include "programs.h" /* of all models; the build writes it */

#define BASE ".base" /* of a unit's array of quantised parameters */

enum { PROGRAMS = sizeof(programs) / sizeof(programs[0]) };

/* What was written, on its way in again. */
struct again {
    struct iz_hf_reader *r;
    enum iz_dtype type;
    float *found;   /* a block */
    int64_t values; /* that were equal */
    int err;
};

/* Values of groups that follow each other: a tensor that lies transposed in a
 * file takes many at a time or is written byte by byte. */
struct run_of_groups {
    const struct stream *of;
    int64_t first, n;
    float *values; /* IZ_CKPT_BLOCK */
};

/* The weights of a unit on their way out, or to be compared with what was
 * written: those of an array, which in the
 * unit's parameters end to end begin at `at`.  adapters: to be merged, NULL:
 * none; buf: for that, of a block. */
struct stream {
    const struct iz_model *m;
    struct iz_hf_writer *w;
    struct again *again; /* NULL: they are written */
    int unit;
    enum iz_unit_part part;
    int64_t at;
    float *adapters, *buf;
    enum iz_dtype type; /* of the run: what quantised weights are rounded to */
    float *group;       /* words of the group that is coming in; so many: */
    int64_t words;
    struct run_of_groups *run; /* one for all streams */
};

static void compare_again(struct again *a, int unit, int64_t from,
                          const float *want, int64_t n)
{
    if (!a->err)
        a->err = iz_hf_read_equal(a->r, unit, from, n, want, a->type, a->found);
    a->values += n;
}

static void pass_on(void *arg, int64_t from, const float *in, int64_t n)
{
    const struct stream *s = arg;
    if (s->adapters) {
        memcpy(s->buf, in, (size_t)n * sizeof(*in));
        iz_lora_merge(s->m, s->unit, s->part, s->adapters, from, s->buf, n);
        in = s->buf;
    }
    if (s->again)
        compare_again(s->again, s->unit, s->at + from, in, n);
    else
        iz_hf_write(s->w, s->unit, s->at + from, in, n);
}

static void pass_run(struct run_of_groups *r)
{
    if (r->n)
        pass_on((void *)(uintptr_t)r->of, r->first, r->values, r->n);
    r->n = 0;
}

/* Group g of a unit, as the run computes with it. */
static void pass_group(const struct stream *s, int64_t g)
{
    const struct iz_unit *u = &s->m->unit[s->unit];
    struct run_of_groups *r = s->run;
    float values[IZ_QUANT_GROUP];
    int64_t first, n = iz_unit_quant_group(u, g, &first);
    if (r->of != s || r->first + r->n != first || r->n + n > IZ_CKPT_BLOCK)
        pass_run(r);
    if (!r->n)
        *r = (struct run_of_groups){s, first, 0, r->values};
    iz_quant_load(iz_unit_quant(u), values, s->type, s->group, n);
    iz_cast(r->values + r->n, IZ_F32, values, s->type, n);
    r->n += n;
}

/* Words of groups come in any lengths. */
static void pass_words(void *arg, int64_t from, const float *in, int64_t n)
{
    struct stream *s = arg;
    int64_t size =
        iz_quant_bytes(iz_unit_quant(&s->m->unit[s->unit])) / sizeof(*in);
    for (int64_t k; n > 0; from += k, in += k, n -= k) {
        k = min64(size - s->words, n);
        memcpy(s->group + s->words, in, (size_t)k * sizeof(*in));
        s->words = (s->words + k) % size;
        if (!s->words)
            pass_group(s, from / size);
    }
}

static void keep_adapters(void *arg, int64_t from, const float *in, int64_t n)
{
    const struct stream *s = arg;
    const struct iz_unit *u = &s->m->unit[s->unit];
    int64_t first = iz_lora_first(u), at = max64(from, first);
    int64_t end = min64(from + n, iz_unit_elems(u, IZ_PART_TRAINED));
    if (at < end)
        memcpy(s->adapters + (at - first), in + (at - from),
               (size_t)(end - at) * sizeof(*in));
}

static void array_name(char *out, size_t size, const struct iz_unit *u,
                       enum iz_unit_part part)
{
    snprintf(out, size, "%s%s/%s", u->name,
             part == IZ_PART_TRAINED  ? ""
             : part == IZ_PART_FROZEN ? ".frozen"
                                      : BASE,
             part == IZ_PART_QUANT && iz_unit_quant(u)
                 ? iz_quant_name(iz_unit_quant(u))
                 : "master");
}

/* Only weights are read, of what is trained or, `all`, also of what is frozen:
 * `put` gets those of array n for s[n], n < IZ_PARTS * units. */
static void set_streams(struct checkpoint *c, const struct iz_model *m,
                        void (*put)(void *, int64_t, const float *, int64_t),
                        bool all, struct stream *s)
{
    for (int i = 0; i < c->k.n_arrays; i++)
        c->k.array[i].count = 0;
    for (int n = 0; n < IZ_PARTS * m->n_units; n += all ? 1 : IZ_PARTS) {
        char name[64];
        enum iz_unit_part part = (enum iz_unit_part)(n % IZ_PARTS);
        array_name(name, sizeof(name), &m->unit[n / IZ_PARTS], part);
        for (int i = 0; i < c->k.n_arrays; i++)
            if (strcmp(c->k.array[i].name, name) == 0) {
                c->k.array[i].count = c->k.array[i].total;
                c->k.sink[i] = (struct iz_ckpt_sink){
                    part == IZ_PART_QUANT ? pass_words : put, &s[n]};
            }
    }
}

/* The weights that an export writes. */
static int pass_all(struct checkpoint *c, const struct iz_model *m, bool all,
                    struct stream *s, struct iz_coll *coll)
{
    set_streams(c, m, pass_on, all, s);
    int err = iz_ckpt_load(&c->k, c->step, coll);
    pass_run(s->run);
    return err;
}

static void streams_close(struct stream *s, const struct iz_model *m)
{
    for (int n = 0; s && n < IZ_PARTS * m->n_units; n++) {
        if (n % IZ_PARTS == 0)
            free(s[n].adapters);
        free(s[n].group);
    }
    if (s) {
        free(s->run->values);
        free(s->run);
        free(s->buf);
    }
    free(s);
}

/* Before the writer is there; the adapters have been read if they are to be
 * merged. */
static int streams_open(struct stream **out, struct checkpoint *c,
                        const struct iz_model *m, bool merge,
                        enum iz_dtype type, struct iz_coll *coll)
{
    struct stream *s = *out =
        iz_take(IZ_PARTS * m->n_units, sizeof(*s), "weights");
    float *buf = iz_take(IZ_CKPT_BLOCK, sizeof(*buf), "weights");
    struct run_of_groups *run = iz_take(1, sizeof(*run), "weights");
    bool any = false;
    run->values = iz_take(IZ_CKPT_BLOCK, sizeof(*buf), "weights");
    for (int n = 0; n < IZ_PARTS * m->n_units; n++) {
        const struct iz_unit *u = &m->unit[n / IZ_PARTS];
        int64_t trained = iz_unit_elems(u, IZ_PART_TRAINED);
        int part = n % IZ_PARTS;
        s[n] = (struct stream){.m = m,
                               .unit = n / IZ_PARTS,
                               .part = (enum iz_unit_part)part,
                               .buf = buf,
                               .type = type,
                               .run = run};
        for (int i = 0; i < part; i++)
            s[n].at += iz_unit_elems(u, (enum iz_unit_part)i);
        if (part == IZ_PART_QUANT && iz_unit_quant(u))
            s[n].group =
                iz_take(1, iz_quant_bytes(iz_unit_quant(u)), "weights");
        if (!merge || !u->n_adapters)
            continue;
        any = true;
        s[n].adapters =
            part ? s[n - 1].adapters
                 : iz_take(trained - iz_lora_first(u), sizeof(*buf), "weights");
    }
    set_streams(c, m, keep_adapters, false, s);
    return any ? iz_ckpt_load(&c->k, c->step, coll) : 0;
}

/* What the index says of a parameter: the end of its array's name, "" of one
 * that was trained. */
static const char *suffix_of(const struct iz_ckpt *k, const char *unit,
                             const char *param)
{
    size_t n = strlen(unit);
    for (int i = 0; i < k->n_names; i++)
        if (strcmp(k->names[i].name, param) == 0 &&
            strncmp(k->names[i].array, unit, n) == 0)
            return k->names[i].array + n;
    return "";
}

static enum iz_quant base_format(const json_t *model)
{
    const char *name = iz_json_text_of(model, "base_dtype");
    int q = IZ_QUANTS - 1;
    while (q > IZ_QUANT_NONE && strcmp(name, iz_quant_name((enum iz_quant)q)))
        q--;
    return (enum iz_quant)q;
}

/* The parameters that the model has, in place of those of the index: the load
 * compares them. */
static int set_names(struct checkpoint *c, struct iz_model *m)
{
    const json_t *model = json_object_get(c->index->root, "model");
    for (int u = 0; u < m->n_units; u++)
        for (int i = 0; i < m->unit[u].n_params; i++) {
            struct iz_param *p = &m->unit[u].param[i];
            const char *end = suffix_of(&c->k, m->unit[u].name, p->name);
            p->frozen = *end != '\0';
            if (strcmp(end, BASE) == 0)
                p->quant = base_format(model);
        }
    int err = json_is_true(json_object_get(model, "reference"))
                  ? iz_rules_add_reference(m, stderr)
                  : 0;
    if (err)
        return err;
    free((void *)(uintptr_t)c->k.names);
    c->k.names = iz_arrays_names(m, &c->k.n_names);
    return 0;
}

const struct iz_program *ckpt_program(int i)
{
    return i < PROGRAMS ? programs[i] : NULL;
}

static const struct iz_program *find_program(const struct checkpoint *c)
{
    const char *name =
        iz_json_text_of(json_object_get(c->index->root, "model"), "name");
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
    char **set = iz_take(iz_json_count(model) + 1, sizeof(*set), "a config");
    char batch[] = "train_batch_size=1";
    const char *key = NULL;
    struct iz_config config;
    struct iz_text t;
    int n = 0, err;
    set[n++] = batch;
    while ((key = iz_json_key(model, key))) {
        char *value = iz_json_dump(json_object_get(model, key));
        bool shape = strcmp(key, "name") != 0 &&
                     strcmp(key, "reference") != 0 &&
                     strncmp(key, "lora_", 5) != 0;
        if (value && shape) {
            fprintf(iz_text_open(&t), "model.%s=%s", key, value);
            set[n++] = iz_text_close(&t);
        }
        free(value);
    }
    err = iz_config_read(&config, &p->section, NULL, set, n, 1, NULL, stderr);
    while (--n > 0)
        free(set[n]);
    free(set);
    return err;
}

/* The type of the parameters of the run that wrote `config`. */
static enum iz_dtype run_dtype(const json_t *config)
{
    if (json_is_true(iz_json_at(config, "fp16.enabled")))
        return IZ_F16;
    return json_is_true(iz_json_at(config, "bf16.enabled")) ? IZ_BF16 : IZ_F32;
}

static bool learns_pairs(const json_t *config)
{
    const char *type = iz_json_text_of(json_object_get(config, "loss"), "type");
    return *type && strcmp(type, "cross_entropy") != 0;
}

static bool find_adapter(const void *arg, const char *b, int *rank,
                         double *alpha)
{
    const struct checkpoint *c = arg;
    const json_t *model = json_object_get(c->index->root, "model");
    const json_t *own =
        json_object_get(json_object_get(model, "lora_alphas"), b);
    int i = 0;
    while (i < c->k.n_names && strcmp(c->k.names[i].name, b) != 0)
        i++;
    if (i == c->k.n_names)
        return false;
    *rank = (int)c->k.names[i].cols;
    *alpha =
        json_number_value(own ? own : json_object_get(model, "lora_alpha"));
    return true;
}

/* The adapters that the checkpoint has, and in *l what its index says of all.
 */
static int add_adapters(const struct checkpoint *c, const struct iz_program *p,
                        struct iz_model *m, struct iz_lora_config *l)
{
    const json_t *model = json_object_get(c->index->root, "model");
    l->rank = (int)max64(iz_json_count_of(model, "lora_rank"), 0);
    l->alpha = json_number_value(json_object_get(model, "lora_alpha"));
    m->adapter_root = l->use_rslora =
        json_is_true(json_object_get(model, "lora_rslora"));
    m->adapter_dora = l->use_dora =
        json_is_true(json_object_get(model, "lora_dora"));
    return l->rank ? iz_lora_restore(m, p->section.hf, find_adapter, c) : 0;
}

/* An export that is to be looked at. */
struct look {
    const struct ckpt_options *o;
    struct checkpoint *c;
    const struct iz_program *p;
    const struct iz_model *m;
    const struct iz_config *like_run; /* its types, paths and adapters */
    enum iz_dtype type;               /* of the folder */
    bool pairs;                       /* the run learnt from such */
    struct stream *s;
    struct iz_coll *coll;
};

/* Whether the program finds in the folder the loss that the run has told of
 * this step; where it told none, or the program cannot, that is said. */
static int look_at_loss(const struct look *l, const char *folder)
{
    char config[IZ_PATH_MAX + 32], frozen[IZ_KEY_NAME_MAX + 128];
    struct iz_text import;
    char *text;
    const char *set[CKPT_SETTINGS + 1] = {
        NULL, "train_micro_batch_size_per_gpu=null",
        "gradient_accumulation_steps=null", "run.sum_group=0",
        "zero_optimization.zero_hpz_partition_size=1"};
    int64_t seq =
        iz_json_count_of(json_object_get(l->c->index->root, "model"), "seq");
    struct iz_hf_losses losses = {.type = l->type,
                                  .own = l->like_run->dtype,
                                  .units = l->m->n_units,
                                  .run = ckpt_validation(l->o->dir, l->c->step),
                                  .found = NAN};
    const char *why = isnan(losses.run) ? "the run told none of this step"
                      : l->pairs        ? "it would be one of pairs"
                                        : NULL;
    snprintf(config, sizeof(config), "%s/config.json", l->o->dir);
    iz_text_open(&import);
    fprintf(import.out, "%s={\"import\": ", l->o->adapter ? "lora" : "model");
    iz_json_print(import.out, folder);
    if (!l->o->adapter) { /* its config.json has the shape */
        fprintf(import.out, ", \"seq\": %" PRId64, seq);
        ckpt_freeze(frozen, sizeof(frozen), l->m);
        set[5] = frozen;
        set[6] = "lora={}";
    }
    fputs("}", import.out);
    set[0] = text = iz_text_close(&import);
    if (!why)
        losses.found = ckpt_loss(l->coll, l->p, config, set);
    free(text);
    if (!why && isnan(losses.found))
        why = "the program cannot, see above";
    if (!why)
        return iz_hf_compare_losses(&losses, l->coll->rank == 0);
    if (l->coll->rank == 0)
        printf("export: no loss: %s\n", why);
    return 0;
}

/* Reads the checkpoint once more, beside the folder. */
static int look_again(void *arg, const char *folder)
{
    const struct look *l = arg;
    struct again a = {.type = l->type,
                      .found =
                          iz_take(IZ_CKPT_BLOCK, sizeof(float), "weights")};
    const struct iz_section *section = &l->p->section;
    int err = l->o->adapter
                  ? iz_adapter_read_open(&a.r, l->like_run, section->hf, l->m,
                                         folder, stderr)
                  : iz_published_same(section, l->m->self, folder, stderr);
    if (!err && !l->o->adapter)
        err =
            iz_hf_read_open(&a.r, section->hf, l->m, "export", folder, stderr);
    for (int n = 0; n < IZ_PARTS * l->m->n_units; n++)
        l->s[n].again = &a;
    if (!err)
        err = pass_all(l->c, l->m, !l->o->adapter, l->s, l->coll);
    err = err ? err : a.err;
    if (!err && l->coll->rank == 0)
        printf("export: %" PRId64 " values read again, equal as %s\n", a.values,
               iz_dtype_name(l->type));
    iz_hf_read_close(&a.r);
    free(a.found);
    return err ? err : look_at_loss(l, folder);
}

static int export_model(const struct ckpt_options *o, struct checkpoint *c,
                        const struct iz_program *p, struct iz_model *m,
                        struct iz_coll *coll)
{
    char path[IZ_PATH_MAX + 32], like[IZ_PATH_MAX + 32];
    json_t *config; /* the run's effective one; NULL: not there */
    struct iz_config run = {.lora.export =
                                o->adapter ? IZ_LORA_ADAPTER : IZ_LORA_MERGED,
                            .run = {.export_dtype = o->dtype + 1,
                                    .export_shard_bytes = o->file_bytes}};
    struct iz_hf_map map = {0};
    struct iz_hf_order order;
    char *text = NULL;
    struct stream *s = NULL;
    struct iz_hf_writer *w;
    struct look look = {
        .o = o, .c = c, .p = p, .m = m, .like_run = &run, .coll = coll};
    int err = add_adapters(c, p, m, &run.lora);
    if (!err && o->adapter && !run.lora.rank)
        err = iz_text_refuse(stderr, "ckpt: --adapter: %s has no adapters",
                             c->path);
    if (!err && !o->adapter && m->adapter_dora)
        err = iz_text_refuse(
            stderr,
            "ckpt: %s has adapters with magnitudes (lora.use_dora), which "
            "need norms of whole weights: use --adapter, or --resume the run "
            "with run.export",
            c->path);
    if (!err)
        err = set_names(c, m);
    snprintf(path, sizeof(path), "%s/config.json", o->dir);
    config = iz_json_read(path, NULL);
    snprintf(run.import, sizeof(run.import), "%s",
             iz_json_text_of(json_object_get(config, "model"), "import"));
    snprintf(run.run.output, sizeof(run.run.output), "%s", o->dir);
    run.dtype = run_dtype(config);
    run.lora.dropout = json_number_value(iz_json_at(config, "lora.dropout"));
    if (!err)
        err = iz_adapter_check_trained(m);
    if (!err)
        err = iz_hf_order_open(&order, &map, &text, like, &run, &p->section, m,
                               true);
    order.folder = o->out;
    order.check = look_again;
    order.arg = &look;
    if (!err)
        err = streams_open(&s, c, m, !o->adapter, run.dtype, coll);
    if (!err)
        err = iz_hf_write_open(&w, &order, coll);
    if (!err) {
        for (int n = 0; n < IZ_PARTS * m->n_units; n++)
            s[n].w = w;
        look.s = s;
        look.type = order.type;
        look.pairs = learns_pairs(config);
        err = pass_all(c, m, !o->adapter, s, coll);
        err = iz_hf_write_close(&w, err);
    }
    streams_close(s, m);
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

int ckpt_export(const struct ckpt_options *o, struct iz_coll *coll)
{
    struct iz_model *m = NULL;
    struct checkpoint c;
    int64_t step = checkpoint_step(o);
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
