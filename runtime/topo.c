/* SPDX-License-Identifier: Apache-2.0 */
/* Cores of a rank through hwloc; see topo.h. */
#include "runtime/topo.h"

#include <errno.h>
#include <hwloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "codelets/die.h"
#include "codelets/mix.h"
#include "runtime/environment.h"

#define CORES_MAX 1024

struct iz_topo {
    hwloc_topology_t machine;
    int n_cores, host_cores;
    bool shared; /* a core computes for several ranks */
    bool bind;
    bool gpu; /* one core drives it */
    hwloc_cpuset_t core[CORES_MAX], all;
    hwloc_cpuset_t before; /* where the calling thread was; NULL: still there */
    hwloc_cpuset_t shared_by; /* cores that ranks like this one divide */
};

/* One logical processor of each core that the process may use. */
static void list_cores(struct iz_topo *t, hwloc_const_cpuset_t allowed)
{
    int n = hwloc_get_nbobjs_by_type(t->machine, HWLOC_OBJ_CORE);
    hwloc_obj_type_t type = n > 0 ? HWLOC_OBJ_CORE : HWLOC_OBJ_PU;
    n = hwloc_get_nbobjs_by_type(t->machine, type);
    for (int i = 0; i < n && t->n_cores < CORES_MAX; i++) {
        hwloc_obj_t o = hwloc_get_obj_by_type(t->machine, type, (unsigned)i);
        hwloc_cpuset_t s = hwloc_bitmap_dup(o->cpuset);
        hwloc_bitmap_and(s, s, allowed);
        if (hwloc_bitmap_iszero(s)) {
            hwloc_bitmap_free(s);
            continue;
        }
        hwloc_bitmap_singlify(s);
        t->core[t->n_cores++] = s;
    }
    t->host_cores = n;
}

/* Ranks of this host with the same cores: ranks that the launcher bound apart,
 * or whose GPUs are near different cores, have none in common. */
struct sharing {
    int index, count; /* of this rank among them */
};

static void find_sharing(struct iz_coll *coll, hwloc_const_cpuset_t mine,
                         struct sharing *out)
{
    enum { WORDS = 33 }; /* the host, and 32 bits of the mask each */
    double *all = calloc((size_t)coll->size * WORDS, sizeof(*all));
    char host[128] = "";
    if (!all)
        iz_die("no memory for the cores of %d ranks", coll->size);
    double *own = all + coll->rank * WORDS;
    gethostname(host, sizeof(host) - 1);
    own[0] = (double)(iz_mix_text(IZ_GOLDEN, host) >> 12);
    for (int i = 0; i + 1 < WORDS; i++) {
        unsigned long w = hwloc_bitmap_to_ith_ulong(mine, (unsigned)i / 2);
        own[1 + i] = (double)(i % 2 ? w >> 32 : w & 0xffffffffUL);
    }
    iz_coll_gather_doubles(coll, all, WORDS, "cpu masks");
    *out = (struct sharing){0, 0};
    for (int r = 0; r < coll->size; r++) {
        bool same = !memcmp(own, all + r * WORDS, WORDS * sizeof(*all));
        out->index += same && r < coll->rank;
        out->count += same;
    }
    free(all);
}

/* Equal parts in order of rank; with fewer cores than ranks, round robin.
 */
static void share_cores(struct iz_topo *t, int rank, int ranks)
{
    int first = t->n_cores * rank / ranks,
        end = t->n_cores * (rank + 1) / ranks;
    if (first == end) {
        first = rank % t->n_cores;
        end = first + 1;
        t->shared = true;
    }
    for (int i = 0; i < t->n_cores; i++)
        if (i < first || i >= end)
            hwloc_bitmap_free(t->core[i]);
    memmove(t->core, t->core + first,
            (size_t)(end - first) * sizeof(t->core[0]));
    t->n_cores = end - first;
}

/* A user's setting wins: STARPU_NCPU is the number of compute workers, and
 * STARPU_RESERVE_NCPU and a core for a bound main thread count where no number
 * is given. */
static int count_workers(const struct iz_topo *t, int cores, int wanted)
{
    int user = iz_environment_number("STARPU_NCPU",
                                     iz_environment_number("STARPU_NCPUS", -1));
    int spare = (t->gpu && cores > 1) +
                iz_environment_number("STARPU_RESERVE_NCPU", 0) +
                (iz_environment_number("STARPU_MAIN_THREAD_BIND", 0) > 0);
    if (user >= 0)
        return user;
    if (wanted > 0)
        return wanted;
    return cores - spare;
}

int iz_topo_workers(const struct iz_topo *t, int wanted, int ranks)
{
    int cores = t->n_cores / ranks;
    return count_workers(t, cores > 0 ? cores : 1, wanted);
}

/* The part of `mask` that is near the GPU, if any is. */
static void keep_near(const struct iz_topo *t, hwloc_cpuset_t mask,
                      const char *pci)
{
    hwloc_obj_t o = hwloc_get_pcidev_by_busidstring(t->machine, pci);
    o = o ? hwloc_get_non_io_ancestor_obj(t->machine, o) : NULL;
    if (o && o->cpuset && hwloc_bitmap_intersects(o->cpuset, mask))
        hwloc_bitmap_and(mask, mask, o->cpuset);
}

/* The cores of this process near the GPU, or all. */
static hwloc_cpuset_t find_mask(const struct iz_topo *t, const char *pci)
{
    hwloc_cpuset_t mask = hwloc_bitmap_alloc();
    if (hwloc_get_cpubind(t->machine, mask, HWLOC_CPUBIND_PROCESS))
        hwloc_bitmap_copy(mask, hwloc_topology_get_allowed_cpuset(t->machine));
    if (pci)
        keep_near(t, mask, pci);
    return mask;
}

bool iz_topo_near(const struct iz_topo *t, const char *pci)
{
    hwloc_cpuset_t mask = find_mask(t, pci);
    bool same = hwloc_bitmap_isequal(mask, t->shared_by);
    hwloc_bitmap_free(mask);
    return same;
}

int iz_topo_open(struct iz_topo **out, struct iz_coll *coll, const char *pci,
                 int *workers)
{
    struct iz_topo *t = calloc(1, sizeof(*t));
    if (!t)
        iz_die("no memory for the list of cores");
    *out = t;
    t->gpu = pci != NULL;
    bool fails = hwloc_topology_init(&t->machine) ||
                 hwloc_topology_set_io_types_filter(
                     t->machine, HWLOC_TYPE_FILTER_KEEP_IMPORTANT) ||
                 hwloc_topology_load(t->machine);
    if (fails)
        fprintf(stderr, "izar: rank %d: hwloc cannot read this machine\n",
                coll->rank);
    if (!iz_coll_all_ok(coll, !fails))
        return -EIO;
    t->shared_by = find_mask(t, pci);
    list_cores(t, t->shared_by);
    struct sharing share;
    find_sharing(coll, t->shared_by, &share);
    if (share.count > 1)
        share_cores(t, share.index, share.count);
    t->all = hwloc_bitmap_alloc();
    for (int i = 0; i < t->n_cores; i++)
        hwloc_bitmap_or(t->all, t->all, t->core[i]);
    *workers = count_workers(t, t->n_cores, *workers);
    if (*workers > 0)
        return 0;
    fprintf(stderr,
            "izar: rank %d: STARPU_NCPU or STARPU_RESERVE_NCPU leaves no "
            "worker on %d core%s\n",
            coll->rank, t->n_cores, t->n_cores > 1 ? "s" : "");
    return -EINVAL;
}

void iz_topo_close(struct iz_topo **out)
{
    struct iz_topo *t = *out;
    if (!t)
        return;
    for (int i = 0; i < t->n_cores; i++)
        hwloc_bitmap_free(t->core[i]);
    hwloc_bitmap_free(t->all);
    hwloc_bitmap_free(t->shared_by);
    if (t->machine)
        hwloc_topology_destroy(t->machine);
    free(t);
    *out = NULL;
}

void iz_topo_prepare(struct iz_topo *t)
{
    t->bind = !getenv("STARPU_WORKERS_CPUID") &&
              !getenv("STARPU_WORKERS_COREID") &&
              !getenv("STARPU_WORKERS_NOBIND");
    if (t->bind)
        setenv("STARPU_WORKERS_NOBIND", "1", 1);
}

/* The first core is the GPU driver's, where there is one and another core. */
static void bind_here(void *arg, int i, struct iz_exec *x)
{
    struct iz_topo *t = arg;
    int first = t->gpu && t->n_cores > 1, n = t->n_cores - first;
    int core = x->backend == IZ_CUDA ? 0 : first + i % n;
    hwloc_set_cpubind(t->machine, t->core[core], HWLOC_CPUBIND_THREAD);
}

/* The calling thread, to all cores of the rank, if it can go back later. */
static void bind_caller(struct iz_topo *t)
{
    hwloc_cpuset_t all = hwloc_bitmap_alloc();
    t->before = hwloc_bitmap_alloc();
    for (int i = 0; all && i < t->n_cores; i++)
        hwloc_bitmap_or(all, all, t->core[i]);
    if (all && t->before &&
        !hwloc_get_cpubind(t->machine, t->before, HWLOC_CPUBIND_THREAD))
        hwloc_set_cpubind(t->machine, all, HWLOC_CPUBIND_THREAD);
    hwloc_bitmap_free(all);
}

void iz_topo_release(struct iz_topo *t)
{
    if (t->before && !hwloc_bitmap_iszero(t->before))
        hwloc_set_cpubind(t->machine, t->before, HWLOC_CPUBIND_THREAD);
    hwloc_bitmap_free(t->before);
    t->before = NULL;
}

void iz_topo_bind(struct iz_topo *t, struct iz_graph *g)
{
    if (t->bind)
        bind_caller(t);
    if (t->bind)
        iz_graph_on_workers(g, bind_here, t);
    if (t->bind && t->gpu)
        iz_graph_on_device(g, bind_here, t);
}

void iz_topo_describe(const struct iz_topo *t, char *out, size_t size)
{
    char list[128];
    hwloc_bitmap_list_snprintf(list, sizeof(list), t->all);
    snprintf(out, size, "core%s %s of %d%s%s", t->n_cores > 1 ? "s" : "", list,
             t->host_cores, t->shared ? ", shared with other ranks" : "",
             t->bind ? "" : ", bound as the environment says");
}
