/* SPDX-License-Identifier: Apache-2.0 */
/* What version 2 of oneDNN calls otherwise than 3 (onednn_3.h), for
 * gemm16_onednn.c.  Functions return dnnl_status_t as an int. */
#pragma once

#include <oneapi/dnnl/dnnl.h>

enum { IZ_ONEDNN_MAJOR = 2 };

typedef dnnl_memory_desc_t iz_desc;

/* A row-major or column-major array of n dimensions. */
static inline int iz_desc_open(iz_desc *d, int n, const dnnl_dims_t dims,
                               const dnnl_dims_t strides, dnnl_data_type_t t)
{
    return (int)dnnl_memory_desc_init_by_strides(d, n, dims, t, strides);
}

static inline void iz_desc_close(iz_desc *d)
{
}

static inline int iz_desc_memory(dnnl_memory_t *m, iz_desc *d, dnnl_engine_t e,
                                 void *p)
{
    return (int)dnnl_memory_create(m, d, e, p);
}

/* C = A B + bias, bias NULL or [1,n]. */
static inline int iz_desc_product(dnnl_primitive_desc_t *out, dnnl_engine_t e,
                                  iz_desc *a, iz_desc *b, iz_desc *bias,
                                  iz_desc *c, dnnl_primitive_attr_t attr)
{
    dnnl_matmul_desc_t d;
    int r = (int)dnnl_matmul_desc_init(&d, a, b, bias, c);
    return r ? r : (int)dnnl_primitive_desc_create(out, &d, attr, e, NULL);
}

/* C += in place of C =. */
static inline int iz_desc_add(dnnl_post_ops_t ops)
{
    return (int)dnnl_post_ops_append_sum(ops, 1);
}
