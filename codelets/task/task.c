/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/task/task.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "codelets/base/die.h"
#include "codelets/base/take.h"
#include "codelets/task/state.h"

/* Returns of which kind they are: what has no worker of its own is the host's.
 */
static enum iz_where choose_workers(struct iz_graph *g,
                                    struct starpu_task *task,
                                    enum iz_where where)
{
    if (where == IZ_ON_COMM && g->config.comm) {
        task->execute_on_a_specific_worker = 1;
        task->workerid = g->comm_worker;
        task->workerorder = ++g->comm_order;
        return where;
    }
    if (where == IZ_ON_COMM || (where == IZ_ON_IO && !g->config.io_workers))
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

int iz_task_add(struct iz_task *t, starpu_data_handle_t h,
                enum starpu_data_access_mode mode)
{
    int n = count_data(t);
    if (!h)
        return -1;
    if (n < IZ_TASK_DATA) {
        t->data[n] = (struct iz_access){h, mode};
        return n;
    }
    t->more = iz_take_more(t->more, t->n_more, &t->room, sizeof(*t->more),
                           "buffers of a task");
    t->more[t->n_more++] = (struct iz_access){h, mode};
    return n;
}

static struct iz_access access_of(const struct iz_task *t, int i)
{
    return i < IZ_TASK_DATA ? t->data[i] : t->more[i - IZ_TASK_DATA];
}

/* StarPU keeps few handles inside the task and takes over malloced arrays
 * beyond. */
static void attach_data(struct starpu_task *task, const struct iz_task *t)
{
    int n = count_data(t);
    task->nbuffers = n;
    if (n > STARPU_NMAXBUFS) {
        task->dyn_handles = iz_take(n, sizeof(*task->dyn_handles), "buffers");
        task->dyn_modes = iz_take(n, sizeof(*task->dyn_modes), "buffers");
    }
    for (int i = 0; i < n; i++) {
        struct iz_access a = access_of(t, i);
        STARPU_TASK_SET_HANDLE(task, a.handle, i);
        STARPU_TASK_SET_MODE(task, a.mode, i);
    }
}

static void keep_waiting(struct iz_graph *g, const struct iz_task *t)
{
    struct waiting *w = &g->waiting[g->submitted % WAITING];
    int n = count_data(t);
    w->ended = true; /* until all of it is there */
    w->kind = t->kind;
    w->unit = t->unit;
    w->step = t->step;
    w->position = g->position;
    w->begin_ns = 0;
    w->data = (unsigned char)(n < WAITING_DATA ? n : WAITING_DATA);
    for (int i = 0; i < w->data; i++) {
        struct iz_access a = access_of(t, i);
        uint32_t address = (uint32_t)((uintptr_t)a.handle >> 3);
        w->datum[i] = (address & ~1u) | ((a.mode & STARPU_W) != 0);
    }
    if (t->where == IZ_ON_COMM && g->config.comm)
        w->datum[w->data++] = 1;
    w->ended = false;
}

static struct head *make_head(struct iz_graph *g, const struct iz_task *t)
{
    struct head *h = iz_take(1, (int64_t)(sizeof(*h) + t->arg_bytes), "a task");
    *h = (struct head){.g = g,
                       .run = t->run,
                       .flops = t->flops,
                       .bytes = t->bytes,
                       .squares = t->squares,
                       .moments = t->moments,
                       .moment_type = t->moment_type,
                       .seconds = t->seconds,
                       .kind = t->kind,
                       .rate = t->rate ? t->rate : t->where,
                       .unit = t->unit,
                       .step = t->step,
                       .position = g->position,
                       .number = g->submitted,
                       .ends_step = t->ends_step};
    keep_waiting(g, t);
    if (t->arg_bytes)
        memcpy(h->arg, t->arg, t->arg_bytes);
    return h;
}

_Static_assert(IZ_KINDS <= 16 && IZ_WORKER_KINDS <= 1 << IZ_TAG_WHERE_BITS,
               "a tag has four bits for each");

static uint64_t tag(enum iz_where where, const struct iz_task *t)
{
    uint64_t unit = (uint64_t)t->unit & ((UINT64_C(1) << IZ_TAG_UNIT_BITS) - 1);
    uint64_t tag = (uint64_t)t->kind << IZ_TAG_WHERE_BITS | (uint64_t)where;
    double most = (double)((INT64_C(1) << IZ_TAG_BYTES_BITS) - 1);
    return (tag << IZ_TAG_UNIT_BITS | unit) << IZ_TAG_BYTES_BITS |
           (uint64_t)(t->bytes < most ? t->bytes : most);
}

/* Steps of a trace begin with 1, as those of a run do.  StarPU forgets to clear
 * the outer number when it is popped, so both are given with every task. */
static int submit_numbered(struct iz_graph *g, struct starpu_task *task,
                           int step)
{
    starpu_iteration_push((unsigned long)step + 1);
    starpu_iteration_push((unsigned long)g->position);
    int r = starpu_task_submit(task);
    starpu_iteration_pop();
    starpu_iteration_pop();
    iz_graph_wake(g);
    return r;
}

static void task_submit(struct iz_graph *g, const struct iz_task *t)
{
    struct starpu_task *task = starpu_task_create();
    struct head *h = make_head(g, t);
    task->cl = &iz_codelets[t->kind];
    task->cl_arg = h;
    task->cl_arg_size = sizeof(*h) + t->arg_bytes;
    task->cl_arg_free = 1;
    task->priority = iz_kinds[t->kind].priority + t->priority_offset;
    task->flops = t->flops;
    task->name = iz_kinds[iz_kinds[t->kind].codelet].name;
    h->where = choose_workers(g, task, t->where);
    task->tag_id = tag(h->where, t);
    if (g->config.simulated || (g->gpu && t->where == IZ_ON_COMPUTE)) {
        task->callback_func =
            g->config.simulated ? iz_task_end_simulated : iz_task_end_cuda;
        task->callback_arg = h;
    }
    attach_data(task, t);
    int r = submit_numbered(g, task, t->step);
    if (r)
        iz_die("submission of %s failed: %s", iz_kinds[t->kind].name,
               strerror(-r));
    g->submitted++;
    g->bytes[t->where] += t->bytes;
    free(t->more);
}

void iz_graph_wait(struct iz_graph *g)
{
    int64_t begin = iz_clock_ns();
    starpu_task_wait_for_all();
    g->waited_ns += iz_clock_ns() - begin;
}

void iz_task_submit(struct iz_graph *g, const struct iz_task *t)
{
    bool alone =
        g->config.comm_alone && g->config.comm && t->where == IZ_ON_COMM;
    if (alone)
        iz_graph_wait(g);
    task_submit(g, t);
    if (alone)
        iz_graph_wait(g);
}

int64_t iz_graph_waited_ns(const struct iz_graph *g)
{
    return g->waited_ns;
}

double iz_graph_bytes(const struct iz_graph *g, enum iz_where where)
{
    return g->bytes[where];
}

int iz_graph_position(struct iz_graph *g, int position)
{
    int before = g->position;
    g->position = position;
    return before;
}

int64_t iz_graph_submitted(const struct iz_graph *g)
{
    return g->submitted;
}

const char *iz_graph_scheduler(const struct iz_graph *g)
{
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
