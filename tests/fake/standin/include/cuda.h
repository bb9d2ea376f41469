/* SPDX-License-Identifier: Apache-2.0 */
/* StarPU's configure looks for this header; the stand-in has no driver API. */
#pragma once

#include <cuda_runtime_api.h>

#define CUDA_VERSION CUDART_VERSION
