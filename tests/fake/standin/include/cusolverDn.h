/* SPDX-License-Identifier: Apache-2.0 */
/* What StarPU's headers name; the library does not exist here. */
#pragma once

typedef enum { CUSOLVER_STATUS_SUCCESS } cusolverStatus_t;
typedef struct cusolverDnContext *cusolverDnHandle_t;
typedef struct cusolverRfContext *cusolverRfHandle_t;
typedef struct cusolverSpContext *cusolverSpHandle_t;
