/* SPDX-License-Identifier: Apache-2.0 */
/* Stand-in for the CUDA runtime: streams and events.  A stream is a thread
 * with a queue, so that streams really run side by side.  The stream NULL is
 * one more stream of its device and waits for no other, which finds more
 * mistakes than CUDA's own rule. */
#define _GNU_SOURCE
#include "tests/fake/standin/cudart.h"

#include <stdlib.h>
#include <time.h>

struct operation {
    struct operation *next;
    void (*run)(void *);
    void *arg;
    int64_t number; /* counts all operations of the process */
};

struct CUstream_st {
    struct CUstream_st *next; /* on the same device */
    int device;
    bool quit;
    pthread_t thread;
    pthread_cond_t filled;
    struct operation *first, **end; /* the first one may be running */
    uint64_t random;
};

/* One recording of an event: the event may be recorded again while others
 * still wait for this. */
struct mark {
    int refs;
    bool done;
    struct timespec at;
};

struct CUevent_st {
    struct mark *last;
};

struct call {
    cudaHostFn_t f;
    void *arg;
};

static pthread_cond_t finished = PTHREAD_COND_INITIALIZER;
static struct CUstream_st *streams[IZ_STANDIN_MAX_DEVICES];
static struct CUstream_st *null_stream[IZ_STANDIN_MAX_DEVICES];
static int64_t numbers, streams_made;

/* ---- the thread of a stream --------------------------------------------- */

static void sleep_us(int64_t us)
{
    struct timespec t = {us / 1000000, us % 1000000 * 1000};

    nanosleep(&t, NULL);
}

static void jitter(struct CUstream_st *s)
{
    if (!iz_standin_settings.jitter_us)
        return;
    s->random ^= s->random << 13;
    s->random ^= s->random >> 7;
    s->random ^= s->random << 17;
    sleep_us((int64_t)(s->random >> 16) % iz_standin_settings.jitter_us);
}

/* The first operation, which stays in the queue; NULL at the end. */
static struct operation *await_work(struct CUstream_st *s)
{
    struct operation *o;

    pthread_mutex_lock(&iz_standin_lock);
    while (!s->first && !s->quit)
        pthread_cond_wait(&s->filled, &iz_standin_lock);
    o = s->first;
    pthread_mutex_unlock(&iz_standin_lock);
    return o;
}

static void finish(struct CUstream_st *s)
{
    struct operation *o;

    pthread_mutex_lock(&iz_standin_lock);
    o = s->first;
    s->first = o->next;
    if (!s->first)
        s->end = &s->first;
    pthread_cond_broadcast(&finished);
    pthread_mutex_unlock(&iz_standin_lock);
    free(o);
}

static void *stream_main(void *arg)
{
    struct CUstream_st *s = arg;
    struct operation *o;

    iz_standin_forbid(true);
    pthread_setname_np(pthread_self(), "standin-stream");
    while ((o = await_work(s))) {
        jitter(s);
        o->run(o->arg);
        finish(s);
    }
    return NULL;
}

/* ---- streams ------------------------------------------------------------ */

/* Under the lock. */
static struct CUstream_st *stream_make(int device)
{
    struct CUstream_st *s = calloc(1, sizeof(*s));

    if (!s)
        iz_standin_die("no memory");
    s->device = device;
    s->end = &s->first;
    s->random = ((uint64_t)iz_standin_settings.seed + 1) * 0x9e3779b97f4a7c15 +
                (uint64_t)++streams_made * 0xd1342543de82ef95;
    pthread_cond_init(&s->filled, NULL);
    s->next = streams[device];
    streams[device] = s;
    if (pthread_create(&s->thread, NULL, stream_main, s))
        iz_standin_die("no thread for a stream");
    return s;
}

/* The stream behind a handle, or NULL; under the lock. */
static struct CUstream_st *stream_find(cudaStream_t handle)
{
    int d = iz_standin_device();
    struct CUstream_st *s = NULL;

    if (!handle || handle == cudaStreamLegacy ||
        handle == cudaStreamPerThread) {
        if (!null_stream[d])
            null_stream[d] = stream_make(d);
        return null_stream[d];
    }
    for (d = 0; d < iz_standin_settings.devices && !s; d++)
        for (s = streams[d]; s && s != handle;)
            s = s->next;
    return s;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned flags,
                                         int priority)
{
    iz_standin_enter();
    pthread_mutex_lock(&iz_standin_lock);
    *s = stream_make(iz_standin_device());
    pthread_mutex_unlock(&iz_standin_lock);
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned flags)
{
    return cudaStreamCreateWithPriority(s, flags, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t *s)
{
    return cudaStreamCreateWithPriority(s, 0, 0);
}

/* Waits for what is in the stream, which CUDA does not. */
cudaError_t cudaStreamDestroy(cudaStream_t s)
{
    iz_standin_enter();
    pthread_mutex_lock(&iz_standin_lock);
    struct CUstream_st **at =
        s && stream_find(s) == s ? &streams[s->device] : NULL;
    while (at && *at != s)
        at = &(*at)->next;
    if (at) {
        *at = s->next;
        s->quit = true;
        pthread_cond_signal(&s->filled);
    }
    pthread_mutex_unlock(&iz_standin_lock);
    if (!at)
        return iz_standin_error(cudaErrorInvalidResourceHandle);
    pthread_join(s->thread, NULL);
    pthread_cond_destroy(&s->filled);
    free(s);
    return cudaSuccess;
}

void iz_standin_reset_streams(int device)
{
    while (streams[device])
        cudaStreamDestroy(streams[device]);
    null_stream[device] = NULL;
}

cudaError_t iz_standin_push(cudaStream_t handle, void (*run)(void *), void *arg)
{
    struct operation *o = calloc(1, sizeof(*o));
    struct CUstream_st *s;

    if (!o)
        iz_standin_die("no memory");
    pthread_mutex_lock(&iz_standin_lock);
    s = stream_find(handle);
    if (s) {
        *o = (struct operation){NULL, run, arg, ++numbers};
        *s->end = o;
        s->end = &o->next;
        pthread_cond_signal(&s->filled);
    }
    pthread_mutex_unlock(&iz_standin_lock);
    if (s)
        return cudaSuccess;
    free(o);
    return iz_standin_error(cudaErrorInvalidResourceHandle);
}

/* Whether s has done all operations up to a number. */
static bool past(const struct CUstream_st *s, int64_t number)
{
    return !s->first || s->first->number > number;
}

static bool device_past(int device, int64_t number)
{
    for (struct CUstream_st *s = streams[device]; s; s = s->next)
        if (!past(s, number))
            return false;
    return true;
}

void iz_standin_drain(cudaStream_t handle)
{
    struct CUstream_st *s;

    pthread_mutex_lock(&iz_standin_lock);
    int64_t number = numbers;
    while ((s = stream_find(handle)) && !past(s, number))
        pthread_cond_wait(&finished, &iz_standin_lock);
    pthread_mutex_unlock(&iz_standin_lock);
}

void iz_standin_drain_device(int device)
{
    pthread_mutex_lock(&iz_standin_lock);
    int64_t number = numbers;
    while (!device_past(device, number))
        pthread_cond_wait(&finished, &iz_standin_lock);
    pthread_mutex_unlock(&iz_standin_lock);
}

static cudaError_t stream_check(cudaStream_t handle, bool *idle)
{
    pthread_mutex_lock(&iz_standin_lock);
    struct CUstream_st *s = stream_find(handle);
    *idle = s && !s->first;
    pthread_mutex_unlock(&iz_standin_lock);
    return iz_standin_error(s ? cudaSuccess : cudaErrorInvalidResourceHandle);
}

cudaError_t cudaStreamSynchronize(cudaStream_t s)
{
    bool idle;

    iz_standin_enter();
    iz_standin_drain(s);
    return stream_check(s, &idle);
}

/* Callers poll: let others have the processor.  Not by sched_yield: called over
 * and over it makes Linux 6.18 starve other threads, kernel threads too. */
static cudaError_t ready(bool yes)
{
    if (yes)
        return cudaSuccess;
    nanosleep(&(struct timespec){.tv_nsec = 20 * 1000}, NULL);
    return cudaErrorNotReady;
}

cudaError_t cudaStreamQuery(cudaStream_t s)
{
    bool idle;

    iz_standin_enter();
    cudaError_t e = stream_check(s, &idle);
    return e ? e : ready(idle);
}

static void run_call(void *arg)
{
    struct call *c = arg;

    c->f(c->arg);
    iz_standin_counts.kernels++;
    free(c);
}

cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t f, void *arg)
{
    struct call c = {f, arg};

    iz_standin_enter();
    return iz_standin_push(s, run_call, iz_standin_dup(&c, sizeof(c)));
}

/* ---- events ------------------------------------------------------------- */

/* Under the lock. */
static void mark_drop(struct mark *m)
{
    if (m && --m->refs == 0)
        free(m);
}

static void run_record(void *arg)
{
    struct mark *m = arg;

    pthread_mutex_lock(&iz_standin_lock);
    m->done = true;
    clock_gettime(CLOCK_MONOTONIC, &m->at);
    pthread_cond_broadcast(&finished);
    mark_drop(m);
    pthread_mutex_unlock(&iz_standin_lock);
}

/* Gives back the caller's reference. */
static void run_wait(void *arg)
{
    struct mark *m = arg;

    pthread_mutex_lock(&iz_standin_lock);
    while (!m->done)
        pthread_cond_wait(&finished, &iz_standin_lock);
    mark_drop(m);
    pthread_mutex_unlock(&iz_standin_lock);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags)
{
    iz_standin_enter();
    *e = calloc(1, sizeof **e);
    return iz_standin_error(*e ? cudaSuccess : cudaErrorMemoryAllocation);
}

cudaError_t cudaEventCreate(cudaEvent_t *e)
{
    return cudaEventCreateWithFlags(e, cudaEventDefault);
}

cudaError_t cudaEventDestroy(cudaEvent_t e)
{
    iz_standin_enter();
    if (!e)
        return iz_standin_error(cudaErrorInvalidResourceHandle);
    pthread_mutex_lock(&iz_standin_lock);
    mark_drop(e->last);
    pthread_mutex_unlock(&iz_standin_lock);
    free(e);
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s)
{
    struct mark *m = calloc(1, sizeof(*m));

    iz_standin_enter();
    if (!m)
        iz_standin_die("no memory");
    m->refs = 2; /* the event's and the operation's */
    cudaError_t r = iz_standin_push(s, run_record, m);
    if (r) {
        free(m);
        return r;
    }
    pthread_mutex_lock(&iz_standin_lock);
    mark_drop(e->last);
    e->last = m;
    pthread_mutex_unlock(&iz_standin_lock);
    return cudaSuccess;
}

/* A reference to the last recording, NULL where there is none. */
static struct mark *event_last(cudaEvent_t e)
{
    pthread_mutex_lock(&iz_standin_lock);
    struct mark *m = e->last;
    if (m)
        m->refs++;
    pthread_mutex_unlock(&iz_standin_lock);
    return m;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned flags)
{
    iz_standin_enter();
    struct mark *m = event_last(e);
    return m ? iz_standin_push(s, run_wait, m) : cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t e)
{
    iz_standin_enter();
    struct mark *m = event_last(e);
    if (m)
        run_wait(m);
    return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t e)
{
    iz_standin_enter();
    pthread_mutex_lock(&iz_standin_lock);
    bool done = !e->last || e->last->done;
    pthread_mutex_unlock(&iz_standin_lock);
    return ready(done);
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t begin, cudaEvent_t end)
{
    iz_standin_enter();
    pthread_mutex_lock(&iz_standin_lock);
    struct mark *a = begin->last, *b = end->last;
    bool recorded = a && b, done = recorded && a->done && b->done;
    if (done)
        *ms = (float)((double)(b->at.tv_sec - a->at.tv_sec) * 1e3 +
                      (double)(b->at.tv_nsec - a->at.tv_nsec) * 1e-6);
    pthread_mutex_unlock(&iz_standin_lock);
    return recorded ? ready(done)
                    : iz_standin_error(cudaErrorInvalidResourceHandle);
}
