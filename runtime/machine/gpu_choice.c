/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/machine/gpu_choice.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#include "codelets/base/int64.h"
#include "codelets/base/mix.h"
#include "codelets/flat/flat.h"
#include "codelets/ops/gpu_ops.h"
#include "runtime/base/environment.h"
#include "runtime/base/text.h"
#include "runtime/comm/nccl.h"
#include "runtime/plan/limits.h"

/* Where what all ranks know is told, by the first. */
static FILE *teller(const struct iz_coll *c)
{
    return c->rank == 0 ? stderr : NULL;
}

/* asked: STARPU_NCUDA, or -1. */
static int no_gpu(struct iz_gpu_choice *p, const struct iz_config *c,
                  const struct iz_coll *coll, int asked)
{
    p->device = -1;
    p->why_cpu = asked == 0 ? "STARPU_NCUDA is 0" : iz_device_why_none();
    if (!p->why_cpu[0])
        p->why_cpu = "another rank has no GPU";
    if (c->run.device == IZ_DEVICE_AUTO && asked < 1)
        return 0;
    iz_text_refuse(teller(coll), "%s: %s",
                   c->run.device == IZ_DEVICE_AUTO ? "STARPU_NCUDA"
                                                   : "run.device: cuda",
                   p->why_cpu);
    return -ENODEV;
}

/* The same number on the same GPU of the same host, as MPI tells hosts: their
 * names may be equal. */
static int64_t identity(const struct iz_gpu_choice *p,
                        const struct iz_coll *coll)
{
    uint64_t host = (uint64_t)iz_coll_host(coll, coll->rank);
    return (int64_t)iz_mix_text(iz_mix(host), p->info.pci);
}

/* Ranks on the same GPU as rank r. */
static int count_same(const int64_t *all, int n, int r)
{
    int same = 0;
    for (int i = 0; i < n; i++)
        same += all[i] == all[r];
    return same;
}

/* How many ranks share this GPU; *most: of all GPUs. */
static void count_sharing(struct iz_gpu_choice *p, struct iz_coll *coll,
                          int *most)
{
    int64_t mine = identity(p, coll);
    int64_t *all = iz_agree_numbers(coll, &mine, 1, "GPUs");
    p->sharing = count_same(all, coll->size, coll->rank);
    for (int r = 0; r < coll->size; r++)
        *most = (int)max64(*most, count_same(all, coll->size, r));
    free(all);
}

/* The same for ranks that were not started: they take GPUs as choose_device
 * does.  A launcher may show each started rank one only. */
static void share_out(struct iz_gpu_choice *p, const struct iz_coll *coll,
                      int here, int *most)
{
    int used = (coll->local_size + p->sharing - 1) / p->sharing;
    int gpus = used > p->gpus ? used : p->gpus;
    p->sharing = *most = (here + gpus - 1) / gpus;
}

static int choose_comm(struct iz_gpu_choice *p, const struct iz_config *c,
                       const struct iz_coll *coll, int ranks, int most)
{
    const char *why = NULL;
    p->nccl = c->run.comm == IZ_COMM_NCCL ||
              (c->run.comm == IZ_COMM_AUTO && iz_nccl_built());
    if (most > 1 && c->run.comm != IZ_COMM_MPI)
        why = "several ranks have the same GPU: use fewer ranks, run.comm: mpi "
              "to share it on purpose, or run.device: cpu";
    else if (p->nccl && ranks > IZ_SUM_INPUTS_MAX)
        why = "a GPU cannot add the parts of so many ranks at once: use "
              "run.comm: mpi";
    else if (p->nccl && !iz_nccl_built())
        why = "this program was built without NCCL: use run.comm: mpi";
    if (!why)
        return 0;
    return iz_text_refuse(
        teller(coll), "run.comm: %s%s", why,
        ranks == coll->size ? "" : "; --machine: to plan for others");
}

/* What a rank alone may have against its GPU; "": nothing. */
struct fault {
    char text[256];
};

/* Whether the program has no kernels for this GPU. */
static void too_old(const struct iz_gpu_choice *p, const struct iz_config *c,
                    struct fault *f)
{
    int have = p->info.capability, need = iz_cuda_capability();
    if (have < need)
        snprintf(f->text, sizeof(f->text),
                 "run.device: %s: GPU %d has compute capability %d.%d, this "
                 "program has kernels for %d.%d and later: use run.device: cpu",
                 c->run.device == IZ_DEVICE_AUTO ? "auto" : "cuda", p->device,
                 have / 10, have % 10, need / 10, need % 10);
}

/* Whether ranks would compute with different kernels, or be refused different
 * things: from 8.0 on the kernels are the same.  The first rank says so. */
static bool mixed(const struct iz_gpu_choice *p, struct iz_coll *coll)
{
    int64_t mine = p->info.capability;
    int64_t *all = iz_agree_numbers(coll, &mine, 1, "GPUs");
    int low = 0, high = 0;
    for (int r = 1; r < coll->size; r++) {
        low = all[r] < all[low] ? r : low;
        high = all[r] > all[high] ? r : high;
    }
    double least = (double)all[low] / 10, most = (double)all[high] / 10;
    free(all);
    if (most <= least || least >= 8)
        return false;
    iz_text_refuse(
        teller(coll),
        "run.device: the GPU of rank %d has compute capability %.1f, that "
        "of rank %d %.1f: below 8.0 all ranks need the same",
        low, least, high, most);
    return true;
}

/* The GPU of this rank: of those in the user's STARPU_WORKERS_CUDAID, or of
 * all, the ranks of a host take one each in turn.  StarPU reads the variable
 * too and must come to the same. */
static void choose_device(struct iz_gpu_choice *p, const struct iz_coll *coll,
                          struct fault *f)
{
    const char *list = getenv("STARPU_WORKERS_CUDAID");
    int n = 0, count = iz_device_count();
    char text[16], *end;
    for (; !list && n < count && n < IZ_GPUS_MAX; n++)
        p->gpu[n] = n;
    for (const char *at = list; at && n < IZ_GPUS_MAX;
         at = end + (*end == ',')) {
        long v = strtol(at, &end, 10);
        if (end == at)
            break;
        if (v < 0 || v >= count)
            n = IZ_GPUS_MAX; /* and refuse */
        else
            p->gpu[n++] = (int)v;
    }
    if (list && (!n || n == IZ_GPUS_MAX || *end)) {
        snprintf(f->text, sizeof(f->text),
                 "STARPU_WORKERS_CUDAID: '%.64s' is no list of numbers below "
                 "%d, the GPUs that this rank sees",
                 list, count);
        return;
    }
    p->gpus = n;
    p->device = p->gpu[coll->local_rank % n];
    snprintf(text, sizeof(text), "%d", p->device);
    if (list)
        setenv("STARPU_WORKERS_CUDAID", text, 1);
}

/* Of several ranks with a fault the first one tells. */
static int take_device(struct iz_gpu_choice *p, const struct iz_config *c,
                       struct iz_coll *coll)
{
    struct fault f = {{0}};
    choose_device(p, coll, &f);
    const char *why = f.text[0] ? NULL : iz_device_why_not(p->device, &p->info);
    if (why)
        snprintf(f.text, sizeof(f.text), "GPU %d: %s", p->device, why);
    if (!f.text[0])
        too_old(p, c, &f);
    int q = iz_coll_refuser(coll, f.text[0] != 0);
    if (q == coll->rank)
        fprintf(stderr, "izar: rank %d: %s\n", q, f.text);
    return q < 0 ? 0 : -ENODEV;
}

static int choose_gpu(struct iz_gpu_choice *p, const struct iz_config *c,
                      struct iz_coll *coll, int ranks, int here)
{
    int most = 1, r = take_device(p, c, coll);
    if (r)
        return r;
    if (mixed(p, coll))
        return -EINVAL;
    count_sharing(p, coll, &most);
    if (ranks != coll->size)
        share_out(p, coll, here, &most);
    if (ranks > 1)
        r = choose_comm(p, c, coll, ranks, most);
    return r;
}

/* What the user's STARPU_NCUDA asks for and cannot have; NULL: nothing. */
static const char *cannot_have(int asked, const struct iz_config *c)
{
    if (asked > 1)
        return "a rank computes on one GPU: start a rank for each";
    if (asked == 1 && c->run.device == IZ_DEVICE_CPU)
        return "1 contradicts run.device: cpu";
    return NULL;
}

int iz_gpu_choose(struct iz_gpu_choice *p, const struct iz_config *c,
                  struct iz_coll *coll, int ranks, int here)
{
    int asked = iz_environment_number("STARPU_NCUDA", -1);
    const char *why = cannot_have(asked, c);
    *p = (struct iz_gpu_choice){
        .device = -1, .sharing = 1, .ranks = ranks, .why_cpu = ""};
    if (why)
        iz_text_refuse(teller(coll), "STARPU_NCUDA: %s", why);
    if (!iz_coll_all_ok(coll, !why))
        return -EINVAL;
    if (c->run.device == IZ_DEVICE_CPU)
        return 0;
    if (!iz_coll_all_ok(coll, asked != 0 && iz_device_count() > 0))
        return no_gpu(p, c, coll, asked);
    return choose_gpu(p, c, coll, ranks, here);
}

int iz_gpu_near(const struct iz_gpu_choice *p, const struct iz_cores *t, int n)
{
    int near = 0;
    if (p->device < 0)
        return n;
    for (int i = 0; i < p->gpus; i++) {
        char pci[16];
        if (!iz_device_pci(p->gpu[i], pci) || iz_cores_near(t, pci))
            near += n / p->gpus + (i < n % p->gpus);
    }
    return near;
}

int64_t iz_gpu_memory(const struct iz_gpu_choice *p, const struct iz_config *c)
{
    int64_t total = p->info.total_bytes;
    if (p->device < 0)
        return 0;
    if (c->run.device_memory_limit_bytes)
        return c->run.device_memory_limit_bytes;
    return p->info.free_bytes / p->sharing -
           iz_plan_reserve(total, p->nccl ? p->ranks : 0);
}

struct iz_target iz_gpu_target(const struct iz_gpu_choice *p,
                               const struct iz_config *c, int workers)
{
    bool gpu = p->device >= 0;
    return (struct iz_target){.workers = workers,
                              .gpu = gpu,
                              .nccl = p->nccl,
                              .act = gpu ? iz_cuda_act(c->dtype) : IZ_F32,
                              .numerics.capability = p->info.capability};
}
