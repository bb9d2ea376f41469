/* SPDX-License-Identifier: Apache-2.0 */
/* Our fused kernels or cuDNN's; see fused.h. */
#include "runtime/machine/fused.h"

#include <errno.h>
#include <stdio.h>

#include "codelets/ops/gpu_ops.h"
#include "codelets/unit/unit.h"
#include "runtime/machine/choice.h"

/* One rank speaks. */
static int refuse(struct iz_coll *coll, const char *why, bool began)
{
    int q = iz_coll_refuser(coll, why != NULL);
    if (q == coll->rank)
        fprintf(stderr, "izar: run.gpu_attention: cudnn: rank %d: %s%s\n", q,
                why,
                began ? "; this run began with it: own goes on with other bits"
                      : "; use own");
    return q < 0 ? 0 : -ENOTSUP;
}

int iz_fused_choose(bool *began, struct iz_config *c,
                    const struct iz_fused_for *on, struct iz_coll *coll)
{
    enum iz_fused_by *by = &c->run.fused;
    *began = false;
    if (*by == IZ_FUSED_AUTO && on->resume && c->dtype != IZ_F32) {
        int w = iz_choice_begun(c, coll, "gpu_attention", "own", "cudnn");
        if (w < 0)
            return w;
        *by = (enum iz_fused_by)w;
        *began = *by != IZ_FUSED_AUTO;
    }
    if (!on->gpu)
        return 0;
    if (*by == IZ_FUSED_AUTO)
        *by = IZ_FUSED_OWN;
    return *by == IZ_FUSED_CUDNN
               ? refuse(coll, iz_cuda_ops->cudnn_missing(), *began)
               : 0;
}

struct asking {
    const struct iz_engine *e;
    struct iz_refusal why;
};

/* A generated text's last token comes from one sample. */
static void ask(void *arg, int i, struct iz_exec *x)
{
    struct asking *a = arg;
    const struct iz_engine *e = a->e;
    (void)i;
    for (int u = 0; u < e->model->n_units; u++) {
        iz_unit_ask(e->model, u, e->plan.samples, e->plan.param_type, x,
                    &a->why);
        if (e->config->run.sample_tokens > 0)
            iz_unit_ask(e->model, u, 1, e->plan.param_type, x, &a->why);
    }
}

int iz_fused_prepare(const struct iz_engine *e, bool began)
{
    struct asking a = {.e = e};
    if (!e->plan.target.cudnn)
        return 0;
    iz_graph_on_device(e->graph, ask, &a);
    return refuse(e->coll, a.why.why[0] ? a.why.why : NULL, began);
}
