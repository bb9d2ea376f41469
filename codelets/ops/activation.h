/* SPDX-License-Identifier: Apache-2.0 */
/* The slopes of activations, whose formulas the CPU and the GPU share. */
#pragma once

#include "codelets/base/build.h"

#define IZ_TWO_ROOT_2_PI 1.5957691216f /* 2 sqrt(2/pi) */
#define IZ_GELU_CUBIC 0.044715f

/* d gelu / da, where s is gelu / a.  Beyond 12 that is 0 or 1 to fp32; the
 * clamp keeps 0 * inf away and lets NaN through. */
IZ_EITHER float iz_activation_gelu_slope(float a, float s)
{
    float c = a > 12 ? 12 : a;
    c = c < -12 ? -12 : c;
    return s +
           c * s * (1 - s) * IZ_TWO_ROOT_2_PI * (1 + 3 * IZ_GELU_CUBIC * c * c);
}

/* d (a s) / da, s = 1 / (1 + exp(-a)).  Beyond 100 that is 0 or 1; as above. */
IZ_EITHER float iz_activation_swiglu_slope(float a, float s)
{
    float c = a > 100 ? 100 : a;
    c = c < -100 ? -100 : c;
    return s + c * s * (1 - s);
}
