/* SPDX-License-Identifier: Apache-2.0 */
/* Rates of this machine; see measure.h.  The others follow from these as on the
 * first machine of which all are known, configs/machines/h100-80-vm.json. */
#include "runtime/machine/measure.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>

#include "codelets/base/clock.h"
#include "codelets/base/die.h"
#include "codelets/base/int64.h"
#include "codelets/base/take.h"
#include "codelets/flat/update.h"
#include "codelets/ops/gpu_ops.h"
#include "runtime/base/text.h"

/* Of each worker.  256 MiB of 14 workers were updated at 1.6 times the rate of
 * their host's memory: they were in its caches. */
#define WORKER_BYTES (INT64_C(96) << 20)
#define PASSES 2
#define LINK_BYTES (INT64_C(128) << 20) /* of a GPU an 8th at most */
#define PRODUCT_S 0.1

/* Products in a step against those of the first 0.1 s; kernels of attention,
 * [cuDNN's][backward], and products summed in fp32 against products; passes
 * that square against copies.  Copies beside one another and while the host
 * updates, against copies alone; updates beside copies, which read the same
 * memory, against updates alone (in steps of a 7B 121 of 146 GB/s). */
#define SUSTAINED 0.97
static const double attention[2][2] = {{0.39, 0.22}, {0.72, 0.40}};
#define SUMMED 0.95
#define SQUARED 0.38
#define UP_BOTH 0.84
#define UP_BUSY 0.67
#define DOWN_BOTH 0.93
#define HOST_BUSY 0.83

static double since_s(int64_t begin_ns)
{
    return (double)(iz_clock_ns() - begin_ns) * 1e-9;
}

/* ---- the host ---- */

/* One worker's elements, and when it has updated them. */
struct worker {
    pthread_t thread;
    pthread_barrier_t *together;
    const struct iz_plan *p;
    const struct iz_hyper *hyper;
    int64_t n;
    double seconds; /* 0: no memory */
};

static void update_once(const struct worker *w, char *states, char *grad,
                        char *param)
{
    struct iz_state_layout l = iz_plan_states(w->p, IZ_HOME_CPU, w->n, 0);
    struct iz_hyper_at step = {.hyper = *w->hyper, .t = 1, .grad_scale = 1};
    struct iz_update_range all = iz_update_range_of(&step);
    struct iz_update u = {.optimizer = l.optimizer,
                          .type = l.type,
                          .g_type = w->p->grad_type,
                          .out_type = w->p->param_type,
                          .n = w->n,
                          .room = l.room,
                          .g = grad,
                          .out = l.master ? param : NULL,
                          .key = 1,
                          .range = &all,
                          .ranges = 1};
    if (l.lower)
        u.lower = (uint16_t *)states;
    else
        u.p = (float *)(l.master ? states : param);
    for (int i = 0; i < l.states; i++)
        u.state[i] = states + l.at[i];
    iz_update(&u);
}

/* All at the same time. */
static void *worker_run(void *arg)
{
    struct worker *w = arg;
    struct iz_state_layout l = iz_plan_states(w->p, IZ_HOME_CPU, w->n, 0);
    int64_t states = round_up(l.bytes, 4096), each = round_up(w->n * 4, 4096);
    char *mem = aligned_alloc(4096, (size_t)(states + 2 * each));
    if (mem)
        memset(mem, 0, (size_t)(states + 2 * each));
    pthread_barrier_wait(w->together);
    int64_t begin = iz_clock_ns();
    for (int i = 0; mem && i < PASSES; i++)
        update_once(w, mem, mem + states, mem + states + each);
    w->seconds = mem ? since_s(begin) / PASSES : 0;
    free(mem);
    return NULL;
}

/* Bytes per second of all workers' updates; 0 without memory. */
static double time_host(const struct iz_plan *p, const struct iz_config *c)
{
    int n = p->target.workers;
    struct worker *w = iz_take(n, sizeof(*w), "workers");
    pthread_barrier_t together;
    double bytes = iz_state_traffic(p, IZ_CHUNK_ALIGN, 0) / IZ_CHUNK_ALIGN;
    double sum = 0;
    int64_t each =
        round_up((int64_t)((double)WORKER_BYTES / bytes), IZ_CHUNK_ALIGN);
    if (pthread_barrier_init(&together, NULL, (unsigned)n))
        iz_die("no barrier to measure the host's memory with");
    for (int i = 0; i < n; i++) {
        w[i] = (struct worker){
            .together = &together, .p = p, .hyper = &c->optimizer, .n = each};
        if (pthread_create(&w[i].thread, NULL, worker_run, &w[i]))
            iz_die("no thread to measure the host's memory with");
    }
    for (int i = 0; i < n; i++) {
        pthread_join(w[i].thread, NULL);
        sum += w[i].seconds > 0 ? bytes * (double)each / w[i].seconds : 0;
    }
    pthread_barrier_destroy(&together);
    free(w);
    return sum;
}

/* ---- the GPU ---- */

static double copies(void *stream, void *dst, const void *src, int64_t bytes)
{
    double least = 1;
    for (int i = 0; i < 3; i++) {
        int64_t begin = iz_clock_ns();
        iz_device_copy(stream, dst, src, bytes);
        iz_device_wait(stream);
        double s = since_s(begin);
        least = s < least ? s : least;
    }
    return (double)bytes / least;
}

static const char *time_link(struct iz_machine *m, void *stream, int64_t bytes)
{
    char *a = iz_device_take(bytes), *b = iz_device_take(bytes);
    char *host = aligned_alloc(4096, (size_t)bytes);
    const char *why = host ? iz_device_pin(host, bytes) : "no memory";
    if (a && b && !why) {
        m->up_bytes_per_s = (int64_t)copies(stream, a, host, bytes);
        m->down_bytes_per_s = (int64_t)copies(stream, host, a, bytes);
        m->gpu_bytes_per_s = (int64_t)(2 * copies(stream, b, a, bytes));
    }
    if (!why)
        iz_device_unpin(host);
    free(host);
    if (b)
        iz_device_give(b);
    if (a)
        iz_device_give(a);
    return !why && !(a && b) ? "no room to copy" : why;
}

const char *iz_machine_measure_gpu(struct iz_machine *m, int device,
                                   unsigned types, int side, double seconds)
{
    struct iz_device_info info;
    struct iz_exec x = {.backend = IZ_CUDA};
    const char *why = iz_device_why_not(device, &info);
    if (why)
        return why;
    x.numerics.capability = info.capability;
    x.stream = iz_device_stream_open();
    if (!x.stream || iz_cuda_open(&x.cuda))
        why = "CUDA does not open";
    for (int t = IZ_F32; !why && t <= IZ_F16; t++) {
        double rate = 0;
        if (!(types & 1U << t) || (t == IZ_BF16 && info.capability < 80))
            continue;
        x.act = (enum iz_dtype)t;
        for (int n = side; rate == 0 && n >= side / 8 && n; n /= 2)
            rate = iz_gemm_rate_cuda(&x, n, n, n, seconds);
        m->flops_per_s[t] = (int64_t)rate;
        if (rate == 0)
            why = "the GPU has no room for matrices";
    }
    if (!why)
        why = time_link(m, x.stream,
                        min64(LINK_BYTES, info.free_bytes / 8 / 4096 * 4096));
    iz_cuda_close(&x.cuda);
    iz_device_stream_close(x.stream);
    return why;
}

static int64_t portion(int64_t of, double part)
{
    return (int64_t)((double)of * part);
}

int iz_machine_measure(struct iz_machine *m, const struct iz_plan *p,
                       const struct iz_config *c, int device, int ranks,
                       int side)
{
    double host = HOST_BUSY * time_host(p, c);
    *m = (struct iz_machine){.name = "this machine",
                             .gpus = ranks,
                             .cores = p->target.workers * ranks,
                             .gpu_capability = p->target.numerics.capability,
                             .launch_ns = 10000,
                             .kernel_ns = 3000,
                             .copy_ns = 15000,
                             .message_ns = 10000};
    const char *why =
        host > 0 ? iz_machine_measure_gpu(m, device, 1U << p->target.act, side,
                                          PRODUCT_S)
                 : "no memory";
    if (why)
        return iz_text_refuse(stderr,
                              "the rates of this machine, by which the plan is "
                              "chosen, cannot be measured: %s: set "
                              "offload_optimizer.ratio, the micro-batches and "
                              "run.sequence_chunk to numbers",
                              why);
    int64_t flops = portion(m->flops_per_s[p->target.act], SUSTAINED);
    m->flops_per_s[p->target.act] = flops;
    m->host_bytes_per_s = (int64_t)(host * ranks);
    m->core_bytes_per_s = (int64_t)(host / p->target.workers);
    for (int i = 0; i < 4; i++)
        m->gpu_attention_flops_per_s[i / 2][i % 2] =
            portion(flops, attention[i / 2][i % 2]);
    m->gpu_sum_flops_per_s = portion(flops, SUMMED);
    m->gpu_squares_bytes_per_s = portion(m->gpu_bytes_per_s, SQUARED);
    m->up_both_bytes_per_s = portion(m->up_bytes_per_s, UP_BOTH);
    m->up_busy_bytes_per_s = portion(m->up_bytes_per_s, UP_BUSY);
    m->down_both_bytes_per_s = portion(m->down_bytes_per_s, DOWN_BOTH);
    /* Between ranks: assumed to be like the link to the host. */
    m->peer_bytes_per_s = m->node_bytes_per_s = m->up_bytes_per_s;
    return 0;
}
