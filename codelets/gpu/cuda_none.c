/* SPDX-License-Identifier: Apache-2.0 */
/* A build without CUDA. */
#include <stddef.h>

#include "codelets/cuda.h"

const struct iz_cuda_ops *const iz_cuda_ops = NULL;
