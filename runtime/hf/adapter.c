/* SPDX-License-Identifier: Apache-2.0 */
/* Adapters in and out; see adapter.h. */
#include "runtime/hf/adapter.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "codelets/base/die.h"
#include "codelets/base/int64.h"
#include "codelets/base/take.h"
#include "runtime/base/json.h"
#include "runtime/base/text.h"
#include "runtime/engine/access.h"
#include "runtime/engine/param_quant.h"
#include "runtime/formats/published.h"
#include "runtime/model/lora.h"

#define TAIL ".weight"

/* The adapter's tensors, `step` for each of the model's that has them: a, b and
 * perhaps magnitudes; behind these, from `saved` on, those that are trained in
 * full. */
struct layout {
    struct iz_hf_map out, model;
    int step;
    int saved;
    bool tied;                          /* one of them */
    const struct iz_lora_config *fused; /* of a file whose experts are; NULL */
    bool fan_in_fan_out;
};

/* "x.weight" -> "base_model.model.x.lora_A.weight". */
static int name_matrix(struct iz_hf_tensor *out, const char *of, char matrix)
{
    if (iz_lora_name(out->name, sizeof(out->name), IZ_LORA_HEAD, of, matrix))
        return 0;
    fprintf(stderr, "izar: lora.export: %s: the name is too long\n", of);
    return -ENAMETOOLONG;
}

/* A tensor that is cut from a stacked weight has the whole of a and its own
 * outputs of b, those of an expert its own part of both; none of an adapter of
 * other outputs.  -EINVAL: it has a part of the inputs. */
static int add_pair(struct layout *l, const struct iz_hf_tensor *t,
                    const struct iz_unit *u, int p, const int64_t *offset)
{
    const struct iz_param *a = &u->param[p], *b = &u->param[p + 1];
    int64_t in = a->out_in ? t->cols : t->rows;
    int64_t out = a->out_in ? t->rows : t->cols;
    int64_t row = a->out_in ? t->row : t->col, rank = b->cols;
    int64_t experts = a->rows / rank, outputs = b->rows / experts;
    int64_t rows = u->param[a->adapts].rows / experts;
    int64_t e = experts > 1 ? row / rows : 0;
    struct iz_hf_tensor *to = &l->out.tensor[l->out.n];
    row -= e * rows + b->first;
    if (row < 0 || row + out > outputs)
        return 0;
    if (in != a->cols)
        return iz_text_refuse(
            stderr,
            "lora: %s: published models cut its inputs; export "
            "merged, and import none",
            a->name);
    to[0] = (struct iz_hf_tensor){.unit = t->unit,
                                  .param = p,
                                  .offset = offset[p],
                                  .width = a->cols,
                                  .row = e * rank,
                                  .rows = rank,
                                  .cols = a->cols};
    to[1] = (struct iz_hf_tensor){.unit = t->unit,
                                  .param = p + 1,
                                  .offset = offset[p + 1],
                                  .width = b->cols,
                                  .row = e * outputs + row,
                                  .rows = out,
                                  .cols = b->cols,
                                  .head = t->head};
    l->fan_in_fan_out = t->transposed == a->out_in;
    l->out.n += l->step;
    int err = name_matrix(&to[0], t->name, 'A');
    if (!err && l->step > 2) {
        to[2] = (struct iz_hf_tensor){.unit = t->unit,
                                      .param = p + 2,
                                      .offset = offset[p + 2],
                                      .width = outputs,
                                      .col = row,
                                      .rows = 1,
                                      .cols = out,
                                      .vector = true,
                                      .head = t->head};
        err = name_matrix(&to[2], t->name, 'M');
    }
    return err ? err : name_matrix(&to[1], t->name, 'B');
}

/* As PEFT has adapters of a tensor of all experts: below their module, or if
 * both are there the first one below what that then wraps. */
static int add_fused(struct layout *l, int unit, const struct iz_unit *u, int p,
                     const int64_t *offset)
{
    const struct iz_param *a = &u->param[p], *b = a + 1;
    const char *weight = u->param[a->adapts].name,
               *prefix = l->model.hf->prefix;
    struct iz_hf_tensor *to = &l->out.tensor[l->out.n];
    char module[IZ_HF_NAME];
    int stem, err = 0;
    iz_lora_fused(l->fused, weight, &stem);
    bool inner = l->fused->down && strstr(weight + stem, "gate_up");
    snprintf(module, sizeof(module), "%s%.*s%s", prefix ? prefix : "", stem,
             weight, inner ? ".base_layer" : "");
    for (int i = 0; i < 2 && !err; i++) {
        const struct iz_param *q = i ? b : a;
        to[i] = (struct iz_hf_tensor){.unit = unit,
                                      .param = p + i,
                                      .offset = offset[p + i],
                                      .width = q->cols,
                                      .rows = q->rows,
                                      .cols = q->cols,
                                      .experts = i ? a->rows / b->cols : 0};
        err = name_matrix(&to[i], module, i ? 'B' : 'A');
    }
    l->out.n += 2;
    return err;
}

static int add_unit(struct layout *l, const struct iz_model *m, int u)
{
    const struct iz_unit *unit = &m->unit[u];
    int64_t offset[IZ_UNIT_PARAMS];
    int err = 0;
    int64_t from[IZ_PARTS] = {0, iz_unit_elems(unit, IZ_PART_TRAINED)};
    iz_unit_offsets(unit, from, offset);
    for (int p = iz_unit_base(unit); p < iz_unit_own(unit) && !err;
         p += l->step) {
        int stem;
        if (l->fused &&
            iz_lora_fused(l->fused, unit->param[unit->param[p].adapts].name,
                          &stem)) {
            err = add_fused(l, u, unit, p, offset);
            continue;
        }
        for (int i = 0; i < l->model.n && !err; i++) {
            const struct iz_hf_tensor *t = &l->model.tensor[i];
            if (t->unit == u && t->param == unit->param[p].adapts && !t->tied)
                err = add_pair(l, t, unit, p, offset);
        }
    }
    return err;
}

/* Of an import what that has, of an export what is trained. */
static int add_saved(struct layout *l, const struct iz_model *m, bool import)
{
    l->saved = l->out.n;
    for (int i = 0; i < l->model.n; i++) {
        const struct iz_hf_tensor *t = &l->model.tensor[i];
        const struct iz_param *p = &m->unit[t->unit].param[t->param];
        struct iz_hf_tensor *to = &l->out.tensor[l->out.n];
        if (import ? !p->saved : p->frozen)
            continue;
        l->tied |= t->tied;
        *to = *t;
        l->out.n++;
        if (snprintf(to->name, sizeof(to->name), IZ_LORA_HEAD "%s", t->name) >=
            (int)sizeof(to->name))
            return -ENAMETOOLONG;
    }
    return 0;
}

static int layout_open(struct layout *l, const struct iz_hf *hf,
                       const struct iz_model *m, bool import)
{
    int err = iz_hf_map_open(&l->model, hf, m);
    l->out.tensor =
        iz_take(4 * l->model.n + 3, sizeof(*l->out.tensor), "adapters");
    l->step = iz_model_adapter(m);
    for (int u = 0; u < m->n_units && !err; u++)
        err = add_unit(l, m, u);
    return err ? err : add_saved(l, m, import);
}

/* The module of a tensor, without the last `parts` of its name, as a JSON
 * string. */
static void put_module(FILE *f, const struct iz_hf_tensor *t, int parts)
{
    char module[IZ_HF_NAME];
    snprintf(module, sizeof(module), "%s", t->name + strlen(IZ_LORA_HEAD));
    while (parts--)
        *strrchr(module, '.') = '\0';
    iz_json_print(f, module);
}

/* A list of such; of what is tied the first. */
static void put_modules(FILE *f, const struct iz_hf_tensor *t, int n, int step,
                        int parts)
{
    for (int i = 0; i < n && !t[i].tied; i += step) {
        fputs(i ? ",\n    " : "\n    ", f);
        put_module(f, &t[i], parts);
    }
}

/* The modules whose adapters have another rank than most, or another alpha. */
static void put_pattern(FILE *f, const struct layout *l,
                        const struct iz_model *m, bool alpha, double most)
{
    const char *between = "\n    ";
    for (int i = 0; i < l->saved; i += l->step) {
        const struct iz_hf_tensor *a = &l->out.tensor[i];
        const struct iz_param *b = &m->unit[a->unit].param[a->param + 1];
        double n = alpha ? b->alpha : (double)b->cols;
        if (n == most)
            continue;
        fputs(between, f);
        put_module(f, a, 2);
        fprintf(f, ": %.17g", n);
        between = ",\n    ";
    }
}

static char *config_text(const struct layout *l, const struct iz_model *m,
                         const struct iz_config *c)
{
    struct iz_text text;
    FILE *f = iz_text_open(&text);
    fprintf(f,
            "{\n  \"peft_type\": \"LORA\",\n  \"task_type\": %s,\n"
            "  \"base_model_name_or_path\": ",
            m->vocab ? "\"CAUSAL_LM\"" : "null");
    if (c->import[0])
        iz_json_print(f, c->import);
    else
        fputs("null", f);
    fprintf(f,
            ",\n  \"r\": %d,\n  \"lora_alpha\": %.17g,\n"
            "  \"lora_dropout\": %.17g,\n  \"bias\": \"none\",\n"
            "  \"fan_in_fan_out\": %s,\n  \"inference_mode\": true,\n"
            "  \"init_lora_weights\": true,\n  \"ensure_weight_tying\": %s,\n"
            "  \"use_rslora\": %s,\n  \"use_dora\": %s,\n"
            "  \"rank_pattern\": {",
            c->lora.rank, c->lora.alpha, c->lora.dropout,
            l->fan_in_fan_out ? "true" : "false", l->tied ? "true" : "false",
            c->lora.use_rslora ? "true" : "false",
            c->lora.use_dora ? "true" : "false");
    put_pattern(f, l, m, false, c->lora.rank);
    fputs("},\n  \"alpha_pattern\": {", f);
    put_pattern(f, l, m, true, c->lora.alpha);
    fputs("},\n  \"target_modules\": [", f);
    put_modules(f, l->out.tensor, l->saved, l->step, 2);
    fputs("\n  ],\n  \"modules_to_save\": [", f);
    put_modules(f, l->out.tensor + l->saved, l->out.n - l->saved, 1, 1);
    fputs("]\n}\n", f);
    return iz_text_close(&text);
}

/* PEFT has all tensors of a module or none, those of modules in it too. */
static int check_modules(const struct layout *l, const struct iz_model *m)
{
    for (int i = l->saved; i < l->out.n; i++)
        for (int k = 0; k < l->model.n; k++) {
            const char *in = l->out.tensor[i].name + strlen(IZ_LORA_HEAD);
            const struct iz_hf_tensor *t = &l->model.tensor[k];
            size_t n = (size_t)(strrchr(in, '.') - in) + 1;
            if (m->unit[t->unit].param[t->param].frozen &&
                strncmp(t->name, in, n) == 0)
                return iz_text_refuse(
                    stderr,
                    "lora.export: %s is trained and %s is not: PEFT has "
                    "modules in full: export merged",
                    in, t->name);
        }
    return 0;
}

int iz_adapter_open(struct iz_hf_map *out, char **config,
                    const struct iz_hf *hf, const struct iz_model *m,
                    const struct iz_config *c)
{
    struct layout l = {0};
    bool multimodal;
    json_decref(iz_published_open(c->import, &multimodal, NULL));
    int err = multimodal
                  ? iz_text_refuse(
                        stderr,
                        "lora.export: %s is a model of text and images: "
                        "export merged, or train adapters of an export of it",
                        c->import)
                  : layout_open(&l, hf, m, false);
    *config = NULL;
    if (!err)
        err = check_modules(&l, m);
    if (!err)
        *config = config_text(&l, m, c);
    for (int i = 0; i < l.out.n; i++)
        l.out.tensor[i].tied = false; /* PEFT wants both names */
    iz_hf_map_close(&l.model);
    if (err)
        iz_hf_map_close(&l.out);
    *out = l.out;
    return err;
}

int iz_adapter_check_trained(const struct iz_model *m)
{
    for (int u = 0; u < m->n_units; u++)
        for (int i = 0; i < iz_unit_own(&m->unit[u]); i++)
            if (m->unit[u].param[i].frozen &&
                (i >= iz_unit_base(&m->unit[u]) || m->unit[u].param[i].saved))
                return iz_text_refuse(
                    stderr,
                    "run.export: %s is of an adapter, and a rule "
                    "freezes it; such adapters cannot be exported",
                    m->unit[u].param[i].name);
    return 0;
}

/* ---- import ---- */

static const struct iz_hf_name no_names[] = {{0}};
static const struct iz_hf no_hf = {.names = no_names};

/* One of a stacked weight lies as several tensors with the same a, which are
 * all there. */
static void tie_same(struct iz_hf_map *map, int n, int step)
{
    for (int i = 0; i < n; i += step)
        for (int k = 0; k < i && !map->tensor[i].tied; k += step)
            map->tensor[i].tied = map->tensor[i].needed =
                map->tensor[k].unit == map->tensor[i].unit &&
                map->tensor[k].param == map->tensor[i].param &&
                map->tensor[k].row == map->tensor[i].row;
}

int iz_adapter_read_open(struct iz_hf_reader **out, const struct iz_config *c,
                         const struct iz_hf *hf, const struct iz_model *m,
                         const char *exported, FILE *err)
{
    struct iz_hf_source from = {.key = exported ? "run.export" : "lora.import",
                                .path = exported ? exported : c->lora.import,
                                .file = IZ_LORA_FILE};
    bool fused = !exported && (c->lora.gate_up || c->lora.down);
    struct layout l = {.fused = fused ? &c->lora : NULL};
    int why = layout_open(&l, hf, m, !exported);
    *out = NULL;
    iz_hf_map_close(&l.model);
    if (why) {
        iz_hf_map_close(&l.out);
        return why;
    }
    l.out.hf = &no_hf;
    tie_same(&l.out, l.saved, l.step);
    return iz_hf_read_open_map(out, &l.out, &from, err);
}

int iz_adapter_check(const struct iz_config *c, const struct iz_hf *hf,
                     const struct iz_model *m, FILE *err)
{
    struct iz_hf_reader *r;
    int why = iz_adapter_read_open(&r, c, hf, m, NULL, err);
    iz_hf_read_close(&r);
    return why;
}

/* What this rank owns of a unit's trained or frozen parameters: those that are
 * no adapters keep their values. */
static int import_unit(struct iz_engine *e, int u, bool frozen,
                       struct iz_hf_reader *r, float *buf)
{
    struct iz_owned p = iz_owned_of(e, u, frozen);
    int err = 0;
    for (int64_t i = p.first, n; i < p.last && !err; i += n) {
        n = min64(p.last - i, IZ_HF_BUFFER);
        iz_access_get(e, u, p.array, i, buf, n);
        err = iz_hf_read(r, u, p.at + i, n, buf);
        if (!err)
            iz_access_put(e, u, p.array, i, buf, n);
    }
    return err;
}

/* Whether it has some of those. */
static bool is_imported(const struct iz_unit *u, bool frozen)
{
    bool any = false;
    for (int p = 0; p < iz_unit_own(u); p++)
        any |= u->param[p].frozen == frozen &&
               (p >= iz_unit_base(u) || u->param[p].saved);
    return any;
}

int iz_adapter_import(struct iz_engine *e, const struct iz_hf *hf)
{
    float *buf = iz_hf_take_buffer();
    struct iz_hf_reader *r;
    int err = iz_adapter_read_open(&r, e->config, hf, e->model, NULL, stderr);
    for (int u = 0; u < e->plan.n_units; u++)
        for (int frozen = 0; frozen < 2 && !err; frozen++)
            if (is_imported(&e->model->unit[u], frozen))
                err = import_unit(e, u, frozen, r, buf);
    iz_hf_read_close(&r);
    free(buf);
    return iz_train_publish(e, err);
}

/* ---- magnitudes ---- */

/* Values [from, from + n) of a part, as the units are computed with them. */
static void values_of(struct iz_engine *e, int u, struct iz_owned p,
                      int64_t from, float *out, int64_t n)
{
    if (p.array != IZ_QUANT_VALUES || !e->quant_from)
        iz_access_get(e, u, p.array, from, out, n);
    else if (e->quant_from->read(e->quant_from->arg, u, from, out, n))
        iz_die("the weights of %s cannot be read", e->model->unit[u].name);
}

/* Sums for iz_lora_norm of each output, the same on all ranks. */
static int64_t *squares_of(struct iz_engine *e, int u, const float *adapters)
{
    int64_t n = 2 * iz_lora_outputs(e->model, u);
    int64_t *sums = iz_take(n, sizeof(*sums), "norms of weights");
    float *buf = iz_hf_take_buffer();
    for (int part = 0; part < IZ_PARTS; part++) {
        struct iz_owned p = iz_owned_of(e, u, (enum iz_unit_part)part);
        for (int64_t i = p.begin, k; i < p.end; i += k) {
            k = min64(p.end - i, IZ_HF_BUFFER);
            values_of(e, u, p, i, buf, k);
            iz_lora_squares(e->model, u, (enum iz_unit_part)part, adapters, i,
                            buf, k, sums);
        }
    }
    int64_t *all = iz_agree_numbers(e->coll, sums, (int)n, "norms of weights");
    for (int64_t i = 0; i < n; i++) {
        sums[i] = 0;
        for (int r = 0; r < e->coll->size; r++)
            sums[i] += all[r * n + i];
    }
    free(all);
    free(buf);
    return sums;
}

float *iz_adapter_gather(struct iz_engine *e, int u)
{
    float *all = iz_access_gather(e, u);
    float *adapters = all + iz_lora_first(&e->model->unit[u]);
    if (e->model->adapter_dora) {
        int64_t *sums = squares_of(e, u, adapters);
        iz_lora_gains(e->model, u, adapters, sums);
        free(sums);
    }
    return all;
}

/* What this rank has of a parameter that begins at `at` of a part. */
static void put_norms(struct iz_engine *e, int u, struct iz_owned p, int64_t at,
                      int64_t n, const int64_t *sums)
{
    int64_t from = max64(at, p.first), end = min64(at + n, p.last);
    if (from >= end)
        return;
    float *norm = iz_take(end - from, sizeof(*norm), "norms of weights");
    for (int64_t i = from; i < end; i++)
        norm[i - from] = iz_lora_norm(sums + 2 * (i - at));
    iz_access_put(e, u, p.array, from, norm, end - from);
    free(norm);
}

int iz_adapter_init_magnitudes(struct iz_engine *e)
{
    for (int u = 0; u < e->plan.n_units; u++) {
        const struct iz_unit *unit = &e->model->unit[u];
        int64_t offset[IZ_UNIT_PARAMS];
        if (!unit->n_adapters)
            continue;
        int64_t *sums = squares_of(e, u, NULL), *of = sums;
        iz_unit_offsets(unit, (int64_t[IZ_PARTS]){0}, offset);
        for (int i = iz_unit_base(unit) + 2; i < iz_unit_own(unit); i += 3) {
            const struct iz_param *m = &unit->param[i];
            put_norms(e, u, iz_owned_of(e, u, iz_param_part(m)), offset[i],
                      m->cols, of);
            of += 2 * m->cols;
        }
        free(sums);
    }
    return iz_train_publish(e, 0);
}
