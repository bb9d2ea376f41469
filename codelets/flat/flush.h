/* SPDX-License-Identifier: Apache-2.0 */
/* States below FLT_MIN become 0: that of an element without gradient would
 * otherwise stay subnormal for ever, at a hundred times the cost. */
#pragma once

#include <float.h>

#include "codelets/flat/half.h"

IZ_EITHER float iz_flush(float x)
{
    uint32_t u = iz_float_bits(x);
    return iz_float_of_bits(u & -(uint32_t)((u & 0x7f800000u) != 0));
}

/* Of a number that is not negative, with one instruction less. */
IZ_EITHER float iz_flush_square(float x)
{
    return iz_float_of_bits(iz_float_bits(x) & -(uint32_t) !(x < FLT_MIN));
}
