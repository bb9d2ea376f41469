/* SPDX-License-Identifier: Apache-2.0 */
/* Descriptors of the stand-in for cuDNN, and the execution of a graph. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include <cudnn_graph.h>

enum { FACTS = 10 };

struct fact {
    cudnnBackendAttributeName_t name;
    cudnnBackendAttributeType_t type;
    int64_t n;
    void *value;
};

/* A descriptor. */
struct thing {
    cudnnBackendDescriptorType_t kind;
    bool finished;
    struct fact fact[FACTS];
    int n;
    /* Of what a search has found, and of plans. */
    const struct thing *graph;
    int config;
};

/* NULL or 0 where it was not told. */
const struct fact *thing_fact(const struct thing *t,
                              cudnnBackendAttributeName_t name);
const struct thing *thing_at(const struct thing *t,
                             cudnnBackendAttributeName_t name, int i);
int64_t thing_int(const struct thing *t, cudnnBackendAttributeName_t name);

/* On the memory of a variant pack; false where a tensor has none. */
bool execute_graph(const struct thing *graph, const struct thing *pack);
