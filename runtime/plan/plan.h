/* SPDX-License-Identifier: Apache-2.0 */
/* The memory plan: what a run will allocate, computed before anything is
 * allocated. Pure arithmetic on config, model and number of ranks; the run
 * allocates exactly this. */
#pragma once

#include "codelets/ops/orthogonal.h"
#include "codelets/unit/unit.h"
#include "runtime/config/config.h"
#include "runtime/plan/places.h"
#include "runtime/plan/state_layout.h"
#include "runtime/plan/zero.h"

/* Parameters that are never updated; the names mean what they do below. */
struct iz_plan_frozen {
    int64_t n, shard, padded, owned, chunk;
    int chunks;
};

/* Quantised parameters: their values, end to end, and the groups that hold them
 * (codelets/flat/quant.h) as words of 4 bytes, which are frozen like others.  A
 * shard is whole groups, a chunk a block of a checkpoint. */
struct iz_plan_quant {
    int64_t n;
    enum iz_quant format;
    struct iz_plan_frozen words;
};

/* The flat parameters of one unit: those that are trained, then the frozen
 * ones, each padded so that every rank's shard has the same length; padding is
 * zero everywhere and stays zero.  Gradients and states are of the trained ones
 * alone.  Those that are quantised have an array of their own; where the unit
 * is gathered, their values come last. */
struct iz_plan_unit {
    int64_t n;      /* real elements */
    int64_t shard;  /* elements per rank */
    int64_t padded; /* shard * ranks */
    int64_t owned;  /* elements that this rank's optimizer updates */
    int64_t
        chunk; /* elements per optimizer task; the last one may be shorter */
    int chunks;
    int host_chunks; /* of an offloaded optimizer: the first ones are updated by
                        the host, the others by the GPU, with states there */
    /* Of an accumulator, but for what is apart: so many, of so many elements,
     * all of them whole chunks but the last.  The host's workers share them. */
    int pieces;
    int64_t piece;
    struct iz_plan_frozen frozen;
    struct iz_plan_quant quant;
    int ring;          /* which ring of gathered units and of unit gradients */
    int ties;          /* other units that use one of its parameters too */
    bool split_accum;  /* ... and has an accumulator of its own */
    bool direct;       /* backward writes the gradient itself, no ring */
    int contributions; /* of a step to an accumulator */
    int reductions;    /* ... after those of a rank were added on it alone */
    /* The last of them is a sum of the host, which takes the norm's squares
     * too; else they are a pass of their own. */
    bool sums_squares;
    enum iz_recompute recompute; /* by its backward */
    /* For a sparse table: the largest number of rows that a step can touch,
     * and their length.  packed: rows x cols, rounded up to cache lines.  All
     * 0 for a dense unit. */
    int64_t rows, cols, packed;
    /* The first one in the plan's list, how many. */
    int matrix, matrices, stack, stacks;
};

/* What one rank updates: the matrices that are stacked in a parameter or, of
 * experts, in one of them.  It covers [begin, end) of its unit's trained
 * elements. */
struct iz_plan_stack {
    int64_t begin, end;
    double flops;
    int owner; /* the rank */
};

/* A matrix that is updated as such: rows of its stack, or columns. */
struct iz_plan_matrix {
    int64_t first, rows, cols, stride; /* first: element of its unit */
    double scale;                      /* of its update */
    double flops, bytes;               /* of a dry run */
    int stack;
};

/* All of them, unit by unit, and the buffers that a unit passes through to be
 * updated: fp32 of all its trained parameters. */
struct iz_plan_matrices {
    struct iz_plan_matrix *list;
    struct iz_plan_stack *stack;
    int n, stacks;
    int steps;         /* of the iteration */
    bool gram, on_gpu; /* whose side makes them, if units are on a GPU */
    /* The buffers are there: in the memory of the host (of a run on the CPU,
     * in the only one), and of the GPU. */
    bool on_host, on_device;
    int most, chunks; /* of a unit that has some, at most */
    int buffers;
    int64_t elems;      /* of each */
    int64_t work_bytes; /* of a task */
    double flops;       /* of this rank and step */
};

/* Buffers of one size that take turns. */
struct iz_plan_ring {
    int64_t elems, grad_elems; /* of a buffer */
    int members;               /* units */
    int params, grads;         /* how many buffers of each */
    int64_t sum_elems;
    int sums; /* of a rank's own sums, with elements of the accumulators */
};

#define IZ_SLICES_MAX 64
#define IZ_PIECES_MAX 16
#define IZ_BOUNCE_BYTES (INT64_C(1) << 25) /* pinned, for single copies */

/* Logits that a GPU computes at a time, and more of them for a large one. */
#define IZ_CHUNK_LEAST INT64_C(128) /* rows that "auto" takes */
#define IZ_LOGITS_BYTES (INT64_C(256) << 20)
#define IZ_LOGITS_LARGE_BYTES (INT64_C(1) << 30)

/* A GPU with more is a large one. */
#define IZ_LARGE_GPU_BYTES (INT64_C(64) << 30)

/* Of scratch, beside what was counted. */
#define IZ_SCRATCH_SPARE 4096

/* Chunks of the optimizer are multiples of this many elements: whole disk pages
 * for every element type. */
#define IZ_CHUNK_ALIGN 2048

/* What one rank computes on. */
struct iz_target {
    int workers;       /* of the CPU */
    int first_workers; /* of the first rank, whose waves are those of all; 0:
                          as many */
    bool gpu;          /* units are computed on a GPU with memory of its own */
    bool nccl;         /* between GPUs; else collectives go through the host */
    struct iz_numerics numerics; /* of a plan; before, without what the config
                                    says */
    enum iz_dtype act;           /* type of activations */
    int host_group;              /* what run.sum_group 0 means; 0: all ranks */
    /* Why "auto" has become our forward of attention, and backward, in words
     * that are borrowed; NULL: it has not. */
    const char *why_own[2];
    /* Rates of a worker that computes units; zero if times are not predicted.
     */
    struct iz_rate compute;
};

/* Buffers on the way between disk, host and GPU. */
enum iz_staging_kind {
    IZ_STAGING_STATE,    /* a chunk's states, from and to disk */
    IZ_STAGING_PARAM,    /* a shard of parameters, from disk */
    IZ_STAGING_QUANT,    /* a unit's quantised parameters, of all ranks; on a
                          GPU, if there is one */
    IZ_STAGING_GRAD,     /* gradients, from a GPU to their accumulator */
    IZ_STAGING_UPDATE,   /* updated chunks, to a GPU */
    IZ_STAGING_BOUNDARY, /* boundaries, between a GPU and their file */
    /* On the GPU, for a chunk of the split: [gradient][parameters], the
     * gradient unless it is there, the parameters if they live on the host. */
    IZ_STAGING_SPLIT,
    /* Between states and a checkpoint that is written beside training; none:
     * training waits while one is written. */
    IZ_STAGING_CKPT,
    IZ_STAGINGS
};

struct iz_plan_staging {
    int n;
    int64_t bytes; /* of each */
};

struct iz_plan_optimizer {
    enum iz_optimizer_type type;
    enum iz_moment_type moments; /* how its states are kept */
    bool remainder;              /* and its master, in 16 bits */
};

/* Buffers of the collectives of a GPU's memory. */
struct iz_plan_comm {
    int64_t staging_bytes;  /* pinned */
    int64_t exchange_bytes; /* what NCCL receives a unit's gradient in */
};

/* Where there are sparse tables: rows that the samples of a step read, each
 * time anew, and different ones of those at most.  0: there are none. */
struct iz_plan_touched {
    int64_t reads, rows;
};

struct iz_plan_activations {
    /* Home of boundaries; if they are not computed there, they pass through so
     * many slots, which are on the host where a unit takes some rows at a time
     * (iz_exec_host_boundaries). */
    enum iz_home boundary_home;
    int boundary_slots;
    int64_t save_bytes, scratch_bytes,
        boundary_elems; /* largest of all units */
};

struct iz_plan {
    int ranks, rank, n_units, n_rings;
    struct iz_target target;
    int tasks_at_once; /* units that are computed side by side */
    int first_trained; /* backward ends with this unit */
    struct iz_plan_unit *unit;
    struct iz_plan_ring *ring;
    struct iz_unit_cost *cost; /* of each unit at `samples` */
    int samples;               /* of one task */
    int slices; /* tasks of one micro-batch: their gradients are added first */
    int micro_batches; /* per rank and step */
    int wave;          /* micro-batches that pass the units together */
    int tracks;        /* activation buffers: wave * slices */
    struct iz_plan_zero zero;
    struct iz_plan_activations act;
    enum iz_dtype param_type, grad_type; /* grad_type: of the accumulators */
    struct iz_sum_order sum;
    struct iz_plan_optimizer optimizer;
    struct iz_plan_staging staging[IZ_STAGINGS];
    struct iz_plan_comm comm;
    struct iz_plan_touched touched;
    struct iz_plan_matrices matrices;
    bool attends;        /* units have attention */
    const char *why_own; /* why it is ours; NULL: it may be cuDNN's */
    struct iz_places places;
    struct iz_bytes bytes; /* of all places */
    double step_flops; /* of one rank and step, without what is recomputed */
};

/* The least number of slices with which a micro-batch occupies these workers,
 * or as near as it gets: what run.slices 0 means. */
int iz_plan_slices(const struct iz_config *c, int workers);

/* -EINVAL: so many ranks cannot add or group so; iz_plan_check tells why. */
int iz_plan_make(struct iz_plan *p, const struct iz_config *c,
                 const struct iz_model *m, int ranks, int rank,
                 const struct iz_target *target);
/* Why attention on such a GPU is ours where the config leaves that open
 * (attention.c), whatever model and library say; NULL: it may be cuDNN's. */
const char *iz_plan_not_cudnn(const struct iz_config *c, int capability);
/* A line, if units attend on a GPU. */
void iz_plan_print_attention(const struct iz_plan *p, FILE *out);

/* Whether the parameters can be updated as the config asks, the target computes
 * in its types and has the GPU of its ratio, and so many ranks can add in its
 * order: 0, or negative errno with the reason printed on `err` (which may be
 * NULL). */
int iz_plan_check(const struct iz_config *c, const struct iz_model *m,
                  const struct iz_target *target, int ranks, FILE *err);
void iz_plan_clear(struct iz_plan *p);
/* Sizes the staging buffers of a plan whose other parts are known, and lists
 * its places (staging.c). */
void iz_plan_list(struct iz_plan *p, const struct iz_config *c,
                  const struct iz_model *m);
/* Deals the units to rings, whose buffers then have their sizes and numbers. */
void iz_plan_rings(struct iz_plan *p, const struct iz_config *c);

/* Where that lies which host and device both touch: on the host. */
static inline enum iz_tier iz_plan_shared_tier(const struct iz_plan *p)
{
    return p->target.gpu ? IZ_TIER_CPU : IZ_TIER_DEVICE;
}
/* On a GPU: gradients are kept on the host; and parameters on the GPU are
 * updated by the host. */
static inline bool iz_plan_grads_to_host(const struct iz_plan *p)
{
    return p->target.gpu && p->zero.grad.home != IZ_HOME_NONE;
}
static inline bool iz_plan_params_to_gpu(const struct iz_plan *p)
{
    return iz_plan_grads_to_host(p) && p->zero.param.home == IZ_HOME_NONE;
}
/* On a GPU: boundaries that live elsewhere pass through it whole. */
static inline bool iz_plan_boundaries_pass(const struct iz_plan *p)
{
    return p->target.gpu && !p->target.numerics.host_boundaries;
}
/* Frozen parameters have a buffer of their own. */
static inline bool iz_plan_frozen_apart(const struct iz_plan *p)
{
    return p->zero.frozen.home != p->zero.param.home;
}
/* Whether several units may take turns in it: all rings but those of a unit. */
static inline bool iz_plan_ring_shared(const struct iz_plan *p, int ring)
{
    return ring == 0 || p->ring[ring].members > 1;
}

void iz_plan_print(const struct iz_plan *p, const struct iz_model *m,
                   FILE *out);
