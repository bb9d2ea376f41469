/* SPDX-License-Identifier: Apache-2.0 */
/* A type that StarPU's headers name; the library does not exist here. */
#ifndef IZ_TESTS_FAKE_STANDIN_INCLUDE_CUSPARSE_H
#define IZ_TESTS_FAKE_STANDIN_INCLUDE_CUSPARSE_H

#include <cuda_runtime_api.h>

typedef struct cusparseContext *cusparseHandle_t;
typedef enum { CUSPARSE_STATUS_SUCCESS } cusparseStatus_t;

#endif
