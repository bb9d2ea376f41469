/* SPDX-License-Identifier: Apache-2.0 */
/* Measures this machine in less than a minute and writes the description that
 * plans and simulations take: products, attention, other ops, squares and Adam
 * with all cores busy, a disk, and a GPU with both directions of its link. */
#include <errno.h>
#include <hwloc.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "codelets/flat/flat.h"
#include "codelets/flat/update.h"
#include "codelets/ops/blas.h"
#include "codelets/ops/gemm_rate.h"
#include "codelets/ops/ops.h"
#include "codelets/task/task.h"
#include "runtime/base/durable.h"
#include "runtime/base/text.h"
#include "runtime/comm/coll.h"
#include "runtime/machine/measure.h"
#include "runtime/tier/memory.h"
#include "runtime/tier/nvme.h"

#define CORES_MAX 1024
#define SECONDS 3.0 /* of each measurement */
#define TYPES (1U << IZ_F32 | 1U << IZ_BF16 | 1U << IZ_F16)

enum what { PRODUCTS, PRODUCTS_16, ATTENTION, OPS, SQUARES, ADAM, WHATS };

static double calibrate_now_s(void)
{
    return (double)iz_clock_ns() * 1e-9;
}

static void *calibrate_take(int64_t bytes)
{
    void *p = aligned_alloc(4096, (size_t)(bytes + 4095) / 4096 * 4096);
    if (!p) {
        fprintf(stderr, "calibrate: no memory\n");
        exit(1);
    }
    memset(p, 0, (size_t)bytes);
    return p;
}

/* ---- what a core does ---- */

/* A measurement under way: an op's surroundings, as a compute worker of the CPU
 * has them, its tensors, and how much of what counts is done. */
struct work {
    struct iz_exec x;
    struct iz_view v[10];
    struct iz_norm2 squares;
    double done;
};

enum { M = 512, K = 384, FF = 1536, SEQ = 256, HEADS = 6 };

/* The products of a linear layer of moderate width on one task's tokens:
 * forward and the two of backward. */
static void products(struct work *w)
{
    struct iz_view *v = w->v;
    struct iz_linear l = {.w = v[1], .dw = v[4]};
    iz_matmul_fwd(&w->x, v[2], IZ_NONE, v[0], &l);
    iz_matmul_da(&w->x, v[3], v[2], &l);
    iz_matmul_dw(&w->x, v[2], v[0], &l);
    w->done = w->x.cost.flops;
}

/* Causal attention of such a width, forward and backward. */
static void attention(struct work *w)
{
    struct iz_view *v = w->v;
    struct iz_attention a = {
        .qkv = v[0], .o = v[1], .lse = v[2], .seq = SEQ, .heads = HEADS};
    iz_attention_fwd(&w->x, &a);
    iz_attention_bwd(&w->x, v[3], v[4], &a);
    w->done = w->x.cost.flops;
}

/* What is neither in a block, forward and backward, by counted bytes. */
static void ops(struct work *w)
{
    struct iz_view *v = w->v;
    struct iz_norm_layer n = {.w = v[4],
                              .b = v[5],
                              .dw = v[6],
                              .db = v[7],
                              .mean = v[8],
                              .rstd = v[9],
                              .eps = 1e-5f};
    iz_norm_layer_fwd(&w->x, v[1], v[0], &n, false);
    iz_activation_apply(&w->x, IZ_NONE, v[3], IZ_NONE, v[2], IZ_GELU_TANH);
    iz_activation_apply(&w->x, v[3], v[2], v[3], v[2], IZ_GELU_TANH);
    iz_norm_layer_bwd(&w->x, v[1], IZ_NONE, v[1], v[0], &n);
    w->done = w->x.cost.bytes;
}

/* Elements of a gradient that a sum has just stored: what its squares add to
 * it. */
static void squares(struct work *w)
{
    enum { TIMES = 1024 };
    for (int i = 0; i < TIMES; i++)
        iz_norm2_add(&w->squares, w->v[0].p, IZ_F32, w->v[0].cols);
    w->done = (double)w->squares.n;
}

/* Far beyond the caches: what the cores get of the memory. */
static void calibrate_adam(struct work *w)
{
    static const struct iz_hyper_at o = {.hyper = {.type = IZ_OPTIMIZER_ADAMW,
                                                   .lr = 1e-3,
                                                   .beta1 = 0.9,
                                                   .beta2 = 0.999,
                                                   .eps = 1e-8,
                                                   .adamw = true,
                                                   .bias_correction = true},
                                         .t = 1,
                                         .grad_scale = 1};
    struct iz_update_range all = iz_update_range_of(&o);
    iz_update(&(struct iz_update){.optimizer = o.hyper.type,
                                  .n = w->v[0].cols,
                                  .p = w->v[0].p,
                                  .state = {w->v[1].p, w->v[2].p},
                                  .g = w->v[3].p,
                                  .range = &all,
                                  .ranges = 1});
    w->done += 28.0 * (double)w->v[0].cols;
}

static void (*const loops[WHATS])(struct work *w) = {
    products, products, attention, ops, squares, calibrate_adam};

/* What stands in a file that only describes. */
static const double plausible[WHATS] = {50e9, 100e9, 25e9, 5e9, 2e9, 5e9};

/* Rows and columns; of products, 1 and 4 are weights. */
static const int tensors[WHATS][10][2] = {
    {{M, K}, {K, FF}, {M, FF}, {M, K}, {K, FF}},
    {{M, K}, {K, FF}, {M, FF}, {M, K}, {K, FF}},
    {{M, 3 * K}, {M, K}, {M / SEQ * HEADS, SEQ}, {M, 3 * K}, {M, K}},
    {{M, K},
     {M, K},
     {M, 4 * K},
     {M, 4 * K},
     {1, K},
     {1, K},
     {1, K},
     {1, K},
     {M, 1},
     {M, 1}},
    {{1, 4096}},
    {{1, 1 << 24}, {1, 1 << 24}, {1, 1 << 24}, {1, 1 << 24}}};

/* What counts, a second. */
static double rate_of(enum what what)
{
    enum { SCRATCH = 8 << 20 };
    struct work w = {
        .x = {.backend = IZ_CPU,
              .act = IZ_F32,
              .numerics.bf16_products = what == PRODUCTS_16,
              .work = {.base = calibrate_take(SCRATCH), .size = SCRATCH}}};
    double begin, spent;
    for (int i = 0; i < 10 && tensors[what][i][0]; i++) {
        struct iz_view *v = &w.v[i];
        v->dtype = what == PRODUCTS_16 && i % 3 == 1 ? IZ_BF16 : IZ_F32;
        v->rows = tensors[what][i][0];
        v->cols = tensors[what][i][1];
        v->p = calibrate_take(iz_view_bytes(*v));
    }
    begin = calibrate_now_s();
    do {
        loops[what](&w);
        spent = calibrate_now_s() - begin;
    } while (spent < SECONDS);
    for (int i = 0; i < 10; i++)
        free(w.v[i].p);
    free(w.x.work.base);
    return w.done / spent;
}

/* One core's work and what it gave. */
struct core {
    pthread_t thread;
    pthread_barrier_t *start;
    enum what what;
    double per_s;
};

static void *calibrate_work(void *arg)
{
    struct core *c = arg;
    pthread_barrier_wait(c->start);
    c->per_s = rate_of(c->what);
    return NULL;
}

/* The mean of all cores, which work at the same time. */
static double on_all(enum what what, int cores)
{
    static struct core core[CORES_MAX];
    pthread_barrier_t start;
    double sum = 0;
    pthread_barrier_init(&start, NULL, (unsigned)cores);
    for (int i = 0; i < cores; i++) {
        core[i] = (struct core){.start = &start, .what = what};
        if (pthread_create(&core[i].thread, NULL, calibrate_work, &core[i])) {
            fprintf(stderr, "calibrate: no thread for core %d\n", i);
            exit(1);
        }
    }
    for (int i = 0; i < cores; i++) {
        pthread_join(core[i].thread, NULL);
        sum += core[i].per_s;
    }
    pthread_barrier_destroy(&start);
    return sum / cores;
}

/* The slower of writing and reading; 0 without a folder. */
static double disk(const char *folder)
{
    enum { PIECE = 8 << 20, PIECES = 64 };
    struct iz_nvme *f = NULL;
    if (!folder)
        return 0;
    if (iz_nvme_open(&f, folder, "calibrate", (int64_t)PIECE * PIECES, false)) {
        fprintf(stderr, "calibrate: the machine is written without a disk\n");
        return 0;
    }
    char *p = calibrate_take(PIECE);
    double least = 1e300;
    for (int pass = 0; pass < 3; pass++) { /* the first one allocates blocks */
        double begin = calibrate_now_s();
        for (int i = 0; i < PIECES; i++) {
            if (pass < 2)
                iz_nvme_write(f, p, (int64_t)i * PIECE, PIECE);
            else
                iz_nvme_read(f, p, (int64_t)i * PIECE, PIECE);
        }
        double rate = (double)PIECE * PIECES / (calibrate_now_s() - begin);
        if (pass && rate < least)
            least = rate;
    }
    free(p);
    iz_nvme_close(&f);
    return least;
}

/* ---- collectives ---- */

/* Seconds of one all-gather (or reduce-scatter of bf16) of such shards. */
static double collective(struct iz_coll *c, char *full, int64_t shard_bytes,
                         bool gathers)
{
    double begin = calibrate_now_s(), spent = 0;
    int n = 0;
    for (bool more = true; more; n++) {
        if (gathers)
            iz_coll_all_gather(c, full, shard_bytes, "calibrate");
        else
            iz_coll_reduce_scatter(
                c, &(struct iz_coll_sum){.full = full,
                                         .wire = IZ_BF16,
                                         .shard = shard_bytes / 2,
                                         .out = full + c->rank * shard_bytes,
                                         .out_type = IZ_BF16,
                                         .what = "calibrate"});
        spent = calibrate_now_s() - begin;
        more = iz_coll_all_ok(c, spent < SECONDS / 2);
    }
    return spent / n;
}

/* Among the ranks that were started: bytes that each receives, and what starts
 * a message. */
static void calibrate_network(struct iz_machine *m, struct iz_coll *c)
{
    enum { SMALL = 64, LARGE = 8 << 20 };
    char *full = calibrate_take((int64_t)LARGE * c->size);
    c->scratch_bytes = iz_coll_scratch_bytes(c->size, LARGE);
    c->scratch = calibrate_take(c->scratch_bytes);
    double per = c->size - 1, large = 0;
    double small = collective(c, full, SMALL, true);
    for (int gathers = 0; gathers <= 1; gathers++)
        large += collective(c, full, LARGE, gathers) / 2;
    free(c->scratch);
    free(full);
    m->peer_bytes_per_s =
        (int64_t)(per * LARGE / (large > small ? large - small : large));
    m->message_ns = (int64_t)(small / per * 1e9);
}

/* ---- the file ---- */

static void write_sources(FILE *f, bool measured, int ranks)
{
    const char *assumed = !measured   ? "all rates"
                          : ranks > 1 ? "launch_ns, kernel_ns, copy_ns"
                                      : "peer_bytes_per_s, latencies";
    fprintf(f, "  \"sources\": {\"%s\": \"assumptions%s\"", assumed,
            !measured || ranks > 1
                ? ""
                : ": a quarter of the memory's rate, and plausible times");
    if (measured)
        fprintf(f, ", \"all other rates\": \"measured by calibrate\"");
    if (ranks > 1)
        fprintf(f,
                ", \"peer_bytes_per_s, message_ns\": \"collectives "
                "of %d ranks\"",
                ranks);
    fprintf(f, "}\n}\n");
}

static int write_file(const char *path, const struct iz_machine *m,
                      bool measured, int ranks)
{
    FILE *f = fopen(path, "w");
    if (!f)
        return iz_durable_refuse("calibrate", path, "cannot create", errno);
    fputs("{\n  ", f);
    iz_machine_print(m, f);
    write_sources(f, measured, ranks);
    int err = fflush(f) || ferror(f)
                  ? iz_durable_refuse("calibrate", path, "cannot write", errno)
                  : 0;
    fclose(f);
    return err;
}

/* Cores that this process may use. */
static int count_cores(void)
{
    hwloc_topology_t t;
    int n = 0;
    if (hwloc_topology_init(&t) || hwloc_topology_load(t)) {
        fprintf(stderr, "calibrate: hwloc cannot read this machine\n");
        exit(1);
    }
    hwloc_cpuset_t mine = hwloc_bitmap_alloc();
    if (hwloc_get_cpubind(t, mine, HWLOC_CPUBIND_PROCESS))
        hwloc_bitmap_copy(mine, hwloc_topology_get_allowed_cpuset(t));
    hwloc_obj_type_t type = hwloc_get_nbobjs_by_type(t, HWLOC_OBJ_CORE) > 0
                                ? HWLOC_OBJ_CORE
                                : HWLOC_OBJ_PU;
    for (hwloc_obj_t o = NULL; (o = hwloc_get_next_obj_by_type(t, type, o));)
        n += hwloc_bitmap_intersects(o->cpuset, mine);
    hwloc_bitmap_free(mine);
    hwloc_topology_destroy(t);
    return n < CORES_MAX ? n : CORES_MAX;
}

/* Rates of the cores: of one, but for the memory of all. */
static void set_rate(struct iz_machine *m, int what, double per_s)
{
    int64_t *rate[WHATS] = {
        &m->core_flops_per_s,       &m->core_bf16_flops_per_s,
        &m->core_fused_flops_per_s, &m->core_bytes_per_s,
        &m->core_squares_per_s,     &m->host_bytes_per_s};
    *rate[what] = (int64_t)(what == ADAM ? per_s * m->cores : per_s);
}

/* What can be read without measuring, and what is assumed. */
static int calibrate_describe(struct iz_machine *m, const char *folder,
                              bool bf16_gains)
{
    struct iz_device_info info = {0};
    struct statvfs f;
    int64_t reserve;
    snprintf(m->name, sizeof(m->name), "this-machine");
    gethostname(m->name, sizeof(m->name) - 1);
    m->cores = count_cores();
    m->gpus = iz_device_count();
    m->host_bytes = iz_memory_available(m->gpus > 0, &reserve);
    if (folder && statvfs(folder, &f))
        return iz_durable_refuse("calibrate", folder, "cannot be measured",
                                 errno);
    if (folder)
        m->disk_bytes = (int64_t)(f.f_bavail * f.f_frsize);
    m->disk_bytes_per_s = m->disk_bytes > 0 ? 1000000000 : 0;
    for (int w = 0; w < WHATS; w++)
        if (w != PRODUCTS_16 || bf16_gains)
            set_rate(m, w, plausible[w]);
    int r = m->gpus ? iz_device_use(0, &info) : 0;
    m->gpu_capability = info.capability;
    m->gpu_bytes = info.free_bytes;
    return r;
}

static int calibrate_measure(struct iz_machine *m, const char *folder,
                             bool bf16_gains)
{
    for (int w = 0; w < WHATS; w++)
        if (w != PRODUCTS_16 || bf16_gains)
            set_rate(m, w, on_all((enum what)w, m->cores));
    m->disk_bytes_per_s = (int64_t)disk(folder);
    const char *why =
        m->gpus ? iz_machine_measure_gpu(m, 0, TYPES, 8192, SECONDS) : NULL;
    printf("%d cores: %.1f GFLOP/s a core in products, %.1f in those of bf16, "
           "%.1f in attention, %.1f GB/s a core in other ops, %.1f G squares/s "
           "a core, %.1f GB/s of memory in Adam\n",
           m->cores, (double)m->core_flops_per_s * 1e-9,
           (double)m->core_bf16_flops_per_s * 1e-9,
           (double)m->core_fused_flops_per_s * 1e-9,
           (double)m->core_bytes_per_s * 1e-9,
           (double)m->core_squares_per_s * 1e-9,
           (double)m->host_bytes_per_s * 1e-9);
    return why ? iz_text_refuse(stderr, "calibrate: GPU 0: %s", why) : 0;
}

/* The other ranks wait while the first one measures what is not shared. */
static int calibrate(struct iz_coll *c, const char *path, const char *folder,
                     bool rates)
{
    struct iz_machine m = {
        .kernel_ns = 4000, .copy_ns = 10000, .message_ns = 20000};
    int r = 0;
    iz_blas_open();
    iz_blas_take_best(M, K, FF);
    bool gains =
        c->rank == 0 && iz_rate_gemm16_gain(M, FF, K) >= IZ_GEMM16_LEAST_GAIN;
    if (c->rank == 0)
        r = calibrate_describe(&m, folder, gains);
    if (c->rank == 0 && !r && rates)
        r = calibrate_measure(&m, folder, gains);
    if (!iz_coll_all_ok(c, r == 0))
        return r ? r : -ECANCELED;
    m.launch_ns = m.gpus ? 20000 : 0;
    m.peer_bytes_per_s = m.host_bytes_per_s / 4;
    if (c->size > 1 && rates)
        calibrate_network(&m, c);
    return c->rank == 0 ? write_file(path, &m, rates, rates ? c->size : 1) : 0;
}

int main(int argc, char **argv)
{
    struct iz_coll *c = NULL;
    bool rates = !(argc > 1 && !strcmp(argv[1], "--describe"));
    char **arg = argv + (rates ? 1 : 2);
    if (!arg[0] || arg[0][0] == '-' ||
        (arg[1] && (arg[1][0] == '-' || arg[2]))) {
        fprintf(stderr, "usage: calibrate [--describe] FILE "
                        "[FOLDER-ON-THE-DISK]\n"
                        "  --describe  cores, memory, GPU and disk, without "
                        "rates: at once\n"
                        "mpirun -np N --bind-to none calibrate ... measures "
                        "collectives too\n");
        return 2;
    }
    int r = iz_coll_open(&c, &argc, &argv);
    if (!r)
        r = calibrate(c, arg[0], arg[1], rates);
    iz_coll_close(&c);
    return r ? 1 : 0;
}
