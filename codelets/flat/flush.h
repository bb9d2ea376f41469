/* SPDX-License-Identifier: Apache-2.0 */
/* States below FLT_MIN become 0: that of an element without gradient would
 * otherwise stay subnormal for ever, at a hundred times the cost. */
#pragma once

#include <float.h>
#include <math.h>

#include "codelets/base/build.h"

IZ_EITHER float iz_flush(float x)
{
    return fabsf(x) < FLT_MIN ? 0.0f : x;
}
