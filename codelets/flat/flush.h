/* SPDX-License-Identifier: Apache-2.0 */
/* States below FLT_MIN become 0: that of an element without gradient would
 * otherwise stay subnormal for ever, at a hundred times the cost. */
#pragma once

#include "codelets/flat/half.h"

IZ_EITHER float iz_flush(float x)
{
    return iz_float_bits(x) & 0x7f800000u ? x : 0.0f;
}
