/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/buffer/flat_buffer.h"

#include <string.h>

#include "codelets/base/int64.h"
#include "codelets/flat/flat.h"
#include "codelets/gpu/device.h"
#include "codelets/ops/gpu_ops.h"

void iz_buffer_copy(struct iz_exec *x, void *dst, const void *src,
                    int64_t bytes)
{
    if (x->stream)
        iz_device_copy(x->stream, dst, src, bytes);
    else
        memcpy(dst, src, (size_t)bytes);
}

void iz_buffer_clear(struct iz_exec *x, void *p, int64_t bytes)
{
    if (x->stream)
        iz_device_clear(x->stream, p, bytes);
    else
        memset(p, 0, (size_t)bytes);
}

void iz_buffer_sum(struct iz_exec *x, void *out, enum iz_dtype out_type,
                   bool accumulate, const void *const *in, int n_in,
                   enum iz_dtype in_type, int64_t n)
{
    if (x->backend == IZ_CUDA)
        iz_flat_sum_cuda(x, out, out_type, accumulate, in, n_in, in_type, n);
    else
        iz_flat_sum(out, out_type, accumulate, in, n_in, in_type, n);
}

void iz_buffer_norm2(struct iz_exec *x, double *norm2, const void *p,
                     enum iz_dtype type, int64_t n)
{
    if (x->backend != IZ_CUDA) {
        *norm2 = iz_flat_norm2(p, type, n);
        return;
    }
    int64_t mark = iz_exec_mark(x);
    struct iz_view scratch =
        iz_exec_work(x, IZ_U8, 1, iz_flat_norm2_scratch_bytes(n));
    iz_flat_norm2_cuda(x, norm2, p, type, n, scratch);
    iz_exec_release(x, mark);
}

void iz_buffer_squares(struct iz_exec *x, double *sum, const void *p,
                       enum iz_dtype type, int64_t n)
{
    if (x->backend == IZ_CUDA)
        iz_flat_squares_cuda(x, sum, p, type, n);
    else
        iz_flat_squares(sum, p, type, n);
}

void iz_buffer_sum_norm2(struct iz_exec *x, double *norm2, void *out,
                         enum iz_dtype out_type, bool accumulate,
                         const void *const *in, int n_in, enum iz_dtype in_type,
                         int64_t n)
{
    struct iz_norm2 s = {0};
    if (x->backend == IZ_CUDA) {
        iz_buffer_sum(x, out, out_type, accumulate, in, n_in, in_type, n);
        iz_buffer_norm2(x, norm2, out, out_type, n);
        return;
    }
    iz_flat_sum_norm2(&s, out, out_type, accumulate, in, n_in, in_type, n);
    *norm2 = iz_norm2_end(&s);
}

void iz_buffer_quant(struct iz_exec *x, enum iz_quant q, void *out,
                     enum iz_dtype type, const void *groups, int64_t n)
{
    const char *g = groups;
    if (x->backend == IZ_CUDA) {
        iz_quant_load_cuda(x, q, out, type, groups, n);
        return;
    }
    for (int64_t i = 0; i < n; i += IZ_QUANT_GROUP, g += iz_quant_bytes(q))
        iz_quant_load(q, (char *)out + i * iz_dtype_bytes(type), type, g,
                      min64(n - i, IZ_QUANT_GROUP));
}

void iz_buffer_update(struct iz_exec *x, const struct iz_update *u)
{
    if (x->backend == IZ_CUDA)
        iz_update_cuda(x, u);
    else
        iz_update(u);
}
