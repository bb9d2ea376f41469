/* SPDX-License-Identifier: Apache-2.0 */
/* What version 3 of oneDNN calls otherwise than 2; see onednn_2.h. */
#pragma once

#include <oneapi/dnnl/dnnl.h>

enum { IZ_ONEDNN_MAJOR = 3 };

typedef dnnl_memory_desc_t iz_desc;

static inline int iz_desc_open(iz_desc *d, int n, const dnnl_dims_t dims,
                               const dnnl_dims_t strides, dnnl_data_type_t t)
{
    return (int)dnnl_memory_desc_create_with_strides(d, n, dims, t, strides);
}

static inline void iz_desc_close(iz_desc *d)
{
    if (*d)
        dnnl_memory_desc_destroy(*d);
    *d = NULL;
}

static inline int iz_desc_memory(dnnl_memory_t *m, iz_desc *d, dnnl_engine_t e,
                                 void *p)
{
    return (int)dnnl_memory_create(m, *d, e, p);
}

static inline int iz_desc_product(dnnl_primitive_desc_t *out, dnnl_engine_t e,
                                  iz_desc *a, iz_desc *b, iz_desc *bias,
                                  iz_desc *c, dnnl_primitive_attr_t attr)
{
    return (int)dnnl_matmul_primitive_desc_create(
        out, e, *a, *b, bias ? *bias : NULL, *c, attr);
}

static inline int iz_desc_add(dnnl_post_ops_t ops)
{
    return (int)dnnl_post_ops_append_sum(ops, 1, 0, dnnl_data_type_undef);
}
