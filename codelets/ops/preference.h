/* SPDX-License-Identifier: Apache-2.0 */
/* The arithmetic of pairs of texts, for the host and for a kernel; see ops.h.
 */
#pragma once

#include <math.h>

#include "codelets/ops/ops.h"

/* log(1 + exp(x)), which does not overflow. */
IZ_EITHER double iz_preference_softplus(double x)
{
    return fmax(x, 0.0) + log1p(exp(-fabs(x)));
}

/* Adds the figures of a pair. */
IZ_EITHER void iz_preference_aux(struct iz_aux *aux, double beta,
                                 const double *logp, const double *l)
{
    aux->pairs += 1;
    aux->pair[IZ_REWARDS_CHOSEN] += beta * l[0];
    aux->pair[IZ_REWARDS_REJECTED] += beta * l[1];
    aux->pair[IZ_REWARDS_ACCURACIES] += l[0] > l[1] ? 1 : 0;
    aux->pair[IZ_REWARDS_MARGINS] += beta * (l[0] - l[1]);
    aux->pair[IZ_LOGPS_CHOSEN] += logp[0];
    aux->pair[IZ_LOGPS_REJECTED] += logp[1];
}

/* The loss of a pair, and its derivative by d. */
IZ_EITHER double iz_preference_loss(const struct iz_preference *p, double d,
                                    double *by)
{
    double margin = p->beta * d, off = d - 0.5 / p->beta;
    bool ipo = p->type == IZ_LOSS_IPO;
    *by = ipo ? 2 * off : -p->beta / (1 + exp(margin));
    return ipo ? off * off : iz_preference_softplus(-margin);
}

/* See iz_pair_loss; returns the loss. */
IZ_EITHER double iz_preference_pairs(const struct iz_preference *p, double part,
                                     int samples, double loss_scale,
                                     const struct iz_sample_loss *each,
                                     struct iz_aux *aux, float *scales)
{
    const struct iz_sample_loss *reference = each + samples;
    double weight = 2 / (double)samples, chosen = 0, loss = 0;
    for (int i = 0; i < samples; i += 2)
        chosen += each[i].targets;
    double sft = chosen > 0 ? p->sft * part / chosen : 0;
    for (int i = 0; i < samples; i += 2) {
        double share[2], logp[2], l[2], by;
        for (int k = 0; k < 2; k++) {
            share[k] =
                p->type == IZ_LOSS_IPO ? 1 / fmax(each[i + k].targets, 1.0) : 1;
            logp[k] = -each[i + k].sum;
            l[k] = logp[k] + reference[i + k].sum;
        }
        loss += weight *
                iz_preference_loss(p, l[0] * share[0] - l[1] * share[1], &by);
        loss += sft * each[i].sum;
        if (aux)
            iz_preference_aux(aux, p->beta, logp, l);
        by *= weight; /* -log p falls where log p grows */
        scales[i] = (float)(loss_scale * (sft - by * share[0]));
        scales[i + 1] = (float)(loss_scale * by * share[1]);
    }
    return loss;
}
