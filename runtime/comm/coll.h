/* SPDX-License-Identifier: Apache-2.0 */
/* Collectives between the ranks of a run, as blocking functions.  During a step
 * only the lane (one thread) calls them; before and after, the main thread
 * does.  All ranks must make the same calls in the same order: the task graph
 * sees to that. A wait that lasts longer than the time-out, or for a rank of
 * this host whose process has ended, ends the job with iz_die. */
#ifndef IZ_RUNTIME_COMM_COLL_H
#define IZ_RUNTIME_COMM_COLL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "codelets/ops/exec.h"

struct iz_coll {
    int rank, size;             /* in the run */
    int local_rank, local_size; /* on this host */
    double timeout_s;           /* set by the owner after open; 0 = none */
    int64_t sent_bytes, received_bytes; /* payload counted by the collectives */
    uint64_t order_hash; /* of all collectives started: kind, bytes, name */
    /* [size + 1], for the caller of a collective of unequal parts to say where
     * each begins; lost with the next one. */
    int64_t *first;
    struct iz_coll_state *state;
    struct iz_coll_gpu *gpu;
};

/* Initialises MPI (a program started alone is rank 0 of 1) and sets iz_die's
 * prefix and ending.  Negative errno with the reason printed. */
int iz_coll_open(struct iz_coll **out, int *argc, char ***argv);
/* The first rank of the host of rank r. */
int iz_coll_host(const struct iz_coll *c, int r);
/* Whether ranks of one host read each other's memory (they do after open where
 * the system allows it) or send messages.  All ranks, with the same wish.
 * NULL, or why memory cannot be read: messages are sent then. */
const char *iz_coll_near(struct iz_coll *c, bool wanted);
/* Finalises MPI; accepts NULL and sets *c to NULL.  All ranks. */
void iz_coll_close(struct iz_coll **c);

/* In place: rank r owns bytes [r, r+1) * shard_bytes of `full`; afterwards
 * every rank has all.  `what` names the operation in messages. */
void iz_coll_all_gather(struct iz_coll *c, void *full, int64_t shard_bytes,
                        const char *what);

/* `full`: size * shard elements of type `wire` (clobbered).  Rank r computes,
 * for each element i of its own shard, sum = ((full_0[i] + full_1[i]) +
 * full_2[i]) + ...   in fp32, ranks in order, and then out[i] = accumulate ?
 * out[i] + sum : sum, rounded to `out_type`. out: shard elements; it may be
 * this rank's own shard inside `full` when accumulate is false and out_type ==
 * wire.  *norm2, unless it is NULL: iz_flat_norm2 of what is in out then, from
 * the same pass. */
void iz_coll_reduce_scatter(struct iz_coll *c, void *out,
                            enum iz_dtype out_type, bool accumulate, void *full,
                            enum iz_dtype wire, int64_t shard, double *norm2,
                            const char *what);

/* The two with parts of different lengths: rank r has the bytes, or the
 * elements, from c->first[r] to c->first[r + 1] - 1 of `full`; all ranks say
 * the same.  Of a reduce-scatter no part may be longer than the shards that the
 * scratch was planned for. */
void iz_coll_all_gather_parts(struct iz_coll *c, void *full, const char *what);
void iz_coll_reduce_scatter_parts(struct iz_coll *c, void *out,
                                  enum iz_dtype out_type, bool accumulate,
                                  void *full, enum iz_dtype wire, double *norm2,
                                  const char *what);

/* In place like iz_coll_all_gather, for a few doubles per rank. */
void iz_coll_gather_doubles(struct iz_coll *c, double *all, int per_rank,
                            const char *what);

/* Whether all ranks have started the same collectives in the same order.  Two
 * numbers of this rank for a gather that is made anyway; of all ranks, each
 * `per` behind the one before, whether they are the same, or in `out` which
 * ranks differ from rank 0: "ranks 1, 3", cut to size. */
void iz_coll_tell_order(const struct iz_coll *c, double own[2]);
bool iz_coll_hear_order(const struct iz_coll *c, const double *all, int per,
                        char *out, size_t size);
/* The same with a gather of its own: 0, or -EPROTO with the ranks printed. */
int iz_coll_check_order(struct iz_coll *c);

/* Counts a collective that another library does. */
void iz_coll_note(struct iz_coll *c, const char *what, int64_t sent_bytes,
                  int64_t received_bytes);

/* Collectives of GPU memory, through NCCL or through the host's.  Called with
 * the exec of the lane; what it has enqueued when the function returns
 * completes the operation. */
struct iz_coll_gpu {
    bool nccl;
    /* NCCL: device memory for a unit's gradient of the wire type.  Else pinned
     * host memory for a unit, and for a shard in fp32 behind it where sums are
     * taken to the GPU.  Borrowed. */
    char *buffer;
    int64_t buffer_bytes;
    struct iz_nccl *comm;
};

int iz_coll_gpu_open(struct iz_coll *c, const struct iz_coll_gpu *g);
/* Connects the GPUs where g->nccl says so.  All ranks.  Negative errno with the
 * reason printed. */
int iz_coll_gpu_connect(struct iz_coll *c);
void iz_coll_gpu_close(struct iz_coll *c);

/* Like iz_coll_all_gather with `full` on the GPU; `shard` is this rank's part,
 * anywhere, and need not be in its place. */
void iz_coll_gpu_all_gather(struct iz_coll *c, struct iz_exec *x, void *full,
                            const void *shard, int64_t shard_bytes,
                            const char *what);
/* Like iz_coll_reduce_scatter with `full` on the GPU, and `out` there too or on
 * the host; the same bits. */
struct iz_coll_gpu_sum {
    void *full;
    enum iz_dtype wire;
    int64_t shard;
    /* With NCCL nothing can be accumulated on the host. */
    void *out;
    enum iz_dtype out_type;
    bool out_on_gpu, accumulate;
    double *norm2; /* NULL unless the host sums into `out` */
    /* With NCCL the last elements may have a sum of their own, on the GPU. */
    int64_t n_apart;
    void *apart;
    enum iz_dtype apart_type;
    bool accumulate_apart;
    const char *what;
};

void iz_coll_gpu_reduce_scatter(struct iz_coll *c, struct iz_exec *x,
                                const struct iz_coll_gpu_sum *s);

/* For a wait of the caller's own that began at start_s (iz_coll_now): how long
 * it has lasted.  Ends the job after the time-out, or once a rank of this host
 * is known to be gone, so it has to be asked again and again. */
double iz_coll_now(void);
double iz_coll_waited(const struct iz_coll *c, double start_s,
                      const char *what);

void iz_coll_barrier(struct iz_coll *c, const char *what);
/* bytes of rank `root` to all. */
void iz_coll_broadcast(struct iz_coll *c, void *p, int64_t bytes, int root,
                       const char *what);
/* True on all ranks if `ok` is true on all ranks. */
bool iz_coll_all_ok(struct iz_coll *c, bool ok);
/* The first rank that refuses, which is the one to say why; -1: none does. */
int iz_coll_refuser(struct iz_coll *c, bool refuses);

/* Bytes of scratch that the collectives need for shards of at most
 * `shard_bytes`; allocated at first use, counted by the planner. */
int64_t iz_coll_scratch_bytes(int ranks, int64_t shard_bytes);
/* Bytes per peer and piece of a reduce-scatter of such shards: whole blocks of
 * the norm, or all of a shard. */
int64_t iz_coll_piece_bytes(int ranks, int64_t shard_bytes);
/* The pieces that a reduce-scatter really takes: shorter ones, more of them in
 * flight, in the same scratch, where some ranks are on other hosts. */
struct iz_coll_cut {
    int64_t bytes;
    int in_flight;
};
struct iz_coll_cut iz_coll_cut(const struct iz_coll *c, int64_t shard_bytes);

#endif
