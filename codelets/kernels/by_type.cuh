/* SPDX-License-Identifier: Apache-2.0 */
/* From a type that is known when the program runs to a template.  Included by
 * launch.cuh and by its twin. */
#pragma once

/* f(zero), where zero has the type of t's elements: fp32, bf16 or fp16.  So f
 * is [&](auto zero) { launch<decltype(zero)>(...); }. */
template <class F> static inline auto iz_by_type(enum iz_dtype t, const F &f)
{
    if (t == IZ_BF16)
        return f(iz_bf16());
    if (t == IZ_F16)
        return f(iz_f16());
    return f(0.0f);
}
