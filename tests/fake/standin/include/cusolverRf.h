/* SPDX-License-Identifier: Apache-2.0 */
/* A type that StarPU's headers name; the library does not exist here. */
#ifndef IZ_STANDIN_CUSOLVER_RF_H
#define IZ_STANDIN_CUSOLVER_RF_H

#include <cusolver_common.h>

typedef struct cusolverRfContext *cusolverRfHandle_t;

#endif
