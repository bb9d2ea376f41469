/* SPDX-License-Identifier: Apache-2.0 */
/* Submission, placement and execution of tasks; see task.h. */
#include "codelets/task.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "codelets/die.h"

/* Okabe-Ito palette and shades of it: told apart with any colour vision. */
const struct iz_kind_info iz_kinds[IZ_KINDS] = {
    [IZ_BATCH] = {"batch", 0x999999, 6000},
    [IZ_LOAD] = {"load", 0x88ccee, 9000},
    [IZ_FETCH] = {"fetch", 0x56b4e9, 9000},
    [IZ_FORWARD] = {"forward", 0x009e73, 4000},
    [IZ_BACKWARD] = {"backward", 0x0072b2, 5000},
    [IZ_REDUCE] = {"reduce", 0xcc79a7, 8000},
    [IZ_NORM] = {"norm", 0xf0e442, 4500},
    [IZ_CLIP] = {"clip", 0x000000, 9500},
    [IZ_ADAM] = {"adam", 0xd55e00, 3000},
    [IZ_STORE] = {"store", 0xe69f00, 8000},
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
    int idle; /* empty turns since the last task */
};

struct iz_graph {
    struct iz_graph_config config;
    int n_workers;
    unsigned lane_worker, lane_order;
    uint32_t compute_mask[MASK_WORDS], io_mask[MASK_WORDS];
    struct worker *worker;
    int idle_hook;
    int64_t submitted;
    bool started;
};

/* What travels with a task; the argument of `run` follows. */
struct head {
    struct iz_graph *g;
    void (*run)(struct iz_exec *x, void **buf, const void *arg);
    double flops, bytes;
    enum iz_kind kind;
    int unit, step;
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

/* Memory of a buffer; tokens have none. */
static void *pointer(starpu_data_handle_t handle, void *buffer)
{
    switch ((int)starpu_data_get_interface_id(handle)) {
    case STARPU_VECTOR_INTERFACE_ID:
        return (void *)STARPU_VECTOR_GET_PTR(buffer);
    case STARPU_VARIABLE_INTERFACE_ID:
        return (void *)STARPU_VARIABLE_GET_PTR(buffer);
    default:
        return NULL;
    }
}

static void run_cpu(void *buffers[], void *arg)
{
    struct head *h = arg;
    int id = starpu_worker_get_id();
    struct worker *w = &h->g->worker[id];
    struct starpu_task *task = starpu_task_get_current();
    int n = STARPU_TASK_GET_NBUFFERS(task);
    void *few[IZ_TASK_DATA], **buf = few;
    if (n > IZ_TASK_DATA && !(buf = malloc((size_t)n * sizeof(*buf))))
        iz_die("%s: out of memory for %d buffers", iz_kinds[h->kind].name, n);
    for (int i = 0; i < n; i++)
        buf[i] = pointer(STARPU_TASK_GET_HANDLE(task, i), buffers[i]);
    delay(h->g, w);
    w->idle = 0;
    w->exec.work.used = w->exec.save.used = 0;
    struct iz_span s = {.kind = (short)h->kind,
                        .worker = (short)id,
                        .unit = h->unit,
                        .step = h->step,
                        .flops = h->flops,
                        .begin_ns = iz_now_ns()};
    h->run(&w->exec, buf, h->arg);
    s.end_ns = iz_now_ns();
    log_span(&w->log, &s);
    if (buf != few)
        free(buf);
}

/* Idle StarPU workers spin.  Lanes mostly wait and may share a core with a
 * compute worker, so after a while without work every worker naps between
 * looks. */
static unsigned nap(void *arg)
{
    struct iz_graph *g = arg;
    int id = starpu_worker_get_id();
    if (id < 0)
        return 1;
    struct worker *w = &g->worker[id];
    if (++w->idle < 64)
        return 1;
    struct timespec t = {.tv_nsec = w->idle < 1024 ? 20000 : 50000};
    nanosleep(&t, NULL);
    return 1;
}

/* ---- cost: the same roofline for every kind ---- */

static double cost_us(struct starpu_task *task,
                      struct starpu_perfmodel_arch *arch, unsigned impl)
{
    (void)arch;
    (void)impl;
    const struct head *h = task->cl_arg;
    double compute = h->flops / 50e3, memory = h->bytes / 10e3; /* per us */
    return 1 + (compute > memory ? compute : memory);
}

#define MODEL(k) [k] = {.type = STARPU_PER_ARCH, .arch_cost_function = cost_us}
static struct starpu_perfmodel models[IZ_KINDS] = {
    MODEL(IZ_BATCH),    MODEL(IZ_LOAD),   MODEL(IZ_FETCH), MODEL(IZ_FORWARD),
    MODEL(IZ_BACKWARD), MODEL(IZ_REDUCE), MODEL(IZ_NORM),  MODEL(IZ_CLIP),
    MODEL(IZ_ADAM),     MODEL(IZ_STORE),  MODEL(IZ_EVAL),  MODEL(IZ_SAMPLE),
};
#undef MODEL

static struct starpu_codelet codelets[IZ_KINDS];

static void codelets_init(void)
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
    }
}

/* ---- submission ---- */

static void place(struct iz_graph *g, struct starpu_task *task,
                  enum iz_where where)
{
    if (where == IZ_ON_LANE && g->config.lane) {
        task->execute_on_a_specific_worker = 1;
        task->workerid = g->lane_worker;
        task->workerorder = ++g->lane_order;
        return;
    }
    task->workerids = where == IZ_ON_IO && g->config.io_workers
                          ? g->io_mask
                          : g->compute_mask;
    task->workerids_len = MASK_WORDS;
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
                       .kind = t->kind,
                       .unit = t->unit,
                       .step = t->step};
    if (t->arg_bytes)
        memcpy(h->arg, t->arg, t->arg_bytes);
    return h;
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
    place(g, task, t->where);
    attach_data(task, t);
    int r = starpu_task_submit(task);
    if (r)
        iz_die("submission of %s failed: %s", iz_kinds[t->kind].name,
               strerror(-r));
    g->submitted++;
}

void iz_submit(struct iz_graph *g, const struct iz_task *t)
{
    bool alone =
        g->config.lane_alone && g->config.lane && t->where == IZ_ON_LANE;
    if (alone)
        starpu_task_wait_for_all();
    submit(g, t);
    if (alone)
        starpu_task_wait_for_all();
}

void iz_graph_wait(struct iz_graph *g)
{
    (void)g;
    starpu_task_wait_for_all();
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

static void split_workers(struct iz_graph *g)
{
    int compute = g->config.workers;
    for (int w = 0; w < g->n_workers; w++) {
        bool lane = g->config.lane && w == compute;
        uint32_t *mask = w < compute ? g->compute_mask : g->io_mask;
        if (!lane)
            mask[w / 32] |= UINT32_C(1) << (w % 32);
        else
            g->lane_worker = (unsigned)w;
    }
}

static int check_workers(const struct iz_graph *g)
{
    if (g->n_workers <= STARPU_MAXCPUS)
        return 0;
    if (g->config.rank == 0)
        fprintf(stderr,
                "izar: run.workers: %d compute workers and %d lanes are more "
                "than the %d CPU workers this StarPU is built for\n",
                g->config.workers, g->n_workers - g->config.workers,
                STARPU_MAXCPUS);
    return -EINVAL;
}

static int open_workers(struct iz_graph *g, char *const *scratch)
{
    g->worker = calloc((size_t)g->n_workers, sizeof(*g->worker));
    if (!g->worker)
        return -ENOMEM;
    for (int w = 0; w < g->n_workers; w++) {
        struct worker *k = &g->worker[w];
        k->exec.backend = IZ_CPU;
        k->exec.act = IZ_F32;
        k->random = g->config.delay_seed * 1000003 + (uint64_t)w + 1;
        if (w < g->config.workers && scratch)
            k->exec.work = (struct iz_arena){.base = scratch[w],
                                             .size = g->config.work_bytes};
        k->log.span = malloc(SPANS * sizeof(*k->log.span));
        if (!k->log.span)
            return -ENOMEM;
    }
    return 0;
}

static bool known_scheduler(const char *name)
{
    struct starpu_sched_policy **p = starpu_sched_get_predefined_policies();
    for (; *p; p++)
        if (!strcmp((*p)->policy_name, name))
            return true;
    return false;
}

static int check_scheduler(const char *name, const char *from)
{
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
    int r = check_scheduler(name, env ? "STARPU_SCHED" : "run.scheduler");
    if (r)
        return r;
    starpu_conf_init(&conf);
    conf.sched_policy_name = name;
    conf.ncuda = 0;
    conf.nopencl = 0;
    conf.catch_signals = 0;
    /* The user's STARPU_NCPU counts compute workers (topo.c has read it);
     * StarPU must also make the lanes. */
    char ncpu[16];
    snprintf(ncpu, sizeof(ncpu), "%d", g->n_workers);
    setenv("STARPU_NCPU", ncpu, 1);
    unsetenv("STARPU_NCPUS");
    starpu_profiling_set_id(g->config.rank);
    r = starpu_init(&conf);
    if (r)
        fprintf(stderr, "izar: starpu_init failed: %s\n", strerror(-r));
    return r;
}

int iz_graph_open(struct iz_graph **out, const struct iz_graph_config *c,
                  char *const *scratch)
{
    struct iz_graph *g = calloc(1, sizeof(*g));
    if (!g)
        return -ENOMEM;
    *out = g;
    g->config = *c;
    g->idle_hook = -1;
    g->n_workers = c->workers + c->lane + c->io_workers;
    int r = check_workers(g);
    if (!r)
        r = open_workers(g, scratch);
    if (!r)
        r = start_starpu(g);
    if (r) {
        iz_graph_close(out);
        return r;
    }
    g->started = true;
    codelets_init();
    int have = (int)starpu_cpu_worker_get_count();
    if (have != g->n_workers) {
        fprintf(stderr,
                "izar: StarPU started %d CPU workers of the %d asked for "
                "(is it built with a smaller --enable-maxcpus?)\n",
                have, g->n_workers);
        iz_graph_close(out);
        return -ENODEV;
    }
    split_workers(g);
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
        starpu_shutdown();
    }
    for (int w = 0; g->worker && w < g->n_workers; w++)
        free(g->worker[w].log.span);
    free(g->worker);
    free(g);
    *out = NULL;
}

void iz_graph_on_workers(struct iz_graph *g, void (*fn)(void *arg), void *arg)
{
    unsigned ids[STARPU_NMAXWORKERS];
    for (int w = 0; w < g->config.workers; w++)
        ids[w] = (unsigned)w;
    starpu_execute_on_specific_workers(fn, arg, (unsigned)g->config.workers,
                                       ids, "izar");
}
