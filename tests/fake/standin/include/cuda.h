/* SPDX-License-Identifier: Apache-2.0 */
/* StarPU's configure looks for this header; the stand-in has no driver API. */
#ifndef IZ_TESTS_FAKE_STANDIN_INCLUDE_CUDA_H
#define IZ_TESTS_FAKE_STANDIN_INCLUDE_CUDA_H

#include <cuda_runtime_api.h>

#define CUDA_VERSION CUDART_VERSION

#endif
