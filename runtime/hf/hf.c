/* SPDX-License-Identifier: Apache-2.0 */
/* Engine and published checkpoints; see hf.h. */
#include "runtime/hf/hf.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "codelets/base/int64.h"
#include "runtime/base/progress.h"
#include "runtime/base/text.h"
#include "runtime/engine/access.h"
#include "runtime/engine/param_quant.h"
#include "runtime/formats/imported.h"
#include "runtime/formats/peft.h"
#include "runtime/formats/published.h"
#include "runtime/hf/adapter.h"
#include "runtime/hf/proof.h"
#include "runtime/hf/tensors.h"
#include "runtime/model/lora.h"
#include "runtime/step/train.h"

#define IMPORT "model.import"

/* ---- import ---- */

/* What this rank owns of a unit's trained or frozen parameters. */
static int import_part(struct iz_engine *e, int u, bool frozen,
                       struct iz_hf_reader *r, float *buf,
                       struct iz_progress *progress)
{
    struct iz_owned p = iz_owned_of(e, u, frozen);
    int err = 0;
    for (int64_t i = p.first, n; i < p.last && !err; i += n) {
        n = min64(p.last - i, IZ_HF_BUFFER);
        memset(buf, 0, (size_t)n * sizeof(*buf)); /* adapters are not there */
        err = iz_hf_read(r, u, p.at + i, n, buf);
        if (!err)
            iz_access_put(e, u, p.array, i, buf, n);
        iz_progress_add(progress, 4 * n);
    }
    return err;
}

struct values {
    struct iz_engine *e;
    struct iz_hf_reader *r;
};

static int import_values(void *arg, int unit, int64_t from, float *out,
                         int64_t n)
{
    const struct values *v = arg;
    int64_t at = iz_owned_of(v->e, unit, IZ_PART_QUANT).at;
    return iz_hf_read(v->r, unit, at + from, n, out);
}

static bool import_group(void *arg, int unit, const struct iz_quant_matrix *m,
                         int64_t g, void *out)
{
    const struct values *v = arg;
    return iz_hf_read_nf4(v->r, unit, m, g, out);
}

/* All ranks: what is quantised may have scales that they make together. */
static int import_quant(struct iz_engine *e, struct iz_hf_reader *r)
{
    struct values v = {e, r};
    struct iz_quant_source from = {import_values, import_group, &v};
    int err = 0;
    for (int u = 0; u < e->plan.n_units && !err; u++)
        err = iz_param_quant_fill(e, u, &from);
    return err;
}

static int import_units(struct iz_engine *e, struct iz_hf_reader *r)
{
    float *buf = iz_hf_take_buffer();
    int err = 0;
    struct iz_progress progress;
    int64_t owned = 0;
    for (int u = 0; u < e->plan.n_units; u++)
        owned += e->unit[u].plan->owned + e->unit[u].plan->frozen.owned;
    iz_progress_begin(&progress, "importing", 4 * owned);
    for (int u = 0; u < e->plan.n_units; u++)
        for (int frozen = 0; frozen < 2 && !err; frozen++)
            err = import_part(e, u, frozen, r, buf, &progress);
    iz_progress_end(&progress);
    free(buf);
    return err;
}

int iz_hf_import(struct iz_engine *e, const struct iz_section *section)
{
    struct iz_hf_reader *r = NULL;
    const char *path = e->config->import;
    bool first = e->coll->rank == 0;
    int err = 0;
    /* What all ranks would find alike is told by the first one. */
    if (first)
        err = iz_hf_read_open(&r, section->hf, e->model, IMPORT, path, stderr);
    err = iz_agree(e->coll, err);
    if (!err && !first)
        err = iz_hf_read_open(&r, section->hf, e->model, IMPORT, path, stderr);
    err = iz_agree(e->coll, err);
    if (!err)
        err = iz_agree(e->coll, import_units(e, r));
    if (!err)
        err = iz_agree(e->coll, import_quant(e, r));
    iz_hf_read_close(&r);
    return err ? err : iz_train_init_adapters(e);
}

/* ---- export ---- */

int iz_hf_export_check(const struct iz_config *c,
                       const struct iz_section *section,
                       const struct iz_model *m)
{
    if (!c->run.export[0])
        return 0;
    if (section->hf && iz_published_type(section->hf, m->self)) {
        struct iz_hf_map map = {0};
        char *text = NULL;
        int err = c->lora.export == IZ_LORA_ADAPTER
                      ? iz_adapter_open(&map, &text, section->hf, m, c)
                      : iz_published_same(section, m->self, NULL, stderr);
        iz_hf_map_close(&map);
        free(text);
        if (!err)
            err = iz_adapter_check_trained(m);
        return err ? err : iz_hf_write_check(c->run.export);
    }
    return iz_text_refuse(stderr, "run.export: %s",
                          section->hf
                              ? "no published type of model has this shape"
                              : "this model has no names for it");
}

bool iz_hf_export_there(const char *folder)
{
    return access(folder, F_OK) == 0 && !iz_hf_is_empty(folder);
}

/* trained: what is merged, or NULL. */
static void export_part(struct iz_engine *e, int u, enum iz_unit_part part,
                        const float *trained, struct iz_hf_writer *w,
                        float *buf, struct iz_progress *progress)
{
    struct iz_owned p = iz_owned_of(e, u, part);
    for (int64_t i = p.begin, n; i < p.end; i += n) {
        n = min64(p.end - i, IZ_HF_BUFFER);
        iz_access_get(e, u, p.array, i, buf, n);
        if (trained)
            iz_lora_merge(e->model, u, part,
                          trained + iz_lora_first(&e->model->unit[u]), i, buf,
                          n);
        iz_hf_write(w, u, p.at + i, buf, n);
        iz_progress_add(progress, 4 * n);
    }
}

/* All units, after the writer was opened; of adapters what is trained. */
static void export_units(struct iz_engine *e, struct iz_hf_writer *w,
                         float *buf)
{
    bool alone = e->config->lora.export == IZ_LORA_ADAPTER;
    int parts = alone ? 1 : IZ_PARTS;
    struct iz_progress progress;
    int64_t mine = 0;
    for (int u = 0; u < e->plan.n_units; u++)
        for (int part = 0; part < parts; part++) {
            struct iz_owned p = iz_owned_of(e, u, (enum iz_unit_part)part);
            mine += p.end - p.begin;
        }
    iz_progress_begin(&progress, "exporting", 4 * mine);
    for (int u = 0; u < e->plan.n_units; u++) {
        bool merges = !alone && e->model->unit[u].n_adapters > 0;
        float *trained = merges ? iz_adapter_gather(e, u) : NULL;
        for (int part = 0; part < parts; part++)
            export_part(e, u, (enum iz_unit_part)part, trained, w, buf,
                        &progress);
        free(trained);
    }
    iz_progress_end(&progress);
}

int iz_hf_order_open(struct iz_hf_order *o, struct iz_hf_map *map, char **text,
                     char like[IZ_PATH_MAX + 32], const struct iz_config *c,
                     const struct iz_section *section, const struct iz_model *m,
                     bool tells)
{
    int type = c->run.export_dtype, err;
    *like = '\0';
    *text = NULL;
    *o = (struct iz_hf_order){.folder = c->run.export,
                              .map = map,
                              .type =
                                  type ? (enum iz_dtype)(type - 1) : c->dtype,
                              .file_bytes = c->run.export_shard_bytes,
                              .file = IZ_HF_SINGLE,
                              .config_file = IZ_PUBLISHED_CONFIG,
                              .like = like};
    if (c->lora.export == IZ_LORA_ADAPTER) {
        o->file_bytes = INT64_MAX;
        o->file = IZ_LORA_FILE;
        o->config_file = IZ_PEFT_CONFIG;
        err = iz_adapter_open(map, text, section->hf, m, c);
    } else {
        err = iz_hf_map_open(map, section->hf, m);
        if (!err && tells)
            err = iz_imported_find(like, IZ_PATH_MAX + 32, c->run.output,
                                   c->import);
        if (!err && tells)
            err = (*text = iz_published_text(section, m->self, o->type, like))
                      ? 0
                      : -EINVAL;
    }
    o->config = *text;
    return err;
}

int iz_hf_export(struct iz_engine *e, const struct iz_section *section)
{
    float *buf = iz_hf_take_buffer();
    struct iz_hf_map map = {0};
    struct iz_hf_order o;
    struct iz_hf_writer *w;
    char *text = NULL, like[IZ_PATH_MAX + 32];
    struct iz_hf_proof proof = {.e = e, .section = section};
    iz_graph_wait(e->graph);
    int err = iz_hf_order_open(&o, &map, &text, like, e->config, section,
                               e->model, e->coll->rank == 0);
    o.check = iz_hf_prove;
    o.arg = &proof;
    err = iz_agree(e->coll, err);
    if (!err)
        err = iz_hf_write_open(&w, &o, e->coll);
    if (!err) {
        proof.type = o.type;
        export_units(e, w, buf);
        err = iz_hf_write_close(&w, 0);
    }
    iz_hf_map_close(&map);
    free(text);
    free(buf);
    return err;
}
