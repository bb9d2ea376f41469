/* SPDX-License-Identifier: Apache-2.0 */
/* Laying out and writing an adapter's folder; see adapter_write.h.  The first
 * rank writes it alone, unit by unit, because adapters are small. */
#include "runtime/hf/adapter_write.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "codelets/base/die.h"
#include "runtime/base/json.h"
#include "runtime/comm/agree.h"
#include "runtime/config/lora.h"
#include "runtime/engine/access.h"
#include "runtime/hf/folder.h"
#include "runtime/hf/map.h"
#include "runtime/hf/write.h"

#define CONFIG "adapter_config.json"
#define TENSORS "adapter_model.safetensors"
#define PATH (IZ_PATH_MAX + 64)
#define ALIGN 64 /* bytes: where the data of a file begin */

float *iz_lora_gather(struct iz_engine *e, int unit)
{
    const struct iz_plan_group *p = e->group[unit].plan;
    int64_t base = p->shard * e->plan.rank;
    float *all = malloc((size_t)p->padded * sizeof *all + 1);

    if (!all)
        iz_die("export: no memory for the adapters of %s",
               e->model->unit[unit].name);
    iz_homes_get(e, unit, IZ_MASTER, e->plan.states_full ? base : 0, all + base,
                 p->shard);
    if (e->plan.ranks > 1)
        iz_coll_all_gather(e->coll, all, p->shard * (int64_t)sizeof *all,
                           "adapters");
    return all;
}

/* ---- what is written ---- */

/* One tensor of the file: rows of a matrix of an adapter. */
struct entry {
    char module[IZ_HF_NAME];
    int unit, param; /* that of the matrix */
    bool is_b;
    int64_t row, rows, cols;
};

struct layout {
    struct entry *entry;
    int n;
    bool fan_in_fan_out;
};

static void module_of(char out[IZ_HF_NAME], const char *tensor)
{
    static const char tail[] = ".weight";
    int n = (int)strlen(tensor), cut = (int)sizeof tail - 1;

    if (n > cut && strcmp(tensor + n - cut, tail) == 0)
        n -= cut;
    snprintf(out, IZ_HF_NAME, "%.*s", n, tensor);
}

/* A tensor that is cut from a stacked weight has the whole of a and its own
 * outputs of b; false: it has a part of the inputs. */
static bool add_tensor(struct layout *l, const struct iz_hf_tensor *t,
                       const struct iz_param *a, int param)
{
    bool out_in = a->out_in;
    int64_t in = out_in ? t->cols : t->rows;
    struct entry *e = &l->entry[l->n];

    if (in != a->cols)
        return false;
    e[0] = (struct entry){
        .unit = t->unit, .param = param, .rows = a->rows, .cols = a->cols};
    module_of(e[0].module, t->name);
    e[1] = e[0];
    e[1].is_b = true;
    e[1].param = param + 1;
    e[1].row = out_in ? t->row : t->col;
    e[1].rows = out_in ? t->rows : t->cols;
    e[1].cols = a->rows;
    l->fan_in_fan_out = t->transposed == out_in;
    l->n += 2;
    return true;
}

static int refuse_part(const struct iz_param *a)
{
    fprintf(stderr,
            "izar: lora.export: %s: published models cut its inputs; export "
            "merged\n",
            a->name);
    return -EINVAL;
}

/* 0, -ENOMEM or -EINVAL with the reason printed. */
static int layout_open(struct layout *l, const struct iz_hf *hf,
                       const struct iz_model *m)
{
    struct iz_hf_map map;
    int err = iz_hf_map_open(&map, hf, m);

    *l = (struct layout){0};
    if (err)
        return err;
    l->entry = calloc(2 * (size_t)map.n + 2, sizeof *l->entry);
    err = l->entry ? 0 : -ENOMEM;
    for (int u = 0; u < m->n_units && !err; u++) {
        const struct iz_unit *unit = &m->unit[u];

        for (int p = iz_unit_base(unit); p < unit->n_params; p += 2)
            for (int i = 0; i < map.n && !err; i++) {
                const struct iz_hf_tensor *t = &map.tensor[i];

                if (t->unit == u && t->param == unit->param[p].adapts &&
                    !t->tied && !add_tensor(l, t, &unit->param[p], p))
                    err = refuse_part(&unit->param[p]);
            }
    }
    iz_hf_map_close(&map);
    return err;
}

int iz_lora_export_check(const struct iz_hf *hf, const struct iz_model *m)
{
    struct layout l;
    int err = layout_open(&l, hf, m);

    free(l.entry);
    for (int u = 0; u < m->n_units && !err; u++)
        for (int i = 0; i < iz_unit_base(&m->unit[u]); i++) {
            if (m->unit[u].param[i].frozen)
                continue;
            fprintf(stderr,
                    "izar: lora.export: %s is trained, too, and would not be "
                    "in the adapter: export merged\n",
                    m->unit[u].param[i].name);
            return -EINVAL;
        }
    return err;
}

/* ---- the files ---- */

struct writer {
    const struct iz_engine *e;
    struct layout l;
    enum iz_dtype type;
    char path[PATH], tmp[PATH + 8];
    FILE *file;
    int err;
};

static int refuse(const char *path, const char *what)
{
    int why = errno ? errno : EIO;

    fprintf(stderr, "izar: export: %s: %s: %s\n", path, what, strerror(why));
    return -why;
}

static void open_file(struct writer *w, const char *name)
{
    char path[PATH + 64];

    snprintf(path, sizeof path, "%s/%s", w->tmp, name);
    w->file = fopen(path, "wb");
    if (!w->file)
        w->err = refuse(path, "cannot create");
}

static void close_file(struct writer *w, const char *name)
{
    bool bad;

    if (!w->file)
        return;
    errno = 0;
    bad = fflush(w->file) != 0 || fsync(fileno(w->file)) != 0;
    bad |= ferror(w->file) != 0;
    bad |= fclose(w->file) != 0;
    w->file = NULL;
    if (bad && !w->err)
        w->err = refuse(name, "cannot write");
}

static void put_config(const struct writer *w)
{
    const struct iz_config *c = w->e->config;
    FILE *f = w->file;

    fputs("{\n  \"peft_type\": \"LORA\",\n  \"task_type\": ", f);
    fputs(w->e->model->vocab ? "\"CAUSAL_LM\"" : "null", f);
    fputs(",\n  \"base_model_name_or_path\": ", f);
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
            c->lora.rank, c->lora.alpha,
            w->l.fan_in_fan_out ? "true" : "false");
    for (int i = 0; i < w->l.n; i += 2) {
        fputs(i ? ",\n    " : "\n    ", f);
        iz_json_print(f, w->l.entry[i].module);
    }
    fputs("\n  ]\n}\n", f);
}

static void put_entry(FILE *f, const struct writer *w, const struct entry *e,
                      int64_t at)
{
    int64_t bytes = e->rows * e->cols * iz_dtype_bytes(w->type);

    fprintf(f,
            ",\"base_model.model.%s.lora_%c.weight\":{\"dtype\":\"%s\","
            "\"shape\":[%" PRId64 ",%" PRId64 "],\"data_offsets\":[%" PRId64
            ",%" PRId64 "]}",
            e->module, e->is_b ? 'B' : 'A', iz_hf_dtype_text(w->type), e->rows,
            e->cols, at, at + bytes);
}

static void put_header(struct writer *w)
{
    char *text = NULL;
    size_t bytes = 0;
    uint64_t length;
    int64_t at = 0;
    FILE *f = open_memstream(&text, &bytes);

    if (!f) {
        w->err = -ENOMEM;
        return;
    }
    fputs("{\"__metadata__\":{\"format\":\"pt\"}", f);
    for (int i = 0; i < w->l.n; i++) {
        const struct entry *e = &w->l.entry[i];

        put_entry(f, w, e, at);
        at += e->rows * e->cols * iz_dtype_bytes(w->type);
    }
    fputc('}', f);
    while ((ftello(f) + (int64_t)sizeof length) % ALIGN)
        fputc(' ', f);
    if (ferror(f) | (fclose(f) != 0))
        w->err = -ENOMEM;
    length = bytes;
    fwrite(&length, sizeof length, 1, w->file);
    fwrite(text, 1, bytes, w->file);
    free(text);
}

/* The entries of a unit, from its trained parameters. */
static void put_unit(struct writer *w, int unit, const float *trained)
{
    const struct iz_unit *u = &w->e->model->unit[unit];
    const int64_t *offset = w->e->group[unit].offset;

    for (int i = 0; i < w->l.n && !w->err; i++) {
        const struct entry *e = &w->l.entry[i];
        int64_t n = e->rows * e->cols, size = iz_dtype_bytes(w->type);
        void *cast;

        if (e->unit != unit)
            continue;
        cast = malloc((size_t)(n * size) + 1);
        if (!cast) {
            w->err = -ENOMEM;
            return;
        }
        iz_cast(cast, w->type,
                trained + offset[e->param] + e->row * u->param[e->param].cols,
                IZ_F32, n);
        fwrite(cast, (size_t)size, (size_t)n, w->file);
        free(cast);
    }
}

static void begin(struct writer *w)
{
    char old[PATH + 64];

    w->err = iz_hf_write_check(w->path);
    if (w->err)
        return;
    /* What a crash left. */
    snprintf(old, sizeof old, "%s/" CONFIG, w->tmp);
    unlink(old);
    snprintf(old, sizeof old, "%s/" TENSORS, w->tmp);
    unlink(old);
    rmdir(w->tmp);
    if (mkdir(w->tmp, 0777) != 0) {
        w->err = refuse(w->tmp, "cannot make");
        return;
    }
    open_file(w, CONFIG);
    if (!w->err)
        put_config(w);
    close_file(w, CONFIG);
    if (!w->err)
        open_file(w, TENSORS);
    if (!w->err)
        put_header(w);
}

static void end(struct writer *w)
{
    close_file(w, TENSORS);
    if (!w->err && rename(w->tmp, w->path) != 0)
        w->err = refuse(w->path, "cannot rename to it");
}

int iz_lora_export(struct iz_engine *e, const struct iz_section *section)
{
    const struct iz_run_config *c = &e->config->run;
    struct writer w = {.e = e,
                       .type = c->export_dtype
                                   ? (enum iz_dtype)(c->export_dtype - 1)
                                   : e->config->dtype};
    bool first = e->coll->rank == 0;
    size_t n;

    snprintf(w.path, sizeof w.path, "%s", c->export);
    for (n = strlen(w.path); n > 1 && w.path[n - 1] == '/'; n--)
        w.path[n - 1] = '\0';
    snprintf(w.tmp, sizeof w.tmp, "%s.tmp", w.path);
    w.err = layout_open(&w.l, section->hf, e->model);
    if (first && !w.err)
        begin(&w);
    for (int u = 0; u < e->plan.n_groups; u++) {
        float *trained;

        if (!e->model->unit[u].n_adapters)
            continue;
        trained = iz_lora_gather(e, u);
        if (first && !w.err)
            put_unit(&w, u, trained);
        free(trained);
    }
    if (first)
        end(&w);
    free(w.l.entry);
    return iz_ckpt_agree(e->coll, w.err);
}
