/* SPDX-License-Identifier: Apache-2.0 */
/* A type that StarPU's headers name; the library does not exist here. */
#pragma once

#include <cusolver_common.h>

typedef struct cusolverRfContext *cusolverRfHandle_t;
