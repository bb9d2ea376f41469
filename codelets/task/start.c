/* SPDX-License-Identifier: Apache-2.0 */
/* Starts StarPU with the workers that a graph needs, and ends it. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>

#include "codelets/base/die.h"
#include "codelets/base/mix.h"
#include "codelets/base/take.h"
#include "codelets/gpu/device.h"
#include "codelets/ops/gpu_ops.h"
#include "codelets/task/state.h"

static void mark(worker_mask m, unsigned id)
{
    m[id / 32] |= UINT32_C(1) << (id % 32);
}

/* Gives the CPU's workers their parts, in order: compute, comm, the two
 * directions of copies, disk. */
static void split_workers(struct iz_graph *g, const int *cpu, int n)
{
    int at = 0;
    for (; at < g->config.workers; at++) {
        g->host_worker[at] = (unsigned)cpu[at];
        g->worker[cpu[at]].index = at;
        mark(g->mask[IZ_ON_HOST], (unsigned)cpu[at]);
    }
    if (g->config.comm)
        g->comm_worker = (unsigned)cpu[at++];
    if (g->gpu) {
        mark(g->mask[IZ_ON_H2D], (unsigned)cpu[at++]);
        mark(g->mask[IZ_ON_D2H], (unsigned)cpu[at++]);
        mark(g->mask[IZ_ON_COMPUTE], g->gpu_worker);
    }
    while (at < n)
        mark(g->mask[IZ_ON_IO], (unsigned)cpu[at++]);
}

static int movers(const struct iz_graph *g)
{
    return g->config.comm + (g->gpu ? 2 : 0) + g->config.io_workers;
}

static int check_workers(const struct iz_graph *g)
{
    int cpu = g->config.workers + movers(g);
    if (cpu <= STARPU_MAXCPUS)
        return 0;
    fprintf(stderr,
            "izar: run.workers or STARPU_NCPU: %d compute workers and %d that "
            "move data are more than the %d CPU workers this StarPU is built "
            "for\n",
            g->config.workers, movers(g), STARPU_MAXCPUS);
    return -EINVAL;
}

static void open_workers(struct iz_graph *g)
{
    g->worker = iz_take(g->n_workers, sizeof(*g->worker), "workers");
    g->host_worker =
        iz_take(g->config.workers, sizeof(*g->host_worker), "workers");
    g->waiting = iz_take(WAITING, sizeof(*g->waiting), "workers");
    for (int w = 0; w < g->n_workers; w++) {
        struct worker *k = &g->worker[w];
        k->exec.backend = IZ_CPU;
        k->exec.act = IZ_F32;
        k->exec.numerics = g->config.numerics;
        k->random = g->config.delay_seed * 1000003 + (uint64_t)w + 1;
        k->log.span = iz_take(SPANS, sizeof(*k->log.span), "spans");
    }
}

void iz_graph_give(struct iz_graph *g, char *const *scratch,
                   struct iz_shadow shadow)
{
    g->shadow = shadow;
    int64_t host = g->gpu ? g->config.host_work_bytes : g->config.work_bytes;
    if (g->gpu)
        g->worker[g->gpu_worker].exec.work =
            (struct iz_arena){.base = scratch[0], .size = g->config.work_bytes};
    for (int i = 0; i < g->config.workers && host; i++)
        g->worker[g->host_worker[i]].exec.work =
            (struct iz_arena){.base = scratch[g->gpu + i], .size = host};
}

/* On a mover: a stream of its own.  A thread's naps take 50 us more than asked
 * for unless it says otherwise, and the next copy begins after one. */
static void open_mover(void *arg)
{
    struct iz_graph *g = arg;
    struct iz_exec *x = &g->worker[starpu_worker_get_id()].exec;
    prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0);
    if (iz_device_use(g->config.device, NULL) ||
        !(x->stream = iz_device_stream_open()))
        iz_die("a mover has no GPU");
}

static void close_mover(void *arg)
{
    struct iz_graph *g = arg;
    struct iz_exec *x = &g->worker[starpu_worker_get_id()].exec;
    iz_device_stream_close(x->stream);
    x->stream = NULL;
}

static void on_movers(struct iz_graph *g, void (*fn)(void *arg))
{
    unsigned ids[STARPU_NMAXWORKERS], n = 0;
    for (unsigned w = 0; w < (unsigned)g->n_workers; w++) {
        bool copies =
            (g->mask[IZ_ON_H2D][w / 32] | g->mask[IZ_ON_D2H][w / 32]) &
            UINT32_C(1) << (w % 32);
        if (copies || (g->config.comm && w == g->comm_worker))
            ids[n++] = w;
    }
    starpu_execute_on_specific_workers(fn, g, n, ids, "izar");
}

static void open_cuda(void *arg, int i, struct iz_exec *x)
{
    struct iz_graph *g = arg;
    x->backend = IZ_CUDA;
    x->act = g->config.act;
    x->stream = iz_device_worker_stream();
    if (iz_cuda_open(&x->cuda))
        iz_die("the libraries of the GPU cannot be used");
}

static void close_cuda(void *arg, int i, struct iz_exec *x)
{
    if (x->cuda)
        iz_cuda_close(&x->cuda);
    for (int way = 0; way < 2; way++)
        iz_device_stream_close(x->beside[way]);
}

/* Schedulers of StarPU 1.4.10 under which a run never ends or aborts: they give
 * a task to a worker that may not run it, or keep it for one that never asks.
 */
static const struct {
    const char *name;
    bool only_io; /* works without workers for the disk */
} bad_schedulers[] = {
    {"heteroprio", false},
    {"modular-dmda", false},
    {"modular-dmdap", false},
    {"modular-dmdar", false},
    {"modular-dmdas", false},
    {"modular-eager", true},
    {"modular-eager-prefetching", true},
    {"modular-heft", true},
    {"modular-heft-prio", true},
    {"modular-heft2", true},
    {"modular-heteroprio", true},
    {"modular-pheft", true},
    {"modular-prandom", true},
    {"modular-prandom-prio", true},
    {"modular-random", true},
    {"modular-random-prefetching", true},
    /* Two threads that push at once may both find nobody for a task that some
     * workers may not run: it reads its last choice twice. */
    {"modular-ws", false},
};

static bool bad_scheduler(const char *name, bool io)
{
    for (size_t i = 0; i < sizeof(bad_schedulers) / sizeof(bad_schedulers[0]);
         i++)
        if (!strcmp(bad_schedulers[i].name, name))
            return io || !bad_schedulers[i].only_io;
    return false;
}

static int check_scheduler(const char *name, const char *from, bool io)
{
    struct starpu_sched_policy **all = starpu_sched_get_predefined_policies();
    bool known = false, bad = bad_scheduler(name, io);
    for (struct starpu_sched_policy **p = all; *p; p++)
        known |= !strcmp((*p)->policy_name, name);
    if (known && !bad)
        return 0;
    char choice[1024] = "";
    size_t n = 0;
    for (struct starpu_sched_policy **p = all; *p && n < sizeof(choice); p++)
        if (!bad_scheduler((*p)->policy_name, io))
            n += (size_t)snprintf(choice + n, sizeof(choice) - n, " %s",
                                  (*p)->policy_name);
    /* In one call, or the lines of several ranks mix. */
    if (bad)
        fprintf(
            stderr, "izar: %s: tasks under '%s' never end%s; choose among%s\n",
            from, name, io ? " where workers read or write files" : "", choice);
    else
        fprintf(stderr,
                "izar: %s: this StarPU has no scheduler '%s'; it has%s\n", from,
                name, choice);
    return -EINVAL;
}

static int start_starpu(struct iz_graph *g)
{
    struct starpu_conf conf;
    const char *env = getenv("STARPU_SCHED");
    const char *name = env ? env : g->config.scheduler;
    int r = check_scheduler(name, env ? "STARPU_SCHED" : "run.scheduler",
                            g->config.io_workers > 0);
    if (r)
        return r;
    starpu_conf_init(&conf);
    conf.sched_policy_name = name;
    conf.ncuda = g->gpu ? 1 : 0;
    conf.use_explicit_workers_cuda_gpuid = g->gpu;
    conf.workers_cuda_gpuid[0] = g->gpu ? (unsigned)g->config.device : 0;
    conf.nopencl = 0;
    conf.catch_signals = 0;
    /* The user's STARPU_NCPU counts compute workers (runtime/machine/cores.c
     * has read it); StarPU must also make the movers, and takes one from the
     * number for a bound main thread. */
    const char *main_thread = getenv("STARPU_MAIN_THREAD_BIND");
    bool taken = main_thread && atoi(main_thread) != 0;
    char ncpu[16];
    snprintf(ncpu, sizeof(ncpu), "%d", g->config.workers + movers(g) + taken);
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
static int take_workers(struct iz_graph *g)
{
    int cpu[STARPU_NMAXWORKERS], gpu[STARPU_NMAXWORKERS];
    int n = (int)starpu_worker_get_ids_by_type(STARPU_CPU_WORKER, cpu,
                                               STARPU_NMAXWORKERS);
    int n_gpu = (int)starpu_worker_get_ids_by_type(STARPU_CUDA_WORKER, gpu,
                                                   STARPU_NMAXWORKERS);
    int wanted = g->config.workers + movers(g);
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
    if (!g->gpu || g->config.simulated)
        return 0;
    /* StarPU leaves the calling thread on the last GPU that it has measured. */
    if (iz_device_use(g->config.device, NULL))
        return -ENODEV;
    on_movers(g, open_mover);
    iz_graph_on_device(g, open_cuda, g);
    return 0;
}

int iz_graph_open(struct iz_graph **out, const struct iz_graph_config *c)
{
    struct iz_graph *g = *out = iz_take(1, sizeof(*g), "workers");
    g->config = *c;
    g->gpu = c->device >= 0;
    g->idle_hook = -1;
    memcpy(g->given, c->rate, sizeof(g->given));
    iz_graph_set_rates(g);
    g->n_workers = c->workers + movers(g) + g->gpu;
    int r = check_workers(g);
    if (!r) {
        open_workers(g);
        r = start_starpu(g);
    }
    g->started = !r;
    if (!r)
        r = take_workers(g);
    if (r) {
        iz_graph_close(out);
        return r;
    }
    iz_task_codelets_init(g->gpu);
    if (c->simulated)
        starpu_profiling_status_set(STARPU_PROFILING_ENABLE);
    else
        g->idle_hook = starpu_idle_hook_register(iz_task_nap, g);
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
            on_movers(g, close_mover);
        }
        starpu_shutdown();
    }
    for (int w = 0; g->worker && w < g->n_workers; w++)
        free(g->worker[w].log.span);
    free(g->worker);
    free(g->host_worker);
    free(g->waiting);
    free(g);
    *out = NULL;
}

bool iz_graph_has(const struct iz_graph *g, enum iz_where where, int w)
{
    if (where == IZ_ON_COMM)
        return g->config.comm && (unsigned)w == g->comm_worker;
    return mask_has(g->mask[where], w);
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

void iz_graph_on_copies(struct iz_graph *g, iz_worker_fn *fn, void *arg)
{
    struct on_workers a = {g, fn, arg};
    unsigned ids[2], n = 0;
    for (int w = 0; g->gpu && w < g->n_workers && n < 2; w++)
        if (mask_has(g->mask[IZ_ON_H2D], w) || mask_has(g->mask[IZ_ON_D2H], w))
            ids[n++] = (unsigned)w;
    starpu_execute_on_specific_workers(on_worker, &a, n, ids, "izar");
}

void iz_graph_on_device(struct iz_graph *g, iz_worker_fn *fn, void *arg)
{
    struct on_workers a = {g, fn, arg};
    starpu_execute_on_specific_workers(on_worker, &a, 1, &g->gpu_worker,
                                       "izar");
}
