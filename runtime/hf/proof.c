/* SPDX-License-Identifier: Apache-2.0 */
/* Reading an export again; see proof.h. */
#include "runtime/hf/proof.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>

#include "codelets/base/int64.h"
#include "codelets/ops/ops.h"
#include "runtime/base/text.h"
#include "runtime/engine/access.h"
#include "runtime/engine/param_quant.h"
#include "runtime/formats/published.h"
#include "runtime/hf/adapter.h"
#include "runtime/hf/tensors.h"
#include "runtime/model/lora.h"

#define WHO "run.export"

/* By which part of itself a number errs that is rounded to a type, on average;
 * in fp32 what sums in another order make of it. */
static const double roundings[] = {
    [IZ_F32] = 0x1p-20, [IZ_BF16] = 0x1p-9, [IZ_F16] = 0x1p-12};

static double rounding_of(enum iz_dtype t, int units, double loss)
{
    return roundings[t] * sqrt(units) * fmax(1, fabs(loss));
}

int iz_hf_compare_losses(const struct iz_hf_losses *l, bool tells)
{
    double apart = fabs(l->run - l->found);
    enum iz_dtype coarse =
        roundings[l->type] > roundings[l->own] ? l->type : l->own;
    double most = l->exact ? 0 : rounding_of(coarse, l->units, l->run);
    bool neither = isnan(l->run) && isnan(l->found); /* values are the run's */
    if (!(apart <= most) && !neither) {
        if (tells)
            iz_text_refuse(stderr,
                           WHO ": what was written has loss %.9g, the run "
                               "%.9g: rounding to %s is %.1e at most",
                           l->found, l->run, iz_dtype_name(coarse), most);
        return -EBADMSG;
    }
    if (!tells)
        return 0;
    printf("export: loss %.4f, run %.4f ", l->found, l->run);
    if (apart > 0)
        printf("(%s rounding %.0e)\n", iz_dtype_name(coarse), apart);
    else
        printf("(equal)\n");
    return 0;
}

struct again {
    const struct iz_hf_proof *p;
    struct iz_hf_reader *r;
    float *want, *found; /* IZ_HF_BUFFER each */
};

static bool is_alone(const struct iz_engine *e)
{
    return e->config->lora.export == IZ_LORA_ADAPTER;
}

/* trained: what was merged, or NULL. */
static int take_part(struct again *a, int u, enum iz_unit_part part,
                     const float *trained)
{
    struct iz_engine *e = a->p->e;
    struct iz_owned p = iz_owned_of(e, u, part);
    int err = 0;
    for (int64_t i = p.first, n; i < p.last && !err; i += n) {
        n = min64(p.last - i, IZ_HF_BUFFER);
        iz_access_get(e, u, p.array, i, a->want, n);
        if (trained)
            iz_lora_merge(e->model, u, part,
                          trained + iz_lora_first(&e->model->unit[u]), i,
                          a->want, n);
        err = iz_hf_read_equal(a->r, u, p.at + i, n, a->want, a->p->type,
                               a->found);
        if (!err && part != IZ_PART_QUANT)
            iz_access_put(e, u, p.array, i, a->found, n);
    }
    return err;
}

/* All that this rank owns: compared, and taken in its place. */
static int take_units(struct again *a)
{
    struct iz_engine *e = a->p->e;
    bool alone = is_alone(e);
    int err = 0;
    for (int u = 0; u < e->plan.n_units; u++) {
        bool merged = !alone && e->model->unit[u].n_adapters > 0;
        float *trained = merged ? iz_adapter_gather(e, u) : NULL;
        for (int part = 0; part < (alone ? 1 : IZ_PARTS) && !err; part++)
            err = take_part(a, u, (enum iz_unit_part)part, trained);
        free(trained);
    }
    return err;
}

static int quant_values(void *arg, int unit, int64_t from, float *out,
                        int64_t n)
{
    const struct again *a = arg;
    int64_t at = iz_owned_of(a->p->e, unit, IZ_PART_QUANT).at;
    return iz_hf_read(a->r, unit, at + from, n, out);
}

static bool has_adapters(const struct iz_model *m)
{
    bool any = false;
    for (int u = 0; u < m->n_units; u++)
        any |= m->unit[u].n_adapters > 0;
    return any;
}

/* Where adapters were merged, the reference of pairs is another one then: they
 * are compared by what the model itself says of the chosen texts. */
static double probe(struct iz_engine *e, bool merged)
{
    struct iz_event v = iz_train_probe(e);
    if (merged && v.aux.pairs > 0)
        return -v.aux.pair[IZ_LOGPS_CHOSEN] / v.aux.pairs;
    return v.loss;
}

static int again_open(struct again *a, const char *folder)
{
    const struct iz_engine *e = a->p->e;
    const struct iz_hf *hf = a->p->section->hf;
    if (is_alone(e))
        return iz_adapter_read_open(&a->r, e->config, hf, e->model, folder,
                                    stderr);
    return iz_hf_read_open(&a->r, hf, e->model, WHO, folder, stderr);
}

/* All ranks would find the same. */
static int check_config(const struct iz_hf_proof *p, const char *folder)
{
    if (is_alone(p->e) || p->e->coll->rank != 0)
        return 0;
    return iz_published_same(p->section, p->e->model->self, folder, stderr);
}

int iz_hf_prove(void *arg, const char *folder)
{
    const struct iz_hf_proof *p = arg;
    struct iz_engine *e = p->e;
    struct iz_counts counts = e->counts; /* those of the run are told */
    struct again a = {p, NULL, iz_hf_take_buffer(), iz_hf_take_buffer()};
    struct iz_quant_source source = {.read = quant_values, .arg = &a};
    bool merged = has_adapters(e->model) && !is_alone(e);
    enum iz_dtype own = e->plan.param_type;
    double run = probe(e, merged), found;
    iz_graph_wait(e->graph);
    int err = iz_agree(e->coll, check_config(p, folder));
    if (!err)
        err = iz_agree(e->coll, again_open(&a, folder));
    if (!err)
        err = iz_agree(e->coll, take_units(&a));
    e->quant_from = is_alone(e) ? NULL : &source;
    if (!err)
        err = merged ? iz_train_init_adapters(e) : iz_train_publish(e, 0);
    if (!err && merged && e->model->adapter_dora)
        err = iz_adapter_init_magnitudes(e);
    if (!err) {
        found = probe(e, merged);
        iz_graph_wait(e->graph);
        err = iz_hf_compare_losses(
            &(struct iz_hf_losses){
                .type = p->type,
                .own = own,
                .units = e->plan.n_units,
                .exact = !merged && (p->type == own || p->type == IZ_F32),
                .run = run,
                .found = found},
            e->coll->rank == 0);
    }
    e->quant_from = NULL;
    e->counts = counts;
    iz_hf_read_close(&a.r);
    free(a.want);
    free(a.found);
    return err;
}
