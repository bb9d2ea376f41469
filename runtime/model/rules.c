/* SPDX-License-Identifier: Apache-2.0 */
/* Rules for parameters by name; see rules.h. */
#include "runtime/model/rules.h"

#include <errno.h>
#include <fnmatch.h>
#include <inttypes.h>
#include <string.h>

#include "codelets/base/take.h"
#include "runtime/base/nearest.h"
#include "runtime/base/text.h"

int iz_rules_none(const struct iz_model *m, const char *key, const char *match,
                  const char *what, FILE *err)
{
    struct iz_nearest n = iz_nearest_start(match, true);
    for (int u = 0; u < m->n_units; u++)
        for (int i = 0; i < m->unit[u].n_params; i++)
            iz_nearest_try(&n, m->unit[u].param[i].name);
    return iz_text_refuse(
        err, "%s: \"%s\" matches no %s of %s%s%s (--parameters lists them)",
        key, match, what, m->name, n.near[0] ? "; the nearest is " : "",
        n.near);
}

static int apply_rule(struct iz_model *m, const struct iz_config *c, int i,
                      FILE *err)
{
    const struct iz_rule *r = &c->rule[i];
    int found = 0;
    for (int u = 0; u < m->n_units; u++)
        for (int k = 0; k < m->unit[u].n_params; k++) {
            struct iz_param *p = &m->unit[u].param[k];
            if (fnmatch(r->match, p->name, 0) != 0)
                continue;
            found++;
            if (r->given[IZ_RULE_DECAY])
                p->weight_decay = r->weight_decay;
            if (r->given[IZ_RULE_LR])
                p->lr_scale = r->lr_scale;
            if (r->given[IZ_RULE_FROZEN])
                p->frozen = r->frozen || p->always_frozen;
            if (r->given[IZ_RULE_SPARSE])
                p->sparse = r->sparse;
            if (!r->given[IZ_RULE_MUON])
                continue;
            if (r->use_muon && !p->outputs[0])
                return iz_text_refuse(
                    err,
                    "parameters[%d].use_muon: true for %s, which is no matrix "
                    "of a block: AdamW updates it",
                    i, p->name);
            p->by_matrix = r->use_muon;
        }
    char key[64];
    snprintf(key, sizeof(key), "parameters[%d].match", i);
    return found ? 0 : iz_rules_none(m, key, r->match, "tensor", err);
}

/* Why a tensor cannot be sparse; NULL: it can. */
static const char *tensor_refusal(const struct iz_unit *u,
                                  const struct iz_param *p)
{
    if (!u->table_reads)
        return "it is no table of rows that samples choose from";
    return p->frozen ? "it is frozen: nothing of it is updated" : NULL;
}

/* Why a sparse tensor cannot be updated in this way; NULL: it can. */
static const char *update_refusal(const struct iz_param *p,
                                  const struct iz_config *c, bool gpu)
{
    if (gpu)
        return "the kernels of a GPU read and update whole tables: use "
               "run.device: cpu, or sparse: false";
    if (c->zero.hpz_partition > 1)
        return "zero_optimization.zero_hpz_partition_size copies whole shards, "
               "and a step touches a few rows: set it to 1";
    if (c->run.state_dtype == IZ_MOMENT_FP8 && p->cols % IZ_MOMENT_BLOCK)
        return "run.state_dtype: fp8 shares an exponent among 64 numbers, and "
               "its rows are no multiple of 64, so rows that no sample reads "
               "would be rounded again: use bf16 or fp32";
    return NULL;
}

int iz_rules_check_sparse(const struct iz_model *m, const struct iz_config *c,
                          bool gpu, FILE *err)
{
    for (int u = 0; u < m->n_units; u++)
        for (int i = 0; i < m->unit[u].n_params; i++) {
            const struct iz_param *p = &m->unit[u].param[i];
            const char *why = !p->sparse ? NULL
                              : c        ? update_refusal(p, c, gpu)
                                         : tensor_refusal(&m->unit[u], p);
            if (!why)
                continue;
            iz_text_refuse(err, "parameters: sparse: true for %s: %s", p->name,
                           why);
            return c ? -ENOTSUP : -EINVAL;
        }
    return 0;
}

/* Of a unit that are updated as such. */
static int64_t count_matrices(const struct iz_unit *u)
{
    int64_t n = 0;
    for (int i = 0; i < u->n_params; i++)
        n += u->param[i].by_matrix && !u->param[i].frozen
                 ? iz_param_matrices(&u->param[i])
                 : 0;
    return n;
}

int iz_rules_check_matrices(const struct iz_model *m, const struct iz_config *c,
                            FILE *err)
{
    enum { MOST = 768 }; /* a task may have data of each */
    const struct iz_optimizer *o = iz_optimizer(c->optimizer.type);
    bool found = false;
    if (!o->matrices)
        return 0;
    for (int u = 0; u < m->n_units; u++) {
        int64_t n = count_matrices(&m->unit[u]);
        found |= n > 0;
        if (n > MOST)
            return iz_text_refuse(
                err,
                "optimizer.type: %s: %s has %lld matrices, and at most %d of a "
                "unit are updated as such: set model.experts_per_unit",
                o->type, m->unit[u].name, (long long)n, MOST);
    }
    if (found)
        return 0;
    iz_text_refuse(err,
                   "optimizer.type: %s, but it would train no matrix of a "
                   "block of %s: use AdamW",
                   o->type, m->name);
    return -ENOTSUP;
}

static int check_trained(const struct iz_model *m, FILE *err)
{
    for (int u = 0; u < m->n_units; u++)
        if (iz_unit_elems(&m->unit[u], false))
            return 0;
    return iz_text_refuse(
        err, "parameters: every tensor is frozen: there is nothing to train");
}

/* Marks the matrices of blocks for model.base_dtype. */
static int apply_base(struct iz_model *m, const struct iz_config *c, FILE *err)
{
    bool found = false;
    const char *name = iz_quant_name(c->base_dtype);
    for (int u = 0; u < m->n_units; u++)
        for (int i = 0; i < m->unit[u].n_params; i++) {
            struct iz_param *p = &m->unit[u].param[i];
            p->quant = p->outputs[0] ? c->base_dtype : IZ_QUANT_NONE;
            if (p->quant && (!p->frozen || p->saved))
                return iz_text_refuse(
                    err,
                    "model.base_dtype: %s: %s is trained, and so few bits have "
                    "no room for its updates: freeze it (lora.rank, or a rule "
                    "of parameters), or set null",
                    name, p->name);
            found |= p->quant != IZ_QUANT_NONE;
        }
    return found || !c->base_dtype
               ? 0
               : iz_text_refuse(err,
                                "model.base_dtype: %s: %s has no matrix of a "
                                "block: set null",
                                name, m->name);
}

/* Frozen copies of what is trained and is no adapter: the reference of pairs
 * is the model as it begins. */
static int add_references(struct iz_unit *u)
{
    static const char tail[] = ".reference";
    int n = u->n_params;
    struct iz_param *list = u->param =
        iz_take_longer(u->param, 2 * n, sizeof(*list), "copies");
    for (int i = 0; i < iz_unit_base(u); i++) {
        struct iz_param *p = &list[u->n_params];
        if (list[i].frozen)
            continue;
        *p = list[i];
        p->frozen = true;
        p->by_matrix = false;
        p->adapts = i;
        size_t at = strlen(p->name);
        if (at + sizeof(tail) > sizeof(p->name))
            return -ENAMETOOLONG;
        memcpy(p->name + at, tail, sizeof(tail));
        u->n_params++;
        u->n_references++;
    }
    return 0;
}

int iz_rules_add_reference(struct iz_model *m, FILE *err)
{
    int status = 0;
    for (int u = 0; u < m->n_units && !status; u++)
        status = add_references(&m->unit[u]);
    if (status)
        iz_text_refuse(
            err,
            "loss.type: copies for the reference: a name becomes too long");
    return status;
}

/* Settings of what is frozen need something that is. */
static int check_frozen(const struct iz_model *m, const struct iz_config *c,
                        FILE *err)
{
    static const char *home[] = {"none", "cpu", "nvme"};
    for (int u = 0; u < m->n_units; u++)
        for (int i = 0; i < m->unit[u].n_params; i++)
            if (m->unit[u].param[i].frozen)
                return 0;
    return c->zero.param.frozen
               ? iz_text_refuse(err,
                                "zero_optimization.offload_param.frozen_device:"
                                " %s, and no tensor is frozen: set null",
                                home[c->zero.param.frozen - 1])
               : 0;
}

int iz_rules_apply(struct iz_model *m, const struct iz_config *c, FILE *err)
{
    int status = 0;
    for (int u = 0; u < m->n_units; u++)
        for (int k = 0; k < m->unit[u].n_params; k++) {
            struct iz_param *p = &m->unit[u].param[k];
            bool decays = p->rows > 1 || !c->run.decay_matrices;
            p->weight_decay = decays ? c->optimizer.weight_decay : 0;
            p->lr_scale = 1;
            p->sparse = false;
            p->by_matrix =
                iz_optimizer(c->optimizer.type)->matrices && p->outputs[0];
            p->frozen = p->always_frozen || (c->lora.rank > 0 && !p->saved &&
                                             k < iz_unit_base(&m->unit[u]));
        }
    for (int i = 0; i < c->n_rules; i++) {
        int s = apply_rule(m, c, i, err);
        status = status ? status : s;
    }
    if (!status)
        status = iz_rules_check_sparse(m, NULL, false, err);
    if (!status)
        status = apply_base(m, c, err);
    if (!status)
        status = check_trained(m, err);
    m->preference = c->data.group > 1 ? &c->loss : NULL;
    if (!status && m->preference)
        status = iz_rules_add_reference(m, err);
    return status ? status : check_frozen(m, c, err);
}

void iz_rules_print(const struct iz_model *m, FILE *out)
{
    for (int u = 0; u < m->n_units; u++)
        for (int i = 0; i < m->unit[u].n_params; i++) {
            const struct iz_param *p = &m->unit[u].param[i];
            fprintf(out, "%-40s [%" PRId64 ", %" PRId64 "]  ", p->name, p->rows,
                    p->cols);
            if (p->frozen)
                fprintf(out, "frozen%s%s\n", p->quant ? "  " : "",
                        p->quant ? iz_quant_name(p->quant) : "");
            else
                fprintf(out, "weight_decay %g  lr_scale %g%s%s\n",
                        p->weight_decay, p->lr_scale,
                        p->sparse ? "  sparse" : "",
                        p->by_matrix ? "  by matrices" : "");
        }
}

struct iz_segment *iz_rules_segments(const struct iz_unit *u)
{
    struct iz_segment *s = iz_take(u->n_params, sizeof(*s), "segments");
    int64_t at = 0;
    int n = 0;
    for (int i = 0; i < u->n_params; i++) {
        const struct iz_param *p = &u->param[i];
        struct iz_segment next = {.lr_scale = p->lr_scale,
                                  .weight_decay = p->weight_decay,
                                  .by_matrix = p->by_matrix};
        if (p->frozen)
            continue;
        at += p->rows * p->cols;
        if (n == 0 || s[n - 1].lr_scale != next.lr_scale ||
            s[n - 1].weight_decay != next.weight_decay ||
            s[n - 1].by_matrix != next.by_matrix)
            s[n++] = next;
        s[n - 1].end = at;
    }
    if (n)
        s[n - 1].end = INT64_MAX;
    return s;
}
