/* SPDX-License-Identifier: Apache-2.0 */
/* Which cores this rank computes on, and the binding of its workers to them. */
#pragma once

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "codelets/task/task.h"
#include "runtime/comm/coll.h"

struct iz_cores;

/* Reads the machine.  Cores: those that the launcher's binding allows and, for
 * a rank with a GPU, that are near it; what several ranks of the host may use
 * is divided between them (cores_share.h), and refused where it cannot be.
 * workers: run.workers, or STARPU_NCPU,
 * or one per core, less iz_cores_spare, and no more than the control groups of
 * the host's ranks give time to; *workers is set.  pci: of this rank's
 * GPU, or NULL.  All ranks.  Negative errno with the reason printed. */
int iz_cores_open(struct iz_cores **out, struct iz_coll *coll, const char *pci,
                  int *workers);
/* Workers of each of `ranks` on this host, that share this rank's cores. */
int iz_cores_workers(const struct iz_cores *t, int wanted, int ranks);
/* Of `cores`, those without a compute worker, beside a GPU. */
int iz_cores_spare(int cores, bool gpu);
/* Whether ranks with the GPU at `pci` share cores with this rank, which has one
 * too. */
bool iz_cores_near(const struct iz_cores *t, const char *pci);
void iz_cores_close(struct iz_cores **t);

/* To be called before iz_graph_open: StarPU leaves binding to us unless the
 * user set it. */
void iz_cores_prepare(struct iz_cores *t);
/* Binds compute worker i to the rank's core i (modulo their number) behind the
 * spare ones, those that copy to the second spare one, and the calling thread
 * to all of them: what it touches comes to lie near them. */
void iz_cores_bind(struct iz_cores *t, struct iz_graph *g);
/* Lets the calling thread go where it was before: threads that libraries start
 * from it later would stay on the workers' cores. */
void iz_cores_release(struct iz_cores *t);

/* What a rank computes on, for the header of a run. */
struct iz_binding {
    int host; /* first rank of it */
    char name[64];
    int workers, cores;
    int gpu;         /* -1: none */
    int host_cores;  /* that the rank may see */
    double quota;    /* of control groups, cores; 0: more than there are */
    bool shared;     /* a core computes for several ranks */
    bool foreign;    /* the environment binds */
    char list[96];   /* of the cores' processors, as the system numbers them */
    int first, last; /* of them */
    uint64_t nodes;  /* NUMA nodes near them, bit i: node i */
};

/* Fills in what it knows: cores and NUMA nodes. */
void iz_cores_describe(const struct iz_cores *t, struct iz_binding *b);
/* A line per rank; consecutive ranks of a host that only move on by the same
 * number of cores and GPUs are one line. */
void iz_binding_print(const struct iz_binding *b, int n, FILE *out);
