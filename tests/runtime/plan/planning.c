/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/plan/planning.h"

#include "models/gpt2.h"

struct iz_model *plan_model;

int plan_open(void **state)
{
    struct iz_gpt2_config c = {32, 32, 2560, 1024, 50257};
    return iz_gpt2_open(&plan_model, &c);
}

int plan_close(void **state)
{
    iz_model_close(&plan_model);
    return 0;
}

struct iz_config plan_config(int stage, enum iz_dtype t)
{
    return (struct iz_config){
        .train_batch_size = 4,
        .micro_batch = 1,
        .grad_accum = 1,
        .dtype = t,
        .zero = {.stage = stage,
                 .sub_group_size = 1000000000,
                 .overlap_comm = true,
                 .prefetch_bucket_size = 50000000,
                 .max_live_parameters = 1000000000,
                 .max_reuse_distance = 1000000000,
                 .optimizer = {.buffer_count = 4, .ratio = 1},
                 .param = {.buffer_count = 5}},
        .run = {.slices = 1}};
}

int plan_fit(struct iz_plan *p, const struct iz_config *c, int64_t bytes,
             FILE *err)
{
    struct iz_limits l = {.host = bytes};
    return iz_plan_fit(p, c, plan_model, &l, err);
}

double plan_parameters(void)
{
    double n = 0;
    for (int u = 0; u < plan_model->n_units; u++)
        for (int i = 0; i < plan_model->unit[u].n_params; i++)
            n += (double)(plan_model->unit[u].param[i].rows *
                          plan_model->unit[u].param[i].cols);
    return n;
}
