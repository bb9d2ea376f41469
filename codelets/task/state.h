/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of task.h share: a graph of tasks, its workers, and what
 * travels with a task. */
#pragma once

#include <stdatomic.h>

#include "codelets/base/futex.h"
#include "codelets/task/task.h"

#define SPANS 32768   /* per worker; a power of two */
#define WAITING 32768 /* tasks whose names are kept; a power of two */
#define MASK_WORDS ((STARPU_NMAXWORKERS + 31) / 32)

/* Written by its worker, read by the submitting thread. */
struct span_log {
    _Atomic uint64_t head, tail;
    _Atomic int64_t lost;
    struct iz_span *span;
};

struct worker {
    struct iz_exec exec;
    struct span_log log;
    uint64_t random;
    int64_t last_end_ns; /* of its last task */
    int index;           /* among the compute workers of the CPU */
    int idle;            /* empty turns since the last task */
    uint32_t seen;       /* of g->ready, before its last look for a task */
    int64_t moves; /* begins and ends of all tasks, when it looked last, */
    int64_t looked_ns, still_ns; /* then, and how long nothing has moved */
};

#define WAITING_DATA 8

/* A task that may wait: its name in messages, and what it may wait for. */
struct waiting {
    enum iz_kind kind;
    int unit, step, position;
    _Atomic int64_t begin_ns; /* 0: it waits */
    short worker;
    _Atomic bool ended;
    /* The first of its data: parts of the handles' addresses, the lowest bit
     * set where they are written.  The comm worker is one, too: its tasks come
     * one after the other. */
    unsigned char data;
    uint32_t datum[WAITING_DATA + 1];
};

typedef uint32_t worker_mask[MASK_WORDS];

static inline bool mask_has(const worker_mask m, int worker)
{
    return m[worker / 32] >> (worker % 32) & 1;
}

struct iz_graph {
    struct iz_graph_config config;
    struct iz_shadow shadow;
    struct iz_rate given[IZ_WORKER_KINDS]; /* rates that the config had */
    int n_workers;
    bool gpu;
    unsigned comm_worker, comm_order;
    worker_mask mask[IZ_WORKER_KINDS]; /* workers of each kind; empty: none */
    unsigned *host_worker;             /* compute workers of the CPU */
    unsigned gpu_worker;
    struct worker *worker; /* by StarPU's number */
    int idle_hook;
    struct iz_futex ready; /* where idle workers sleep */
    _Atomic int64_t submitted, begun, ended;
    struct waiting *waiting; /* the last ones submitted, by their number */
    double bytes[IZ_WORKER_KINDS]; /* of what was submitted */
    /* Simulated: workers of each kind that have a task, and when the host's
     * memory has moved all that its tasks have begun. */
    int busy[IZ_WORKER_KINDS];
    double memory_free_s;
    int64_t waited_ns; /* that the submitting thread waited for tasks */
    int position;
    bool started;
};

/* What travels with a task; the argument of `run` follows. */
struct head {
    struct iz_graph *g;
    void (*run)(struct iz_exec *x, void **buf, const void *arg);
    double flops, bytes, squares, moments, seconds;
    double memory_s; /* simulated, once it has begun: what its bytes take */
    int moment_type;
    enum iz_kind kind;
    enum iz_where where, rate;
    int unit, step, position;
    bool ends_step, begun; /* simulated: it is in g->busy */
    int64_t number;        /* of those submitted */
    int64_t begin_ns;
    _Alignas(16) char arg[];
};

/* ---- run.c: tasks on their workers ---- */

extern struct starpu_codelet iz_codelets[IZ_KINDS];

/* After StarPU has started. */
void iz_task_codelets_init(bool gpu);
/* Rates that nobody gave become plausible ones. */
void iz_graph_set_rates(struct iz_graph *g);
/* Callbacks of tasks whose end only StarPU sees; arg: the head. */
void iz_task_end_cuda(void *arg);
void iz_task_end_simulated(void *arg);
/* Something may have made tasks ready. */
void iz_graph_wake(struct iz_graph *g);
/* StarPU's idle hook; arg: the graph. */
unsigned iz_task_nap(void *arg);
