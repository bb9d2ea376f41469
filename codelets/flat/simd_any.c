/* SPDX-License-Identifier: Apache-2.0 */
/* A processor without SIMD levels of its own: what the compiler does anyway. */
#include <stddef.h>

#include "codelets/flat/simd.h"

extern const struct iz_simd iz_simd_portable;
extern const struct iz_attention_loops iz_attention_portable;

const struct iz_simd_level iz_simd_levels[] = {
    {"portable", &iz_simd_portable, &iz_attention_portable, NULL},
    {NULL, NULL, NULL, NULL}};
