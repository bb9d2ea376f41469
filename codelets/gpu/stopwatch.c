/* SPDX-License-Identifier: Apache-2.0 */
/* Measured times on a GPU; see stopwatch.h. */
#include "codelets/gpu/stopwatch.h"

#include <cuda_runtime_api.h>

#include "codelets/base/die.h"
#include "codelets/gpu/device.h"

enum { REPEATS = 3 };

static void stopwatch_check(cudaError_t e, const char *call)
{
    if (e != cudaSuccess)
        iz_die("%s: %s", call, cudaGetErrorString(e));
}

static cudaEvent_t event_new(void)
{
    cudaEvent_t e;
    stopwatch_check(cudaEventCreateWithFlags(&e, cudaEventDefault),
                    "cudaEventCreate");
    return e;
}

void iz_stopwatch_open(struct iz_stopwatch *w, double budget_s)
{
    *w = (struct iz_stopwatch){
        .begin = event_new(), .end = event_new(), .budget_s = budget_s};
}

void iz_stopwatch_close(struct iz_stopwatch *w)
{
    stopwatch_check(cudaEventDestroy(w->begin), "cudaEventDestroy");
    stopwatch_check(cudaEventDestroy(w->end), "cudaEventDestroy");
}

bool iz_stopwatch_over(const struct iz_stopwatch *w)
{
    return w->spent_s >= w->budget_s;
}

static double time_once(struct iz_stopwatch *w, struct iz_exec *x,
                        iz_stopwatch_run *run, const void *arg)
{
    float ms = 0;
    stopwatch_check(cudaEventRecord(w->begin, (cudaStream_t)x->stream),
                    "cudaEventRecord");
    if (!run(x, arg))
        return -1;
    stopwatch_check(cudaEventRecord(w->end, (cudaStream_t)x->stream),
                    "cudaEventRecord");
    iz_device_wait(x->stream);
    stopwatch_check(cudaEventElapsedTime(&ms, w->begin, w->end),
                    "cudaEventElapsedTime");
    w->spent_s += (double)ms / 1e3;
    return (double)ms / 1e3;
}

double iz_stopwatch_best(struct iz_stopwatch *w, struct iz_exec *x,
                         iz_stopwatch_run *run, const void *arg)
{
    double best = -1;
    for (int i = 0; i <= REPEATS; i++) {
        double s = time_once(w, x, run, arg);
        if (s < 0)
            return -1;
        if (i == 1 || (i > 1 && s < best))
            best = s;
    }
    return best;
}
