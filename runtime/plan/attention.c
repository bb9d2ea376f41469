/* SPDX-License-Identifier: Apache-2.0 */
/* Whose kernels do attention's forward and backward on a GPU; see plan.h. */
#include <stdio.h>
#include <string.h>

#include "runtime/plan/plan.h"

/* From here on cuDNN's kernels are known to be faster, both ways. */
#define CAPABILITY 90

/* Of the forward's flops, what a plan may repeat more to have room for cuDNN's
 * scratch.  A block of a 7B at 2048 tokens saves 0.05 of its forward's time by
 * cuDNN's forward, and twice that by its backward. */
#define REPEATS_MORE 0.02

const char *iz_plan_not_cudnn(const struct iz_config *c, int capability)
{
    if (c->dtype == IZ_F32)
        return "cuDNN's attention is of bf16 and fp16";
    if (c->data.document_end >= 0)
        return "cuDNN's attention does not keep documents apart";
    return capability < CAPABILITY ? "cuDNN's is not known to be faster below "
                                     "compute capability 9.0"
                                   : NULL;
}

/* A plan with one kernel or the other. */
struct trial {
    bool fits, near, attends;
    double repeats;
};

static struct trial try_plan(const struct iz_config *c,
                             const struct iz_model *m, int ranks, int rank,
                             const struct iz_target *t,
                             const struct iz_limits *limit)
{
    struct trial y = {0};
    struct iz_plan p;
    if (iz_plan_make(&p, c, m, ranks, rank, t))
        return y;
    y.fits = !iz_plan_fit(&p, c, m, limit, NULL);
    y.near = p.zero.sums_near;
    y.attends = p.attends;
    y.repeats = iz_plan_repeats(&p);
    iz_plan_clear(&p);
    return y;
}

void iz_plan_choose_attention(struct iz_config *c, const struct iz_model *m,
                              int ranks, int rank, struct iz_target *t,
                              const struct iz_limits *limit,
                              bool (*all)(void *arg, bool ok), void *arg)
{
    enum iz_attention_by *by[] = {&c->run.gpu_attention,
                                  &c->run.gpu_attention_backward};
    for (int back = 0; t->gpu && back < 2; back++) {
        const char **why = &t->why_own[back];
        if (*by[back] != IZ_ATTENTION_AUTO)
            continue;
        *by[back] = IZ_ATTENTION_OWN;
        if ((*why = iz_plan_not_cudnn(c, t->capability)))
            continue;
        struct trial own = try_plan(c, m, ranks, rank, t, limit);
        *by[back] = IZ_ATTENTION_CUDNN;
        struct trial its = try_plan(c, m, ranks, rank, t, limit);
        bool ok = own.attends && its.fits && its.near == own.near &&
                  its.repeats <= own.repeats + REPEATS_MORE;
        if (all ? all(arg, ok) : ok)
            continue;
        *by[back] = IZ_ATTENTION_OWN;
        *why = own.fits ? "the plan has no room for cuDNN's scratch" : NULL;
    }
}

void iz_plan_print_attention(const struct iz_plan *p, FILE *out)
{
    const struct iz_target *t = &p->target;
    const char *fwd = t->cudnn || !t->why_own[0] ? "" : t->why_own[0];
    const char *bwd = t->cudnn_bwd || !t->why_own[1] ? "" : t->why_own[1];
    if (!t->gpu || !p->attends)
        return;
    if (strcmp(fwd, bwd) == 0)
        bwd = "";
    fprintf(out, "      attention: forward by %s, backward by %s%s%s%s%s\n",
            t->cudnn ? "cuDNN" : "izar", t->cudnn_bwd ? "cuDNN" : "izar",
            *fwd || *bwd ? ": " : "", fwd, *fwd && *bwd ? "; " : "", bwd);
}
