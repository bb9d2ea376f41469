/* SPDX-License-Identifier: Apache-2.0 */
/* The loss of pairs of texts on a GPU: a thread has all samples, whose numbers
 * are few; what is wide about it is the classifier's. */
#include "codelets/ops/preference.h"

#include "codelets/kernels/launch.cuh"
#include "codelets/ops/gpu_ops.h"

static __global__ void form_pairs(struct iz_preference p, double part,
                                  int samples, double loss_scale,
                                  const struct iz_sample_loss *each,
                                  struct iz_aux *aux, float *scales,
                                  double *loss)
{
    *loss =
        iz_preference_pairs(&p, part, samples, loss_scale, each, aux, scales);
}

void iz_pair_loss_cuda(struct iz_exec *x, const struct iz_classifier *c,
                       const struct iz_pairs *p,
                       const struct iz_sample_loss *each, float *scales)
{
    IZ_LAUNCH(form_pairs, 1, 1, 0, x->stream, *p->loss, p->weight, c->samples,
              (double)c->loss_scale, each, p->aux, scales, c->loss);
}
