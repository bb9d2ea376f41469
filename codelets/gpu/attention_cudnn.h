/* SPDX-License-Identifier: Apache-2.0 */
/* Attention's forward through cuDNN.  The library is looked for when it is
 * asked for: a program that was built with it runs where there is none. */
#pragma once

#include "codelets/ops/ops.h"

struct iz_cudnn; /* handle of cuDNN and the plans made so far */

/* For the calling thread's GPU, to work in this stream; `described`: for the
 * device of that description (CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION), of
 * which plans can be made and not run.  -errno with the reason in `why`; close
 * accepts NULL. */
int iz_cudnn_open(struct iz_cudnn **out, void *stream, const char *described,
                  struct iz_refusal *why);
void iz_cudnn_close(struct iz_cudnn **c);

/* Whether cuDNN has a plan for attention of this shape and type that keeps to
 * IZ_CUDNN_SCRATCH, which it then has ready; else false with the reason. */
bool iz_cudnn_plan(struct iz_cudnn *c, const struct iz_attention *a,
                   struct iz_refusal *why);
