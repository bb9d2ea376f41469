/* SPDX-License-Identifier: Apache-2.0 */
/* Element types of tensors, and the conversion between them. */
#pragma once

#include <stdint.h>

#include "codelets/base/build.h"

IZ_C_BEGIN

enum iz_dtype { IZ_F32, IZ_BF16, IZ_F16, IZ_I32, IZ_U8 };

/* Bytes of one element. */
int64_t iz_dtype_bytes(enum iz_dtype t);
/* "fp32", "bf16", "fp16", "int32", "uint8". */
const char *iz_dtype_name(enum iz_dtype t);

/* Converts n floating-point elements, rounding to nearest even; fp16 overflow
 * becomes infinity, NaN stays NaN.  dst and src must not overlap unless they
 * are the same pointer and the same type (then nothing is done). */
void iz_cast(void *dst, enum iz_dtype to, const void *src, enum iz_dtype from,
             int64_t n);

/* fp32 to the type of parameters: as iz_cast, but in bf16 a number between two
 * others goes away from zero, so that iz_cast_split and iz_half_join lose
 * nothing. */
void iz_cast_params(void *dst, enum iz_dtype to, const float *src, int64_t n);

/* n fp32 numbers as bf16 parameters and the 16 bits that those lack, and back
 * to the same numbers; NaN becomes quiet.  Nothing overlaps. */
void iz_cast_split(uint16_t *upper, uint16_t *lower, const float *src,
                   int64_t n);
void iz_cast_join(float *dst, const uint16_t *upper, const uint16_t *lower,
                  int64_t n);

IZ_C_END
