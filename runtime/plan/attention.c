/* SPDX-License-Identifier: Apache-2.0 */
/* Whose kernels do attention's forward and backward on a GPU; see plan.h. */
#include <stdio.h>
#include <string.h>

#include "runtime/plan/plan.h"

/* From here on cuDNN's kernels are known to be faster, both ways. */
#define CAPABILITY 90

const char *iz_plan_not_cudnn(const struct iz_config *c, int capability)
{
    if (c->dtype == IZ_F32)
        return "cuDNN's attention is of bf16 and fp16";
    if (c->data.apart)
        return "cuDNN's attention does not keep documents apart";
    return capability < CAPABILITY ? "cuDNN's is not known to be faster below "
                                     "compute capability 9.0"
                                   : NULL;
}

void iz_plan_print_attention(const struct iz_plan *p, FILE *out)
{
    const struct iz_target *t = &p->target;
    const char *fwd = t->numerics.cudnn || !t->why_own[0] ? "" : t->why_own[0];
    const char *bwd =
        t->numerics.cudnn_bwd || !t->why_own[1] ? "" : t->why_own[1];
    if (!t->gpu || !p->attends)
        return;
    if (strcmp(fwd, bwd) == 0)
        bwd = "";
    fprintf(out, "      attention: forward by %s, backward by %s%s%s%s%s\n",
            t->numerics.cudnn ? "cuDNN" : "izar",
            t->numerics.cudnn_bwd ? "cuDNN" : "izar", *fwd || *bwd ? ": " : "",
            fwd, *fwd && *bwd ? "; " : "", bwd);
}
