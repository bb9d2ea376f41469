/* SPDX-License-Identifier: Apache-2.0 */
/* Tasks on their workers: calls, the log of spans, and what StarPU takes a task
 * to cost. */
#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "codelets/base/die.h"
#include "codelets/base/take.h"
#include "codelets/gpu/device.h"
#include "codelets/task/state.h"

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
    bool token =
        starpu_data_get_interface_id(handle) != STARPU_VARIABLE_INTERFACE_ID;
    return token ? NULL : (char *)STARPU_VARIABLE_GET_PTR(buffer);
}

static void *pointer(const struct iz_graph *g, starpu_data_handle_t handle,
                     void *buffer)
{
    const struct iz_shadow *s = &g->shadow;
    char *p = registered(handle, buffer);
    return p >= s->shadow && p < s->shadow + s->bytes
               ? s->base + (p - s->shadow)
               : p;
}

static void log_task(const struct head *h, int id, int64_t begin_ns,
                     int64_t end_ns)
{
    h->g->waiting[h->number % WAITING].ended = true;
    atomic_fetch_add(&h->g->ended, 1);
    struct iz_span s = {.kind = (short)h->kind,
                        .worker = (short)id,
                        .unit = h->unit,
                        .step = h->step,
                        .position = h->position,
                        .begin_ns = begin_ns,
                        .end_ns = end_ns};
    log_span(&h->g->worker[id].log, &s);
    if (h->ends_step) {
        char text[32];
        snprintf(text, sizeof(text), "end of step %d", h->step + 1);
        starpu_fxt_trace_user_event_string(text);
    }
}

/* Calls the task's function with the memory of its buffers. */
static void call(void *buffers[], struct head *h, struct worker *w)
{
    struct starpu_task *task = starpu_task_get_current();
    int n = STARPU_TASK_GET_NBUFFERS(task);
    void *few[IZ_TASK_DATA], **buf = few;
    if (n > IZ_TASK_DATA)
        buf = iz_take(n, sizeof(*buf), "a task's buffers");
    for (int i = 0; i < n; i++)
        buf[i] = pointer(h->g, STARPU_TASK_GET_HANDLE(task, i), buffers[i]);
    iz_graph_wake(h->g); /* what this worker ended before made others ready */
    atomic_fetch_add(&h->g->begun, 1);
    delay(h->g, w);
    w->idle = 0;
    w->exec.work.used = w->exec.save.used = 0;
    w->exec.task++;
    h->begin_ns = iz_clock_ns();
    h->g->waiting[h->number % WAITING].worker = (short)(w - h->g->worker);
    h->g->waiting[h->number % WAITING].begin_ns = h->begin_ns;
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
    log_task(h, id, h->begin_ns, iz_clock_ns());
}

/* Returns when everything is enqueued; StarPU sees the end by an event. */
static void run_cuda(void *buffers[], void *arg)
{
    struct head *h = arg;
    call(buffers, h, &h->g->worker[starpu_worker_get_id()]);
}

/* The stream runs one task after the other: a task begins when it has been
 * enqueued and the one before it has ended. */
void iz_task_end_cuda(void *arg)
{
    struct head *h = arg;
    int id = starpu_worker_get_id();
    struct worker *w = &h->g->worker[id];
    int64_t now = iz_clock_ns();
    int64_t begin = h->begin_ns > w->last_end_ns ? h->begin_ns : w->last_end_ns;
    w->last_end_ns = now;
    log_task(h, id, begin, now);
    iz_graph_wake(
        h->g); /* StarPU calls this when what waited for it is ready */
}

/* In a simulation only StarPU knows when a task began. */
void iz_task_end_simulated(void *arg)
{
    struct head *h = arg;
    struct starpu_profiling_task_info *p =
        starpu_task_get_current()->profiling_info;
    h->g->busy[h->where] -= h->begun;
    log_task(h, starpu_worker_get_id(),
             (int64_t)(starpu_timing_timespec_to_us(&p->start_time) * 1e3),
             (int64_t)(starpu_timing_timespec_to_us(&p->end_time) * 1e3));
}

/* Idle StarPU workers spin.  Movers mostly wait and may share a core with a
 * compute worker, so after some turns without work a worker sleeps.  A task
 * becomes ready when another one is submitted or has ended; StarPU does the
 * latter after the codelet's function, so it is over when that worker begins
 * its next task or has an idle turn, or when the callback of a task on the GPU
 * is called: its driver has no idle turns.  StarPU's own tasks do not wake
 * anybody: no sleep is long. */
#define SPINS 64
#define NAP_NS 5000000

void iz_graph_wake(struct iz_graph *g)
{
    iz_futex_wake(&g->ready);
}

/* All tasks before the first that waits have ended, so it is ready. */
static void die_stuck(const struct iz_graph *g)
{
    int64_t n = g->submitted, i = n > WAITING ? n - WAITING : 0;
    const struct waiting *w = &g->waiting[i % WAITING];
    while (i < n - 1 && w->ended)
        w = &g->waiting[++i % WAITING];
    iz_die_stuck(
        "%lld tasks wait and all workers are idle for %g s: the scheduler "
        "'%s' gives none of them the first, %s of unit %d in step %d: use "
        "prio, without STARPU_SCHED and STARPU_SCHED_LIB",
        (long long)(n - g->ended), g->config.stuck_s,
        starpu_sched_get_sched_policy()->policy_name, iz_kinds[w->kind].name,
        w->unit, w->step + 1);
}

/* Whether tasks wait though no worker has one: a scheduler, or a variable of
 * StarPU that nobody knows, may keep a task for ever.  It is an idle worker's
 * time that counts: there is none while the process is stopped. */
static void watch_idle(const struct iz_graph *g, struct worker *w)
{
    int64_t ended = g->ended, begun = g->begun, now = iz_clock_ns();
    int64_t turn = now - w->looked_ns;
    bool still = ended == begun && begun < g->submitted;
    w->still_ns += turn < 4 * NAP_NS ? turn : 4 * NAP_NS;
    if (!still || w->moves != begun + ended)
        w->still_ns = 0;
    w->moves = begun + ended;
    w->looked_ns = now;
    if (g->config.stuck_s > 0 && (double)w->still_ns * 1e-9 > g->config.stuck_s)
        die_stuck(g);
}

unsigned iz_task_nap(void *arg)
{
    struct iz_graph *g = arg;
    int id = starpu_worker_get_id();
    if (id < 0)
        return 1;
    struct worker *w = &g->worker[id];
    if (w->idle == 0)
        iz_graph_wake(g);
    if (w->idle < SPINS)
        w->idle++;
    uint32_t seen = w->seen;
    w->seen = iz_futex_look(&g->ready);
    if (w->idle == SPINS && seen == w->seen) {
        iz_futex_sleep(&g->ready, seen, NAP_NS);
        watch_idle(g, w);
    }
    return 1;
}

/* ---- cost: the same roofline for every kind ---- */

static const struct iz_rate plausible[IZ_RATES] = {
    [IZ_ON_COMPUTE] = {400e12, 3e12, 5e-6}, [IZ_ON_HOST] = {50e9, 10e9, 1e-6},
    [IZ_ON_COMM] = {0, 10e9, 10e-6},        [IZ_ON_H2D] = {0, 25e9, 10e-6},
    [IZ_ON_D2H] = {0, 25e9, 10e-6},         [IZ_ON_IO] = {0, 2e9, 50e-6},
    [IZ_RATE_GATHER] = {0, 10e9, 10e-6},    [IZ_RATE_GROUP] = {0, 10e9, 10e-6},
    [IZ_RATE_COPY] = {0, 10e9, 10e-6},      [IZ_RATE_SQUARES] = {0, 1e12, 5e-6},
};

void iz_graph_set_rates(struct iz_graph *g)
{
    if (!g->gpu && g->config.rate[IZ_ON_COMPUTE].bytes_per_s == 0)
        g->config.rate[IZ_ON_COMPUTE] = plausible[IZ_ON_HOST];
    for (int w = 0; w < IZ_RATES; w++)
        if (g->config.rate[w].bytes_per_s == 0)
            g->config.rate[w] = plausible[w];
}

/* What the bytes take of a worker that begins now.  What others have begun
 * before it comes first: the host's memory never moves more than it can. */
static double begun_memory_s(struct iz_graph *g, const struct head *h,
                             const struct iz_rate *r)
{
    enum iz_where other = h->where == IZ_ON_H2D ? IZ_ON_D2H : IZ_ON_H2D;
    double now = starpu_timing_now() * 1e-6, rate = r->bytes_per_s, s;
    if (r->both_bytes_per_s > 0 && g->busy[other])
        rate = fmin(rate, r->both_bytes_per_s);
    if (r->busy_bytes_per_s > 0 && 2 * g->busy[IZ_ON_HOST] > g->config.workers)
        rate = fmin(rate, r->busy_bytes_per_s);
    s = h->bytes / rate;
    if (r->all_bytes_per_s <= 0)
        return s;
    g->memory_free_s =
        fmax(g->memory_free_s, now) + h->bytes / r->all_bytes_per_s;
    return fmax(s, g->memory_free_s - now);
}

/* A task begins when StarPU, to simulate it, asks for its cost on the worker;
 * to a scheduler that asks before, all workers are busy. */
static double memory_s(struct head *h, struct starpu_task *task,
                       const struct iz_rate *r)
{
    struct iz_graph *g = h->g;
    double rate = r->bytes_per_s;
    if (g->config.simulated && starpu_task_get_current() == task && !h->begun) {
        h->memory_s = begun_memory_s(g, h, r);
        h->begun = true;
        g->busy[h->where]++;
    }
    if (r->all_bytes_per_s > 0)
        rate = fmin(rate, r->all_bytes_per_s / g->config.workers);
    return h->begun ? h->memory_s : h->bytes / rate;
}

static double cost_us(struct starpu_task *task,
                      struct starpu_perfmodel_arch *arch, unsigned impl)
{
    struct head *h = task->cl_arg;
    const struct iz_rate *r = &h->g->config.rate[h->rate];
    double moments_per_s = r->moments_per_s[h->moment_type];
    double compute = r->flops_per_s > 0 ? h->flops / r->flops_per_s : 0;
    double moments = moments_per_s > 0 ? h->moments / moments_per_s : 0;
    double squares = r->squares_per_s > 0 ? h->squares / r->squares_per_s : 0;
    double memory = memory_s(h, task, r);
    double s = h->seconds > 0 ? h->seconds
                              : r->latency_s + squares +
                                    fmax(fmax(compute, moments), memory);
    return s > 1e-6 ? s * 1e6 : 1;
}

static struct starpu_perfmodel models[IZ_KINDS];
struct starpu_codelet iz_codelets[IZ_KINDS];

/* Every buffer has its planned place for the whole run, on the GPU too, so
 * StarPU has nothing to move: for it, all data are in main memory, and a task
 * on the GPU takes the pointers as they are. */
static void codelet_init_cuda(struct starpu_codelet *c)
{
    static int nodes[IZ_GPU_DATA]; /* StarPU's own have room for few */
    for (int i = 0; i < IZ_GPU_DATA; i++)
        nodes[i] = STARPU_SPECIFIC_NODE_CPU;
    c->where |= STARPU_CUDA;
    c->cuda_funcs[0] = run_cuda;
    c->cuda_flags[0] = STARPU_CUDA_ASYNC;
    c->specific_nodes = 1;
    c->dyn_nodes = nodes;
}

void iz_task_codelets_init(bool gpu)
{
    for (int k = 0; k < IZ_KINDS; k++) {
        const struct iz_kind_info *lender = &iz_kinds[iz_kinds[k].codelet];
        starpu_codelet_init(&iz_codelets[k]);
        models[k] = (struct starpu_perfmodel){.type = STARPU_PER_ARCH,
                                              .arch_cost_function = cost_us,
                                              .symbol = iz_kinds[k].name};
        iz_codelets[k].where = STARPU_CPU;
        iz_codelets[k].cpu_funcs[0] = run_cpu;
        iz_codelets[k].nbuffers = STARPU_VARIABLE_NBUFFERS;
        iz_codelets[k].model = &models[k];
        iz_codelets[k].name = lender->name;
        iz_codelets[k].color = lender->color;
        /* clip has a buffer per unit, more than `nodes` has room for, and
         * snapshot one per chunk. */
        if (gpu && k != IZ_CLIP && k != IZ_SNAPSHOT)
            codelet_init_cuda(&iz_codelets[k]);
    }
}
