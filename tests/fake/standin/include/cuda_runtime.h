/* SPDX-License-Identifier: Apache-2.0 */
/* For C there is nothing more than the API. */
#ifndef IZ_TESTS_FAKE_STANDIN_INCLUDE_CUDA_RUNTIME_H
#define IZ_TESTS_FAKE_STANDIN_INCLUDE_CUDA_RUNTIME_H

#include <cuda_runtime_api.h>

#endif
