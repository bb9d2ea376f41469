/* SPDX-License-Identifier: Apache-2.0 */
/* Cores of a rank through hwloc; see cores.h. */
#include "runtime/machine/cores.h"

#include <errno.h>
#include <hwloc.h>
#include <stdio.h>
#include <stdlib.h>

#include "codelets/base/die.h"
#include "codelets/base/take.h"
#include "runtime/base/cgroup.h"
#include "runtime/base/environment.h"
#include "runtime/machine/cores_share.h"

#define CORES_MAX 1024

struct iz_cores {
    hwloc_topology_t machine;
    int n_cores, host_cores;
    double quota; /* of control groups, cores */
    bool shared;  /* a core computes for several ranks */
    bool bind;
    bool gpu;
    int spare; /* first cores without compute workers */
    hwloc_cpuset_t core[CORES_MAX], all;
    hwloc_cpuset_t before; /* where the calling thread was; NULL: still there */
    hwloc_cpuset_t shared_by; /* processors that it may use, and others may */
};

/* One logical processor of each core that the process may use. */
static void list_cores(struct iz_cores *t, hwloc_const_cpuset_t allowed)
{
    int n = hwloc_get_nbobjs_by_type(t->machine, HWLOC_OBJ_CORE);
    hwloc_obj_type_t type = n > 0 ? HWLOC_OBJ_CORE : HWLOC_OBJ_PU;
    n = hwloc_get_nbobjs_by_type(t->machine, type);
    for (int i = 0; i < n && t->n_cores < CORES_MAX; i++) {
        hwloc_obj_t o = hwloc_get_obj_by_type(t->machine, type, (unsigned)i);
        t->host_cores += hwloc_bitmap_intersects(
            o->cpuset, hwloc_topology_get_allowed_cpuset(t->machine));
        hwloc_cpuset_t s = hwloc_bitmap_dup(o->cpuset);
        hwloc_bitmap_and(s, s, allowed);
        if (hwloc_bitmap_iszero(s)) {
            hwloc_bitmap_free(s);
            continue;
        }
        hwloc_bitmap_singlify(s);
        t->core[t->n_cores++] = s;
    }
}

enum { WORDS = 32 }; /* for processors of CORES_MAX cores with two each */

/* Number of the processor of core i that all ranks of the host give it, also
 * those that may not use it. */
static unsigned machine_cores_number(const struct iz_cores *t, int i)
{
    int os = hwloc_bitmap_first(t->core[i]);
    return hwloc_get_pu_obj_by_os_index(t->machine, (unsigned)os)
        ->logical_index;
}

/* What the ranks of this host may use, in order: sets[n] of such numbers, in
 * ranks[] who they are.  Returns n; `mine` is this rank's place.  All ranks. */
static int gather_sets(const struct iz_cores *t, struct iz_coll *coll,
                       hwloc_bitmap_t *sets, int *ranks, int *mine)
{
    enum { BITS = 8 * sizeof(unsigned long) };
    unsigned long *all = iz_take((int64_t)coll->size * WORDS, sizeof(*all),
                                 "the cores of %d ranks", coll->size);
    int n = 0;
    unsigned long *own = all + coll->rank * WORDS;
    for (int i = 0; i < t->n_cores; i++) {
        unsigned number = machine_cores_number(t, i);
        if (number >= WORDS * BITS)
            iz_die("rank %d may use processor %u of this host: bind it to the "
                   "first %d (taskset)",
                   coll->rank, number, WORDS * BITS);
        own[number / BITS] |= 1UL << number % BITS;
    }
    iz_coll_all_gather(coll, all, WORDS * sizeof(*all), "processors");
    for (int r = 0; r < coll->size; r++) {
        if (iz_coll_host(coll, r) != iz_coll_host(coll, coll->rank))
            continue;
        if (r == coll->rank)
            *mine = n;
        ranks[n] = r;
        sets[n] = hwloc_bitmap_alloc();
        if (!sets[n] ||
            hwloc_bitmap_from_ulongs(sets[n], WORDS, all + r * WORDS))
            iz_die("no memory for the cores of %d ranks", coll->size);
        n++;
    }
    free(all);
    return n;
}

/* As the system numbers them. */
static void list_numbers(const struct iz_cores *t, hwloc_const_bitmap_t set,
                         char *out, size_t size)
{
    hwloc_bitmap_t os = hwloc_bitmap_alloc();
    unsigned i;
    hwloc_bitmap_foreach_begin(i, set) hwloc_bitmap_set(
        os, hwloc_get_obj_by_type(t->machine, HWLOC_OBJ_PU, i)->os_index);
    hwloc_bitmap_foreach_end();
    hwloc_bitmap_list_snprintf(out, size, os);
    hwloc_bitmap_free(os);
}

static void refuse_cross(const struct iz_cores *t, hwloc_bitmap_t *sets,
                         const int *ranks, const int cross[2])
{
    char text[3][256];
    int a = cross[0], b = cross[1];
    list_numbers(t, sets[a], text[0], sizeof(text[0]));
    list_numbers(t, sets[b], text[1], sizeof(text[1]));
    hwloc_bitmap_and(sets[a], sets[a], sets[b]);
    list_numbers(t, sets[a], text[2], sizeof(text[2]));
    fprintf(stderr,
            "izar: ranks %d and %d may both use cores %s, but their cores (%s "
            "and %s) overlap only in part: bind the ranks to separate cores, "
            "to equal sets, or one set inside the other (mpirun --bind-to, "
            "taskset)\n",
            ranks[a], ranks[b], text[2], text[0], text[1]);
}

/* Keeps of the cores those that are this rank's; see cores_share.h. */
static void keep_own(struct iz_cores *t, hwloc_bitmap_t *sets, int n, int mine)
{
    int kept = 0;
    for (int i = 0; i < t->n_cores; i++)
        if (hwloc_bitmap_isset(sets[mine], machine_cores_number(t, i)))
            t->core[kept++] = t->core[i];
        else
            hwloc_bitmap_free(t->core[i]);
    t->n_cores = kept;
    for (int i = 0; i < n; i++)
        t->shared |= i != mine && hwloc_bitmap_intersects(sets[i], sets[mine]);
}

/* All ranks.  Negative errno on those of the host that is refused. */
static int share_cores(struct iz_cores *t, struct iz_coll *coll)
{
    hwloc_bitmap_t *sets = iz_take(coll->size, sizeof(*sets), "cores");
    int *ranks = iz_take(coll->size, sizeof(*ranks), "cores");
    int mine = 0, cross[2];
    int n = gather_sets(t, coll, sets, ranks, &mine);
    int r = iz_share_out(sets, n, cross);
    if (!r)
        keep_own(t, sets, n, mine);
    else if (r == -EINVAL && mine == cross[0])
        refuse_cross(t, sets, ranks, cross);
    for (int i = 0; i < n; i++)
        hwloc_bitmap_free(sets[i]);
    free(sets);
    free(ranks);
    return r;
}

/* Of a GPU's driver, which polls, and of the movers, which wake up in the
 * middle of Adam on all others and must not wait for their turn. */
int iz_cores_spare(int cores, bool gpu)
{
    enum { MANY = 8 };
    return !gpu ? 0 : cores >= MANY ? 2 : cores > 1;
}

/* Of `cores`, those that the quota gives each of the host's ranks time on: more
 * workers would be stopped in the middle of tasks that others wait for. */
static int within_quota(const struct iz_cores *t, int cores, int ranks)
{
    int most = t->quota / ranks < cores ? (int)(t->quota / ranks) : cores;
    return most > 0 ? most : 1;
}

/* A user's setting wins: STARPU_NCPU is the number of compute workers, and
 * STARPU_RESERVE_NCPU and a core for a bound main thread count where no number
 * is given. */
static int count_workers(const struct iz_cores *t, int cores, int ranks,
                         int wanted)
{
    int user = iz_environment_number("STARPU_NCPU",
                                     iz_environment_number("STARPU_NCPUS", -1));
    int spare = iz_cores_spare(cores, t->gpu) +
                iz_environment_number("STARPU_RESERVE_NCPU", 0) +
                (iz_environment_number("STARPU_MAIN_THREAD_BIND", 0) > 0);
    if (user >= 0)
        return user;
    if (wanted > 0)
        return wanted;
    return cores - spare < 1 ? cores - spare
                             : within_quota(t, cores - spare, ranks);
}

int iz_cores_workers(const struct iz_cores *t, int wanted, int ranks)
{
    int cores = t->n_cores / ranks;
    return count_workers(t, cores > 0 ? cores : 1, ranks, wanted);
}

/* The part of `mask` that is near the GPU, if any is. */
static void keep_near(const struct iz_cores *t, hwloc_cpuset_t mask,
                      const char *pci)
{
    hwloc_obj_t o = hwloc_get_pcidev_by_busidstring(t->machine, pci);
    o = o ? hwloc_get_non_io_ancestor_obj(t->machine, o) : NULL;
    if (o && o->cpuset && hwloc_bitmap_intersects(o->cpuset, mask))
        hwloc_bitmap_and(mask, mask, o->cpuset);
}

/* The cores of this process near the GPU, or all. */
static hwloc_cpuset_t find_mask(const struct iz_cores *t, const char *pci)
{
    hwloc_const_cpuset_t allowed =
        hwloc_topology_get_allowed_cpuset(t->machine);
    hwloc_cpuset_t mask = hwloc_bitmap_alloc();
    if (hwloc_get_cpubind(t->machine, mask, HWLOC_CPUBIND_PROCESS))
        hwloc_bitmap_copy(mask, allowed);
    hwloc_bitmap_and(mask, mask, allowed);
    if (pci)
        keep_near(t, mask, pci);
    return mask;
}

bool iz_cores_near(const struct iz_cores *t, const char *pci)
{
    hwloc_cpuset_t mask = find_mask(t, pci);
    bool same = hwloc_bitmap_isequal(mask, t->shared_by);
    hwloc_bitmap_free(mask);
    return same;
}

int iz_cores_open(struct iz_cores **out, struct iz_coll *coll, const char *pci,
                  int *workers)
{
    struct iz_cores *t = *out = iz_take(1, sizeof(*t), "the list of cores");
    t->gpu = pci != NULL;
    t->quota = iz_cgroup_cores();
    /* With what this rank may not use: ranks number processors alike. */
    bool fails = hwloc_topology_init(&t->machine) ||
                 hwloc_topology_set_flags(
                     t->machine, HWLOC_TOPOLOGY_FLAG_INCLUDE_DISALLOWED) ||
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
    int r = share_cores(t, coll);
    if (r)
        return r;
    t->all = hwloc_bitmap_alloc();
    for (int i = 0; i < t->n_cores; i++)
        hwloc_bitmap_or(t->all, t->all, t->core[i]);
    *workers = count_workers(t, t->n_cores, coll->local_size, *workers);
    /* A user may want more workers than that: then only the driver's. */
    t->spare = t->n_cores - *workers < iz_cores_spare(t->n_cores, t->gpu)
                   ? t->gpu && t->n_cores > 1
                   : iz_cores_spare(t->n_cores, t->gpu);
    if (*workers > 0)
        return 0;
    fprintf(stderr,
            "izar: rank %d: STARPU_NCPU, STARPU_RESERVE_NCPU or "
            "STARPU_MAIN_THREAD_BIND leaves no worker on %d core%s\n",
            coll->rank, t->n_cores, t->n_cores > 1 ? "s" : "");
    return -EINVAL;
}

void iz_cores_close(struct iz_cores **out)
{
    struct iz_cores *t = *out;
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

void iz_cores_prepare(struct iz_cores *t)
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
    struct iz_cores *t = arg;
    int n = t->n_cores - t->spare;
    int core = x->backend == IZ_CUDA ? 0 : t->spare + i % n;
    hwloc_set_cpubind(t->machine, t->core[core], HWLOC_CPUBIND_THREAD);
}

static void bind_mover(void *arg, int i, struct iz_exec *x)
{
    struct iz_cores *t = arg;
    hwloc_set_cpubind(t->machine, t->core[1], HWLOC_CPUBIND_THREAD);
}

/* The calling thread, to all cores of the rank, if it can go back later. */
static void bind_caller(struct iz_cores *t)
{
    t->before = hwloc_bitmap_alloc();
    if (t->before &&
        !hwloc_get_cpubind(t->machine, t->before, HWLOC_CPUBIND_THREAD))
        hwloc_set_cpubind(t->machine, t->all, HWLOC_CPUBIND_THREAD);
}

void iz_cores_release(struct iz_cores *t)
{
    if (t->before && !hwloc_bitmap_iszero(t->before))
        hwloc_set_cpubind(t->machine, t->before, HWLOC_CPUBIND_THREAD);
    hwloc_bitmap_free(t->before);
    t->before = NULL;
}

void iz_cores_bind(struct iz_cores *t, struct iz_graph *g)
{
    if (!t->bind)
        return;
    bind_caller(t);
    iz_graph_on_workers(g, bind_here, t);
    if (t->gpu)
        iz_graph_on_device(g, bind_here, t);
    if (t->spare > 1)
        iz_graph_on_copies(g, bind_mover, t);
}

void iz_cores_describe(const struct iz_cores *t, struct iz_binding *b)
{
    b->cores = t->n_cores;
    b->host_cores = t->host_cores;
    b->quota = t->quota < t->host_cores ? t->quota : 0;
    b->shared = t->shared;
    b->foreign = !t->bind;
    b->first = hwloc_bitmap_first(t->all);
    b->last = hwloc_bitmap_last(t->all);
    hwloc_bitmap_list_snprintf(b->list, sizeof(b->list), t->all);
    b->nodes = 0;
    for (hwloc_obj_t o = NULL;
         (o = hwloc_get_next_obj_by_type(t->machine, HWLOC_OBJ_NUMANODE, o));)
        if (o->os_index < 64 && hwloc_bitmap_intersects(o->cpuset, t->all))
            b->nodes |= UINT64_C(1) << o->os_index;
}

/* ---- the header of a run ---- */

static bool solid(const struct iz_binding *b)
{
    return b->last - b->first + 1 == b->cores;
}

/* Whether b follows a as `step` cores and `gpu_step` GPUs further on say. */
static bool follows(const struct iz_binding *a, const struct iz_binding *b,
                    int step, int gpu_step)
{
    return a->host == b->host && a->workers == b->workers &&
           a->cores == b->cores && a->shared == b->shared &&
           a->foreign == b->foreign && a->host_cores == b->host_cores &&
           (a->gpu < 0) == (b->gpu < 0) && solid(a) && solid(b) &&
           b->first - a->first == step && b->gpu - a->gpu == gpu_step;
}

/* Ranks from the first of b on that one line can tell. */
static int count_alike(const struct iz_binding *b, int n)
{
    int k = 1;
    if (n > 1) {
        int step = b[1].first - b[0].first, gpu_step = b[1].gpu - b[0].gpu;
        while (k < n && step >= 0 && gpu_step >= 0 &&
               follows(&b[k - 1], &b[k], step, gpu_step))
            k++;
    }
    return k;
}

static void print_nodes(uint64_t nodes, FILE *out)
{
    hwloc_bitmap_t set = hwloc_bitmap_alloc();
    char text[256] = "";
    if (set && !hwloc_bitmap_from_ulong(set, nodes))
        hwloc_bitmap_list_snprintf(text, sizeof(text), set);
    if (nodes)
        fprintf(out, ", NUMA node%s %s", nodes & (nodes - 1) ? "s" : "", text);
    hwloc_bitmap_free(set);
}

static void print_binding(const struct iz_binding *b, int rank, int k,
                          bool named, FILE *out)
{
    const struct iz_binding *z = b + k - 1;
    uint64_t nodes = 0;
    for (int i = 0; i < k; i++)
        nodes |= b[i].nodes;
    if (k > 1)
        fprintf(out, "      ranks %d-%d", rank, rank + k - 1);
    else
        fprintf(out, "      rank %d", rank);
    if (named)
        fprintf(out, " on %s", b->name);
    fprintf(out, ": %d worker%s%s on core%s %s", b->workers,
            b->workers > 1 ? "s" : "", k > 1 ? " each" : "",
            b->cores > 1 || z->first != b->first ? "s" : "", b->list);
    if (z->first != b->first)
        fprintf(out, k > 2 ? " ... %s" : " and %s", z->list);
    fprintf(out, " of %d", b->host_cores);
    if (b->gpu >= 0 && z->gpu != b->gpu)
        fprintf(out, k > 2 ? ", GPUs %d ... %d" : ", GPUs %d and %d", b->gpu,
                z->gpu);
    else if (b->gpu >= 0)
        fprintf(out, ", GPU %d", b->gpu);
    print_nodes(nodes, out);
    if (b->quota > 0)
        fprintf(out, ", quota of %.3g core%s", b->quota,
                b->quota > 1 ? "s" : "");
    fprintf(out, "%s%s\n", b->shared ? ", shared with other ranks" : "",
            b->foreign ? ", bound as the environment says" : "");
}

void iz_binding_print(const struct iz_binding *b, int n, FILE *out)
{
    bool named = false;
    for (int i = 1; i < n; i++)
        named |= b[i].host != b[0].host;
    for (int i = 0, k; i < n; i += k) {
        k = count_alike(b + i, n - i);
        print_binding(b + i, i, k, named, out);
    }
}
