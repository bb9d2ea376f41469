/* SPDX-License-Identifier: Apache-2.0 */
/* cuDNN's backend interface: loading the library, and building graphs of small
 * operations on tensors of four dimensions, which it turns into one kernel.
 * Only this header includes cuDNN's. */
#pragma once

#include <cudnn_graph.h>
#include <stdbool.h>
#include <stdint.h>

#include "codelets/ops/exec.h"

typedef cudnnBackendDescriptor_t iz_dnn_descriptor;

/* The functions of the library that are used. */
struct iz_dnn_library {
    size_t (*version)(void);
    const char *(*status)(cudnnStatus_t s);
    void (*last_error)(char *text, size_t size);
    cudnnStatus_t (*create)(cudnnHandle_t *h);
    cudnnStatus_t (*destroy)(cudnnHandle_t h);
    cudnnStatus_t (*set_stream)(cudnnHandle_t h, cudaStream_t s);
    cudnnStatus_t (*make)(cudnnBackendDescriptorType_t t, iz_dnn_descriptor *d);
    cudnnStatus_t (*unmake)(iz_dnn_descriptor d);
    cudnnStatus_t (*finish)(iz_dnn_descriptor d);
    cudnnStatus_t (*set)(iz_dnn_descriptor d, cudnnBackendAttributeName_t name,
                         cudnnBackendAttributeType_t t, int64_t n,
                         const void *value);
    cudnnStatus_t (*get)(iz_dnn_descriptor d, cudnnBackendAttributeName_t name,
                         cudnnBackendAttributeType_t t, int64_t most,
                         int64_t *n, void *value);
    cudnnStatus_t (*execute)(cudnnHandle_t h, iz_dnn_descriptor plan,
                             iz_dnn_descriptor pack);
};

/* Loaded by the first call of iz_dnn_missing, which comes before there are
 * workers, and never unloaded. */
extern struct iz_dnn_library iz_dnn;

/* Why it cannot be used at all, or NULL. */
const char *iz_dnn_missing(void);

/* Writes the library's message about s to r, after `what`. */
void iz_dnn_refuse(struct iz_refusal *r, const char *what, cudnnStatus_t s);

/* ---- graphs ---- */

enum { IZ_DNN_MADE = 128, IZ_DNN_OPS = 16 };

/* Descriptors that live and end together.  After the first call that fails the
 * others do nothing. */
struct iz_dnn_graph {
    iz_dnn_descriptor made[IZ_DNN_MADE], op[IZ_DNN_OPS];
    int n, ops;
    int64_t uid; /* of the next tensor that exists in the kernel alone */
    cudnnStatus_t failed;
};

void iz_dnn_clear(struct iz_dnn_graph *g);
iz_dnn_descriptor iz_dnn_make(struct iz_dnn_graph *g,
                              cudnnBackendDescriptorType_t t);
void iz_dnn_set(struct iz_dnn_graph *g, iz_dnn_descriptor d,
                cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t t,
                int64_t n, const void *value);
void iz_dnn_set_descriptor(struct iz_dnn_graph *g, iz_dnn_descriptor d,
                           cudnnBackendAttributeName_t name,
                           iz_dnn_descriptor value);
void iz_dnn_finish(struct iz_dnn_graph *g, iz_dnn_descriptor d);

/* ---- tensors [samples, heads, rows, cols] ---- */

enum iz_dnn_where { IZ_DNN_MEMORY, IZ_DNN_VALUE, IZ_DNN_VIRTUAL };

iz_dnn_descriptor iz_dnn_tensor(struct iz_dnn_graph *g, int64_t uid,
                                enum iz_dnn_where where, cudnnDataType_t t,
                                const int64_t size[4], const int64_t stride[4]);
/* A number that is given with each call. */
iz_dnn_descriptor iz_dnn_number(struct iz_dnn_graph *g, int64_t uid);
/* A tensor without gaps that exists only inside the kernel. */
iz_dnn_descriptor iz_dnn_passing(struct iz_dnn_graph *g, const int64_t size[4],
                                 cudnnDataType_t t);

/* ---- operations; they return y ---- */

void iz_dnn_product(struct iz_dnn_graph *g, iz_dnn_descriptor a,
                    iz_dnn_descriptor b, iz_dnn_descriptor c);
/* y[row] = the reduction of all columns of x. */
iz_dnn_descriptor iz_dnn_reduce(struct iz_dnn_graph *g,
                                cudnnReduceTensorOp_t kind, iz_dnn_descriptor x,
                                iz_dnn_descriptor y);

/* An operation per element.  b, t: NULL where it has fewer operands; axis: of
 * an index. */
struct iz_dnn_pointwise {
    cudnnPointwiseMode_t mode;
    cudnnDataType_t type;
    iz_dnn_descriptor x, b, t;
    int64_t axis;
};

iz_dnn_descriptor iz_dnn_pointwise(struct iz_dnn_graph *g,
                                   const struct iz_dnn_pointwise *p,
                                   iz_dnn_descriptor y);
iz_dnn_descriptor iz_dnn_of_two(struct iz_dnn_graph *g,
                                cudnnPointwiseMode_t mode, iz_dnn_descriptor x,
                                iz_dnn_descriptor b, iz_dnn_descriptor y);
iz_dnn_descriptor iz_dnn_of_one(struct iz_dnn_graph *g,
                                cudnnPointwiseMode_t mode, iz_dnn_descriptor x,
                                iz_dnn_descriptor y);
