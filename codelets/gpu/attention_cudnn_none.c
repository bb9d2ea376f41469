/* SPDX-License-Identifier: Apache-2.0 */
/* A build without cuDNN. */
#include "codelets/gpu/attention_cudnn.h"

#include <stdio.h>

#include "codelets/base/die.h"
#include "codelets/ops/gpu_ops.h"

const char *iz_cudnn_missing(void)
{
    return "this program was built without cuDNN";
}

void iz_cudnn_close(struct iz_cudnn **c)
{
    *c = NULL;
}

bool iz_attention_ask_cudnn(struct iz_exec *x, const struct iz_attention *a,
                            bool back, int64_t scratch_bytes)
{
    snprintf(x->ask->why, sizeof(x->ask->why), "%s", iz_cudnn_missing());
    return false;
}

void iz_attention_fwd_cudnn(struct iz_exec *x, const struct iz_attention *a,
                            struct iz_view scratch)
{
    iz_die("%s", iz_cudnn_missing());
}

void iz_attention_bwd_cudnn(struct iz_exec *x, struct iz_view dqkv,
                            struct iz_view dy, const struct iz_attention *a,
                            struct iz_view delta, struct iz_view scratch)
{
    iz_die("%s", iz_cudnn_missing());
}
