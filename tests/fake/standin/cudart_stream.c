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

/* Recorded last as an operation of a stream; 0: never. */
struct CUevent_st {
    cudaStream_t stream;
    int64_t number;
};

static pthread_cond_t finished = PTHREAD_COND_INITIALIZER;
static struct CUstream_st *streams[IZ_STANDIN_MAX_DEVICES];
static struct CUstream_st *null_stream[IZ_STANDIN_MAX_DEVICES];
static int64_t numbers, streams_made;

/* ---- the thread of a stream --------------------------------------------- */

static void jitter(struct CUstream_st *s)
{
    if (!iz_standin_settings.jitter_us)
        return;
    s->random ^= s->random << 13;
    s->random ^= s->random >> 7;
    s->random ^= s->random << 17;
    int64_t us = (int64_t)(s->random >> 16) % iz_standin_settings.jitter_us;
    struct timespec t = {us / 1000000, us % 1000000 * 1000};
    nanosleep(&t, NULL);
}

/* The first operation, which stays in the queue; NULL at the end. */
static struct operation *await_work(struct CUstream_st *s)
{
    pthread_mutex_lock(&iz_standin_lock);
    while (!s->first && !s->quit)
        pthread_cond_wait(&s->filled, &iz_standin_lock);
    struct operation *o = s->first;
    pthread_mutex_unlock(&iz_standin_lock);
    return o;
}

static void finish(struct CUstream_st *s)
{
    pthread_mutex_lock(&iz_standin_lock);
    struct operation *o = s->first;
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
    s->random = (uint64_t)++streams_made * 0xd1342543de82ef95;
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
    if (!handle) {
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
    pthread_mutex_lock(&iz_standin_lock);
    *s = stream_make(iz_standin_device());
    pthread_mutex_unlock(&iz_standin_lock);
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned flags)
{
    return cudaStreamCreateWithPriority(s, flags, 0);
}

/* Waits for what is in the stream, which CUDA does not. */
cudaError_t cudaStreamDestroy(cudaStream_t s)
{
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

/* Also records an event where there is one. */
static cudaError_t push(cudaStream_t handle, void (*run)(void *), void *arg,
                        struct CUevent_st *e)
{
    struct operation o = {.run = run, .arg = arg};
    pthread_mutex_lock(&iz_standin_lock);
    struct CUstream_st *s = stream_find(handle);
    if (s) {
        o.number = ++numbers;
        *s->end = iz_standin_dup(&o, sizeof(o));
        s->end = &(*s->end)->next;
        pthread_cond_signal(&s->filled);
    }
    if (s && e)
        *e = (struct CUevent_st){s, o.number};
    pthread_mutex_unlock(&iz_standin_lock);
    return iz_standin_error(s ? cudaSuccess : cudaErrorInvalidResourceHandle);
}

cudaError_t iz_standin_push(cudaStream_t s, void (*run)(void *), void *arg)
{
    return push(s, run, arg, NULL);
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
    cudaError_t e = stream_check(s, &idle);
    return e ? e : ready(idle);
}

cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t f, void *arg)
{
    iz_standin_count[IZ_STANDIN_KERNELS]++;
    return iz_standin_push(s, f, arg);
}

/* ---- events ------------------------------------------------------------- */

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags)
{
    *e = calloc(1, sizeof **e);
    return iz_standin_error(*e ? cudaSuccess : cudaErrorMemoryAllocation);
}

cudaError_t cudaEventDestroy(cudaEvent_t e)
{
    free(e);
    return iz_standin_error(e ? cudaSuccess : cudaErrorInvalidResourceHandle);
}

static void run_nothing(void *arg)
{
}

cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s)
{
    return push(s, run_nothing, NULL, e);
}

/* arg: the event as it was when a stream was told to wait for it. */
static void run_wait(void *arg)
{
    struct CUevent_st *e = arg;
    struct CUstream_st *s;
    pthread_mutex_lock(&iz_standin_lock);
    while ((s = stream_find(e->stream)) && !past(s, e->number))
        pthread_cond_wait(&finished, &iz_standin_lock);
    pthread_mutex_unlock(&iz_standin_lock);
    free(e);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned flags)
{
    return e->number
               ? iz_standin_push(s, run_wait, iz_standin_dup(e, sizeof(*e)))
               : cudaSuccess;
}

/* A stream that is gone has done all of its operations. */
cudaError_t cudaEventQuery(cudaEvent_t e)
{
    pthread_mutex_lock(&iz_standin_lock);
    struct CUstream_st *s = e->number ? stream_find(e->stream) : NULL;
    bool done = !s || past(s, e->number);
    pthread_mutex_unlock(&iz_standin_lock);
    return ready(done);
}
