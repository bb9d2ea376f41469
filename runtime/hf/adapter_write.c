/* SPDX-License-Identifier: Apache-2.0 */
/* Laying out an adapter's folder; see adapter_write.h. */
#include "runtime/hf/adapter_write.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/json.h"
#include "runtime/base/text.h"
#include "runtime/config/lora.h"

#define HEAD "base_model.model."
#define TAIL ".weight"

/* The adapter's tensors, two for each of the model's that has them: a and b. */
struct layout {
    struct iz_hf_map out, model;
    bool fan_in_fan_out;
};

/* "x.weight" -> "base_model.model.x.lora_A.weight". */
static int name_matrix(struct iz_hf_tensor *out, const char *of, char matrix)
{
    if (iz_lora_name(out->name, sizeof(out->name), HEAD, of, matrix))
        return 0;
    fprintf(stderr, "izar: lora.export: %s: the name is too long\n", of);
    return -ENAMETOOLONG;
}

/* Elements of a unit's flat array before its parameter p. */
static int64_t offset_of(const struct iz_unit *u, int p)
{
    int64_t at = 0;
    for (int i = 0; i < p; i++)
        at += u->param[i].frozen ? 0 : u->param[i].rows * u->param[i].cols;
    return at;
}

/* A tensor that is cut from a stacked weight has the whole of a and its own
 * outputs of b.  -EINVAL: it has a part of the inputs. */
static int add_pair(struct layout *l, const struct iz_hf_tensor *t,
                    const struct iz_unit *u, int p)
{
    const struct iz_param *a = &u->param[p], *b = &u->param[p + 1];
    int64_t in = a->out_in ? t->cols : t->rows;
    struct iz_hf_tensor *out = &l->out.tensor[l->out.n];
    if (in != a->cols)
        return iz_refuse(stderr,
                         "lora.export: %s: published models cut its inputs; "
                         "export merged",
                         a->name);
    out[0] = (struct iz_hf_tensor){.unit = t->unit,
                                   .param = p,
                                   .offset = offset_of(u, p),
                                   .width = a->cols,
                                   .rows = a->rows,
                                   .cols = a->cols};
    out[1] = (struct iz_hf_tensor){.unit = t->unit,
                                   .param = p + 1,
                                   .offset = offset_of(u, p + 1),
                                   .width = b->cols,
                                   .row = a->out_in ? t->row : t->col,
                                   .rows = a->out_in ? t->rows : t->cols,
                                   .cols = b->cols};
    l->fan_in_fan_out = t->transposed == a->out_in;
    l->out.n += 2;
    int err = name_matrix(&out[0], t->name, 'A');
    return err ? err : name_matrix(&out[1], t->name, 'B');
}

static int add_pairs(struct layout *l, const struct iz_model *m)
{
    int err = 0;
    l->out.tensor = calloc(2 * (size_t)l->model.n + 2, sizeof(*l->out.tensor));
    if (!l->out.tensor)
        return -ENOMEM;
    for (int u = 0; u < m->n_units; u++)
        for (int p = iz_unit_base(&m->unit[u]); p < m->unit[u].n_params; p += 2)
            for (int i = 0; i < l->model.n && !err; i++) {
                const struct iz_hf_tensor *t = &l->model.tensor[i];
                if (t->unit == u && t->param == m->unit[u].param[p].adapts &&
                    !t->tied)
                    err = add_pair(l, t, &m->unit[u], p);
            }
    return err;
}

/* Nothing else may be trained: it would not be in the file. */
static int check_trained(const struct iz_model *m)
{
    for (int u = 0; u < m->n_units; u++)
        for (int i = 0; i < iz_unit_base(&m->unit[u]); i++) {
            if (m->unit[u].param[i].frozen)
                continue;
            return iz_refuse(
                stderr,
                "lora.export: %s is trained, too, and would not be "
                "in the adapter: export merged",
                m->unit[u].param[i].name);
        }
    return 0;
}

/* The module of an adapter's matrix a, as a JSON string. */
static void put_module(FILE *f, const struct iz_hf_tensor *a)
{
    char module[IZ_HF_NAME];
    size_t n = strlen(a->name) - strlen(HEAD) - strlen(".lora_A" TAIL);

    snprintf(module, sizeof(module), "%.*s", (int)n, a->name + strlen(HEAD));
    iz_json_print(f, module);
}

static char *config_text(const struct layout *l, const struct iz_model *m,
                         const struct iz_config *c)
{
    struct iz_text text;
    FILE *f = iz_text_open(&text);
    if (!f)
        return NULL;
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
            "  \"lora_dropout\": 0.0,\n  \"bias\": \"none\",\n"
            "  \"fan_in_fan_out\": %s,\n  \"inference_mode\": true,\n"
            "  \"init_lora_weights\": true,\n  \"modules_to_save\": null,\n"
            "  \"target_modules\": [",
            c->lora.rank, c->lora.alpha, l->fan_in_fan_out ? "true" : "false");
    for (int i = 0; i < l->out.n; i += 2) {
        fputs(i ? ",\n    " : "\n    ", f);
        put_module(f, &l->out.tensor[i]);
    }
    fputs("\n  ]\n}\n", f);
    return iz_text_close(&text);
}

int iz_lora_map_open(struct iz_hf_map *out, char **config,
                     const struct iz_hf *hf, const struct iz_model *m,
                     const struct iz_config *c)
{
    struct layout l = {0};
    int err = iz_hf_map_open(&l.model, hf, m);
    *config = NULL;
    if (!err)
        err = add_pairs(&l, m);
    if (!err)
        err = check_trained(m);
    if (!err && !(*config = config_text(&l, m, c)))
        err = -ENOMEM;
    iz_hf_map_close(&l.model);
    if (err)
        iz_hf_map_close(&l.out);
    *out = l.out;
    return err;
}
