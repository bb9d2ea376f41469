/* SPDX-License-Identifier: Apache-2.0 */
/* The loss of pairs of texts; see ops.h.  It needs the log-probabilities of
 * whole samples before it can form a gradient, so the logits are computed three
 * times: for the reference, for the policy, and for the policy's gradient. */
#include "codelets/ops/preference.h"

#include <assert.h>
#include <stddef.h>

#include "codelets/ops/gpu_ops.h"

void iz_pair_loss(struct iz_exec *x, const struct iz_classifier *c,
                  const struct iz_pairs *p, const struct iz_sample_loss *each,
                  float *scales)
{
    if (x->dry)
        return;
    if (x->backend == IZ_CUDA)
        iz_pair_loss_cuda(x, c, p, each, scales);
    else
        *c->loss =
            iz_preference_pairs(p->loss, p->weight, c->samples,
                                (double)c->loss_scale, each, p->aux, scales);
}

void iz_preference(struct iz_exec *x, const struct iz_classifier *c,
                   const struct iz_pairs *p)
{
    int64_t mark = iz_exec_mark(x), bytes = sizeof(struct iz_sample_loss);
    struct iz_view work =
        iz_exec_work(x, IZ_U8, 2 * (int64_t)c->samples, bytes);
    struct iz_view scales = iz_exec_work(x, IZ_F32, c->samples, 1);
    struct iz_sample_loss *each = work.p;
    struct iz_classifier k = {.a = c->a,
                              .w = c->w,
                              .b = c->b,
                              .target = c->target,
                              .each = each,
                              .cap = c->cap,
                              .samples = c->samples};
    assert(c->samples % 2 == 0 && c->a.rows % c->samples == 0);
    iz_classifier(x, &k);
    k.a = p->a;
    k.w = p->w;
    k.b = p->b;
    k.each = x->dry ? NULL : each + c->samples;
    iz_classifier(x, &k);
    iz_pair_loss(x, c, p, each, scales.p);
    if (c->da.rows) {
        k = *c;
        k.loss = NULL;
        k.scales = scales.p;
        iz_classifier(x, &k);
    }
    iz_exec_release(x, mark);
}
