/* SPDX-License-Identifier: Apache-2.0 */
/* Random operands of products that are timed. */
#include "codelets/gpu/pattern.h"

#include <stdlib.h>

#include <cuda_runtime_api.h>

#include "codelets/base/die.h"
#include "codelets/base/mix.h"
#include "codelets/base/take.h"

enum { PATTERN = 1 << 18 }; /* elements that repeat */

static void pattern_check(cudaError_t e, const char *call)
{
    if (e != cudaSuccess)
        iz_die("%s: %s", call, cudaGetErrorString(e));
}

/* PATTERN numbers, uniform in [-1, 1). */
static void make_pattern(void *to, enum iz_dtype t)
{
    for (uint64_t i = 0; i < PATTERN; i++) {
        float f = (float)(iz_mix(i * IZ_GOLDEN) >> 40) * 0x1p-23f - 1;
        iz_cast((char *)to + (int64_t)i * iz_dtype_bytes(t), t, &f, IZ_F32, 1);
    }
}

void iz_pattern_fill(char *p, int64_t bytes, enum iz_dtype t)
{
    int64_t done = PATTERN * iz_dtype_bytes(t);
    void *pattern = iz_take(done, 1, "random numbers");
    make_pattern(pattern, t);
    done = done < bytes ? done : bytes;
    pattern_check(cudaMemcpy(p, pattern, (size_t)done, cudaMemcpyHostToDevice),
                  "cudaMemcpy");
    free(pattern);
    while (done < bytes) {
        int64_t n = done < bytes - done ? done : bytes - done;
        pattern_check(
            cudaMemcpy(p + done, p, (size_t)n, cudaMemcpyDeviceToDevice),
            "cudaMemcpy");
        done += n;
    }
    pattern_check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}
