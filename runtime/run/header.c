/* SPDX-License-Identifier: Apache-2.0 */
/* What a run says of itself before its first step: plan, place, speed. */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "codelets/base/die.h"
#include "codelets/base/units.h"
#include "codelets/ops/gemm.h"
#include "codelets/ops/gemm16.h"
#include "codelets/ops/gemm_rate.h"
#include "runtime/base/environment.h"
#include "runtime/run/state.h"

static void print_place(const struct run *r)
{
    const struct iz_gpu_choice *p = &r->gpu;
    if (p->why_cpu[0])
        printf("      on the CPU: %s\n", p->why_cpu);
    if (p->device < 0)
        return;
    printf("      GPU %d (%s, compute capability %d.%d), %.1f of %.1f MiB free",
           p->device, p->info.pci, p->info.capability / 10,
           p->info.capability % 10, iz_mib(p->info.free_bytes),
           iz_mib(p->info.total_bytes));
    if (p->sharing > 1)
        printf(", shared by %d ranks", p->sharing);
    if (r->e->plan.target.cudnn)
        printf("; forward of attention by cuDNN");
    if (r->coll->size > 1)
        printf("; collectives through %s",
               p->nccl ? "NCCL" : "MPI and pinned memory");
    printf("\n");
}

/* Of all ranks, in order; malloc'ed. */
static struct iz_binding *gather_bindings(const struct run *r)
{
    struct iz_binding *all = calloc((size_t)r->coll->size, sizeof(*all));
    if (!all)
        iz_die("no memory for the cores of %d ranks", r->coll->size);
    struct iz_binding *own = all + r->coll->rank;
    own->host = iz_coll_host(r->coll, r->coll->rank);
    gethostname(own->name, sizeof(own->name) - 1);
    own->workers = r->workers;
    own->gpu = r->gpu.device;
    iz_cores_describe(r->topo, own);
    iz_coll_all_gather(r->coll, all, sizeof(*all), "bindings");
    return all;
}

static void print_header(struct run *r, const struct iz_binding *bindings)
{
    char blas[128], warning[256], product[32] = "";
    if (r->arithmetic.bf16_products)
        iz_gemm16_name(blas, sizeof(blas));
    else
        iz_blas_name(blas, sizeof(blas));
    iz_blas_warning(warning, sizeof(warning));
    if (r->gemm_side)
        snprintf(product, sizeof(product), " of %d cubed", r->gemm_side);
    iz_plan_print(&r->e->plan, r->model, stdout);
    printf("run:  %d rank%s; scheduler %s; %s, %.1f GFLOP/s in GEMM%s%s\n",
           r->coll->size, r->coll->size > 1 ? "s" : "",
           iz_graph_scheduler(r->e->graph),
           r->gpu.device < 0 ? blas : r->gpu.info.name, r->gemm_rate * 1e-9,
           r->arithmetic.bf16_products ? " of bf16" : product,
           r->coll->size > 1 ? " on rank 0" : "");
    iz_binding_print(bindings, r->coll->size, stdout);
    if (r->arithmetic.why[0])
        printf("      products in fp32: %s\n", r->arithmetic.why);
    print_place(r);
    iz_environment_print(stdout);
    if (r->why_messages)
        printf("      ranks of one host send messages: %s\n", r->why_messages);
    printf("      train %lld %s, output %s\n",
           (long long)iz_data_windows(r->data, IZ_TRAIN),
           r->model->record.bytes ? "records" : "windows", r->c.run.output);
    if (warning[0])
        printf("warning: %s\n", warning);
    fflush(stdout);
}

void iz_run_print_header(struct run *r)
{
    struct iz_binding *bindings = gather_bindings(r);
    if (iz_run_first(r))
        print_header(r, bindings);
    free(bindings);
}
