/* SPDX-License-Identifier: Apache-2.0 */
/* Building blocks of the kernels that work row by row: whether rows may be read
 * in pieces of 16 bytes, and loads of long rows. */
#pragma once

#include "codelets/kernels/launch.cuh"

/* Whether rows of n elements, one behind the other, consist of whole aligned
 * pieces. */
template <class T> static inline bool iz_rows_aligned(const void *p, int64_t n)
{
    return (uintptr_t)p % 16 == 0 && n * sizeof(T) % 16 == 0;
}

/* A pieces of N elements of a row of c, STEP apart from `at` on.  Loads without
 * branches, so that they go out together: beyond the end, the last piece again.
 */
template <int STEP, int A, int N, class T>
static __device__ void iz_load_ahead(float (&v)[A][N], const T *row, int at,
                                     int c)
{
#pragma unroll
    for (int k = 0; k < A; k++)
        iz_load_row(v[k], row + min(at + k * STEP, c - N));
}
