/* SPDX-License-Identifier: Apache-2.0 */
/* A type that StarPU's headers name; the library does not exist here. */
#ifndef IZ_TESTS_FAKE_STANDIN_INCLUDE_CUSOLVERDN_H
#define IZ_TESTS_FAKE_STANDIN_INCLUDE_CUSOLVERDN_H

#include <cusolver_common.h>

typedef struct cusolverDnContext *cusolverDnHandle_t;

#endif
