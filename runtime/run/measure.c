/* SPDX-License-Identifier: Apache-2.0 */
/* The rate of products, which a run prints and estimates with. */
#include <stdlib.h>

#include "codelets/ops/gemm.h"
#include "codelets/ops/gemm16.h"
#include "codelets/ops/gemm_rate.h"
#include "codelets/ops/gpu_ops.h"
#include "runtime/base/environment.h"
#include "runtime/run/state.h"

enum { LEAST = 64, USUAL = 8192 }; /* side of a yardstick */

int iz_run_yardstick(void)
{
    bool asked = getenv("IZ_YARDSTICK") != NULL;
    int n = iz_environment_number("IZ_YARDSTICK", asked ? -1 : USUAL);
    return n < LEAST || n > USUAL ? -1 : n;
}

struct rate_arg {
    double rate[STARPU_NMAXWORKERS];
    int side; /* of the GPU's product */
};

/* Smaller products where a GPU that is full has no room for large ones. */
static double measure_gpu(struct rate_arg *a, struct iz_exec *x)
{
    double rate = 0;
    int n = iz_run_yardstick();
    for (int least = n < 1024 ? n : 1024; rate == 0 && n >= least; n /= 2) {
        rate = iz_gemm_rate_cuda(x, n, n, n, 0.3);
        a->side = n;
    }
    return rate;
}

/* A smaller yardstick is for less time. */
static double measure_core(const struct iz_exec *x)
{
    double seconds = 0.15 * iz_run_yardstick() / USUAL;
    return x->bf16_products ? iz_gemm16_rate(512, 1536, 384, seconds)
                            : iz_blas_rate(512, 1536, 384, seconds);
}

static void run_measure(void *arg, int i, struct iz_exec *x)
{
    struct rate_arg *a = arg;
    a->rate[i] = x->backend == IZ_CUDA ? measure_gpu(a, x) : measure_core(x);
}

void iz_run_measure(struct run *r)
{
    struct rate_arg a = {.side = 0};
    bool gpu = r->gpu.device >= 0;
    iz_coll_barrier(r->coll, "start of the measurement");
    if (gpu)
        iz_graph_on_device(r->e->graph, run_measure, &a);
    else
        iz_graph_on_workers(r->e->graph, run_measure, &a);
    for (int w = 0; w < (gpu ? 1 : r->workers); w++)
        r->gemm_rate += a.rate[w];
    r->gemm_side = a.side;
    r->e->gemm_rate = r->gemm_rate;
}
