/* SPDX-License-Identifier: Apache-2.0 */
/* A type that StarPU's headers name; the library does not exist here. */
#ifndef IZ_STANDIN_CUSOLVER_DN_H
#define IZ_STANDIN_CUSOLVER_DN_H

#include <cusolver_common.h>

typedef struct cusolverDnContext *cusolverDnHandle_t;

#endif
