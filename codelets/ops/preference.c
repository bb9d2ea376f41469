/* SPDX-License-Identifier: Apache-2.0 */
/* The loss of pairs of texts; see ops.h.  It needs the log-probabilities of
 * whole samples before it can form a gradient, so the logits are computed three
 * times: for the reference, for the policy, and for the policy's gradient. */
#include <assert.h>
#include <math.h>
#include <stddef.h>

#include "codelets/ops/ops.h"

/* Targets of a sample. */
static double targets(const struct iz_classifier *c, int sample)
{
    int64_t rows = c->a.rows / c->samples, n = 0;
    for (int64_t i = 0; i < rows; i++)
        n += c->target[sample * rows + i] >= 0;
    return (double)n;
}

/* log(1 + exp(x)), which does not overflow. */
static double softplus(double x)
{
    return fmax(x, 0) + log1p(exp(-fabs(x)));
}

/* Adds the figures of a pair. */
static void tell_pair(struct iz_told *told, double beta, const double logp[2],
                      const double l[2])
{
    told->pairs++;
    told->pair[IZ_REWARDS_CHOSEN] += beta * l[0];
    told->pair[IZ_REWARDS_REJECTED] += beta * l[1];
    told->pair[IZ_REWARDS_ACCURACIES] += l[0] > l[1];
    told->pair[IZ_REWARDS_MARGINS] += beta * (l[0] - l[1]);
    told->pair[IZ_LOGPS_CHOSEN] += logp[0];
    told->pair[IZ_LOGPS_REJECTED] += logp[1];
}

/* The loss of a pair, and its derivative by d. */
static double pair_loss(const struct iz_preference *p, double d, double *by)
{
    double margin = p->beta * d, off = d - 0.5 / p->beta;
    bool ipo = p->type == IZ_LOSS_IPO;
    *by = ipo ? 2 * off : -p->beta / (1 + exp(margin));
    return ipo ? off * off : softplus(-margin);
}

/* policy, reference: sums of -log p of each sample.  Writes the loss and by
 * what each sample's sum is scaled in the gradient. */
static void form_pairs(const struct iz_classifier *c, const struct iz_pairs *p,
                       const double *policy, const double *reference,
                       float *scales)
{
    double weight = 2 / (double)c->samples, chosen = 0;
    for (int i = 0; i < c->samples; i += 2)
        chosen += targets(c, i);
    double sft = chosen > 0 ? p->loss->sft * p->weight / chosen : 0;
    *c->loss = 0;
    for (int i = 0; i < c->samples; i += 2) {
        double part[2], logp[2], l[2], by;
        for (int k = 0; k < 2; k++) {
            part[k] = p->loss->type == IZ_LOSS_IPO
                          ? 1 / fmax(targets(c, i + k), 1)
                          : 1;
            logp[k] = -policy[i + k];
            l[k] = logp[k] + reference[i + k];
        }
        *c->loss +=
            weight * pair_loss(p->loss, l[0] * part[0] - l[1] * part[1], &by) +
            sft * policy[i];
        if (p->told)
            tell_pair(p->told, p->loss->beta, logp, l);
        by *= weight; /* -log p falls where log p grows */
        scales[i] = (float)((double)c->loss_scale * (sft - by * part[0]));
        scales[i + 1] = (float)((double)c->loss_scale * by * part[1]);
    }
}

void iz_preference(struct iz_exec *x, const struct iz_classifier *c,
                   const struct iz_pairs *p)
{
    int64_t mark = iz_work_mark(x);
    struct iz_view sums = iz_work(x, IZ_U8, 2 * (int64_t)c->samples, 8);
    struct iz_view scales = iz_work(x, IZ_F32, c->samples, 1);
    double *of_policy = sums.p;
    double *of_reference = x->dry ? NULL : of_policy + c->samples;
    struct iz_classifier k = {.a = p->a,
                              .w = p->w,
                              .target = c->target,
                              .sums = of_reference,
                              .samples = c->samples};
    assert(c->samples % 2 == 0 && c->a.rows % c->samples == 0);
    iz_classifier(x, &k);
    k.a = c->a;
    k.w = c->w;
    k.sums = of_policy;
    iz_classifier(x, &k);
    if (!x->dry)
        form_pairs(c, p, of_policy, of_reference, scales.p);
    if (c->da.rows) {
        k = *c;
        k.loss = NULL;
        k.scales = scales.p;
        iz_classifier(x, &k);
    }
    iz_work_release(x, mark);
}
