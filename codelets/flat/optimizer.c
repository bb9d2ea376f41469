/* SPDX-License-Identifier: Apache-2.0 */
/* The table of optimizers; see optimizer.h.  Their loops are in
 * codelets/flat/loops.c and update.cu. */
#include "codelets/flat/optimizer.h"

#include <assert.h>
#include <math.h>
#include <stddef.h>
#include <string.h>

#include "codelets/flat/consts.h"

static struct iz_adam_consts adam_of(const struct iz_hyper_at *s, double lr)
{
    const struct iz_hyper *a = &s->hyper;
    double t = (double)s->t, wd = a->weight_decay;
    double c1 = a->bias_correction ? 1.0 - pow(a->beta1, t) : 1.0;
    double unbias = a->bias_correction ? sqrt(1.0 - pow(a->beta2, t)) : 1.0;
    return (struct iz_adam_consts){
        .scale = s->grad_scale,
        .beta1 = (float)a->beta1,
        .rest1 = (float)(1.0 - a->beta1),
        .beta2 = (float)a->beta2,
        .rest2 = (float)(1.0 - a->beta2),
        .l2 = a->adamw ? 0.0f : (float)wd,
        .keep = a->adamw ? (float)(1.0 - lr * wd) : 1.0f,
        .step = (float)(lr / c1 * unbias),
        .eps = (float)(a->eps * unbias),
    };
}

static void adam_consts(union iz_consts *k, const struct iz_hyper_at *s)
{
    k->adam = adam_of(s, s->hyper.lr);
}

static void lion_consts(union iz_consts *k, const struct iz_hyper_at *s)
{
    const struct iz_hyper *a = &s->hyper;
    k->lion = (struct iz_lion_consts){
        .scale = s->grad_scale,
        .beta1 = (float)a->beta1,
        .rest1 = (float)(1.0 - a->beta1),
        .beta2 = (float)a->beta2,
        .rest2 = (float)(1.0 - a->beta2),
        .keep = (float)(1.0 - a->lr * a->weight_decay),
        .lr = (float)a->lr,
    };
}

static void muon_consts(union iz_consts *k, const struct iz_hyper_at *s)
{
    const struct iz_hyper *a = &s->hyper;
    float momentum = (float)a->momentum, rest = (float)(1.0 - a->momentum);
    k->muon = (struct iz_muon_consts){
        .matrix = s->matrix,
        .adam = adam_of(s, a->lr * a->adam_rate),
        .momentum = momentum,
        .rest = rest,
        .ahead = a->nesterov ? momentum : 1,
        .now = a->nesterov ? rest : 0,
    };
}

static void along_consts(union iz_consts *k, const struct iz_hyper_at *s)
{
    const struct iz_hyper *a = &s->hyper;
    k->along = (struct iz_along_consts){
        .keep = (float)(1.0 - a->lr * a->weight_decay), .lr = (float)a->lr};
}

double iz_hyper_shape_scale(const struct iz_hyper *a, int64_t out, int64_t in)
{
    double most = (double)(out > in ? out : in);
    return a->shape_scale == IZ_SCALE_RMS_ADAMW ? 0.2 * sqrt(most)
                                                : sqrt(most / (double)in);
}

static const struct iz_optimizer_param adam_params[] = {
    {"lr", NULL},           {"betas", NULL},       {"eps", NULL},
    {"weight_decay", NULL}, {"adam_w_mode", NULL}, {"bias_correction", NULL},
    {"torch_adam", NULL},   {NULL, NULL}};

static const struct iz_optimizer_param lion_params[] = {
    {"lr", NULL}, {"betas", "[0.9, 0.99]"}, {"weight_decay", NULL}, {0}};

static const struct iz_optimizer_param muon_params[] = {
    {"lr", NULL},
    {"muon_lr", NULL},
    {"adam_lr", NULL},
    {"momentum", NULL},
    {"nesterov", NULL},
    {"ns_steps", NULL},
    {"ns_method", NULL},
    {"adjust_lr_fn", NULL},
    {"betas", "[0.9, 0.95]"},
    {"eps", "1e-10"},
    {"weight_decay", NULL},
    {"adam_w_mode", NULL},
    {"torch_adam", NULL},
    {NULL, NULL}};

static const struct iz_optimizer optimizers[IZ_UPDATES] = {
    [IZ_OPTIMIZER_ADAM] = {.type = "Adam",
                           .name = "adam",
                           .param = adam_params,
                           .states = 2,
                           .state = {{"m", IZ_MOMENT_M, false},
                                     {"v", IZ_MOMENT_V, false}},
                           .consts = adam_consts},
    [IZ_OPTIMIZER_ADAMW] = {.type = "AdamW",
                            .name = "adam",
                            .param = adam_params,
                            .states = 2,
                            .state = {{"m", IZ_MOMENT_M, false},
                                      {"v", IZ_MOMENT_V, false}},
                            .consts = adam_consts},
    [IZ_OPTIMIZER_LION] = {.type = "Lion",
                           .name = "lion",
                           .param = lion_params,
                           .states = 1,
                           .state = {{"m", IZ_MOMENT_M, false}},
                           .consts = lion_consts},
    [IZ_OPTIMIZER_MUON] = {.type = "Muon",
                           .matrices = true,
                           .name = "muon",
                           .param = muon_params,
                           .states = 2,
                           .state = {{"m", IZ_MOMENT_M, false},
                                     {"v", IZ_MOMENT_V, true}},
                           .consts = muon_consts},
    [IZ_OPTIMIZER_DIRECTION] = {.states = 1,
                                .state = {{"m", IZ_MOMENT_M, false}},
                                .consts = muon_consts},
    [IZ_OPTIMIZER_ALONG] = {.consts = along_consts},
};

const struct iz_optimizer *iz_optimizer(enum iz_optimizer_type t)
{
    assert(t < IZ_UPDATES);
    return &optimizers[t];
}

const struct iz_optimizer_param *
iz_optimizer_param(const struct iz_optimizer *o, const char *key)
{
    for (const struct iz_optimizer_param *p = o->param; p->key; p++)
        if (strcmp(p->key, key) == 0)
            return p;
    return NULL;
}

union iz_consts iz_hyper_consts(const struct iz_hyper_at *s)
{
    union iz_consts k;
    assert(s->t >= 1);
    memset(&k, 0, sizeof(k));
    iz_optimizer(s->hyper.type)->consts(&k, s);
    return k;
}
