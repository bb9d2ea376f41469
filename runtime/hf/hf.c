/* SPDX-License-Identifier: Apache-2.0 */
/* Engine and published checkpoints; see hf.h. */
#include "runtime/hf/hf.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "codelets/base/die.h"
#include "runtime/base/progress.h"
#include "runtime/base/text.h"
#include "runtime/comm/agree.h"
#include "runtime/config/lora.h"
#include "runtime/config/published.h"
#include "runtime/engine/access.h"
#include "runtime/hf/adapter_write.h"
#include "runtime/hf/folder.h"
#include "runtime/hf/read.h"
#include "runtime/hf/write.h"
#include "runtime/step/train.h"

/* ---- import ---- */

/* Trained or frozen parameters of a group: n elements, which in the unit's
 * parameters end to end begin at `at`. */
struct part {
    enum iz_array array;
    int64_t n, shard, owned, at;
};

enum { PARTS = 2 };

static struct part part_of(const struct iz_engine *e, int u, int i)
{
    const struct iz_plan_group *p = e->group[u].plan;
    const struct iz_plan_frozen *f = &p->frozen;
    if (i == 0)
        return (struct part){IZ_MASTER, p->n, p->shard, p->owned, 0};
    return (struct part){IZ_FROZEN, f->n, f->shard, f->owned, p->n};
}

/* This rank's elements of a part: those it owns, without padding. */
static int import_part(struct iz_engine *e, int u, const struct part *p,
                       struct iz_hf_reader *r, float *buf,
                       struct iz_progress *progress)
{
    int64_t base = e->plan.zero.states_full ? 0 : p->shard * e->plan.rank;
    int64_t end = base + p->owned < p->n ? base + p->owned : p->n;
    int err = 0;
    for (int64_t i = base; i < end && !err; i += IZ_HF_PIECE) {
        int64_t n = end - i < IZ_HF_PIECE ? end - i : IZ_HF_PIECE;
        memset(buf, 0, (size_t)n * sizeof(*buf)); /* adapters are not there */
        err = iz_hf_read(r, u, p->at + i, n, buf);
        if (!err)
            iz_access_put(e, u, p->array, i - base, buf, n);
        iz_progress_add(progress, 4 * n);
    }
    return err;
}

static int import_groups(struct iz_engine *e, struct iz_hf_reader *r)
{
    float *buf = malloc(IZ_HF_PIECE * sizeof(*buf));
    int err = buf ? 0 : -ENOMEM;
    struct iz_progress progress;
    int64_t owned = 0;

    for (int u = 0; u < e->plan.n_groups; u++)
        owned += e->group[u].plan->owned + e->group[u].plan->frozen.owned;
    iz_progress_begin(&progress, "importing", 4 * owned);
    for (int u = 0; u < e->plan.n_groups; u++)
        for (int i = 0; i < PARTS && !err; i++) {
            struct part p = part_of(e, u, i);
            err = import_part(e, u, &p, r, buf, &progress);
        }
    iz_progress_end(&progress);
    free(buf);
    return err;
}

/* Every other fault has been told where it was found. */
static int agree(const struct iz_engine *e, int err)
{
    if (err == -ENOMEM)
        fprintf(stderr, "izar: rank %d: no memory for model.import: %s\n",
                e->coll->rank, e->config->import);
    return iz_agree(e->coll, err);
}

int iz_hf_import(struct iz_engine *e, const struct iz_section *section)
{
    struct iz_hf_reader *r = NULL;
    const char *path = e->config->import;
    bool first = e->coll->rank == 0;
    int err = 0;
    /* What all ranks would find alike is told by the first one. */
    if (first)
        err = iz_hf_read_open(&r, section->hf, e->model, path, stderr);
    err = agree(e, err);
    if (!err)
        err = agree(e, first ? 0
                             : iz_hf_read_open(&r, section->hf, e->model, path,
                                               stderr));
    if (!err)
        err = agree(e, import_groups(e, r));
    iz_hf_read_close(&r);
    return err ? err : iz_train_init_adapters(e);
}

/* ---- export ---- */

/* The files are made of what is trained and of the model's own tensors. */
static int check_adapters(const struct iz_model *m)
{
    for (int u = 0; u < m->n_units; u++)
        for (int i = iz_unit_base(&m->unit[u]); i < m->unit[u].n_params; i++)
            if (m->unit[u].param[i].frozen)
                return iz_refuse(stderr,
                                 "run.export: %s is an adapter that a rule "
                                 "freezes; such adapters cannot be exported",
                                 m->unit[u].param[i].name);
    return 0;
}

int iz_hf_export_check(const struct iz_config *c,
                       const struct iz_section *section,
                       const struct iz_model *m)
{
    if (!c->run.export[0])
        return 0;
    if (section->hf && iz_hf_type(section->hf, m->self)) {
        struct iz_hf_map map = {0};
        char *text = NULL;
        int err = 0;
        if (c->lora.export == IZ_LORA_ADAPTER)
            err = iz_lora_map_open(&map, &text, section->hf, m, c);
        iz_hf_map_close(&map);
        free(text);
        if (!err)
            err = check_adapters(m);
        return err ? err : iz_hf_write_check(c->run.export);
    }
    return iz_refuse(stderr, "run.export: %s",
                     section->hf ? "no published type of model has this shape"
                                 : "this model has no names for it");
}

/* All trained parameters of a unit as fp32, end to end and then padding, on
 * every rank; malloc'ed. */
static float *gather_trained(struct iz_engine *e, int u)
{
    const struct iz_plan_group *p = e->group[u].plan;
    int64_t base = p->shard * e->plan.rank;
    float *all = malloc((size_t)p->padded * sizeof(*all) + 1);
    if (!all)
        iz_die("export: no memory for the adapters of %s",
               e->model->unit[u].name);
    iz_access_get(e, u, IZ_MASTER, e->plan.zero.states_full ? base : 0,
                  all + base, p->shard);
    if (e->plan.ranks > 1)
        iz_coll_all_gather(e->coll, all, p->shard * (int64_t)sizeof(*all),
                           "adapters");
    return all;
}

/* trained: what is merged, or NULL. */
static void export_part(struct iz_engine *e, int u, const struct part *p,
                        const float *trained, struct iz_hf_writer *w,
                        float *buf, struct iz_progress *progress)
{
    int64_t base = p->shard * e->plan.rank;
    int64_t skip = e->plan.zero.states_full ? base : 0;
    int64_t end = base + p->shard < p->n ? base + p->shard : p->n;
    for (int64_t i = base; i < end; i += IZ_HF_PIECE) {
        int64_t n = end - i < IZ_HF_PIECE ? end - i : IZ_HF_PIECE;
        iz_access_get(e, u, p->array, i - base + skip, buf, n);
        if (trained)
            iz_lora_merge(e->model, u, p->array == IZ_FROZEN, trained, i, buf,
                          n);
        iz_hf_write(w, u, p->at + i, buf, n);
        iz_progress_add(progress, 4 * n);
    }
}

/* All groups, after the writer was opened; of adapters what is trained. */
static void export_groups(struct iz_engine *e, struct iz_hf_writer *w,
                          float *buf)
{
    bool alone = e->config->lora.export == IZ_LORA_ADAPTER;
    int parts = alone ? 1 : PARTS;
    struct iz_progress progress;
    int64_t mine = 0;

    for (int u = 0; u < e->plan.n_groups; u++)
        for (int i = 0; i < parts; i++)
            mine += part_of(e, u, i).shard;
    iz_progress_begin(&progress, "exporting", 4 * mine);
    for (int u = 0; u < e->plan.n_groups; u++) {
        bool merges = !alone && e->model->unit[u].n_adapters > 0;
        float *trained = merges ? gather_trained(e, u) : NULL;
        for (int i = 0; i < parts; i++) {
            struct part p = part_of(e, u, i);
            export_part(e, u, &p, trained, w, buf, &progress);
        }
        free(trained);
    }
    iz_progress_end(&progress);
}

/* What is written; the text of its config on the first rank. */
static int open_order(struct iz_hf_order *o, struct iz_hf_map *map, char **text,
                      struct iz_engine *e, const struct iz_section *section)
{
    const struct iz_config *c = e->config;
    int type = c->run.export_dtype, err;
    char like[IZ_PATH_MAX + 32];

    *text = NULL;
    *o = (struct iz_hf_order){.folder = c->run.export,
                              .map = map,
                              .type =
                                  type ? (enum iz_dtype)(type - 1) : c->dtype,
                              .file_bytes = c->run.export_shard_bytes,
                              .file = IZ_HF_SINGLE,
                              .config_file = IZ_HF_CONFIG};
    if (c->lora.export == IZ_LORA_ADAPTER) {
        o->file_bytes = INT64_MAX;
        o->file = IZ_LORA_FILE;
        o->config_file = IZ_LORA_CONFIG;
        err = iz_lora_map_open(map, text, section->hf, e->model, c);
    } else {
        err = iz_hf_map_open(map, section->hf, e->model);
        if (!err && e->coll->rank == 0)
            err =
                iz_hf_config_kept(like, sizeof(like), c->run.output, c->import);
        if (!err && e->coll->rank == 0)
            err = (*text = iz_hf_config_text(section, e->model->self, o->type,
                                             like))
                      ? 0
                      : -EINVAL;
    }
    o->config = *text;
    return err;
}

int iz_hf_export(struct iz_engine *e, const struct iz_section *section)
{
    float *buf = malloc(IZ_HF_PIECE * sizeof(*buf));
    struct iz_hf_map map = {0};
    struct iz_hf_order o;
    struct iz_hf_writer *w;
    char *text = NULL;

    iz_graph_wait(e->graph);
    int err = buf ? open_order(&o, &map, &text, e, section) : -ENOMEM;
    err = iz_agree(e->coll, err);
    if (!err)
        err = iz_hf_write_open(&w, &o, e->coll);
    if (!err) {
        export_groups(e, w, buf);
        err = iz_hf_write_close(&w, 0);
    }
    iz_hf_map_close(&map);
    free(text);
    free(buf);
    return err;
}
