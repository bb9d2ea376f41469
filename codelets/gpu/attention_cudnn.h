/* SPDX-License-Identifier: Apache-2.0 */
/* Attention through cuDNN.  The library is loaded at the first
 * use, so a program that was built with cuDNN also runs on machines without it.
 */
#pragma once

#include "codelets/ops/ops.h"

struct iz_cudnn; /* handle of cuDNN and the plans made so far */

/* Opens cuDNN for the calling thread's GPU; its work goes into this stream.
 * With `described`, opens it for a device that need not exist, given by its
 * description (CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION): plans can then be
 * made but not run.  -errno with the reason in `why`.  Close accepts NULL. */
int iz_cudnn_open(struct iz_cudnn **out, void *stream, const char *described,
                  struct iz_refusal *why);
void iz_cudnn_close(struct iz_cudnn **c);

/* Prepares a plan for attention of this shape and type, or for its gradient of
 * so many samples (back; 0: no gradient), that needs no more scratch than
 * IZ_CUDNN_SCRATCH or iz_gpu_cudnn_bwd_bytes.  bytes: what it needs.  False,
 * with the reason, if there is none. */
bool iz_cudnn_plan(struct iz_cudnn *c, const struct iz_attention *a,
                   int64_t back, int64_t *bytes, struct iz_refusal *why);
/* Of a backward's samples, in equal parts, as many at once as so much scratch
 * has room for, if the library does them by the kernel that it has for one, set
 * in the same way: bits must not depend on it.  1: no more. */
int64_t iz_cudnn_at_once(struct iz_cudnn *c, const struct iz_attention *a,
                         int64_t bytes);
