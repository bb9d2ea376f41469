/* SPDX-License-Identifier: Apache-2.0 */
/* Cores of a rank through hwloc; see topo.h. */
#include "runtime/topo.h"

#include <errno.h>
#include <hwloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CORES_MAX 1024

struct iz_topo {
    hwloc_topology_t machine;
    int n_cores, host_cores;
    bool shared; /* a core computes for several ranks */
    bool bind;
    hwloc_cpuset_t core[CORES_MAX], all;
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

/* The launcher bound the ranks of this host apart if the masks of any two
 * differ. */
static bool bound_apart(struct iz_coll *coll, hwloc_const_cpuset_t mine)
{
    enum { WORDS = 16 };
    double *all = calloc((size_t)coll->size * WORDS, sizeof(*all));
    if (!all)
        return false;
    /* 32 bits of the mask per double are exact. */
    for (int i = 0; i < WORDS; i++) {
        unsigned long w = hwloc_bitmap_to_ith_ulong(mine, (unsigned)i / 2);
        all[coll->rank * WORDS + i] =
            (double)(i % 2 ? w >> 32 : w & 0xffffffffUL);
    }
    iz_coll_gather_doubles(coll, all, WORDS, "cpu masks");
    bool differ = false;
    for (int r = 1; r < coll->size; r++)
        differ |= memcmp(all, all + r * WORDS, WORDS * sizeof(*all)) != 0;
    free(all);
    return differ;
}

/* Equal parts in order of local rank; with fewer cores than ranks, round robin.
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

/* A user's setting wins: STARPU_NCPU is the number of compute workers. */
static int user_workers(void)
{
    const char *s = getenv("STARPU_NCPU");
    if (!s)
        s = getenv("STARPU_NCPUS");
    return s ? atoi(s) : 0;
}

int iz_topo_open(struct iz_topo **out, struct iz_coll *coll, int *workers)
{
    struct iz_topo *t = calloc(1, sizeof(*t));
    if (!t)
        return -ENOMEM;
    *out = t;
    if (hwloc_topology_init(&t->machine) || hwloc_topology_load(t->machine)) {
        fprintf(stderr, "izar: hwloc cannot read this machine\n");
        return -EIO;
    }
    hwloc_cpuset_t mask = hwloc_bitmap_alloc();
    if (hwloc_get_cpubind(t->machine, mask, HWLOC_CPUBIND_PROCESS))
        hwloc_bitmap_copy(mask, hwloc_topology_get_allowed_cpuset(t->machine));
    list_cores(t, mask);
    bool apart = coll->local_size > 1 && bound_apart(coll, mask);
    if (coll->local_size > 1 && !apart)
        share_cores(t, coll->local_rank, coll->local_size);
    hwloc_bitmap_free(mask);
    t->all = hwloc_bitmap_alloc();
    for (int i = 0; i < t->n_cores; i++)
        hwloc_bitmap_or(t->all, t->all, t->core[i]);
    int user = user_workers();
    if (user > 0)
        *workers = user;
    if (*workers <= 0)
        *workers = t->n_cores;
    return 0;
}

void iz_topo_close(struct iz_topo **out)
{
    struct iz_topo *t = *out;
    if (!t)
        return;
    for (int i = 0; i < t->n_cores; i++)
        hwloc_bitmap_free(t->core[i]);
    hwloc_bitmap_free(t->all);
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

static void bind_here(void *arg)
{
    struct iz_topo *t = arg;
    int i = starpu_worker_get_id() % t->n_cores;
    hwloc_set_cpubind(t->machine, t->core[i], HWLOC_CPUBIND_THREAD);
}

void iz_topo_bind(struct iz_topo *t, struct iz_graph *g)
{
    if (t->bind)
        iz_graph_on_workers(g, bind_here, t);
}

void iz_topo_describe(const struct iz_topo *t, char *out, size_t size)
{
    char list[128];
    hwloc_bitmap_list_snprintf(list, sizeof(list), t->all);
    snprintf(out, size, "core%s %s of %d%s%s", t->n_cores > 1 ? "s" : "", list,
             t->host_cores, t->shared ? ", shared with other ranks" : "",
             t->bind ? "" : ", bound as the environment says");
}
