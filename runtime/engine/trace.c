/* SPDX-License-Identifier: Apache-2.0 */
/* What StarPU's trace of a run needs beside the tasks: which steps it is taken
 * of, a buffer of the right size, names and homes of the data, and a
 * description of the run in a file beside it.  StarPU writes the trace itself;
 * tools/trace makes pictures of both. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "codelets/base/take.h"
#include "runtime/base/json.h"
#include "runtime/engine/trace.h"
#include "runtime/plan/fit.h"

#define BYTES_PER_TASK 6144 /* of the trace; 2.2 to 3.1 KiB were seen */
#define MOST_BYTES (INT64_C(4) << 30)

struct iz_trace {
    char dir[IZ_PATH_MAX];
    /* Steps [from, to) of this process, the first of which is `first`. */
    long long from, to, first;
    int64_t begin_ns; /* when its first event was recorded */
    bool seen, on, done;
    double gemm_rate; /* flop/s of all compute workers; 0: not measured */
};

/* ---- what to trace ---- */

/* The first steps of a run warm up; a simulation is short and never does. */
static bool read_steps(struct iz_trace *t, const struct iz_engine *e,
                       const char *text)
{
    char rest;
    t->from = e->config->run.steps > 5 && !e->simulated ? 2 : 0;
    t->to = t->from + 4;
    if (!text)
        return true;
    return sscanf(text, "%lld:%lld%c", &t->from, &t->to, &rest) == 2 &&
           t->from >= 0 && t->to > t->from;
}

/* Tasks of a step at most. */
static int64_t tasks_per_step(const struct iz_plan *p)
{
    int64_t waves = (p->micro_batches + p->wave - 1) / p->wave;
    int64_t units = p->n_units, chunks = 0;
    for (int u = 0; u < p->n_units; u++)
        chunks += p->unit[u].chunks;
    int64_t slices = (int64_t)p->micro_batches * p->slices;
    int64_t compute = slices * (2 + 2 * units);
    int64_t reduce = 3 * p->micro_batches * (units + 1) + 3 * units;
    int64_t fetch = waves * 2 * (2 * units + 2 * (units + chunks));
    return compute + reduce + fetch + 1 + units + 6 * chunks;
}

/* A trace that outgrows its buffer stops the run again and again to write it.
 * The user's size wins. */
static const char *size_buffer(const struct iz_engine *e,
                               const struct iz_trace *t)
{
    char mib[24];
    int64_t end = e->config->run.steps, steps;
    if (t->to < end || e->simulated)
        end = t->to;
    steps = end - t->from;
    int64_t bytes = steps * tasks_per_step(&e->plan) * BYTES_PER_TASK;
    if (bytes > MOST_BYTES && !getenv("STARPU_TRACE_BUFFER_SIZE"))
        return "IZ_TRACE_STEPS: a trace of so many tasks needs more than 4 GiB "
               "per rank: take fewer steps";
    snprintf(mib, sizeof(mib), "%lld", (long long)(bytes >> 20) + 16);
    setenv("STARPU_TRACE_BUFFER_SIZE", mib, 0);
    return NULL;
}

/* What this rank's environment asks for; returns why that cannot be, or NULL.
 */
static const char *read_wish(struct iz_engine *e)
{
    const char *dir = getenv("IZ_TRACE"), *steps = getenv("IZ_TRACE_STEPS");
    if (!dir)
        return steps ? "IZ_TRACE_STEPS: goes with IZ_TRACE, the folder of the "
                       "trace"
                     : NULL;
    if (!IZ_FXT)
        return "IZ_TRACE: this StarPU was built without FxT, with which it "
               "takes traces";
    struct stat st;
    if (!stat(dir, &st) && !S_ISDIR(st.st_mode))
        return "IZ_TRACE: is a file, and should be a folder";
    struct iz_trace *t = e->trace = iz_take(1, sizeof(*t), "the trace");
    snprintf(t->dir, sizeof(t->dir), "%s", dir);
    if (!read_steps(t, e, steps))
        return "IZ_TRACE_STEPS: is not a:b with 0 <= a < b, the steps done "
               "before the trace begins and ends";
    if (t->from >= e->config->run.steps && !e->simulated)
        return "IZ_TRACE_STEPS: begins after run.steps";
    return size_buffer(e, t);
}

/* Ranks begin together (see `begin`), so all trace the same steps. */
static void compare(const struct iz_engine *e, char *why, size_t size)
{
    const struct iz_trace *t = e->trace;
    int64_t mine[2] = {t ? t->from : -1, t ? t->to : -1};
    int64_t *all = iz_agree_numbers(e->coll, mine, 2, "traces");
    bool same = mine[0] == all[0] && mine[1] == all[1];
    if (!same && !t)
        snprintf(why, size,
                 "IZ_TRACE is not set, but rank 0 traces steps %lld:%lld",
                 (long long)all[0], (long long)all[1]);
    else if (!same && all[0] < 0)
        snprintf(why, size, "IZ_TRACE: rank 0 takes none");
    else if (!same)
        snprintf(why, size,
                 "IZ_TRACE_STEPS: %lld:%lld, those of rank 0 are %lld:%lld",
                 t->from, t->to, (long long)all[0], (long long)all[1]);
    free(all);
}

/* The first rank with a reason tells it. */
static int agree(const struct iz_engine *e, const char *why)
{
    int q = iz_coll_refuser(e->coll, why != NULL);
    if (why && q == e->plan.rank)
        fprintf(stderr, "izar: rank %d: %s\n", q, why);
    return q < 0 ? 0 : -EINVAL;
}

int iz_trace_open(struct iz_engine *e)
{
    char other[160] = "";
    int r = agree(e, read_wish(e));
    if (!r && e->plan.ranks > 1 && !e->simulated) {
        compare(e, other, sizeof(other));
        r = agree(e, other[0] ? other : NULL);
    }
    if (r || !e->trace)
        return r;
    setenv("STARPU_FXT_TRACE", "1", 1);
    setenv("STARPU_FXT_PREFIX", e->trace->dir, 1);
    starpu_fxt_autostart_profiling(0);
    return 0;
}

void iz_trace_close(struct iz_engine *e)
{
    free(e->trace);
    e->trace = NULL;
}

void iz_trace_rate(struct iz_engine *e, double gemm_rate)
{
    if (e->trace)
        e->trace->gemm_rate = gemm_rate;
}

/* ---- the description ---- */

static const char *const worker_kinds[IZ_WORKER_KINDS] = {
    [IZ_ON_COMPUTE] = "compute", [IZ_ON_HOST] = "host", [IZ_ON_COMM] = "comm",
    [IZ_ON_H2D] = "up",          [IZ_ON_D2H] = "down",  [IZ_ON_IO] = "io",
};

/* What workers of a kind could do at most: of the machine that is simulated, or
 * what was measured at the start. */
static struct iz_rate rate_of(const struct iz_engine *e, enum iz_where p)
{
    struct iz_rate r = iz_graph_rate(e->graph, p);
    bool computes = e->plan.target.gpu ? p == IZ_ON_COMPUTE : p == IZ_ON_HOST;
    if (computes && !e->simulated)
        r.flops_per_s =
            e->trace ? e->trace->gemm_rate / e->plan.tasks_at_once : 0;
    if (computes && r.flops_per_s <= 0)
        r = iz_graph_rate(e->graph, IZ_ON_COMPUTE);
    return r;
}

/* The workers, what they could do, and the tasks' kinds. */
static void write_workers(const struct iz_engine *e, FILE *f)
{
    const char *comma = "";
    fprintf(f, "\"kinds\": [");
    for (int k = 0; k < IZ_KINDS; k++)
        fprintf(f,
                "%s{\"name\": \"%s\", \"codelet\": \"%s\", "
                "\"color\": \"#%06x\", \"priority\": %d}",
                k ? ", " : "", iz_kinds[k].name,
                iz_kinds[iz_kinds[k].codelet].name, iz_kinds[k].color,
                iz_kinds[k].priority);
    fprintf(f, "],\n\"workers\": [");
    for (int w = 0; w < iz_graph_workers(e->graph); w++) {
        const char *where = "host";
        for (enum iz_where p = 0; p < IZ_WORKER_KINDS; p++)
            if (iz_graph_has(e->graph, p, w))
                where = worker_kinds[p];
        fprintf(f, "%s\"%s\"", w ? ", " : "", where);
    }
    fprintf(f, "],\n\"worker_kinds\": [");
    for (enum iz_where p = 0; p < IZ_WORKER_KINDS; p++)
        fprintf(f, "%s\"%s\"", p ? ", " : "", worker_kinds[p]);
    fprintf(f, "],\n\"rates\": {");
    for (enum iz_where p = 0; p < IZ_WORKER_KINDS; p++) {
        struct iz_rate r = rate_of(e, p);
        if (r.flops_per_s <= 0 && r.bytes_per_s <= 0)
            continue;
        fprintf(f, "%s\"%s\": {\"flops_per_s\": %.0f, \"bytes_per_s\": %.0f}",
                comma, worker_kinds[p], r.flops_per_s, r.bytes_per_s);
        comma = ", ";
    }
    fprintf(f, "},\n");
}

static void write_data(const struct iz_engine *e, FILE *f)
{
    const char *comma = "";
    fprintf(f, "\"data\": {");
    for (enum iz_datum d = 0; d < IZ_DATA; d++) {
        const struct iz_place *a = iz_places_find(&e->plan.places, d);
        if (!a)
            continue;
        fprintf(f, "%s\"%s\": {\"class\": \"%s\", \"tier\": \"%s\"}", comma,
                iz_datum_infos[d].name, iz_class_names[iz_datum_infos[d].class],
                iz_tier_names[a->tier]);
        comma = ", ";
    }
    fprintf(f, "},\n\"plan\": [");
    comma = "";
    for (int i = 0; i < IZ_TIERS * IZ_MEM_CLASSES; i++) {
        int t = i / IZ_MEM_CLASSES, c = i % IZ_MEM_CLASSES;
        if (!e->plan.bytes.b[t][c])
            continue;
        fprintf(f, "%s{\"tier\": \"%s\", \"class\": \"%s\", \"bytes\": %lld}",
                comma, iz_tier_names[t], iz_class_names[c],
                (long long)e->plan.bytes.b[t][c]);
        comma = ", ";
    }
    fprintf(f, "],\n");
}

static void write_run(const struct iz_engine *e, FILE *f, int64_t from,
                      int64_t begin_ns)
{
    const struct iz_plan *p = &e->plan;
    static const char *const words[] = {"false", "true"};
    char host[256] = "", program[IZ_PATH_MAX] = "";
    gethostname(host, sizeof(host) - 1);
    if (readlink("/proc/self/exe", program, sizeof(program) - 1) < 0)
        program[0] = 0;
    fprintf(f, "\"program\": ");
    iz_json_print(f, program);
    fprintf(f, ", \"host\": ");
    iz_json_print(f, host);
    fprintf(f,
            ",\n\"version\": \"%s\",\n"
            "\"rank\": %d, \"ranks\": %d, \"simulated\": %s, \"gpu\": %s, "
            "\"nccl\": %s,\n\"from\": %lld, \"to\": %lld, "
            "\"begin_ns\": %lld,\n",
            IZ_VERSION, p->rank, p->ranks, words[e->simulated],
            words[p->target.gpu], words[p->target.nccl], (long long)from,
            (long long)e->step, (long long)begin_ns);
    fprintf(f,
            "\"stage_fetches\": %s, \"micro_batches\": %d, \"slices\": %d, "
            "\"wave\": %d,\n\"ring\": %d, \"recompute\": [%d, %d, %d], "
            "\"compute_workers\": %d,\n\"units\": [",
            words[p->zero.fetch], p->micro_batches, p->slices, p->wave,
            p->n_rings ? p->ring[0].params : 0,
            iz_plan_recomputing(p, e->model, IZ_RECOMPUTE_NONE),
            iz_plan_recomputing(p, e->model, IZ_RECOMPUTE_WIDENED),
            iz_plan_recomputing(p, e->model, IZ_RECOMPUTE_FULL),
            p->tasks_at_once);
    for (int u = 0; u < e->model->n_units; u++)
        fprintf(f, "%s\"%s\"", u ? ", " : "", e->model->unit[u].name);
    fprintf(f, "]\n");
}

void iz_trace_describe(const struct iz_engine *e, FILE *f, int64_t from,
                       int64_t begin_ns)
{
    fprintf(f, "{");
    write_workers(e, f);
    write_data(e, f);
    write_run(e, f, from, begin_ns);
    fprintf(f, "}\n");
}

static void trace_describe(const struct iz_engine *e)
{
    const struct iz_trace *t = e->trace;
    char path[IZ_PATH_MAX + 32];
    snprintf(path, sizeof(path), "%s/rank-%d.json", e->trace->dir,
             e->plan.rank);
    FILE *f = fopen(path, "w");
    if (f)
        iz_trace_describe(e, f, t->first + t->from, t->begin_ns);
    if (!f || fclose(f))
        fprintf(stderr, "izar: %s: %s: the trace has no description\n", path,
                strerror(errno));
}

/* ---- begin and end ---- */

/* All ranks come here at the same time; on one host their clocks agree. */
static void begin(struct iz_engine *e)
{
    iz_graph_wait(e->graph);
    if (e->plan.ranks > 1 && !e->simulated)
        iz_coll_barrier(e->coll, "begin of the trace");
    starpu_fxt_start_profiling();
    e->trace->begin_ns = iz_clock_ns();
    starpu_fxt_trace_user_event_string("begin of the trace");
    e->trace->on = true;
}

void iz_trace_stop(struct iz_engine *e)
{
    struct iz_trace *t = e->trace;
    if (!t || t->done)
        return;
    if (!t->on) {
        if (e->plan.rank == 0)
            fprintf(stderr,
                    "izar: IZ_TRACE: there is no trace: this start did not "
                    "come to step %lld of its own\n",
                    t->from + 1);
        return;
    }
    iz_graph_wait(e->graph);
    starpu_fxt_stop_profiling();
    trace_describe(e);
    t->on = false;
    t->done = true;
}

void iz_trace_step(struct iz_engine *e)
{
    struct iz_trace *t = e->trace;
    if (!t || t->done)
        return;
    if (!t->seen)
        t->first = e->step;
    t->seen = true;
    int64_t step = e->step - t->first;
    if (t->on && step >= t->to)
        iz_trace_stop(e);
    else if (!t->on && step >= t->from && step < t->to)
        begin(e);
}
