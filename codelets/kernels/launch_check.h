/* SPDX-License-Identifier: Apache-2.0 */
/* Whether a kernel was launched.  CUDA remembers the last error of a thread,
 * also one of a call that had nothing to do with the launch: it is forgotten
 * before.  "Not ready" is the answer of a query and no error.  Errors that
 * break a GPU cannot be forgotten; the launch itself shows them. */
#pragma once

#include <cuda_runtime_api.h>

#include "codelets/base/die.h"

static inline void iz_launch_forget(void)
{
    (void)cudaGetLastError();
}

static inline void iz_launch_check(cudaError_t err, const char *kernel,
                                   const char *where)
{
    if (err != cudaSuccess && err != cudaErrorNotReady)
        iz_die("launch of %s in %s: %s", kernel, where,
               cudaGetErrorString(err));
}
