/* SPDX-License-Identifier: Apache-2.0 */
/* What a run does before its first step: config, model, place, plan, output,
 * engine. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "codelets/cuda.h"
#include "codelets/die.h"
#include "codelets/gemm.h"
#include "codelets/gemm16.h"
#include "codelets/rate.h"
#include "runtime/environment.h"
#include "runtime/fused.h"
#include "runtime/hf.h"
#include "runtime/hf_config.h"
#include "runtime/lora.h"
#include "runtime/machine.h"
#include "runtime/rules.h"
#include "runtime/run_state.h"
#include "runtime/state.h"

/* Those that were started, or that a plan is for. */
static int ranks_all(const struct run *r)
{
    return r->o.ranks ? r->o.ranks : r->coll->size;
}

/* Only one rank speaks about what is the same for all. */
static int read_config(struct run *r)
{
    return iz_config_read(&r->c, &r->p->section, r->o.path, r->o.set,
                          r->o.n_set, ranks_all(r),
                          iz_run_first(r) ? stderr : NULL);
}

/* Of the run's or of --ranks, those that share a host: as many of all as MPI
 * shows of the ranks that are here. */
static int ranks_here(const struct run *r)
{
    int64_t here = r->coll->local_size, all = r->coll->size;
    return r->o.ranks ? (int)((r->o.ranks * here + all - 1) / all) : (int)here;
}

static int64_t memory_limit(const struct run *r)
{
    if (r->c.run.memory_limit_bytes)
        return r->c.run.memory_limit_bytes;
    return iz_memory_available() / ranks_here(r);
}

static void print_share(const struct run *r, FILE *out)
{
    if (r->o.machine || ranks_here(r) == 1)
        return;
    if (!r->c.run.memory_limit_bytes)
        fprintf(out,
                "%d ranks share the memory that is free on this host: %.1f MiB "
                "each; --machine or run.memory_limit_bytes: another host\n",
                ranks_here(r), (double)r->limit.host / 1048576);
    if (r->place.sharing > 1 && !r->c.run.device_memory_limit_bytes)
        fprintf(out, "%d of them share a GPU: %.1f MiB each\n",
                r->place.sharing, (double)r->limit.device / 1048576);
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
static int check_locked(const struct run *r)
{
    struct rlimit l;
    const struct iz_bytes *b = &r->plan.bytes;
    int64_t need = r->plan.target.gpu ? b->b[IZ_TIER_CPU][IZ_MEM_STATE]
                                      : iz_bytes_tier(b, IZ_TIER_CPU);
    if (!r->plan.pin_cpu || locks_all() || getrlimit(RLIMIT_MEMLOCK, &l) ||
        l.rlim_cur == RLIM_INFINITY || (int64_t)l.rlim_cur >= need)
        return 0;
    fprintf(stderr,
            "izar: pin_memory: true locks %.1f MiB, but the limit of locked "
            "memory is %.1f MiB: raise it (ulimit -l) or set "
            "zero_optimization.offload_*.pin_memory to false\n",
            (double)need / 1048576, (double)l.rlim_cur / 1048576);
    return -ENOMEM;
}

static int check_free(const struct run *r, const char *path, const char *key,
                      int64_t need)
{
    struct statvfs f;
    if (!need)
        return 0;
    if (statvfs(path, &f)) {
        int why = errno;
        fprintf(stderr, "izar: %s: %s: %s\n", key, path, strerror(why));
        return -why;
    }
    int64_t have = (int64_t)f.f_bavail * (int64_t)f.f_frsize;
    if (need * r->coll->local_size <= have)
        return 0;
    fprintf(stderr,
            "izar: %s: %s has %.1f MiB free, this run needs %.1f MiB there\n",
            key, path, (double)have / 1048576,
            (double)(need * r->coll->local_size) / 1048576);
    return -ENOSPC;
}

static int check_disk(const struct run *r)
{
    const int64_t *b = r->plan.bytes.b[IZ_TIER_NVME];
    int s = check_free(r, r->c.zero.optimizer.nvme_path,
                       "zero_optimization.offload_optimizer.nvme_path",
                       b[IZ_MEM_STATE]);
    return s ? s
             : check_free(r, r->c.zero.param.nvme_path,
                          "zero_optimization.offload_param.nvme_path",
                          b[IZ_MEM_PARAM]);
}

/* What the plan is for: this machine, or the one of --machine. */
static int find_target(struct run *r, int ranks, struct iz_target *t,
                       struct iz_limits *limit)
{
    struct iz_machine m;
    if (!r->o.machine) {
        if (r->o.ranks) {
            int started =
                iz_place_near(&r->place, r->topo, r->coll->local_size);
            int here = iz_place_near(&r->place, r->topo, ranks_here(r));
            r->workers = iz_topo_workers(r->topo, r->c.run.workers,
                                         (here + started - 1) / started);
        }
        if (r->workers < 1) {
            if (iz_run_first(r))
                fprintf(stderr,
                        "izar: --ranks %d: the cores of this host "
                        "leave a rank no worker\n",
                        r->o.ranks);
            return -EINVAL;
        }
        *t = iz_place_target(&r->place, &r->c, r->workers);
        t->narrow = r->products.narrow;
        *limit =
            (struct iz_limits){.host = memory_limit(r),
                               .device = iz_place_memory(&r->place, &r->c),
                               .tables = !r->c.run.device_memory_limit_bytes};
        return 0;
    }
    int s = iz_machine_read(&m, r->o.machine, iz_run_first(r) ? stderr : NULL);
    if (s)
        return s;
    *limit = iz_machine_limits(&m, ranks);
    return iz_machine_target(t, &m, &r->c, ranks,
                             iz_run_first(r) ? stderr : NULL);
}

static void print_largest(const struct run *r)
{
    double params;
    int blocks = iz_plan_largest(&r->plan, &r->c, r->model, &r->limit, &params);
    if (blocks)
        printf("with this config up to %d blocks of this shape fit: %.2fB "
               "parameters\n",
               blocks, params * 1e-9);
    else
        printf("with this config not one block of this shape fits\n");
}

void iz_run_print_plan(const struct run *r)
{
    iz_plan_print(&r->plan, r->model, stdout);
    print_share(r, stdout);
    print_largest(r);
}

/* The first rank that has too little memory says so; others may have enough. */
static int fit_plan(struct run *r)
{
    int s = iz_plan_fit(&r->plan, &r->c, r->model, &r->limit, NULL);
    if (iz_coll_refuser(r->coll, s != 0) == r->coll->rank)
        iz_plan_fit(&r->plan, &r->c, r->model, &r->limit, stderr);
    return s;
}

static int make_plan(struct run *r)
{
    int ranks = ranks_all(r);
    int rank = r->o.ranks ? 0 : r->coll->rank;
    struct iz_target t;
    int f = find_target(r, ranks, &t, &r->limit);
    if (!f)
        f = iz_rules_check_sparse(r->model, &r->c, t.gpu,
                                  iz_run_first(r) ? stderr : NULL);
    if (!f)
        f = iz_plan_check_types(&r->c, &t, iz_run_first(r) ? stderr : NULL);
    if (!f)
        f = iz_plan_split_check(&r->c, &t, iz_run_first(r) ? stderr : NULL);
    if (f)
        return iz_run_agree(r, f, NULL);
    int s = iz_run_agree(
        r, iz_plan_make(&r->plan, &r->c, r->model, ranks, rank, &t),
        "the plan");
    if (!s)
        s = fit_plan(r);
    if (s == -ENOMEM && r->o.plan && iz_run_first(r)) {
        print_share(r, stdout);
        print_largest(r);
    }
    if (!s && !r->o.plan)
        s = check_locked(r);
    if (!s && !r->o.plan)
        s = check_disk(r);
    return iz_run_agree(r, s, NULL);
}

static int make_directory(const char *path)
{
    char part[IZ_PATH_MAX];
    snprintf(part, sizeof(part), "%s", path);
    for (char *p = part + 1;; p++) {
        if (*p && *p != '/')
            continue;
        char c = *p;
        *p = 0;
        if (mkdir(part, 0777) && errno != EEXIST)
            return -errno;
        *p = c;
        if (!c)
            return 0;
    }
}

/* The effective config beside the output; a run that would write over another
 * one's checkpoints is refused. */
static int open_output(struct run *r)
{
    char path[IZ_PATH_MAX + 32];
    int64_t step;
    if (!iz_run_first(r))
        return 0;
    int s = make_directory(r->c.run.output);
    if (s) {
        fprintf(stderr, "izar: run.output: %s: %s\n", r->c.run.output,
                strerror(-s));
        return s;
    }
    if (!r->o.resume && !iz_state_latest(r->c.run.output, &step)) {
        fprintf(stderr,
                "izar: run.output: %s holds a checkpoint of step %lld: "
                "continue it with --resume, or choose another directory\n",
                r->c.run.output, (long long)step);
        return -EEXIST;
    }
    s = iz_hf_export_check(&r->c, &r->p->section, r->model);
    if (!s)
        s = iz_hf_config_keep(r->c.run.output, r->c.import, r->o.resume);
    if (s)
        return s;
    snprintf(path, sizeof(path), "%s/config.json", r->c.run.output);
    s = iz_config_write(&r->c, &r->p->section, path);
    if (s)
        fprintf(stderr, "izar: %s: %s\n", path, strerror(-s));
    return s;
}

/* The model section as text: what a checkpoint must agree with. */
static char *model_text(const struct run *r)
{
    char *text = NULL;
    size_t size = 0;
    FILE *f = open_memstream(&text, &size);
    const struct iz_key *k = r->p->section.keys;
    if (!f)
        return NULL;
    fprintf(f, "{\"name\": \"%s\"", r->model->name);
    for (; k->name; k++) {
        fprintf(f, ", \"%s\": ", k->name);
        iz_config_value(f, k, r->p->section.target);
    }
    if (r->c.lora.rank)
        fprintf(f, ", \"lora_rank\": %d, \"lora_alpha\": %.17g", r->c.lora.rank,
                r->c.lora.alpha);
    fprintf(f, "}");
    fclose(f);
    return text;
}

/* Rows and columns of the product that a GPU is measured with, or less than 0:
 * a debugging tool takes long for a large one. */
static int yardstick(void)
{
    enum { USUAL = 8192, LEAST = 64 };
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
    int n = yardstick();
    for (int least = n < 1024 ? n : 1024; rate == 0 && n >= least; n /= 2) {
        rate = iz_cuda_ops->gemm_rate(x, n, n, n, 0.3);
        a->side = n;
    }
    return rate;
}

static void measure(void *arg, int i, struct iz_exec *x)
{
    struct rate_arg *a = arg;
    a->rate[i] = x->backend == IZ_CUDA ? measure_gpu(a, x)
                 : x->narrow           ? iz_gemm16_rate(512, 1536, 384, 0.15)
                                       : iz_blas_rate(512, 1536, 384, 0.15);
}

static void measure_gemm(struct run *r)
{
    struct rate_arg a = {.side = 0};
    bool gpu = r->place.device >= 0;
    iz_coll_barrier(r->coll, "start of the measurement");
    if (gpu)
        iz_graph_on_device(r->e->graph, measure, &a);
    else
        iz_graph_on_workers(r->e->graph, measure, &a);
    for (int w = 0; w < (gpu ? 1 : r->workers); w++)
        r->gemm_rate += a.rate[w];
    r->gemm_side = a.side;
}

static void print_place(const struct run *r)
{
    const struct iz_place *p = &r->place;
    if (p->why_cpu[0])
        printf("      on the CPU: %s\n", p->why_cpu);
    if (p->device < 0)
        return;
    printf("      GPU %d (%s, compute capability %d.%d), %.1f of %.1f MiB free",
           p->device, p->info.pci, p->info.capability / 10,
           p->info.capability % 10, (double)p->info.free_bytes / 1048576,
           (double)p->info.total_bytes / 1048576);
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
    own->gpu = r->place.device;
    iz_topo_describe(r->topo, own);
    iz_coll_all_gather(r->coll, all, sizeof(*all), "bindings");
    return all;
}

static void print_header(struct run *r, const struct iz_binding *bindings)
{
    char blas[128], warning[256], product[32] = "";
    if (r->products.narrow)
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
           r->place.device < 0 ? blas : r->place.info.name, r->gemm_rate * 1e-9,
           r->products.narrow ? " of bf16" : product,
           r->coll->size > 1 ? " on rank 0" : "");
    iz_binding_print(bindings, r->coll->size, stdout);
    if (r->products.why[0])
        printf("      products in fp32: %s\n", r->products.why);
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

static int open_data(struct run *r)
{
    bool val = r->c.run.eval_batches > 0;
    if (r->model->record.bytes)
        return iz_data_open_records(&r->data, &r->c.data, r->model,
                                    r->c.run.seed, val);
    return iz_data_open(&r->data, &r->c.data, r->model->tokens, r->model->vocab,
                        r->c.run.seed, val);
}

static int open_engine(struct run *r)
{
    struct iz_train_config t = {.config = &r->c,
                                .model = r->model,
                                .coll = r->coll,
                                .data = r->data,
                                .stop = r->stop,
                                .topo = r->topo,
                                .device = r->place.device};
    int64_t begin = iz_now_ns();
    iz_topo_prepare(r->topo);
    int s =
        iz_run_agree(r, iz_train_open(&r->e, &t, &r->plan), "what was planned");
    if (!s)
        s = iz_run_agree(r, iz_coll_gpu_connect(r->coll), "the connections");
    if (!s)
        s = iz_fused_prepare(r->e, r->fused_began);
    if (s)
        return s;
    int64_t opened = iz_now_ns();
    r->open_s = (double)(opened - begin) * 1e-9;
    if (r->o.resume)
        s = iz_state_load(r->e, r->model_text);
    else if (r->c.import[0])
        s = iz_hf_import(r->e, &r->p->section);
    else
        s = iz_train_init(r->e);
    r->init_s = (double)(iz_now_ns() - opened) * 1e-9;
    return s;
}

static int check_sample(const struct run *r)
{
    const struct iz_run_config *c = &r->c.run;
    bool wanted = c->sample_tokens > 0 && c->sample_prompt[0];
    FILE *err = iz_run_first(r) ? stderr : NULL;
    if (!wanted)
        return 0;
    if (!r->model->unit[r->model->n_units - 1].generate) {
        if (err)
            fprintf(err,
                    "izar: run.sample_tokens: %s generates nothing: set "
                    "it to 0\n",
                    r->model->name);
        return -EINVAL;
    }
    for (const char *p = c->sample_prompt; *p; p++)
        if ((unsigned char)*p >= r->model->vocab) {
            if (err)
                fprintf(err,
                        "izar: run.sample_prompt: '%c' is not below the "
                        "vocabulary of %d\n",
                        *p, r->model->vocab);
            return -EINVAL;
        }
    return 0;
}

static int choose_host_comm(struct run *r)
{
    enum iz_host_comm wish = r->c.run.host_comm;
    const char *why = iz_coll_near(r->coll, wish != IZ_HOST_MESSAGES);
    if (wish == IZ_HOST_AUTO)
        r->why_messages = why;
    if (wish != IZ_HOST_MEMORY || !why)
        return 0;
    if (iz_run_first(r))
        fprintf(stderr,
                "izar: run.host_comm: memory: %s: set auto or messages\n", why);
    return -ENOTSUP;
}

int iz_run_prepare_model(struct run *r)
{
    int s = iz_run_agree(r, read_config(r), "the config");
    if (!s)
        s = iz_run_agree(r, choose_host_comm(r), NULL);
    if (!s)
        s = iz_run_agree(r, r->p->open(&r->model, r->p->section.target),
                         "the model");
    if (!s)
        s = iz_run_agree(
            r, iz_lora_apply(r->model, &r->c, iz_run_first(r) ? stderr : NULL),
            "the adapters");
    if (!s)
        s = iz_run_agree(
            r, iz_rules_apply(r->model, &r->c, iz_run_first(r) ? stderr : NULL),
            "the rules");
    return s ? s : iz_run_agree(r, check_sample(r), NULL);
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

static int check_environment(const struct run *r)
{
    bool asked = iz_environment_number("STARPU_USE_NUMA", 0) != 0;
    if (refused(r, "STARPU_USE_NUMA", asked,
                "StarPU would copy data between the host's memories by itself, "
                "beside what is planned: unset it, and start a rank for each "
                "of them"))
        return -EINVAL;
    bool odd = yardstick() < 0;
    return refused(r, "IZ_YARDSTICK", odd,
                   "is the side of a product, from 64 to 8192")
               ? -EINVAL
               : 0;
}

int iz_run_prepare(struct run *r)
{
    int s = check_environment(r);
    if (s)
        return s;
    iz_gemm_open();
    r->workers = r->c.run.workers;
    r->coll->timeout_s = r->c.run.comm_timeout_s;
    /* What is planned for another machine needs no GPU here. */
    r->place = (struct iz_place){.device = -1, .sharing = 1, .why_cpu = ""};
    if (!r->o.machine)
        s = iz_run_agree(r,
                         iz_place_choose(&r->place, &r->c, r->coll,
                                         ranks_all(r), ranks_here(r)),
                         "the list of GPUs");
    if (!s)
        s = iz_run_agree(
            r,
            iz_topo_open(&r->topo, r->coll,
                         r->place.device < 0 ? NULL : r->place.info.pci,
                         &r->workers),
            "the list of cores");
    struct iz_products_for on = {.workers = r->workers,
                                 .resume = r->o.resume,
                                 .gpu = r->place.device >= 0};
    if (!s && !r->o.machine)
        s = iz_run_agree(
            r, iz_products_choose(&r->products, &r->c, r->model, &on, r->coll),
            NULL);
    struct iz_fused_for fused = {.resume = r->o.resume, .gpu = on.gpu};
    if (!s && !r->o.machine)
        s = iz_run_agree(
            r, iz_fused_choose(&r->fused_began, &r->c, &fused, r->coll), NULL);
    return s ? s : make_plan(r);
}

int iz_run_start(struct run *r)
{
    int s = iz_run_agree(r, open_data(r), "the data");
    if (!s)
        s = iz_run_agree(r, open_output(r), "the output");
    if (s)
        return s;
    r->model_text = model_text(r);
    s = iz_run_agree(r, r->model_text ? 0 : -ENOMEM, "the model's text");
    if (s)
        return s;
    s = open_engine(r);
    if (s)
        return s;
    measure_gemm(r);
    r->e->gemm_rate = r->gemm_rate;
    struct iz_binding *bindings = gather_bindings(r);
    if (iz_run_first(r))
        print_header(r, bindings);
    free(bindings);
    if (r->e->plan.save_stages)
        s = iz_save_open(&r->saver, r->e, r->model_text);
    if (s)
        return s;
    s = iz_metrics_open(&r->metrics, r->e, r->gemm_rate, !iz_run_first(r));
    if (!s)
        iz_metrics_line(r->metrics,
                        "{\"start\": {\"open_s\": %.3f, \"weights_s\": "
                        "%.3f}}",
                        r->open_s, r->init_s);
    return iz_run_agree(r, s, "the metrics");
}
