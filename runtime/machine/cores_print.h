/* SPDX-License-Identifier: Apache-2.0 */
/* What each rank computes on, for the header of a run. */
#pragma once

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

struct iz_binding {
    int host; /* first rank of it */
    char name[64];
    int workers, cores;
    int gpu;         /* -1: none */
    int host_cores;  /* that the rank may see */
    bool shared;     /* a core computes for several ranks */
    bool foreign;    /* the environment binds */
    char list[96];   /* of the cores' processors, as the system numbers them */
    int first, last; /* of them */
    uint64_t nodes;  /* NUMA nodes near them, bit i: node i */
};

/* A line per rank; consecutive ranks of a host that only move on by the same
 * number of cores and GPUs are one line. */
void iz_binding_print(const struct iz_binding *b, int n, FILE *out);
