/* SPDX-License-Identifier: Apache-2.0 */
/* What a run says of itself before its first step: plan, place, speed. */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "codelets/base/take.h"
#include "codelets/base/units.h"
#include "codelets/ops/blas.h"
#include "codelets/ops/gemm16.h"
#include "codelets/ops/gemm_rate.h"
#include "codelets/ops/gpu_ops.h"
#include "runtime/base/environment.h"
#include "runtime/engine/trace.h"
#include "runtime/run/state.h"

/* ---- the rate of products, also to estimate with ---- */

enum { LEAST = 64, USUAL = 8192 }; /* side of the reference GEMM */

int iz_run_reference_gemm(void)
{
    bool asked = getenv("IZ_REFERENCE_GEMM") != NULL;
    int n = iz_environment_number("IZ_REFERENCE_GEMM", asked ? -1 : USUAL);
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
    int n = iz_run_reference_gemm();
    for (int least = n < 1024 ? n : 1024; rate == 0 && n >= least; n /= 2) {
        rate = iz_gemm_rate_cuda(x, n, n, n, 0.3);
        a->side = n;
    }
    return rate;
}

/* A smaller one is for less time, and below 512 for a smaller product: it
 * is formed three times at least. */
static double measure_core(const struct iz_exec *x)
{
    int side = iz_run_reference_gemm(), m = side < 512 ? side : 512;
    double seconds = 0.15 * side / USUAL;
    return x->numerics.bf16_products
               ? iz_rate_gemm16(m, 3 * m, 3 * m / 4, seconds)
               : iz_rate_blas(m, 3 * m, 3 * m / 4, seconds);
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
        r->gemm.rate += a.rate[w];
    r->gemm.side = a.side;
    iz_trace_rate(r->e, r->gemm.rate);
}

/* ---- what is printed ---- */

static void print_place(const struct run *r)
{
    const struct iz_gpu_choice *p = &r->gpu;
    if (p->why_cpu[0])
        printf("      on the CPU: %s\n", p->why_cpu);
    if (p->device < 0)
        return;
    printf("      GPU %d (%s, compute capability %d.%d), %.1f of %.1f MiB free",
           p->device, p->info.pci, p->info.capability / 10,
           p->info.capability % 10, iz_units_mib(p->info.free_bytes),
           iz_units_mib(p->info.total_bytes));
    if (p->sharing > 1)
        printf(", shared by %d ranks", p->sharing);
    if (r->coll->size > 1)
        printf("; collectives through %s",
               p->nccl ? "NCCL" : "MPI and pinned memory");
    printf("\n");
}

/* How several disks share a file. */
static void print_disks(const struct iz_nvme *f, const char *what)
{
    const struct iz_disks *s = f ? iz_nvme_disks(f) : NULL;
    if (!s || s->n < 2)
        return;
    printf("      %s on disks, MiB of %d:", what, IZ_DISKS_TURNS);
    for (const struct iz_disk *d = s->disk; d < s->disk + s->n; d++)
        printf("%s %d in %.*s (%.2f GB/s)", d == s->disk ? "" : ",", d->turns,
               (int)(strrchr(d->path, '/') - d->path), d->path, d->rate * 1e-9);
    printf("\n");
}

/* Of all ranks, in order; malloc'ed. */
static struct iz_binding *gather_bindings(const struct run *r)
{
    struct iz_binding *all =
        iz_take(r->coll->size, sizeof(*all), "the cores of the ranks");
    struct iz_binding *own = all + r->coll->rank;
    own->host = iz_coll_host(r->coll, r->coll->rank);
    gethostname(own->name, sizeof(own->name) - 1);
    own->workers = r->workers;
    own->gpu = r->gpu.device;
    iz_cores_describe(r->cores, own);
    iz_coll_all_gather(r->coll, all, sizeof(*all), "bindings");
    return all;
}

void iz_run_remark(const struct run *r, const struct iz_plan *p)
{
    const struct iz_setting s = {
        .ranks = p->ranks,
        .slices = p->slices,
        .gpu = p->target.gpu,
        .gathers = p->zero.fetch,
        .chunks = p->target.numerics.chunk_rows > 0,
        .saves_beside = p->staging[IZ_STAGING_CKPT].n > 0,
        .masked = !r->data || iz_data_masked(r->data, IZ_TRAIN),
        .samples = r->data ? iz_data_windows(r->data, IZ_TRAIN) : 0};
    iz_config_remark(&r->c, &r->p->section, &s, stdout);
}

static void print_header(struct run *r, const struct iz_binding *bindings)
{
    char blas[128], product[32] = "";
    if (r->arithmetic.bf16_products)
        iz_gemm16_name(blas, sizeof(blas));
    else
        iz_blas_name(blas, sizeof(blas));
    if (r->gemm.side)
        snprintf(product, sizeof(product), " of %d cubed", r->gemm.side);
    iz_run_remark(r, &r->e->plan);
    iz_plan_print(&r->e->plan, r->model, stdout);
    printf("run:  %d rank%s; scheduler %s; %s, %.1f GFLOP/s in GEMM%s%s\n",
           r->coll->size, r->coll->size > 1 ? "s" : "",
           iz_graph_scheduler(r->e->graph),
           r->gpu.device < 0 ? blas : r->gpu.info.name, r->gemm.rate * 1e-9,
           r->arithmetic.bf16_products ? " of bf16" : product,
           r->coll->size > 1 ? " on rank 0" : "");
    iz_binding_print(bindings, r->coll->size, stdout);
    if (r->arithmetic.why[0])
        printf("      products in fp32: %s\n", r->arithmetic.why);
    print_place(r);
    iz_environment_print(stdout);
    print_disks(r->e->file.state, "states");
    print_disks(r->e->file.param, "parameters");
    print_disks(r->e->file.boundary, "boundaries");
    if (iz_nvme_without_uring(r->e->file.state) ||
        iz_nvme_without_uring(r->e->file.param) ||
        iz_nvme_without_uring(r->e->file.boundary))
        printf("      disks: io_uring is forbidden here (by a container's "
               "seccomp profile, or kernel.io_uring_disabled): each worker "
               "reads and writes one piece at a time\n");
    if (r->why_messages)
        printf("      ranks of one host send messages: %s\n", r->why_messages);
    printf("      train %lld %s, output %s\n",
           (long long)iz_data_windows(r->data, IZ_TRAIN),
           r->model->record.bytes ? "records"
           : r->c.data.group > 1  ? "texts of pairs"
                                  : "windows",
           r->c.run.output);
    if (r->arithmetic.note[0])
        printf("note: %s\n", r->arithmetic.note);
    fflush(stdout);
}

void iz_run_print_header(struct run *r)
{
    struct iz_binding *bindings = gather_bindings(r);
    if (iz_run_first(r))
        print_header(r, bindings);
    free(bindings);
}
