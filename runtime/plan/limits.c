/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/plan/limits.h"

#include "codelets/base/int64.h"

/* What a process has beside its plan: libraries with their buffers, StarPU,
 * MPI, the log of tasks.  The resident set of an almost empty run is 211 MiB
 * with one worker, 216 with 2, 225 with 4, 279 with 16, 351 with 32.  StarPU's
 * state of a chunk's two handles: 40 units of 12 and of 48 chunks took 28 and
 * 107 MiB more than such of one chunk. */
#define PROCESS_BYTES (INT64_C(212) << 20)
#define WORKER_BYTES (INT64_C(5) << 20)
#define CHUNK_BYTES (INT64_C(60) << 10)

/* The GPU's page tables have an entry of 8 bytes for each page of pinned
 * memory, and these are of 4 KiB unless the system has put them together: at
 * most one part in 512.  The driver keeps them on the GPU if nothing else is
 * asked for (its open modules: NV_MMU_VER3_PTE__SIZE, uvm_page_table_location).
 * The levels above them are less than a hundredth of that. */
#define TABLE_PART 512 /* so have the kernel's, of all that a process maps */

/* NCCL connects every pair of ranks at the first exchange: on eight H100 that
 * took 3.3 GB on each (NVIDIA/nccl, issue 1685), 470 MB for each other rank.
 * Ranks of other hosts share the channels of the network.  Of a small memory
 * the libraries get one part of RESERVE_SHARE, and NCCL another.  On a large
 * card there is twice as much for libraries that load kernels in the middle of
 * a step, of which the free memory at the start tells nothing. */
#define RESERVE_BYTES (INT64_C(768) << 20)
#define RESERVE_LARGE_BYTES (INT64_C(1536) << 20)
#define RESERVE_PEER_BYTES (INT64_C(470) * 1000 * 1000)
#define RESERVE_PEERS 7
#define RESERVE_SHARE 16

/* Of a host, beside what ranks use: one part in 33, or 1 GiB; with a GPU 4 GiB,
 * as CUDA's part on the host is 1 to 2 GiB and pinned memory cannot be swapped,
 * but no more than a quarter. */
#define HOST_RESERVE_PART 33
#define HOST_RESERVE_LEAST (INT64_C(1) << 30)
#define HOST_RESERVE_GPU (INT64_C(4) << 30)

int64_t iz_plan_host_bytes(const struct iz_plan *p)
{
    int64_t cpu = iz_bytes_tier(&p->bytes, IZ_TIER_CPU);
    return p->target.gpu ? cpu : cpu + iz_bytes_tier(&p->bytes, IZ_TIER_DEVICE);
}

int64_t iz_plan_device_bytes(const struct iz_plan *p)
{
    return p->target.gpu ? iz_bytes_tier(&p->bytes, IZ_TIER_DEVICE) : 0;
}

int64_t iz_plan_beside(const struct iz_plan *p)
{
    int64_t chunks = 0;
    for (int u = 0; u < p->n_units; u++)
        chunks += p->unit[u].chunks + p->unit[u].pieces / 2;
    return PROCESS_BYTES + p->target.workers * WORKER_BYTES +
           chunks * CHUNK_BYTES + iz_plan_host_bytes(p) / TABLE_PART;
}

int64_t iz_plan_host_need(const struct iz_plan *p, const struct iz_limits *l)
{
    return iz_plan_host_bytes(p) + (l->beside ? iz_plan_beside(p) : 0);
}

/* All of the host's tier is pinned but the states; see iz_memory_open. */
static int64_t table_bytes(const struct iz_plan *p)
{
    int64_t pinned = iz_bytes_tier(&p->bytes, IZ_TIER_CPU) -
                     p->bytes.b[IZ_TIER_CPU][IZ_MEM_STATE];
    return p->target.gpu ? (pinned + TABLE_PART - 1) / TABLE_PART : 0;
}

int64_t iz_plan_device_need(const struct iz_plan *p, const struct iz_limits *l)
{
    return iz_plan_device_bytes(p) + (l->tables ? table_bytes(p) : 0);
}

bool iz_plan_within(const struct iz_plan *p, const struct iz_limits *l)
{
    return iz_plan_host_need(p, l) <= l->host &&
           iz_plan_device_need(p, l) <= l->device;
}

int64_t iz_plan_reserve(int64_t total_bytes, int nccl_ranks)
{
    int64_t most = total_bytes / RESERVE_SHARE;
    int64_t peers = nccl_ranks > 1 ? min64(nccl_ranks - 1, RESERVE_PEERS) : 0;
    int64_t own =
        total_bytes > IZ_LARGE_GPU_BYTES ? RESERVE_LARGE_BYTES : RESERVE_BYTES;
    return min64(own, most) + min64(peers * RESERVE_PEER_BYTES, most);
}

int64_t iz_plan_host_reserve(int64_t total_bytes, bool gpu)
{
    int64_t least = max64(total_bytes / HOST_RESERVE_PART, HOST_RESERVE_LEAST);
    return gpu ? max64(least, min64(HOST_RESERVE_GPU, total_bytes / 4)) : least;
}
