/* SPDX-License-Identifier: Apache-2.0 */
/* The one door through which tasks enter StarPU.  A task is a kind (name,
 * colour, priority), a function, the data it touches and a small argument that
 * is copied. Everything that happens around every task happens here: placement
 * on the right workers, the order of the comm worker, cost for the scheduler,
 * the span log. */
#pragma once

#include <starpu.h>
#include <stdbool.h>
#include <stdint.h>

#include "codelets/base/clock.h"
#include "codelets/base/sink.h"
#include "codelets/ops/exec.h"
#include "codelets/task/where.h"

enum iz_kind {
    IZ_BATCH,    /* copy the samples of a micro-batch out of the data set */
    IZ_LOAD,     /* nvme -> staging buffer */
    IZ_FETCH,    /* all-gather and/or copy of a unit's parameters, and copies of
                  boundaries and gradients to the GPU */
    IZ_FORWARD,  /* one unit, one micro-batch */
    IZ_BACKWARD, /* same, recomputation included */
    IZ_REDUCE,   /* reduce-scatter and/or accumulation of a unit's gradient */
    IZ_OFFLOAD,  /* a unit's gradient, boundary or updated parameters from the
                  GPU to the host */
    IZ_NORM,     /* sums: squares of a gradient shard, losses */
    IZ_CLIP,     /* the scalars of a step: loss, norm, scale, learning rate */
    IZ_ADAM,     /* one chunk of the optimizer */
    IZ_MUON,     /* what Muon does to a matrix; to and from its owner */
    IZ_STORE,    /* staging buffer -> nvme */
    IZ_SNAPSHOT, /* a part of the states into a buffer of a checkpoint */
    IZ_SAVE,     /* such a buffer to the checkpoint's file */
    IZ_EVAL,     /* forward without gradients */
    IZ_SAMPLE,   /* forward of generation and the choice of the next token */
    IZ_KINDS
};
#define IZ_KINDS_OPTIMIZER (1u << IZ_ADAM | 1u << IZ_MUON)
#define IZ_KINDS_LINKS (1u << IZ_FETCH | 1u << IZ_REDUCE | 1u << IZ_OFFLOAD)

/* Kinds are what izar counts; traces call a task by its codelet, of which there
 * are few enough for a legend. */
struct iz_kind_info {
    const char *name;
    enum iz_kind codelet; /* the kind that lends name and colour */
    unsigned color;       /* 0xRRGGBB, distinguishable by colour-blind people */
    int priority;         /* larger first */
};
extern const struct iz_kind_info iz_kinds[IZ_KINDS];

/* StarPU reads the first bytes of registered memory on the host, so a GPU's
 * memory at `base` is registered under other addresses: `shadow` is as large,
 * readable and unused.  Tasks are given the real addresses. */
struct iz_shadow {
    char *shadow, *base;
    int64_t bytes;
};

struct iz_access {
    starpu_data_handle_t handle;
    enum starpu_data_access_mode mode; /* STARPU_R, STARPU_W or STARPU_RW */
};

#define IZ_TASK_DATA 16
/* Of a task at most, with a GPU; but clip and snapshot may have more.  A unit's
 * chunks and matrices are less. */
#define IZ_GPU_DATA 1024

struct iz_task {
    enum iz_kind kind;
    enum iz_where where;
    /* buf[i] is the memory of data[i]; x is the worker's exec (arenas empty).
     * On the GPU's worker it only enqueues on x->stream; what a mover enqueues
     * there is waited for after it returns. */
    void (*run)(struct iz_exec *x, void **buf, const void *arg);
    const void *arg; /* copied */
    size_t arg_bytes;
    struct iz_access data[IZ_TASK_DATA]; /* ends at the first NULL handle */
    struct iz_access *more;              /* n_more further ones */
    int n_more, room;
    int priority_offset; /* added to the kind's priority */
    double flops, bytes; /* for the scheduler's cost and the trace */
    double squares;      /* elements that it squares while it has them */
    double moments;      /* elements whose states, of such a type, it updates */
    int moment_type;     /* enum iz_moment_type */
    enum iz_where rate;  /* IZ_RATE_..., or 0: that of its workers */
    double seconds;      /* if known: what it costs */
    int unit, step;      /* what the trace and the messages call it */
    bool ends_step;      /* its end is marked in the trace */
};

/* The tag of a task in StarPU's trace: its kind, its workers' kind, its unit
 * (all ones: none) and its bytes, from the highest bit down.  Nothing else
 * reads it. */
enum { IZ_TAG_WHERE_BITS = 4, IZ_TAG_UNIT_BITS = 16, IZ_TAG_BYTES_BITS = 40 };

/* One executed task: times of CLOCK_MONOTONIC in ns. */
struct iz_span {
    int64_t begin_ns, end_ns;
    short kind, worker;
    int unit, step, position;
};

struct iz_graph_config {
    int workers;       /* compute workers of the CPU */
    int device;        /* index of the rank's GPU, -1: none */
    enum iz_dtype act; /* type of activations */
    struct iz_numerics numerics;
    /* For schedulers that ask what a task costs, and for a simulation, which
     * takes the cost for the truth.  Zero: plausible rates. */
    struct iz_rate rate[IZ_RATES];
    bool simulated;  /* tasks are not executed, times are virtual */
    bool comm;       /* one more worker for collectives */
    bool comm_alone; /* collectives never run beside other tasks: it waits */
    int io_workers;  /* more workers for the disk */
    const char *scheduler; /* StarPU's name; STARPU_SCHED wins */
    int rank;              /* names the trace file */
    double
        stuck_s; /* of idle workers while tasks wait: ends the job; 0: never */
    int64_t work_bytes;      /* scratch of each worker that computes units */
    int64_t host_work_bytes; /* with a GPU: of each worker of the host */
    int delay_us;            /* random delay before each task: 0 = none */
    uint64_t delay_seed;
};

struct iz_graph;

/* Starts StarPU.  Negative errno with the reason printed (unknown scheduler, no
 * worker, ...).  The first start on a machine measures its bus and resets every
 * GPU for that: memory of a GPU and pinned memory are to be taken later. */
int iz_graph_open(struct iz_graph **out, const struct iz_graph_config *c);
/* What tasks need of memory, borrowed until close: work_bytes of scratch for
 * each compute worker i of the CPU; or scratch[0] for the GPU's, and if there
 * are host_work_bytes so many in scratch[1 + i]. */
void iz_graph_give(struct iz_graph *g, char *const *scratch,
                   struct iz_shadow shadow);
/* Waits for all tasks, stops StarPU. */
void iz_graph_close(struct iz_graph **g);

/* Sets the position in a step's graph of the tasks submitted from now on.  It
 * is StarPU's sub-iteration, by which traces order them.  Returns the position
 * before. */
int iz_graph_position(struct iz_graph *g, int position);

/* Appends an access and returns which buffer it is; -1 for no handle. */
int iz_task_add(struct iz_task *t, starpu_data_handle_t h,
                enum starpu_data_access_mode mode);
/* Submits, and frees what was appended.  What StarPU refuses ends the job:
 * other ranks would wait for it. */
void iz_task_submit(struct iz_graph *g, const struct iz_task *t);
void iz_graph_wait(struct iz_graph *g); /* until every task has ended */
/* Time that the submitting thread has waited in iz_task_submit and
 * iz_graph_wait. */
int64_t iz_graph_waited_ns(const struct iz_graph *g);
/* Sum of `bytes` of the tasks submitted for a kind of workers. */
double iz_graph_bytes(const struct iz_graph *g, enum iz_where where);

/* Name of the scheduler in force. */
const char *iz_graph_scheduler(const struct iz_graph *g);
int64_t iz_graph_submitted(const struct iz_graph *g);

/* Hands every span since the last call to `take`, oldest first per worker. Only
 * the submitting thread calls it.  Returns how many spans were lost to a full
 * log. */
int64_t iz_graph_spans(struct iz_graph *g,
                       void (*take)(void *arg, const struct iz_span *s),
                       void *arg);

/* Runs fn(arg, i, its exec) on every compute worker i of the CPU at the same
 * time and waits; iz_graph_on_device does so on the GPU's worker (i = 0),
 * iz_graph_on_copies on those that only copy to and from it. */
typedef void iz_worker_fn(void *arg, int i, struct iz_exec *x);
void iz_graph_on_workers(struct iz_graph *g, iz_worker_fn *fn, void *arg);
void iz_graph_on_device(struct iz_graph *g, iz_worker_fn *fn, void *arg);
void iz_graph_on_copies(struct iz_graph *g, iz_worker_fn *fn, void *arg);

/* What such workers do according to the config; zero: nobody said. */
struct iz_rate iz_graph_rate(const struct iz_graph *g, enum iz_where where);
/* Number of StarPU's workers. */
int iz_graph_workers(const struct iz_graph *g);

/* Whether StarPU's worker w is of a kind. */
bool iz_graph_has(const struct iz_graph *g, enum iz_where where, int w);

/* A span as a line of JSON without its end, times since zero_ns. */
void iz_span_print(struct iz_sink *s, const struct iz_span *t, int64_t zero_ns);
/* Members of a JSON object: the last tasks, those that run and those that wait,
 * as a signal's handler may write them. */
void iz_graph_box(const struct iz_graph *g, struct iz_sink *s, int64_t zero_ns);

/* h with a span mixed in. */
uint64_t iz_span_hash(uint64_t h, const struct iz_span *s);
