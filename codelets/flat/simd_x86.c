/* SPDX-License-Identifier: Apache-2.0 */
/* The SIMD levels of x86-64.  What is asked for here is what meson.build lets
 * the compiler use. */
#include <cpuid.h>
#include <stddef.h>

#include "codelets/flat/simd.h"

extern const struct iz_simd iz_simd_avx512, iz_simd_avx2, iz_simd_portable;
extern const struct iz_attention_loops iz_attention_avx512, iz_attention_avx2,
    iz_attention_portable;

static bool has_avx512(void)
{
    return __builtin_cpu_supports("avx512f") &&
           __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl");
}

/* Not every compiler has a name for F16C. */
static bool has_avx2(void)
{
    unsigned a, b, c, d;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

const struct iz_simd_level iz_simd_levels[] = {
    {"avx512", &iz_simd_avx512, &iz_attention_avx512, has_avx512},
    {"avx2", &iz_simd_avx2, &iz_attention_avx2, has_avx2},
    {"portable", &iz_simd_portable, &iz_attention_portable, NULL},
    {NULL, NULL, NULL, NULL}};
