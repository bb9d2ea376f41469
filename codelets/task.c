/* SPDX-License-Identifier: Apache-2.0 */
/* Submission, placement and execution of tasks; see task.h. */
#include "codelets/task.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "codelets/cuda.h"
#include "codelets/device.h"
#include "codelets/die.h"
#include "codelets/mix.h"

/* Okabe-Ito palette and shades of it: told apart with any colour vision. */
const struct iz_kind_info iz_kinds[IZ_KINDS] = {
    [IZ_BATCH] = {"batch", 0x999999, 6000},
    [IZ_LOAD] = {"load", 0x88ccee, 9000},
    [IZ_FETCH] = {"fetch", 0x56b4e9, 9000},
    [IZ_FORWARD] = {"forward", 0x009e73, 4000},
    [IZ_BACKWARD] = {"backward", 0x0072b2, 5000},
    [IZ_REDUCE] = {"reduce", 0xcc79a7, 8000},
    [IZ_OFFLOAD] = {"offload", 0x882255, 8500},
    [IZ_NORM] = {"norm", 0xf0e442, 4500},
    [IZ_CLIP] = {"clip", 0x000000, 9500},
    [IZ_ADAM] = {"adam", 0xd55e00, 3000},
    [IZ_STORE] = {"store", 0xe69f00, 8000},
    [IZ_SNAPSHOT] = {"snapshot", 0xaa4499, 3900},
    [IZ_SAVE] = {"save", 0xddcc77, 7000},
    [IZ_EVAL] = {"eval", 0x66c2a5, 4000},
    [IZ_SAMPLE] = {"sample", 0x117733, 4000},
};

#define SPANS 32768 /* per worker; a power of two */
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
};

typedef uint32_t worker_mask[MASK_WORDS];

struct iz_graph {
    struct iz_graph_config config;
    struct iz_rate given[IZ_PLACES]; /* rates that the config had */
    int n_workers;
    bool gpu;
    unsigned lane_worker, lane_order;
    worker_mask mask[IZ_PLACES]; /* workers of each place; empty: none */
    unsigned *host_worker;       /* compute workers of the CPU */
    unsigned gpu_worker;
    struct worker *worker; /* by StarPU's number */
    int idle_hook;
    int64_t submitted;
    double bytes[IZ_PLACES]; /* of what was submitted */
    int64_t waited_ns;       /* that the submitting thread waited for tasks */
    int turn;
    bool started;
};

/* What travels with a task; the argument of `run` follows. */
struct head {
    struct iz_graph *g;
    void (*run)(struct iz_exec *x, void **buf, const void *arg);
    double flops, bytes, seconds;
    enum iz_kind kind;
    enum iz_where where;
    bool gathers;
    int unit, step;
    bool ends_step;
    int64_t begin_ns;
    _Alignas(16) char arg[];
};

int64_t iz_now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

/* ---- inside a worker ---- */

static void log_span(struct span_log *log, const struct iz_span *s)
{
    uint64_t head = atomic_load_explicit(&log->head, memory_order_relaxed);
    uint64_t tail = atomic_load_explicit(&log->tail, memory_order_acquire);
    if (head - tail == SPANS) {
        atomic_fetch_add_explicit(&log->lost, 1, memory_order_relaxed);
        return;
    }
    log->span[head % SPANS] = *s;
    atomic_store_explicit(&log->head, head + 1, memory_order_release);
}

static void delay(struct iz_graph *g, struct worker *w)
{
    if (!g->config.delay_us)
        return;
    w->random = w->random * UINT64_C(6364136223846793005) + 1442695040888963407;
    int64_t ns =
        (int64_t)((w->random >> 33) % ((uint64_t)g->config.delay_us * 1000));
    struct timespec t = {.tv_sec = ns / 1000000000, .tv_nsec = ns % 1000000000};
    nanosleep(&t, NULL);
}

/* Memory of a buffer as StarPU knows it; tokens have none. */
static char *registered(starpu_data_handle_t handle, void *buffer)
{
    switch ((int)starpu_data_get_interface_id(handle)) {
    case STARPU_VECTOR_INTERFACE_ID:
        return (char *)STARPU_VECTOR_GET_PTR(buffer);
    case STARPU_VARIABLE_INTERFACE_ID:
        return (char *)STARPU_VARIABLE_GET_PTR(buffer);
    default:
        return NULL;
    }
}

static void *pointer(const struct iz_graph *g, starpu_data_handle_t handle,
                     void *buffer)
{
    const struct iz_shadow *s = &g->config.shadow;
    char *p = registered(handle, buffer);
    return p >= s->shadow && p < s->shadow + s->bytes
               ? s->base + (p - s->shadow)
               : p;
}

static void log_task(const struct head *h, int id, int64_t begin_ns,
                     int64_t end_ns)
{
    struct iz_span s = {.kind = (short)h->kind,
                        .worker = (short)id,
                        .unit = h->unit,
                        .step = h->step,
                        .flops = h->flops,
                        .begin_ns = begin_ns,
                        .end_ns = end_ns};
    log_span(&h->g->worker[id].log, &s);
    if (h->ends_step) {
        char text[32];
        snprintf(text, sizeof(text), "end of step %d", h->step);
        starpu_fxt_trace_user_event_string(text);
    }
}

/* Calls the task's function with the memory of its buffers. */
static void call(void *buffers[], struct head *h, struct worker *w)
{
    struct starpu_task *task = starpu_task_get_current();
    int n = STARPU_TASK_GET_NBUFFERS(task);
    void *few[IZ_TASK_DATA], **buf = few;
    if (n > IZ_TASK_DATA && !(buf = malloc((size_t)n * sizeof(*buf))))
        iz_die("%s: out of memory for %d buffers", iz_kinds[h->kind].name, n);
    for (int i = 0; i < n; i++)
        buf[i] = pointer(h->g, STARPU_TASK_GET_HANDLE(task, i), buffers[i]);
    delay(h->g, w);
    w->idle = 0;
    w->exec.work.used = w->exec.save.used = 0;
    h->begin_ns = iz_now_ns();
    h->run(&w->exec, buf, h->arg);
    if (buf != few)
        free(buf);
}

static void run_cpu(void *buffers[], void *arg)
{
    struct head *h = arg;
    int id = starpu_worker_get_id();
    struct worker *w = &h->g->worker[id];
    call(buffers, h, w);
    if (w->exec.stream)
        iz_device_wait(w->exec.stream);
    log_task(h, id, h->begin_ns, iz_now_ns());
}

/* Returns when everything is enqueued; StarPU sees the end by an event. */
static void run_cuda(void *buffers[], void *arg)
{
    struct head *h = arg;
    call(buffers, h, &h->g->worker[starpu_worker_get_id()]);
}

/* The stream runs one task after the other: a task begins when it has been
 * enqueued and the one before it has ended. */
static void end_cuda(void *arg)
{
    struct head *h = arg;
    int id = starpu_worker_get_id();
    struct worker *w = &h->g->worker[id];
    int64_t now = iz_now_ns();
    int64_t begin = h->begin_ns > w->last_end_ns ? h->begin_ns : w->last_end_ns;
    w->last_end_ns = now;
    log_task(h, id, begin, now);
}

/* In a simulation only StarPU knows when a task began. */
static void end_simulated(void *arg)
{
    const struct head *h = arg;
    struct starpu_profiling_task_info *p =
        starpu_task_get_current()->profiling_info;
    log_task(h, starpu_worker_get_id(),
             (int64_t)(starpu_timing_timespec_to_us(&p->start_time) * 1e3),
             (int64_t)(starpu_timing_timespec_to_us(&p->end_time) * 1e3));
}

/* Idle StarPU workers spin.  Lanes mostly wait and may share a core with a
 * compute worker, so after a while without work every worker naps between
 * looks. */
static unsigned nap(void *arg)
{
    struct iz_graph *g = arg;
    int id = starpu_worker_get_id();
    if (id < 0 || (g->gpu && (unsigned)id == g->gpu_worker))
        return 1; /* the GPU's driver polls for the end of its tasks */
    struct worker *w = &g->worker[id];
    if (++w->idle < 64)
        return 1;
    struct timespec t = {.tv_nsec = w->idle < 1024 ? 20000 : 50000};
    nanosleep(&t, NULL);
    return 1;
}

/* ---- cost: the same roofline for every kind ---- */

static const struct iz_rate plausible[IZ_RATES] = {
    [IZ_ON_COMPUTE] = {400e12, 3e12, 5e-6}, [IZ_ON_HOST] = {50e9, 10e9, 1e-6},
    [IZ_ON_LANE] = {0, 10e9, 10e-6},        [IZ_ON_UP] = {0, 25e9, 10e-6},
    [IZ_ON_DOWN] = {0, 25e9, 10e-6},        [IZ_ON_IO] = {0, 2e9, 50e-6},
    [IZ_RATE_GATHER] = {0, 10e9, 10e-6},
};

static void set_rates(struct iz_graph *g)
{
    if (!g->gpu && g->config.rate[IZ_ON_COMPUTE].bytes_per_s == 0)
        g->config.rate[IZ_ON_COMPUTE] = plausible[IZ_ON_HOST];
    for (int w = 0; w < IZ_RATES; w++)
        if (g->config.rate[w].bytes_per_s == 0)
            g->config.rate[w] = plausible[w];
}

static double cost_us(struct starpu_task *task,
                      struct starpu_perfmodel_arch *arch, unsigned impl)
{
    (void)arch;
    (void)impl;
    const struct head *h = task->cl_arg;
    const struct iz_rate *r =
        &h->g->config.rate[h->gathers ? IZ_RATE_GATHER : (int)h->where];
    double compute = r->flops_per_s > 0 ? h->flops / r->flops_per_s : 0;
    double memory = h->bytes / r->bytes_per_s;
    double s = h->seconds > 0
                   ? h->seconds
                   : r->latency_s + (compute > memory ? compute : memory);
    return s > 1e-6 ? s * 1e6 : 1;
}

#define MODEL(k) [k] = {.type = STARPU_PER_ARCH, .arch_cost_function = cost_us}
static struct starpu_perfmodel models[IZ_KINDS] = {
    MODEL(IZ_BATCH),   MODEL(IZ_LOAD),     MODEL(IZ_FETCH),
    MODEL(IZ_FORWARD), MODEL(IZ_BACKWARD), MODEL(IZ_REDUCE),
    MODEL(IZ_OFFLOAD), MODEL(IZ_NORM),     MODEL(IZ_CLIP),
    MODEL(IZ_ADAM),    MODEL(IZ_STORE),    MODEL(IZ_EVAL),
    MODEL(IZ_SAMPLE),  MODEL(IZ_SNAPSHOT), MODEL(IZ_SAVE),
};
#undef MODEL

static struct starpu_codelet codelets[IZ_KINDS];

/* Every buffer has its planned place for the whole run, on the GPU too, so
 * StarPU has nothing to move: for it, all data are in main memory, and a task
 * on the GPU takes the pointers as they are. */
static void codelet_init_cuda(struct starpu_codelet *c)
{
    c->where |= STARPU_CUDA;
    c->cuda_funcs[0] = run_cuda;
    c->cuda_flags[0] = STARPU_CUDA_ASYNC;
    c->specific_nodes = 1;
    for (int i = 0; i < STARPU_NMAXBUFS; i++)
        c->nodes[i] = STARPU_SPECIFIC_NODE_CPU;
}

static void codelets_init(bool gpu)
{
    for (int k = 0; k < IZ_KINDS; k++) {
        starpu_codelet_init(&codelets[k]);
        models[k].symbol = iz_kinds[k].name;
        codelets[k].where = STARPU_CPU;
        codelets[k].cpu_funcs[0] = run_cpu;
        codelets[k].nbuffers = STARPU_VARIABLE_NBUFFERS;
        codelets[k].model = &models[k];
        codelets[k].name = iz_kinds[k].name;
        codelets[k].color = iz_kinds[k].color;
        /* clip has a buffer per unit, more than `nodes` has room for, and
         * snapshot one per chunk. */
        if (gpu && k != IZ_CLIP && k != IZ_SNAPSHOT)
            codelet_init_cuda(&codelets[k]);
    }
}

/* ---- submission ---- */

/* Returns where it will be: what has no worker of its own is the host's. */
static enum iz_where place(struct iz_graph *g, struct starpu_task *task,
                           enum iz_where where)
{
    if (where == IZ_ON_LANE && g->config.lane) {
        task->execute_on_a_specific_worker = 1;
        task->workerid = g->lane_worker;
        task->workerorder = ++g->lane_order;
        return where;
    }
    if (where == IZ_ON_LANE || (where == IZ_ON_IO && !g->config.io_workers))
        where = IZ_ON_HOST;
    if (!g->gpu && where != IZ_ON_IO)
        where = IZ_ON_HOST;
    task->workerids = g->mask[where];
    task->workerids_len = MASK_WORDS;
    return where;
}

static int count_data(const struct iz_task *t)
{
    int n = 0;
    while (n < IZ_TASK_DATA && t->data[n].handle)
        n++;
    return n + t->n_more;
}

/* StarPU keeps few handles inside the task and takes over malloced arrays
 * beyond. */
static void attach_data(struct starpu_task *task, const struct iz_task *t)
{
    int n = count_data(t), own = n - t->n_more;
    task->nbuffers = n;
    if (n > STARPU_NMAXBUFS) {
        task->dyn_handles = malloc((size_t)n * sizeof(*task->dyn_handles));
        task->dyn_modes = malloc((size_t)n * sizeof(*task->dyn_modes));
        if (!task->dyn_handles || !task->dyn_modes)
            iz_die("%s: out of memory for %d buffers", iz_kinds[t->kind].name,
                   n);
    }
    for (int i = 0; i < n; i++) {
        const struct iz_access *a = i < own ? &t->data[i] : &t->more[i - own];
        STARPU_TASK_SET_HANDLE(task, a->handle, i);
        STARPU_TASK_SET_MODE(task, a->mode, i);
    }
}

static struct head *make_head(struct iz_graph *g, const struct iz_task *t)
{
    struct head *h = malloc(sizeof(*h) + t->arg_bytes);
    if (!h)
        return NULL;
    *h = (struct head){.g = g,
                       .run = t->run,
                       .flops = t->flops,
                       .bytes = t->bytes,
                       .seconds = t->seconds,
                       .kind = t->kind,
                       .where = t->where,
                       .gathers = t->gathers,
                       .unit = t->unit,
                       .step = t->step,
                       .ends_step = t->ends_step};
    if (t->arg_bytes)
        memcpy(h->arg, t->arg, t->arg_bytes);
    return h;
}

static uint64_t tag(enum iz_where where, const struct iz_task *t)
{
    uint64_t unit = (uint64_t)t->unit & ((UINT64_C(1) << IZ_TAG_UNIT_BITS) - 1);
    return (uint64_t)where << (IZ_TAG_UNIT_BITS + IZ_TAG_BYTES_BITS) |
           unit << IZ_TAG_BYTES_BITS | (uint64_t)t->bytes;
}

/* StarPU forgets to clear the outer number when it is popped, so both are given
 * with every task. */
static int submit_numbered(struct iz_graph *g, struct starpu_task *task,
                           int step)
{
    starpu_iteration_push((unsigned long)step);
    starpu_iteration_push((unsigned long)g->turn);
    int r = starpu_task_submit(task);
    starpu_iteration_pop();
    starpu_iteration_pop();
    return r;
}

static void submit(struct iz_graph *g, const struct iz_task *t)
{
    struct starpu_task *task = starpu_task_create();
    struct head *h = make_head(g, t);
    if (!task || !h)
        iz_die("%s: out of memory for a task", iz_kinds[t->kind].name);
    task->cl = &codelets[t->kind];
    task->cl_arg = h;
    task->cl_arg_size = sizeof(*h) + t->arg_bytes;
    task->cl_arg_free = 1;
    task->priority = iz_kinds[t->kind].priority + t->urgency;
    task->flops = t->flops;
    task->name = iz_kinds[t->kind].name;
    task->tag_id = tag(place(g, task, t->where), t);
    if (g->config.simulated || (g->gpu && t->where == IZ_ON_COMPUTE)) {
        task->callback_func = g->config.simulated ? end_simulated : end_cuda;
        task->callback_arg = h;
    }
    attach_data(task, t);
    int r = submit_numbered(g, task, t->step);
    if (r)
        iz_die("submission of %s failed: %s", iz_kinds[t->kind].name,
               strerror(-r));
    g->submitted++;
    g->bytes[t->where] += t->bytes;
}

static void wait_all(struct iz_graph *g)
{
    int64_t begin = iz_now_ns();
    starpu_task_wait_for_all();
    g->waited_ns += iz_now_ns() - begin;
}

void iz_submit(struct iz_graph *g, const struct iz_task *t)
{
    bool alone =
        g->config.lane_alone && g->config.lane && t->where == IZ_ON_LANE;
    if (alone)
        wait_all(g);
    submit(g, t);
    if (alone)
        wait_all(g);
}

void iz_graph_wait(struct iz_graph *g)
{
    wait_all(g);
}

int64_t iz_graph_waited_ns(const struct iz_graph *g)
{
    return g->waited_ns;
}

double iz_graph_bytes(const struct iz_graph *g, enum iz_where where)
{
    return g->bytes[where];
}

int iz_graph_turn(struct iz_graph *g, int turn)
{
    int before = g->turn;
    g->turn = turn;
    return before;
}

int64_t iz_graph_submitted(const struct iz_graph *g)
{
    return g->submitted;
}

const char *iz_graph_scheduler(const struct iz_graph *g)
{
    (void)g;
    return starpu_sched_get_sched_policy()->policy_name;
}

int64_t iz_graph_spans(struct iz_graph *g,
                       void (*take)(void *arg, const struct iz_span *s),
                       void *arg)
{
    int64_t lost = 0;
    for (int i = 0; i < g->n_workers; i++) {
        struct span_log *log = &g->worker[i].log;
        uint64_t head = atomic_load_explicit(&log->head, memory_order_acquire);
        for (uint64_t k = atomic_load(&log->tail); k < head; k++)
            take(arg, &log->span[k % SPANS]);
        atomic_store_explicit(&log->tail, head, memory_order_release);
        lost += atomic_exchange(&log->lost, 0);
    }
    return lost;
}

/* ---- start and end ---- */

static void mark(worker_mask m, unsigned id)
{
    m[id / 32] |= UINT32_C(1) << (id % 32);
}

/* Gives the CPU's workers their parts, in order: compute, lane, the two
 * directions of copies, disk. */
static void split_workers(struct iz_graph *g, const int *cpu, int n)
{
    int at = 0;
    for (; at < g->config.workers; at++) {
        g->host_worker[at] = (unsigned)cpu[at];
        g->worker[cpu[at]].index = at;
        mark(g->mask[IZ_ON_HOST], (unsigned)cpu[at]);
    }
    if (g->config.lane)
        g->lane_worker = (unsigned)cpu[at++];
    if (g->gpu) {
        mark(g->mask[IZ_ON_UP], (unsigned)cpu[at++]);
        mark(g->mask[IZ_ON_DOWN], (unsigned)cpu[at++]);
        mark(g->mask[IZ_ON_COMPUTE], g->gpu_worker);
    }
    while (at < n)
        mark(g->mask[IZ_ON_IO], (unsigned)cpu[at++]);
}

static int lanes(const struct iz_graph *g)
{
    return g->config.lane + (g->gpu ? 2 : 0) + g->config.io_workers;
}

static int check_workers(const struct iz_graph *g)
{
    int cpu = g->config.workers + lanes(g);
    if (cpu <= STARPU_MAXCPUS)
        return 0;
    if (g->config.rank == 0)
        fprintf(stderr,
                "izar: run.workers: %d compute workers and %d lanes are more "
                "than the %d CPU workers this StarPU is built for\n",
                g->config.workers, lanes(g), STARPU_MAXCPUS);
    return -EINVAL;
}

static int open_workers(struct iz_graph *g)
{
    g->worker = calloc((size_t)g->n_workers, sizeof(*g->worker));
    g->host_worker = calloc((size_t)g->config.workers, sizeof(*g->host_worker));
    if (!g->worker || !g->host_worker)
        return -ENOMEM;
    for (int w = 0; w < g->n_workers; w++) {
        struct worker *k = &g->worker[w];
        k->exec.backend = IZ_CPU;
        k->exec.act = IZ_F32;
        k->random = g->config.delay_seed * 1000003 + (uint64_t)w + 1;
        k->log.span = malloc(SPANS * sizeof(*k->log.span));
        if (!k->log.span)
            return -ENOMEM;
    }
    return 0;
}

static void give_scratch(struct iz_graph *g, char *const *scratch)
{
    for (int i = 0; !g->gpu && scratch && i < g->config.workers; i++)
        g->worker[g->host_worker[i]].exec.work =
            (struct iz_arena){.base = scratch[i], .size = g->config.work_bytes};
    if (g->gpu)
        g->worker[g->gpu_worker].exec.work = (struct iz_arena){
            .base = g->config.device_scratch, .size = g->config.work_bytes};
}

/* On a lane: a stream of its own. */
static void open_lane(void *arg)
{
    struct iz_graph *g = arg;
    struct iz_exec *x = &g->worker[starpu_worker_get_id()].exec;
    if (iz_device_use(g->config.device, NULL) ||
        !(x->stream = iz_device_stream_open()))
        iz_die("a lane has no GPU");
}

static void close_lane(void *arg)
{
    struct iz_graph *g = arg;
    struct iz_exec *x = &g->worker[starpu_worker_get_id()].exec;
    iz_device_stream_close(x->stream);
    x->stream = NULL;
}

static void on_lanes(struct iz_graph *g, void (*fn)(void *arg))
{
    unsigned ids[STARPU_NMAXWORKERS], n = 0;
    for (unsigned w = 0; w < (unsigned)g->n_workers; w++) {
        bool copies =
            (g->mask[IZ_ON_UP][w / 32] | g->mask[IZ_ON_DOWN][w / 32]) &
            UINT32_C(1) << (w % 32);
        if (copies || (g->config.lane && w == g->lane_worker))
            ids[n++] = w;
    }
    starpu_execute_on_specific_workers(fn, g, n, ids, "izar");
}

static void open_cuda(void *arg, int i, struct iz_exec *x)
{
    struct iz_graph *g = arg;
    (void)i;
    x->backend = IZ_CUDA;
    x->act = g->config.act;
    x->tf32 = g->config.tf32;
    x->stream = iz_device_worker_stream();
    if (iz_cuda_ops->open(&x->cuda, x->stream))
        iz_die("the libraries of the GPU cannot be used");
}

static void close_cuda(void *arg, int i, struct iz_exec *x)
{
    (void)arg;
    (void)i;
    if (x->cuda)
        iz_cuda_ops->close(&x->cuda);
}

static bool known_scheduler(const char *name)
{
    struct starpu_sched_policy **p = starpu_sched_get_predefined_policies();
    for (; *p; p++)
        if (!strcmp((*p)->policy_name, name))
            return true;
    return false;
}

static int check_scheduler(const char *name, const char *from, bool gpu)
{
    if (gpu && !strcmp(name, "heteroprio")) {
        fprintf(stderr,
                "izar: %s: with a GPU, tasks under heteroprio never end: use "
                "another scheduler\n",
                from);
        return -EINVAL;
    }
    if (known_scheduler(name))
        return 0;
    fprintf(stderr, "izar: %s: this StarPU has no scheduler '%s'; it has", from,
            name);
    struct starpu_sched_policy **p = starpu_sched_get_predefined_policies();
    for (; *p; p++)
        fprintf(stderr, " %s", (*p)->policy_name);
    fprintf(stderr, "\n");
    return -EINVAL;
}

static int start_starpu(struct iz_graph *g)
{
    struct starpu_conf conf;
    const char *env = getenv("STARPU_SCHED");
    const char *name = env ? env : g->config.scheduler;
    int r =
        check_scheduler(name, env ? "STARPU_SCHED" : "run.scheduler", g->gpu);
    if (r)
        return r;
    starpu_conf_init(&conf);
    conf.sched_policy_name = name;
    conf.ncuda = g->gpu ? 1 : 0;
    conf.use_explicit_workers_cuda_gpuid = g->gpu;
    conf.workers_cuda_gpuid[0] = g->gpu ? (unsigned)g->config.device : 0;
    conf.nopencl = 0;
    conf.catch_signals = 0;
    /* The user's STARPU_NCPU counts compute workers (topo.c has read it);
     * StarPU must also make the lanes, and takes one from the number for a
     * bound main thread. */
    const char *main_thread = getenv("STARPU_MAIN_THREAD_BIND");
    bool taken = main_thread && atoi(main_thread) != 0;
    char ncpu[16];
    snprintf(ncpu, sizeof(ncpu), "%d", g->config.workers + lanes(g) + taken);
    setenv("STARPU_NCPU", ncpu, 1);
    unsetenv("STARPU_NCPUS");
    unsetenv("STARPU_RESERVE_NCPU"); /* has been counted too */
    conf.reserve_ncpus = -1;
    starpu_profiling_set_id(g->config.rank);
    r = starpu_init(&conf);
    if (r)
        fprintf(stderr, "izar: starpu_init failed: %s\n", strerror(-r));
    return r;
}

/* Takes over the workers that StarPU has started. */
static int take_workers(struct iz_graph *g, char *const *scratch)
{
    int cpu[STARPU_NMAXWORKERS], gpu[STARPU_NMAXWORKERS];
    int n = (int)starpu_worker_get_ids_by_type(STARPU_CPU_WORKER, cpu,
                                               STARPU_NMAXWORKERS);
    int n_gpu = (int)starpu_worker_get_ids_by_type(STARPU_CUDA_WORKER, gpu,
                                                   STARPU_NMAXWORKERS);
    int wanted = g->config.workers + lanes(g);
    if (n != wanted || n_gpu != g->gpu) {
        fprintf(stderr,
                "izar: StarPU started %d CPU workers of the %d asked for and "
                "%d of %d for a GPU (is it built with a smaller "
                "--enable-maxcpus or without CUDA, or is STARPU_NCUDA or "
                "STARPU_NWORKER_PER_CUDA set?)\n",
                n, wanted, n_gpu, g->gpu);
        return -ENODEV;
    }
    g->gpu_worker = g->gpu ? (unsigned)gpu[0] : 0;
    split_workers(g, cpu, n);
    give_scratch(g, scratch);
    if (!g->gpu || g->config.simulated)
        return 0;
    on_lanes(g, open_lane);
    iz_graph_on_device(g, open_cuda, g);
    return 0;
}

int iz_graph_open(struct iz_graph **out, const struct iz_graph_config *c,
                  char *const *scratch)
{
    struct iz_graph *g = calloc(1, sizeof(*g));
    if (!g)
        return -ENOMEM;
    *out = g;
    g->config = *c;
    g->gpu = c->device >= 0;
    g->idle_hook = -1;
    memcpy(g->given, c->rate, sizeof(g->given));
    set_rates(g);
    g->n_workers = c->workers + lanes(g) + g->gpu;
    int r = check_workers(g);
    if (!r)
        r = open_workers(g);
    if (!r)
        r = start_starpu(g);
    g->started = !r;
    if (!r)
        r = take_workers(g, scratch);
    if (r) {
        iz_graph_close(out);
        return r;
    }
    codelets_init(g->gpu);
    if (c->simulated)
        starpu_profiling_status_set(STARPU_PROFILING_ENABLE);
    else
        g->idle_hook = starpu_idle_hook_register(nap, g);
    return 0;
}

void iz_graph_close(struct iz_graph **out)
{
    struct iz_graph *g = *out;
    if (!g)
        return;
    if (g->started) {
        starpu_task_wait_for_all();
        if (g->idle_hook >= 0)
            starpu_idle_hook_deregister(g->idle_hook);
        if (g->gpu && g->idle_hook >= 0) {
            iz_graph_on_device(g, close_cuda, g);
            on_lanes(g, close_lane);
        }
        starpu_shutdown();
    }
    for (int w = 0; g->worker && w < g->n_workers; w++)
        free(g->worker[w].log.span);
    free(g->worker);
    free(g->host_worker);
    free(g);
    *out = NULL;
}

bool iz_graph_has(const struct iz_graph *g, enum iz_where where, int w)
{
    if (where == IZ_ON_LANE)
        return g->config.lane && (unsigned)w == g->lane_worker;
    return g->mask[where][w / 32] >> (w % 32) & 1;
}

struct iz_rate iz_graph_rate(const struct iz_graph *g, enum iz_where where)
{
    return g->given[where];
}

int iz_graph_workers(const struct iz_graph *g)
{
    return g->n_workers;
}

uint64_t iz_span_hash(uint64_t h, const struct iz_span *s)
{
    h = iz_mix(h + (uint64_t)s->begin_ns);
    h = iz_mix(h + (uint64_t)s->end_ns);
    return iz_mix(h + (uint64_t)(s->kind * 4096 + s->worker) * IZ_GOLDEN +
                  (uint64_t)s->unit);
}

struct on_workers {
    struct iz_graph *g;
    iz_worker_fn *fn;
    void *arg;
};

static void on_worker(void *arg)
{
    const struct on_workers *a = arg;
    struct worker *w = &a->g->worker[starpu_worker_get_id()];
    a->fn(a->arg, w->index, &w->exec);
}

void iz_graph_on_workers(struct iz_graph *g, iz_worker_fn *fn, void *arg)
{
    struct on_workers a = {g, fn, arg};
    starpu_execute_on_specific_workers(
        on_worker, &a, (unsigned)g->config.workers, g->host_worker, "izar");
}

void iz_graph_on_device(struct iz_graph *g, iz_worker_fn *fn, void *arg)
{
    struct on_workers a = {g, fn, arg};
    starpu_execute_on_specific_workers(on_worker, &a, 1, &g->gpu_worker,
                                       "izar");
}
