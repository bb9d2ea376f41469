/* SPDX-License-Identifier: Apache-2.0 */
/* Where a run takes place and the plan of it: GPU, cores, products, memory. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "codelets/base/units.h"
#include "codelets/ops/blas.h"
#include "runtime/base/environment.h"
#include "runtime/base/text.h"
#include "runtime/machine/measure.h"
#include "runtime/plan/choose.h"
#include "runtime/plan/fit.h"
#include "runtime/plan/forecast.h"
#include "runtime/run/state.h"

/* Of the run's or of --ranks, those that share a host: as many of all as MPI
 * shows of the ranks that are here. */
static int ranks_here(const struct run *r)
{
    int64_t here = r->coll->local_size, all = r->coll->size;
    return r->o.ranks ? (int)((r->o.ranks * here + all - 1) / all) : (int)here;
}

/* A user's own limit is the plan's alone, and nothing is taken from it.  What
 * the ranks that were started have already is free for them. */
static int64_t memory_limit(struct run *r)
{
    if (r->c.run.memory_limit_bytes)
        return r->c.run.memory_limit_bytes;
    r->free_bytes = iz_memory_available(r->gpu.device >= 0, &r->reserve_bytes) +
                    iz_memory_own() * r->coll->local_size;
    return r->free_bytes / ranks_here(r);
}

static void print_share(const struct run *r, FILE *out)
{
    if (r->o.machine)
        return;
    if (!r->c.run.memory_limit_bytes) {
        fprintf(out, "this host: %.1f MiB are free for ranks",
                iz_units_mib(r->free_bytes));
        if (r->reserve_bytes)
            fprintf(out, " beside a reserve of %.1f MiB",
                    iz_units_mib(r->reserve_bytes));
        fprintf(out,
                "; a rank needs %.1f MiB of them beside its plan (libraries, "
                "StarPU, page tables)\n",
                iz_units_mib(iz_plan_beside(&r->plan)));
    }
    if (ranks_here(r) == 1)
        return;
    if (!r->c.run.memory_limit_bytes)
        fprintf(out,
                "%d ranks share the memory that is free on this host: %.1f MiB "
                "each; --machine or run.memory_limit_bytes: another host\n",
                ranks_here(r), iz_units_mib(r->limit.host));
    if (r->gpu.sharing > 1 && !r->c.run.device_memory_limit_bytes)
        fprintf(out, "%d of them share a GPU: %.1f MiB each\n", r->gpu.sharing,
                iz_units_mib(r->limit.device));
}

/* Whether the kernel sets no limit: the superuser of a container may be bound
 * by one. */
static bool locks_all(void)
{
    enum { IPC_LOCK = 14 }; /* capabilities(7) */
    unsigned long long effective = 0;
    char line[256];
    FILE *f = fopen("/proc/self/status", "r");
    while (f && fgets(line, sizeof(line), f))
        if (sscanf(line, "CapEff: %llx", &effective) == 1)
            break;
    if (f)
        fclose(f);
    return effective >> IPC_LOCK & 1;
}

/* Beside a GPU only states are locked: the driver pins the rest. */
static int check_locked(const struct run *r, FILE *err)
{
    struct rlimit l;
    const struct iz_bytes *b = &r->plan.bytes;
    int64_t need = r->plan.target.gpu ? b->b[IZ_TIER_CPU][IZ_MEM_STATE]
                                      : iz_bytes_tier(b, IZ_TIER_CPU);
    if (!r->plan.zero.pin_cpu || locks_all() || getrlimit(RLIMIT_MEMLOCK, &l) ||
        l.rlim_cur == RLIM_INFINITY || (int64_t)l.rlim_cur >= need)
        return 0;
    return iz_text_refuse(
        err,
        "pin_memory: true locks %.1f MiB, but the limit of locked memory is "
        "%.1f MiB: raise it (ulimit -l) or set "
        "zero_optimization.offload_*.pin_memory to false",
        iz_units_mib(need), iz_units_mib(l.rlim_cur));
}

/* Of all folders of a list. */
static int check_free(const struct run *r, const char *folders, const char *key,
                      int64_t need, FILE *err)
{
    char path[IZ_PATH_MAX];
    struct statvfs f;
    int64_t have = 0;
    for (int i = 0; need && iz_disks_folder(folders, i, path, sizeof(path));
         i++) {
        if (statvfs(path, &f))
            return iz_text_refuse(err, "%s: %s: %s", key, path,
                                  strerror(errno));
        have += (int64_t)f.f_bavail * (int64_t)f.f_frsize;
    }
    if (need * r->coll->local_size <= have)
        return 0;
    return iz_text_refuse(
        err, "%s: %s has %.1f MiB free, this run needs %.1f MiB there", key,
        folders, iz_units_mib(have), iz_units_mib(need * r->coll->local_size));
}

/* The place of what is planned; err: NULL where nothing is to be told. */
static int check_place(const struct run *r, FILE *err)
{
    const int64_t *b = r->plan.bytes.b[IZ_TIER_NVME];
    int s = check_locked(r, err);
    if (!s)
        s = check_free(r, r->c.zero.optimizer.nvme_path,
                       "zero_optimization.offload_optimizer.nvme_path",
                       b[IZ_MEM_STATE], err);
    if (!s)
        s = check_free(r, r->c.zero.param.nvme_path,
                       "zero_optimization.offload_param.nvme_path",
                       b[IZ_MEM_PARAM], err);
    return s ? s
             : check_free(r, r->c.boundary_path,
                          "activation_checkpointing.nvme_path",
                          b[IZ_MEM_BOUNDARY], err);
}

/* What the plan is for: this machine, or the one of --machine. */
static int find_target(struct run *r, int ranks, struct iz_target *t,
                       struct iz_limits *limit, struct iz_machine *m)
{
    if (!r->o.machine) {
        if (r->o.ranks) {
            int started = iz_gpu_near(&r->gpu, r->cores, r->coll->local_size);
            int here = iz_gpu_near(&r->gpu, r->cores, ranks_here(r));
            r->workers = iz_cores_workers(r->cores, r->c.run.workers,
                                          (here + started - 1) / started);
        }
        if (r->workers < 1)
            return iz_text_refuse(iz_run_err(r),
                                  "--ranks %d: the cores of this host "
                                  "leave a rank no worker",
                                  r->o.ranks);
        *t = iz_gpu_target(&r->gpu, &r->c, r->workers);
        t->numerics.bf16_products = r->arithmetic.bf16_products;
        for (int back = 0; back < 2; back++)
            if (r->arithmetic.attention_why[back].why[0])
                t->why_own[back] = r->arithmetic.attention_why[back].why;
        *limit =
            (struct iz_limits){.host = memory_limit(r),
                               .beside = !r->c.run.memory_limit_bytes,
                               .device = iz_gpu_memory(&r->gpu, &r->c),
                               .tables = !r->c.run.device_memory_limit_bytes};
        return 0;
    }
    int s = iz_machine_read(m, &r->c, r->o.machine, iz_run_err(r));
    if (s)
        return s;
    *limit = iz_machine_limits(m, &r->c, ranks);
    return iz_machine_target(t, m, &r->c, ranks, iz_run_err(r));
}

static void print_largest(const struct run *r)
{
    double params;
    if (r->model->table_rows) /* it has no blocks */
        return;
    int blocks = iz_plan_largest(&r->plan, &r->c, r->model, &r->limit, &params);
    if (blocks)
        printf("with this config %s %d blocks of this shape fit: %.2fB "
               "parameters\n",
               blocks < IZ_PLAN_MOST_BLOCKS ? "up to" : "at least", blocks,
               params * 1e-9);
    else
        printf("with this config not one block of this shape fits\n");
}

void iz_run_print_plan(const struct run *r)
{
    iz_run_remark(r, &r->plan);
    iz_plan_print(&r->plan, r->model, stdout);
    iz_forecast_print(&r->plan, r->rate, stdout);
    print_share(r, stdout);
    print_largest(r);
}

/* The first rank that has too little memory says so; others may have enough. */
static int fit_plan(struct run *r)
{
    int s = iz_plan_fit(&r->plan, &r->c, r->model, &r->limit, NULL);
    if (iz_coll_refuser(r->coll, s != 0) == r->coll->rank) {
        iz_plan_fit(&r->plan, &r->c, r->model, &r->limit, stderr);
        if (!r->o.plan)
            print_share(r, stderr);
    }
    return s;
}

static bool all_fit(void *coll, bool ok)
{
    return iz_coll_all_ok(coll, ok);
}

struct rates_for {
    struct run *r;
    struct iz_target *target;
    struct iz_machine *machine;
};

/* Of the machine file, or of this machine if something is chosen by them. */
static int find_rates(void *arg)
{
    const struct rates_for *f = arg;
    struct run *r = f->r;
    struct iz_target *t = f->target;
    const struct iz_config *c = &r->c;
    bool open =
        c->cut_auto || c->zero.optimizer.ratio_auto || !c->run.sequence_chunk;
    if (!r->o.machine && (!t->gpu || !open))
        return 0;
    if (!r->o.machine) {
        int s = iz_machine_measure(f->machine, &r->plan, c, r->gpu.device,
                                   ranks_here(r), iz_run_reference_gemm());
        if (s)
            return s;
        t->compute =
            iz_machine_compute(f->machine, t->act, false, r->plan.ranks);
        r->plan.target.compute = t->compute;
    }
    iz_machine_rates(f->machine, &r->plan, r->rate);
    return 0;
}

/* Files of a plan that are larger than the described machine's disk: a run
 * there would refuse. */
static void tell_disk(const struct run *r, const struct iz_machine *m)
{
    int64_t ranks = iz_machine_ranks(m, r->plan.ranks);
    int64_t files = iz_bytes_tier(&r->plan.bytes, IZ_TIER_NVME) * ranks;
    if (files > m->disk_bytes && iz_run_first(r))
        fprintf(stderr,
                "izar: the files of %lld ranks take %.1f MiB, the disk of %s "
                "has %.1f MiB\n",
                (long long)ranks, iz_units_mib(files), m->name,
                iz_units_mib(m->disk_bytes));
}

static int make_plan(struct run *r)
{
    int ranks = iz_run_ranks(r);
    struct iz_target t;
    struct iz_machine m;
    struct rates_for rates = {r, &t, &m};
    const struct iz_plan_for plan = {.model = r->model,
                                     .ranks = ranks,
                                     .rank = r->o.ranks ? 0 : r->coll->rank,
                                     .target = &t,
                                     .limit = &r->limit,
                                     .rate = r->rate,
                                     .all = all_fit,
                                     .arg = r->coll};
    int s = iz_run_agree(r, find_target(r, ranks, &t, &r->limit, &m), NULL);
    if (s)
        return s;
    t.first_workers = t.workers;
    iz_coll_broadcast(r->coll, &t.first_workers, sizeof(t.first_workers), 0,
                      "workers");
    if (!r->c.run.slices) /* of the whole batch, before it is cut */
        r->c.run.slices = iz_plan_slices(&r->c, t.gpu ? 1 : t.first_workers);
    s = iz_run_agree(
        r, iz_plan_check(&r->c, r->model, &t, ranks, iz_run_err(r)), NULL);
    if (!s)
        s = iz_run_agree(
            r, iz_plan_complete(&r->plan, &r->c, &plan, find_rates, &rates),
            "the plan");
    if (s)
        return s;
    s = fit_plan(r);
    if (s == -ENOMEM && r->o.plan && iz_run_first(r)) {
        print_share(r, stdout);
        print_largest(r);
    }
    if (!s && r->o.machine)
        tell_disk(r, &m);
    s = iz_run_agree(r, s, NULL);
    if (s || r->o.plan)
        return s;
    s = check_place(r, NULL);
    if (iz_coll_refuser(r->coll, s != 0) == r->coll->rank)
        check_place(r, stderr);
    return iz_run_agree(r, s, NULL);
}

/* Whether a variable is wrong on any rank, of which the first one tells. */
static bool refused(const struct run *r, const char *name, bool bad,
                    const char *why)
{
    int q = iz_coll_refuser(r->coll, bad);
    if (q == r->coll->rank)
        fprintf(stderr, "izar: %s: rank %d: %s\n", name, q, why);
    return q >= 0;
}

/* The variable that names the folder in which StarPU makes .starpu for its
 * measurements, or would end the process; NULL: it can. */
static const char *bad_home(void)
{
    static const char *const homes[] = {"XDG_CACHE_HOME", "STARPU_HOME",
                                        "HOME"};
    const char *home = NULL, *name = NULL;
    char path[4096];
    for (int i = 0; i < 3 && !home; i++)
        home = getenv(name = homes[i]);
    if (!home || getenv("STARPU_PERF_MODEL_DIR"))
        return NULL; /* it takes a temporary folder, or another */
    snprintf(path, sizeof(path), "%s/.starpu", home);
    for (char *p = path; *p;) {
        p += 1 + strcspn(p + 1, "/");
        char c = *p;
        *p = 0;
        if (mkdir(path, 0777) && errno != EEXIST && errno != EISDIR)
            return name;
        *p = c;
    }
    return access(path, W_OK) ? name : NULL;
}

/* Variables of StarPU that a run goes on with at one value alone. */
static const struct {
    const char *name;
    int value;
    const char *why;
} only[] = {
    {"STARPU_USE_NUMA", 0,
     "StarPU would copy data between the host's memories by itself, beside "
     "what is planned: unset it, and start a rank for each of them"},
    {"STARPU_NTHREADS_PER_CORE", 1,
     "a compute worker has a core of its own: unset it"},
    {"STARPU_DISABLE_KERNELS", 0, "no task would do anything: unset it"}};

static int check_environment(const struct run *r)
{
    const char *bad = iz_environment_bad();
    if (refused(r, bad, bad != NULL,
                "is not a number from 0 on, as StarPU wants it: unset it"))
        return -EINVAL;
    bad = bad_home();
    if (refused(r, bad, bad != NULL,
                "StarPU cannot write its measurements to .starpu in this "
                "folder: set STARPU_HOME to another one"))
        return -EINVAL;
    const char *host = getenv("STARPU_HOSTNAME");
    if (refused(r, "STARPU_HOSTNAME", host && strchr(host, '/'),
                "StarPU cannot name its measurements by a path: unset it"))
        return -EINVAL;
    for (size_t i = 0; i < sizeof(only) / sizeof(only[0]); i++)
        if (refused(r, only[i].name,
                    iz_environment_number(only[i].name, only[i].value) !=
                        only[i].value,
                    only[i].why))
            return -EINVAL;
    bool odd = iz_run_reference_gemm() < 0;
    return refused(r, "IZ_REFERENCE_GEMM", odd,
                   "is the side of a product, from 64 to 8192")
               ? -EINVAL
               : 0;
}

int iz_run_prepare(struct run *r)
{
    int s = check_environment(r);
    if (s)
        return s;
    iz_blas_open();
    r->workers = r->c.run.workers;
    r->coll->timeout_s = r->c.run.comm_timeout_s;
    /* What is planned for another machine needs no GPU here. */
    r->gpu = (struct iz_gpu_choice){.device = -1, .sharing = 1, .why_cpu = ""};
    if (!r->o.machine)
        s = iz_run_agree(r,
                         iz_gpu_choose(&r->gpu, &r->c, r->coll, iz_run_ranks(r),
                                       ranks_here(r)),
                         "the list of GPUs");
    if (!s)
        s = iz_run_agree(
            r,
            iz_cores_open(&r->cores, r->coll,
                          r->gpu.device < 0 ? NULL : r->gpu.info.pci,
                          &r->workers),
            "the list of cores");
    struct iz_arithmetic_for on = {.workers = r->workers,
                                   .gpu = r->gpu.device >= 0,
                                   .capability = r->gpu.info.capability,
                                   .here = !r->o.ranks};
    if (!s && !r->o.machine)
        s = iz_run_agree(
            r,
            iz_arithmetic_choose(&r->arithmetic, &r->c, r->model, &on, r->coll),
            NULL);
    return s ? s : make_plan(r);
}
