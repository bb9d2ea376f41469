/* SPDX-License-Identifier: Apache-2.0 */
/* Rounding of tensors, which is on a GPU a sum of one buffer; sums; copies. */
#include "codelets/ops/ops.h"

#include <assert.h>
#include <math.h>
#include <string.h>

#include "codelets/flat/flat.h"
#include "codelets/ops/gpu_ops.h"

void iz_convert(struct iz_exec *x, struct iz_view y, struct iz_view a)
{
    const void *in = a.p;
    assert(iz_view_len(y) == iz_view_len(a));
    iz_exec_count(x, 0, (double)(iz_view_bytes(y) + iz_view_bytes(a)));
    if (iz_exec_runs(x, IZ_CPU))
        iz_cast(y.p, y.dtype, a.p, a.dtype, iz_view_len(a));
    if (iz_exec_runs(x, IZ_CUDA) && (y.p != a.p || y.dtype != a.dtype))
        iz_flat_sum_cuda(x, y.p, y.dtype, false, &in, 1, a.dtype,
                         iz_view_len(a));
}

void iz_op_add(struct iz_exec *x, struct iz_view y, struct iz_view a)
{
    const void *in = a.p;
    assert(iz_view_len(y) == iz_view_len(a));
    iz_exec_count(x, 0, (double)(2 * iz_view_bytes(y) + iz_view_bytes(a)));
    if (iz_exec_runs(x, IZ_CPU))
        iz_flat_sum(y.p, y.dtype, true, &in, 1, a.dtype, iz_view_len(a));
    if (iz_exec_runs(x, IZ_CUDA))
        iz_flat_sum_cuda(x, y.p, y.dtype, true, &in, 1, a.dtype,
                         iz_view_len(a));
}

void iz_op_scale(struct iz_exec *x, struct iz_view y, struct iz_view a,
                 float scale, float cap)
{
    assert(iz_view_len(y) == iz_view_len(a) && y.dtype == a.dtype);
    iz_exec_count(x, 0, (double)(iz_view_bytes(y) + iz_view_bytes(a)));
    if (iz_exec_runs(x, IZ_CPU))
        for (int64_t i = 0; i < iz_view_len(a); i++) {
            float v = scale * ((float *)a.p)[i];
            ((float *)y.p)[i] = cap != 0 ? cap * tanhf(v / cap) : v;
        }
    if (iz_exec_runs(x, IZ_CUDA))
        iz_op_scale_cuda(x, y, a, scale, cap);
}

void iz_op_clear(struct iz_exec *x, struct iz_view v)
{
    if (!iz_view_wanted(x, v))
        return;
    iz_exec_count(x, 0, (double)iz_view_bytes(v));
    if (iz_exec_runs(x, IZ_CPU))
        memset(v.p, 0, (size_t)iz_view_bytes(v));
    if (iz_exec_runs(x, IZ_CUDA))
        iz_op_clear_cuda(x, v);
}

void iz_op_columns(struct iz_exec *x, struct iz_view y, int64_t to,
                   struct iz_view a, int64_t from, int64_t cols)
{
    int64_t in = iz_dtype_bytes(a.dtype), out = iz_dtype_bytes(y.dtype);
    assert(y.rows == a.rows && (y.dtype == a.dtype || a.dtype == IZ_F32));
    assert(to + cols <= y.cols && from + cols <= a.cols);
    iz_exec_count(x, 0, (double)(y.rows * cols * (in + out)));
    if (iz_exec_runs(x, IZ_CUDA))
        iz_op_columns_cuda(x, y, to, a, from, cols);
    for (int64_t r = 0; iz_exec_runs(x, IZ_CPU) && r < y.rows; r++)
        iz_cast((char *)y.p + (r * y.cols + to) * out, y.dtype,
                (char *)a.p + (r * a.cols + from) * in, a.dtype, cols);
}

void iz_op_copy(struct iz_exec *x, struct iz_view y, struct iz_view a)
{
    assert(iz_view_bytes(y) == iz_view_bytes(a));
    iz_exec_count(x, 0, (double)(iz_view_bytes(y) + iz_view_bytes(a)));
    if (iz_exec_runs(x, IZ_CPU))
        memcpy(y.p, a.p, (size_t)iz_view_bytes(a));
    if (iz_exec_runs(x, IZ_CUDA))
        iz_op_copy_cuda(x, y, a);
}
