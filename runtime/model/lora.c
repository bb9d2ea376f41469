/* SPDX-License-Identifier: Apache-2.0 */
/* Adapters as parameters of their units; see lora.h. */
#define _DEFAULT_SOURCE /* strsep */

#include "runtime/model/lora.h"

#include <errno.h>
#include <fnmatch.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "codelets/base/mix.h"
#include "codelets/base/take.h"
#include "codelets/unit/unit.h"
#include "runtime/base/json.h"
#include "runtime/base/text.h"
#include "runtime/formats/map.h"
#include "runtime/formats/peft.h"
#include "runtime/formats/st.h"
#include "runtime/model/rules.h"

/* ---- making them ---- */

/* Of a key of the config: names, with numbers in a map. */
struct patterns {
    const char *key;
    json_t *of, *found;
    bool regular; /* as in a file of PEFT */
};

/* Names with commas between. */
static json_t *split(const char *text)
{
    json_t *of = json_object();
    char copy[IZ_PATH_MAX], *rest = copy, *part;
    snprintf(copy, sizeof(copy), "%s", text);
    while ((part = strsep(&rest, ","))) {
        part += strspn(part, " ");
        part[strcspn(part, " ")] = '\0';
        if (*part)
            json_object_set_new(of, part, json_true());
    }
    return of;
}

/* As PEFT has it: "q_proj" is every module of this name. */
static bool ends_module(const char *end, const char *name)
{
    size_t n = strlen(name), k = strlen(end), tail = strlen(".weight");
    if (n < k + tail || strcmp(name + n - tail, ".weight") != 0)
        return false;
    name += n - tail - k;
    return strncmp(name, end, k) == 0 && (n == k + tail || name[-1] == '.');
}

/* What the first pattern that matches has; NULL: none does. */
static const json_t *match(struct patterns *p, const char *name)
{
    const json_t *first = NULL;
    const char *text;
    json_t *v;
    json_object_foreach(p->of, text, v)
    {
        if (p->regular ? !iz_peft_matches(text, name)
                       : fnmatch(text, name, 0) && !ends_module(text, name))
            continue;
        json_object_set_new(p->found, text, json_true());
        first = first ? first : v;
    }
    return first;
}

static double number_of(struct patterns *p, const char *name, double otherwise)
{
    const json_t *v = match(p, name);
    return v ? json_number_value(v) : otherwise;
}

bool iz_lora_name(char *out, size_t size, const char *head, const char *of,
                  char matrix)
{
    static const char tail[] = ".weight";
    int n = (int)strlen(of), cut = (int)sizeof(tail) - 1;
    if (n > cut && strcmp(of + n - cut, tail) == 0)
        n -= cut;
    int k = matrix == 'M' ? snprintf(out, size, "%s%.*s.lora_magnitude_vector",
                                     head, n, of)
                          : snprintf(out, size, "%s%.*s.lora_%c%s", head, n, of,
                                     matrix, tail);
    return k < (int)size;
}

/* What an adapter adds to: all outputs of a weight, or those of the tensor that
 * is a part of it in published models; of experts, of each one. */
struct aim {
    const char *name;
    int target;
    bool out_in;
    int64_t first, outputs;
    int64_t experts; /* 1: it is a weight of none */
    int rank;
    double alpha;
    bool dora;
};

/* a is normal with the variance of PEFT's uniform one, 1 / (3 in); b is zero,
 * so that the first step is that of the model without. */
static int add_adapter(struct iz_unit *u, const struct aim *aim)
{
    int rank = aim->rank;
    const struct iz_param w = u->param[aim->target];
    int64_t in = aim->out_in ? w.cols : w.rows;
    struct iz_param *a = &u->param[u->n_params], *b = a + 1;
    *a = (struct iz_param){.rows = aim->experts * rank,
                           .cols = in,
                           .init = IZ_INIT_NORMAL,
                           .std = (float)sqrt(1 / (3.0 * (double)in)),
                           .adapts = aim->target,
                           .out_in = aim->out_in};
    *b = (struct iz_param){.rows = aim->experts * aim->outputs,
                           .cols = rank,
                           .init = IZ_INIT_ZERO,
                           .adapts = aim->target,
                           .out_in = aim->out_in,
                           .first = aim->first,
                           .alpha = aim->alpha};
    u->n_params += 2;
    u->n_adapters += 2;
    bool named = iz_lora_name(a->name, sizeof(a->name), "", aim->name, 'A') &&
                 iz_lora_name(b->name, sizeof(b->name), "", aim->name, 'B');
    if (aim->dora) { /* which norms of weights are to be */
        b[1] = (struct iz_param){.rows = 1,
                                 .cols = b->rows,
                                 .init = IZ_INIT_ONE,
                                 .adapts = aim->target,
                                 .out_in = aim->out_in};
        named &= iz_lora_name(b[1].name, sizeof(b[1].name), "", aim->name, 'M');
        u->n_params++;
        u->n_adapters++;
    }
    return named ? 0 : -ENAMETOOLONG;
}

/* The tensors of a weight in published models, from *first on; their number. */
static int tensors_of(const struct iz_hf_map *map, int unit, int param,
                      int *first)
{
    int i = 0, n = 0;
    while (i < map->n && (map->tensor[i].unit != unit ||
                          map->tensor[i].param != param || map->tensor[i].tied))
        i++;
    *first = i;
    while (i + n < map->n && map->tensor[i + n].unit == unit &&
           map->tensor[i + n].param == param && !map->tensor[i + n].tied)
        n++;
    return n;
}

/* The tensor is that of the first expert. */
static struct aim part_of(const struct iz_hf_map *map, int tensor,
                          const struct aim *whole)
{
    const struct iz_hf_tensor *t = &map->tensor[tensor];
    struct aim part = *whole;
    part.name = iz_hf_bare(map, t->name);
    part.first = whole->out_in ? t->row : t->col;
    part.outputs = whole->out_in ? t->rows : t->cols;
    return part;
}

bool iz_lora_fused(const struct iz_lora_config *l, const char *weight,
                   int *stem)
{
    const struct {
        const char *tail;
        bool has;
    } which[] = {{".experts.gate_up_proj.weight", l->gate_up},
                 {".experts.down_proj.weight", l->down}};
    int n = (int)strlen(weight);
    for (int i = 0; i < 2; i++) {
        int k = n - (int)strlen(which[i].tail);
        *stem = k + (int)strlen(".experts");
        if (k > 0 && strcmp(weight + k, which[i].tail) == 0)
            return which[i].has;
    }
    *stem = 0;
    return false;
}

/* Where adapters are wanted: by patterns, by a file that has them, or by what
 * parameters there are. */
struct wish {
    struct patterns targets, ranks, alphas, saved;
    const struct iz_st *import;         /* or NULL */
    const struct iz_st *file;           /* the same, or NULL, and: */
    const struct iz_lora_config *fused; /* of the file, whose experts are one
                                           tensor; NULL: they are not */
    iz_lora_find *find;
    const void *arg;
    struct iz_hf_map map;
    int rank;
    double alpha;
    bool ties; /* as the import says */
    FILE *err; /* NULL: nothing is told */
};

/* Not of one by a file. */
static bool is_wanted(struct wish *w, const char *name)
{
    char b[IZ_HF_NAME];
    struct aim any;
    if (!w->find)
        return match(&w->targets, name) != NULL;
    return iz_lora_name(b, sizeof(b), "", name, 'B') &&
           w->find(w->arg, b, &any.rank, &any.alpha);
}

/* Of what is tensor `first` in published models, or begins with it; there are n
 * of them. */
static int add_wanted(struct wish *w, struct iz_unit *u, struct aim *aim,
                      int first, int n)
{
    char b[IZ_HF_NAME];
    const char *name =
        w->ranks.regular && n ? w->map.tensor[first].name : aim->name;
    if (w->find && iz_lora_name(b, sizeof(b), "", aim->name, 'B') &&
        w->find(w->arg, b, &aim->rank, &aim->alpha))
        return add_adapter(u, aim);
    aim->rank = (int)number_of(&w->ranks, name, w->rank);
    aim->alpha = number_of(&w->alphas, name, w->alpha);
    return add_adapter(u, aim);
}

/* The matrix a of a published tensor; NULL: the file has none. */
static const struct iz_st_tensor *in_file(const struct wish *w, int tensor)
{
    char name[IZ_HF_NAME];
    const char *of = w->map.tensor[tensor].name;
    return iz_lora_name(name, sizeof(name), IZ_LORA_HEAD, of, 'A')
               ? iz_st_find(w->file, name)
               : NULL;
}

/* Whether one adapter of the whole weight is the same: all parts have one, with
 * equal a and alpha. */
static bool alike(struct wish *w, int first, int n)
{
    const struct iz_hf_tensor *t = w->map.tensor;
    const struct iz_st_tensor *a = n ? in_file(w, first) : NULL, *b = a;
    for (int i = 1; i < n && b; i++) {
        b = in_file(w, first + i);
        if (b && (b->bytes != a->bytes ||
                  memcmp(a->data, b->data, (size_t)a->bytes) != 0 ||
                  number_of(&w->alphas, t[first].name, w->alpha) !=
                      number_of(&w->alphas, t[first + i].name, w->alpha)))
            b = NULL;
    }
    return b != NULL;
}

/* The same of each expert. */
static bool all_alike(struct wish *w, int first, int n, int experts)
{
    bool all = n > 0;
    for (int i = 0; i < experts && all; i++)
        all = alike(w, first + i * (n / experts), n / experts);
    return all;
}

static bool is_part(struct wish *w, int tensor)
{
    return w->file
               ? in_file(w, tensor) != NULL
               : is_wanted(w, iz_hf_bare(&w->map, w->map.tensor[tensor].name));
}

/* Of how many experts a part is wanted, which lies as tensor `at` of the first
 * one and every `step` tensors behind it.  What a run has, it has for all. */
static int experts_with(struct wish *w, int at, int step, int experts)
{
    int n = 0;
    if (w->find)
        return is_part(w, at) ? experts : 0;
    for (int i = 0; i < experts; i++)
        n += is_part(w, at + i * step);
    return n;
}

static int add_to_weight(struct wish *w, struct iz_model *m, int unit, int i,
                         const struct iz_adapter *seen)
{
    struct iz_unit *u = &m->unit[unit];
    int experts = seen->experts ? (int)seen->experts : 1;
    int64_t outputs = seen->out_in ? u->param[i].rows : u->param[i].cols;
    struct aim whole = {.name = u->param[i].name,
                        .target = i,
                        .out_in = seen->out_in,
                        .outputs = outputs / experts,
                        .dora = m->adapter_dora,
                        .experts = experts};
    int first, n = tensors_of(&w->map, unit, i, &first), err = 0;
    int parts = n / experts, stem;
    if (n && n < experts) { /* all of them are one tensor */
        bool wanted = w->file ? w->fused != NULL
                              : is_wanted(w, whole.name) || is_part(w, first);
        return wanted ? iz_text_refuse(
                            w->err,
                            "lora.%s: %s: its experts are published as one "
                            "tensor, of which adapters are not built",
                            w->file ? "import" : "targets", whole.name)
                      : 0;
    }
    if (w->fused && seen->experts) {
        bool has = iz_lora_fused(w->fused, whole.name, &stem);
        if (!stem)
            return iz_text_refuse(
                w->err, "lora.import: its adapters of experts are of one "
                        "tensor: model.experts_per_unit must be 0");
        return has ? add_wanted(w, u, &whole, first, n) : 0;
    }
    if (w->file ? all_alike(w, first, n, experts)
                : is_wanted(w, u->param[i].name))
        return add_wanted(w, u, &whole, first, n);
    for (int k = first; k < first + parts && !err; k++) {
        int with = experts_with(w, k, parts, experts);
        struct aim part = part_of(&w->map, k, &whole);
        if (with == experts)
            err = add_wanted(w, u, &part, k, 1);
        else if (with)
            err = iz_text_refuse(
                w->err,
                "lora.%s: adapters of %d of the %d experts of %s; "
                "they must be of all or of none",
                w->file ? "import" : "targets", with, experts, part.name);
    }
    return err;
}

static bool has_adapter(const struct iz_unit *u, int param)
{
    bool any = false;
    for (int i = iz_unit_base(u); i < iz_unit_own(u); i++)
        any |= u->param[i].adapts == param;
    return any;
}

static int add_adapters(struct iz_model *m, int unit, struct wish *w)
{
    struct iz_unit *u = &m->unit[unit];
    int n = u->n_params, most = n, err = 0;
    for (int i = 0; i < w->map.n; i++)
        most += w->map.tensor[i].unit == unit;
    struct iz_adapter *probe = iz_take(n, sizeof(*probe), "adapters");
    u->param = iz_take_longer(u->param, n + 3 * most + 1, sizeof(*u->param),
                              "parameters");
    iz_unit_probe(m, unit, probe);
    for (int i = 0; i < n && !err; i++)
        if (probe[i].seen)
            err = add_to_weight(w, m, unit, i, &probe[i]);
    for (int i = 0; i < n && !err; i++)
        if (probe[i].experts && has_adapter(u, i) &&
            (m->adapter_dropout > 0 || m->adapter_dora))
            err = iz_text_refuse(w->err,
                                 "lora.%s: %g, but adapters of experts, such "
                                 "as those of %s, have none, as in PEFT",
                                 m->adapter_dora ? "use_dora" : "dropout",
                                 m->adapter_dora ? 1 : m->adapter_dropout,
                                 u->param[i].name);
    free(probe);
    return err;
}

/* Whether the tensor is meant by its name, or by that of a module it is in. */
static bool is_saved(struct wish *w, const char *name)
{
    char module[2 * IZ_HF_NAME];
    bool any = match(&w->saved, name) != NULL;
    for (int n = (int)strlen(name); n > 0 && !any; n--)
        if (name[n] == '.') {
            snprintf(module, sizeof(module), "%.*s.weight", n, name);
            any = match(&w->saved, module) != NULL;
        }
    return any;
}

static bool is_tied(const struct iz_model *m, int unit, int param)
{
    bool any = false;
    for (int u = 0; u < m->n_units; u++)
        any |= m->unit[u].tied_unit == unit && m->unit[u].tied_param == param;
    return any;
}

/* What is trained in full beside the adapters: what patterns match, or what an
 * import has. */
static int mark_saved(struct wish *w, struct iz_model *m, int unit, int i)
{
    struct iz_param *p = &m->unit[unit].param[i];
    int first, n = tensors_of(&w->map, unit, i, &first), with = 0;
    char name[2 * IZ_HF_NAME];
    for (int k = first; k < first + n; k++) {
        const char *of = w->map.tensor[k].name;
        snprintf(name, sizeof(name), IZ_LORA_HEAD "%s", of);
        with += w->import ? iz_st_find(w->import, name) != NULL
                          : is_saved(w, iz_hf_bare(&w->map, of));
    }
    p->saved = (n && with == n) || (!w->import && is_saved(w, p->name));
    const char *why =
        with && !p->saved
            ? "a part of it is to be trained in full, and others not"
        : p->saved && has_adapter(&m->unit[unit], i) ? "it has an adapter, too"
        : p->saved && w->import && !w->ties && is_tied(m, unit, i)
            ? "it is tied, and ensure_weight_tying is not true"
            : NULL;
    return why ? iz_text_refuse(w->err, "%s: %s: %s",
                                w->import ? "lora.import" : w->saved.key,
                                p->name, why)
               : 0;
}

/* Tells all patterns of a key that match none. */
static int check_found(const struct iz_model *m, const struct patterns *p,
                       FILE *err)
{
    const char *text;
    json_t *v;
    int status = 0;
    json_object_foreach(p->of, text, v)
    {
        double n = json_number_value(v);
        const char *what = strstr(p->key, "save") ? "tensor"
                           : strstr(p->key, "pattern")
                               ? "weight with an adapter"
                               : "weight of a linear layer";
        if (!p->regular && !json_object_get(p->found, text))
            status = iz_rules_none(m, p->key, text, what, err);
        else if (strcmp(p->key, "lora.rank_pattern") == 0 && n != floor(n))
            status =
                iz_text_refuse(err, "%s: %s: %g is no rank", p->key, text, n);
    }
    return status;
}

static int lora_apply(struct iz_model *m, struct wish *w, FILE *err)
{
    int status = 0;
    w->err = err;
    for (int u = 0; u < m->n_units && !status; u++) {
        status = add_adapters(m, u, w);
        if (status == -ENAMETOOLONG)
            iz_text_refuse(err,
                           "lora.targets: adapters of %s: a name becomes too "
                           "long",
                           m->unit[u].name);
    }
    for (int u = 0; u < m->n_units; u++)
        for (int i = 0; i < iz_unit_base(&m->unit[u]) && !status; i++)
            status = mark_saved(w, m, u, i);
    struct patterns *all[] = {&w->targets, &w->ranks, &w->alphas, &w->saved};
    for (int i = 0; i < 4; i++) {
        if (!status)
            status = check_found(m, all[i], err);
        json_decref(all[i]->of);
        json_decref(all[i]->found);
    }
    return status;
}

/* The patterns of a config, or where it has an import of that. */
static int read_patterns(struct wish *w, const struct iz_lora_config *l,
                         FILE *err)
{
    char path[IZ_PATH_MAX + 64];
    bool regular = l->import[0];
    json_t *root = NULL;
    snprintf(path, sizeof(path), "%s/" IZ_PEFT_CONFIG, l->import);
    if (regular && !(root = iz_json_read(path, err)))
        return -EINVAL;
    w->targets = (struct patterns){"lora.targets", split(l->targets),
                                   json_object(), false};
    w->saved =
        (struct patterns){"lora.modules_to_save", split(l->modules_to_save),
                          json_object(), false};
    struct {
        struct patterns *to;
        const char *key, *text;
    } map[] = {{&w->ranks, "lora.rank_pattern", l->rank_pattern},
               {&w->alphas, "lora.alpha_pattern", l->alpha_pattern}};
    for (int i = 0; i < 2; i++) {
        json_t *of = regular ? json_incref(json_object_get(
                                   root, map[i].key + strlen("lora.")))
                             : json_loads(map[i].text, 0, NULL);
        *map[i].to = (struct patterns){map[i].key, of, json_object(), regular};
    }
    json_decref(root);
    return 0;
}

int iz_lora_apply(struct iz_model *m, const struct iz_config *c,
                  const struct iz_hf *hf, FILE *err)
{
    const struct iz_lora_config *l = &c->lora;
    bool from_file = l->import[0] && !l->targets[strspn(l->targets, " ,")];
    char path[IZ_PATH_MAX + 64];
    struct wish w = {.rank = l->rank, .alpha = l->alpha, .ties = l->ties};
    struct iz_st file = {.fd = -1};
    if (l->rank == 0)
        return 0;
    if (l->import[0] && !hf)
        return iz_text_refuse(err,
                              "lora.import: this model has no names for it");
    snprintf(path, sizeof(path), "%s/" IZ_LORA_FILE, l->import);
    m->adapter_root = l->use_rslora;
    m->adapter_dora = l->use_dora;
    m->adapter_dropout = l->dropout;
    m->dropout_key = iz_mix_text(iz_mix(c->run.seed), "dropout");
    int status = hf ? iz_hf_map_open(&w.map, hf, m) : 0;
    if (!status)
        status = read_patterns(&w, l, err);
    if (!status && l->import[0]) {
        status = iz_st_open(&file, "lora.import: ", path, err);
        if (!status)
            status = iz_st_map(&file);
        w.import = &file;
        w.file = from_file ? &file : NULL;
        w.fused = from_file && (l->gate_up || l->down) ? l : NULL;
    }
    if (!status)
        status = lora_apply(m, &w, err);
    iz_st_close(&file);
    iz_hf_map_close(&w.map);
    return status;
}

int iz_lora_restore(struct iz_model *m, const struct iz_hf *hf,
                    iz_lora_find *find, const void *arg)
{
    struct wish w = {.find = find, .arg = arg};
    int status = iz_hf_map_open(&w.map, hf, m);
    if (!status)
        status = lora_apply(m, &w, stderr);
    iz_hf_map_close(&w.map);
    return status;
}
