/* SPDX-License-Identifier: Apache-2.0 */
/* The SIMD levels of AArch64: NEON, which all of them have, and SVE. */
#include <stddef.h>
#include <sys/auxv.h>

#include "codelets/flat/simd.h"

#define HWCAP_BIT_SVE (1ul << 22) /* HWCAP_SVE of the kernel's asm/hwcap.h */

extern const struct iz_simd iz_simd_sve, iz_simd_portable;
extern const struct iz_attention_loops iz_attention_sve, iz_attention_portable;

static bool has_sve(void)
{
    return getauxval(AT_HWCAP) & HWCAP_BIT_SVE;
}

const struct iz_simd_level iz_simd_levels[] = {
    {"sve", &iz_simd_sve, &iz_attention_sve, has_sve},
    {"portable", &iz_simd_portable, &iz_attention_portable, NULL},
    {NULL, NULL, NULL, NULL}};
