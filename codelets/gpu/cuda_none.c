/* SPDX-License-Identifier: Apache-2.0 */
/* A build without CUDA. */
#include <stddef.h>

#include "codelets/ops/gpu_ops.h"

const struct iz_cuda_ops *const iz_cuda_ops = NULL;
