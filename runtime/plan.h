/* SPDX-License-Identifier: Apache-2.0 */
/* The memory plan: what a run will allocate, computed before anything is
 * allocated. Pure arithmetic on config, model and number of ranks; the run
 * allocates exactly this. */
#ifndef IZ_RUNTIME_PLAN_H
#define IZ_RUNTIME_PLAN_H

#include "codelets/unit.h"
#include "runtime/config.h"
#include "runtime/memory.h"

/* The flat parameters of one unit.  The whole is padded so that every rank's
 * shard has the same length; padding is zero everywhere and stays zero. */
struct iz_plan_group {
    int64_t n;      /* real elements */
    int64_t shard;  /* elements per rank */
    int64_t padded; /* shard * ranks */
    int64_t owned;  /* elements that this rank's optimizer updates */
    int64_t
        chunk; /* elements per optimizer task; the last one may be shorter */
    int chunks;
    int ring;         /* which ring of gathered units and of unit gradients */
    bool tied;        /* another unit uses one of its parameters too */
    bool split_accum; /* ... and has an accumulator of its own */
    bool direct;      /* backward writes the gradient itself, no ring */
};

/* Buffers of one size that take turns. */
struct iz_plan_ring {
    int64_t elems;
    int params, grads; /* how many buffers of each */
};

#define IZ_SLICES_MAX 64

struct iz_plan {
    int ranks, rank, n_groups, n_rings, workers;
    struct iz_plan_group *group;
    struct iz_plan_ring *ring;
    struct iz_unit_cost *cost; /* of each unit at `samples` */
    int samples;               /* of one task */
    int slices; /* tasks of one micro-batch: their gradients are added first */
    int micro_batches; /* per rank and step */
    int wave;          /* micro-batches that pass the units together */
    int lanes;         /* activation buffers: wave * slices */
    bool params_full, grads_full, states_full; /* on every rank, or shards */
    bool fetch; /* units are copied or gathered into a ring */
    bool recompute;
    bool pin_cpu;                        /* lock the cpu tier into memory */
    enum iz_dtype param_type, grad_type; /* grad_type: of the accumulators */
    int state_arrays;                    /* 2: m, v; 3: master too */
    enum iz_home state_home, param_home;
    int64_t save_bytes, scratch_bytes,
        boundary_elems; /* largest of all units */
    int64_t state_stage_bytes,
        param_stage_bytes; /* one staging buffer, 0: none */
    int state_stages, param_stages;
    struct iz_bytes bytes;
    double step_flops; /* of one rank and step, recomputation excluded */
};

/* Negative errno with the reason printed on `err` (which may be NULL). */
int iz_plan_make(struct iz_plan *p, const struct iz_config *c,
                 const struct iz_model *m, int ranks, int rank, int workers);
void iz_plan_clear(struct iz_plan *p);

/* Bytes of host memory that the plan needs (device and cpu tier: one memory
 * here). */
int64_t iz_plan_host_bytes(const struct iz_plan *p);

/* Fits the plan into `limit` bytes per rank: with recompute "auto" keeps
 * activations if they fit.  Where nothing fits, prints the table and the
 * smallest change of the config that would, and returns -ENOMEM. */
int iz_plan_fit(struct iz_plan *p, const struct iz_config *c,
                const struct iz_model *m, int64_t limit, FILE *err);

void iz_plan_print(const struct iz_plan *p, const struct iz_model *m,
                   FILE *out);

#endif
