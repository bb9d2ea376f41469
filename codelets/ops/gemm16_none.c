/* SPDX-License-Identifier: Apache-2.0 */
/* A build without oneDNN. */
#include <stdio.h>

#include "codelets/base/die.h"
#include "codelets/ops/gemm16.h"

const char *iz_gemm16_onednn_missing(void)
{
    return "izar was built without oneDNN";
}

const char *iz_gemm16_missing(void)
{
    return iz_gemm16_onednn_missing();
}

void iz_gemm_onednn(const struct iz_gemm *g)
{
    iz_die("%s", iz_gemm16_onednn_missing());
}

void iz_gemm16_name(char *out, size_t size)
{
    snprintf(out, size, "%s", "");
}

int64_t iz_gemm16_scratch(const struct iz_gemm16 *g)
{
    return 0;
}

void iz_gemm16(const struct iz_gemm16 *g)
{
    iz_die("%s", iz_gemm16_missing());
}
