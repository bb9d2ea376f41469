/* SPDX-License-Identifier: Apache-2.0 */
/* A type that StarPU's headers name; the library does not exist here. */
#ifndef IZ_TESTS_FAKE_STANDIN_INCLUDE_CUSOLVER_COMMON_H
#define IZ_TESTS_FAKE_STANDIN_INCLUDE_CUSOLVER_COMMON_H

#include <cuda_runtime_api.h>

typedef enum { CUSOLVER_STATUS_SUCCESS } cusolverStatus_t;

#endif
