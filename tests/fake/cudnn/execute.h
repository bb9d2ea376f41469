/* SPDX-License-Identifier: Apache-2.0 */
/* Descriptors of the stand-in for cuDNN, and the execution of a graph. */
#pragma once

#include <stdint.h>

#include <cudnn_graph.h>

enum { FACTS = 10, WORDS = 32 };

struct fact {
    cudnnBackendAttributeName_t name;
    int64_t n, value[WORDS];
};

/* A descriptor. */
struct thing {
    cudnnBackendDescriptorType_t kind;
    struct fact fact[FACTS];
    int n;
    /* Of what a search has found, and of plans. */
    const struct thing *graph;
    int config;
};

/* NULL or 0 where it was not told; thing_int: the first of its numbers. */
const struct fact *thing_fact(const struct thing *t,
                              cudnnBackendAttributeName_t name);
const struct thing *thing_at(const struct thing *t,
                             cudnnBackendAttributeName_t name, int i);
int64_t thing_int(const struct thing *t, cudnnBackendAttributeName_t name);

/* On the memory of a variant pack. */
void execute_graph(const struct thing *graph, const struct thing *pack);
