/* SPDX-License-Identifier: Apache-2.0 */
/* Units of experts that the host computes where few rows want them: what that
 * needs, and where it cannot be had; see plan.h. */
#include "codelets/base/int64.h"
#include "runtime/base/text.h"
#include "runtime/plan/plan.h"

static bool has_experts(const struct iz_model *m)
{
    for (int u = 0; u < m->n_units; u++)
        if (m->unit[u].rows)
            return true;
    return false;
}

#define OFFLOAD "zero_optimization.offload_"

int iz_plan_check_cold(const struct iz_config *c, const struct iz_model *m,
                       const struct iz_target *t, int ranks, FILE *err)
{
    const struct iz_zero_config *z = &c->zero;
    const struct {
        bool is;
        const char *why;
    } faults[] = {
        {!has_experts(m), "there is no unit of experts: set "
                          "model.experts_per_unit, of a mixture of experts"},
        {!t->gpu, "units are computed on the CPU, nothing goes up to a GPU: "
                  "use off"},
        {ranks > 1, "several ranks have a part of an expert each: use one "
                    "rank, or off"},
        {z->stage < 3 || z->param.home != IZ_HOME_CPU,
         "parameters have to live on the host: set zero_optimization.stage to "
         "3 and " OFFLOAD "param.device to cpu"},
        {z->param.frozen && z->param.frozen != 1 + IZ_HOME_CPU,
         "frozen parameters have to live on the host, too: " OFFLOAD
         "param.frozen_device"},
        {z->optimizer.home == IZ_HOME_NONE || z->optimizer.ratio < 1,
         "their gradients have to be kept on the host: set " OFFLOAD
         "optimizer.device to cpu or nvme, with a ratio of 1.0"},
        {!c->cpu_checkpointing || c->boundary_path[0],
         "what experts read has to come to the host: set "
         "activation_checkpointing.cpu_checkpointing, without nvme_path"},
        {m->preference, "not with pairs (loss.type): use off"},
    };
    for (size_t i = 0; i < sizeof(faults) / sizeof(faults[0]); i++)
        if (c->run.cold_experts && faults[i].is)
            return iz_text_refuse(err, "run.cold_experts: auto: %s",
                                  faults[i].why);
    return 0;
}

void iz_plan_find_cold(struct iz_plan *p, const struct iz_config *c,
                       const struct iz_model *m)
{
    struct iz_exec host = {.backend = IZ_CPU,
                           .act = IZ_F32,
                           .between = p->target.act,
                           .bf16_products = p->target.bf16_products};
    struct iz_plan_cold *k = &p->cold;
    k->rows =
        c->run.cold_experts && p->target.gpu ? c->run.cold_expert_rows : 0;
    for (int u = 0, kind = -1; u < m->n_units && k->rows; u++) {
        const struct iz_unit *unit = &m->unit[u];
        if (!unit->rows)
            continue;
        int64_t far = iz_dtype_bytes(p->target.act) * unit->far_elems;
        k->far_bytes = max64(k->far_bytes, far * p->samples);
        if (!m->unit[u + 1].rows)
            k->dy_bytes = max64(k->dy_bytes, iz_plan_boundary_bytes(p, m, u));
        if (unit->kind != kind)
            k->work_bytes =
                max64(k->work_bytes,
                      iz_unit_far_work(m, u, p->samples, p->param_type, &host));
        kind = unit->kind;
    }
    if (k->work_bytes)
        k->work_bytes = round_up(k->work_bytes, 64) + IZ_SCRATCH_SPARE;
}
