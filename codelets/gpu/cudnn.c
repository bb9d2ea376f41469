/* SPDX-License-Identifier: Apache-2.0 */
/* cuDNN's backend interface; see cudnn.h. */
#include "codelets/gpu/cudnn.h"

#include <assert.h>
#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#define LIBRARY "libcudnn.so.9"
#define VERSION_LEAST 90800 /* descriptions of devices */

typedef iz_dnn_descriptor descriptor;

/* ---- the library -------------------------------------------------------- */

static const struct {
    const char *name;
    size_t at;
} symbols[] = {
    {"cudnnGetVersion", offsetof(struct iz_dnn_library, version)},
    {"cudnnGetErrorString", offsetof(struct iz_dnn_library, status)},
    {"cudnnGetLastErrorString", offsetof(struct iz_dnn_library, last_error)},
    {"cudnnCreate", offsetof(struct iz_dnn_library, create)},
    {"cudnnDestroy", offsetof(struct iz_dnn_library, destroy)},
    {"cudnnSetStream", offsetof(struct iz_dnn_library, set_stream)},
    {"cudnnBackendCreateDescriptor", offsetof(struct iz_dnn_library, make)},
    {"cudnnBackendDestroyDescriptor", offsetof(struct iz_dnn_library, unmake)},
    {"cudnnBackendFinalize", offsetof(struct iz_dnn_library, finish)},
    {"cudnnBackendSetAttribute", offsetof(struct iz_dnn_library, set)},
    {"cudnnBackendGetAttribute", offsetof(struct iz_dnn_library, get)},
    {"cudnnBackendExecute", offsetof(struct iz_dnn_library, execute)},
};

struct iz_dnn_library iz_dnn;
static char missing[160];

static void cudnn_load(void)
{
    void *l = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL);

    if (!l)
        snprintf(missing, sizeof(missing), "%s", dlerror());
    for (size_t i = 0; l && i < sizeof(symbols) / sizeof(symbols[0]); i++) {
        void *f = dlsym(l, symbols[i].name);

        if (!f)
            snprintf(missing, sizeof(missing), "%s has no %s", LIBRARY,
                     symbols[i].name);
        memcpy((char *)&iz_dnn + symbols[i].at, &f, sizeof(f));
    }
    if (!missing[0] && iz_dnn.version() < VERSION_LEAST)
        snprintf(missing, sizeof(missing), "%s is of version %d, 9.8 is needed",
                 LIBRARY, (int)iz_dnn.version());
}

const char *iz_dnn_missing(void)
{
    if (!iz_dnn.version && !missing[0])
        cudnn_load();
    return missing[0] ? missing : NULL;
}

void iz_dnn_refuse(struct iz_refusal *r, const char *what, cudnnStatus_t s)
{
    char text[1024] = "";
    int v = (int)iz_dnn.version();

    iz_dnn.last_error(text, sizeof(text));
    text[strcspn(text, "\n")] = 0;
    snprintf(r->why, sizeof(r->why), "%s: cuDNN %d.%d.%d: %s%s%.120s", what,
             v / 10000, v / 100 % 100, v % 100, iz_dnn.status(s),
             text[0] ? ": " : "", text);
}

/* ---- descriptors -------------------------------------------------------- */

void iz_dnn_clear(struct iz_dnn_graph *g)
{
    while (g->n > 0)
        iz_dnn.unmake(g->made[--g->n]);
}

descriptor iz_dnn_make(struct iz_dnn_graph *g, cudnnBackendDescriptorType_t t)
{
    descriptor d = NULL;

    assert(g->n < IZ_DNN_MADE);
    if (g->failed == CUDNN_STATUS_SUCCESS)
        g->failed = iz_dnn.make(t, &d);
    if (g->failed == CUDNN_STATUS_SUCCESS)
        g->made[g->n++] = d;
    return d;
}

void iz_dnn_set(struct iz_dnn_graph *g, descriptor d,
                cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t t,
                int64_t n, const void *value)
{
    if (g->failed == CUDNN_STATUS_SUCCESS)
        g->failed = iz_dnn.set(d, name, t, n, value);
}

void iz_dnn_set_descriptor(struct iz_dnn_graph *g, descriptor d,
                           cudnnBackendAttributeName_t name, descriptor value)
{
    iz_dnn_set(g, d, name, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &value);
}

static void set_type(struct iz_dnn_graph *g, descriptor d,
                     cudnnBackendAttributeName_t name, cudnnDataType_t t)
{
    iz_dnn_set(g, d, name, CUDNN_TYPE_DATA_TYPE, 1, &t);
}

void iz_dnn_finish(struct iz_dnn_graph *g, descriptor d)
{
    if (g->failed == CUDNN_STATUS_SUCCESS)
        g->failed = iz_dnn.finish(d);
}

/* ---- tensors ------------------------------------------------------------ */

descriptor iz_dnn_tensor(struct iz_dnn_graph *g, int64_t uid,
                         enum iz_dnn_where where, cudnnDataType_t t,
                         const int64_t size[4], const int64_t stride[4])
{
    descriptor d = iz_dnn_make(g, CUDNN_BACKEND_TENSOR_DESCRIPTOR);
    bool is = true;
    int64_t align = 16;

    iz_dnn_set(g, d, CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, 1, &uid);
    set_type(g, d, CUDNN_ATTR_TENSOR_DATA_TYPE, t);
    iz_dnn_set(g, d, CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, 4, size);
    iz_dnn_set(g, d, CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, 4, stride);
    iz_dnn_set(g, d, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, 1,
               &align);
    if (where == IZ_DNN_VALUE)
        iz_dnn_set(g, d, CUDNN_ATTR_TENSOR_IS_BY_VALUE, CUDNN_TYPE_BOOLEAN, 1,
                   &is);
    if (where == IZ_DNN_VIRTUAL)
        iz_dnn_set(g, d, CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, 1,
                   &is);
    iz_dnn_finish(g, d);
    return d;
}

descriptor iz_dnn_number(struct iz_dnn_graph *g, int64_t uid)
{
    static const int64_t one[4] = {1, 1, 1, 1};

    return iz_dnn_tensor(g, uid, IZ_DNN_VALUE, CUDNN_DATA_FLOAT, one, one);
}

descriptor iz_dnn_passing(struct iz_dnn_graph *g, const int64_t size[4],
                          cudnnDataType_t t)
{
    int64_t row = size[3], head = row * size[2];
    int64_t stride[4] = {head * size[1], head, row, 1};

    return iz_dnn_tensor(g, g->uid++, IZ_DNN_VIRTUAL, t, size, stride);
}

/* ---- operations --------------------------------------------------------- */

static void add_op(struct iz_dnn_graph *g, descriptor op)
{
    assert(g->ops < IZ_DNN_OPS);
    iz_dnn_finish(g, op);
    g->op[g->ops++] = op;
}

void iz_dnn_product(struct iz_dnn_graph *g, descriptor a, descriptor b,
                    descriptor c)
{
    descriptor how = iz_dnn_make(g, CUDNN_BACKEND_MATMUL_DESCRIPTOR);
    descriptor op = iz_dnn_make(g, CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR);

    set_type(g, how, CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_DATA_FLOAT);
    iz_dnn_finish(g, how);
    iz_dnn_set_descriptor(g, op, CUDNN_ATTR_OPERATION_MATMUL_DESC, how);
    iz_dnn_set_descriptor(g, op, CUDNN_ATTR_OPERATION_MATMUL_ADESC, a);
    iz_dnn_set_descriptor(g, op, CUDNN_ATTR_OPERATION_MATMUL_BDESC, b);
    iz_dnn_set_descriptor(g, op, CUDNN_ATTR_OPERATION_MATMUL_CDESC, c);
    add_op(g, op);
}

descriptor iz_dnn_reduce(struct iz_dnn_graph *g, cudnnReduceTensorOp_t kind,
                         descriptor x, descriptor y)
{
    descriptor how = iz_dnn_make(g, CUDNN_BACKEND_REDUCTION_DESCRIPTOR);
    descriptor op =
        iz_dnn_make(g, CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR);

    iz_dnn_set(g, how, CUDNN_ATTR_REDUCTION_OPERATOR,
               CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, 1, &kind);
    set_type(g, how, CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_DATA_FLOAT);
    iz_dnn_finish(g, how);
    iz_dnn_set_descriptor(g, op, CUDNN_ATTR_OPERATION_REDUCTION_DESC, how);
    iz_dnn_set_descriptor(g, op, CUDNN_ATTR_OPERATION_REDUCTION_XDESC, x);
    iz_dnn_set_descriptor(g, op, CUDNN_ATTR_OPERATION_REDUCTION_YDESC, y);
    add_op(g, op);
    return y;
}

descriptor iz_dnn_pointwise(struct iz_dnn_graph *g,
                            const struct iz_dnn_pointwise *p, descriptor y)
{
    descriptor how = iz_dnn_make(g, CUDNN_BACKEND_POINTWISE_DESCRIPTOR);
    descriptor op =
        iz_dnn_make(g, CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);

    iz_dnn_set(g, how, CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, 1,
               &p->mode);
    set_type(g, how, CUDNN_ATTR_POINTWISE_MATH_PREC, p->type);
    if (p->mode == CUDNN_POINTWISE_GEN_INDEX)
        iz_dnn_set(g, how, CUDNN_ATTR_POINTWISE_AXIS, CUDNN_TYPE_INT64, 1,
                   &p->axis);
    iz_dnn_finish(g, how);
    iz_dnn_set_descriptor(g, op, CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR,
                          how);
    iz_dnn_set_descriptor(g, op, CUDNN_ATTR_OPERATION_POINTWISE_XDESC, p->x);
    if (p->b)
        iz_dnn_set_descriptor(g, op, CUDNN_ATTR_OPERATION_POINTWISE_BDESC,
                              p->b);
    if (p->t)
        iz_dnn_set_descriptor(g, op, CUDNN_ATTR_OPERATION_POINTWISE_TDESC,
                              p->t);
    iz_dnn_set_descriptor(g, op, CUDNN_ATTR_OPERATION_POINTWISE_YDESC, y);
    add_op(g, op);
    return y;
}

descriptor iz_dnn_of_two(struct iz_dnn_graph *g, cudnnPointwiseMode_t mode,
                         descriptor x, descriptor b, descriptor y)
{
    return iz_dnn_pointwise(
        g, &(struct iz_dnn_pointwise){mode, CUDNN_DATA_FLOAT, .x = x, .b = b},
        y);
}

descriptor iz_dnn_of_one(struct iz_dnn_graph *g, cudnnPointwiseMode_t mode,
                         descriptor x, descriptor y)
{
    return iz_dnn_of_two(g, mode, x, NULL, y);
}
