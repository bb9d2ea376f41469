/* SPDX-License-Identifier: Apache-2.0 */
/* cuDNN's backend interface: the library, which is loaded at its first use, and
 * its descriptors.  Only this file includes cuDNN's header. */
#pragma once

#include <stdint.h>

#include <cudnn_graph.h>

#include "codelets/ops/exec.h"

/* Types of attributes. */
#define IZ_DNN_PART CUDNN_TYPE_BACKEND_DESCRIPTOR
#define IZ_DNN_INT CUDNN_TYPE_INT64
#define IZ_DNN_TYPE CUDNN_TYPE_DATA_TYPE

/* Its functions, there after iz_cudnn_missing has returned NULL. */
struct iz_dnn {
    size_t (*version)(void);
    const char *(*status)(cudnnStatus_t s);
    void (*last_error)(char *text, size_t size);
    cudnnStatus_t (*create)(cudnnHandle_t *h);
    cudnnStatus_t (*destroy)(cudnnHandle_t h);
    cudnnStatus_t (*set_stream)(cudnnHandle_t h, cudaStream_t s);
    cudnnStatus_t (*make)(cudnnBackendDescriptorType_t t,
                          cudnnBackendDescriptor_t *d);
    cudnnStatus_t (*unmake)(cudnnBackendDescriptor_t d);
    cudnnStatus_t (*finish)(cudnnBackendDescriptor_t d);
    cudnnStatus_t (*set)(cudnnBackendDescriptor_t d,
                         cudnnBackendAttributeName_t name,
                         cudnnBackendAttributeType_t t, int64_t n,
                         const void *value);
    cudnnStatus_t (*get)(cudnnBackendDescriptor_t d,
                         cudnnBackendAttributeName_t name,
                         cudnnBackendAttributeType_t t, int64_t most,
                         int64_t *n, void *value);
    cudnnStatus_t (*execute)(cudnnHandle_t h, cudnnBackendDescriptor_t plan,
                             cudnnBackendDescriptor_t pack);
};
extern struct iz_dnn iz_dnn;

/* Writes the library's message about s to r, after `what`. */
void iz_cudnn_refuse(struct iz_refusal *r, const char *what, cudnnStatus_t s);

enum { IZ_DNN_MADE = 192 };

/* Descriptors that live and end together.  After the first call that fails the
 * others do nothing. */
struct iz_dnn_set {
    cudnnBackendDescriptor_t made[IZ_DNN_MADE];
    int n;
    cudnnStatus_t failed;
};

/* What a descriptor is given: n values, 0 at the end of a list. */
struct iz_dnn_fact {
    cudnnBackendAttributeName_t name;
    cudnnBackendAttributeType_t type;
    int64_t n;
    const void *value;
};

/* One to be filled by the library. */
cudnnBackendDescriptor_t iz_dnn_make(struct iz_dnn_set *g,
                                     cudnnBackendDescriptorType_t t);
/* A finished one. */
cudnnBackendDescriptor_t iz_dnn_add(struct iz_dnn_set *g,
                                    cudnnBackendDescriptorType_t t,
                                    const struct iz_dnn_fact *a);
/* Returns how many values there are, 0 after a failure. */
int64_t iz_dnn_get(struct iz_dnn_set *g, cudnnBackendDescriptor_t d,
                   cudnnBackendAttributeName_t name,
                   cudnnBackendAttributeType_t t, int64_t most, void *value);
void iz_dnn_clear(struct iz_dnn_set *g);
