/* SPDX-License-Identifier: Apache-2.0 */
/* Collectives between the ranks of a run, as blocking functions.  During a step
 * only the comm worker (one thread) calls them; before and after, the main
 * thread does.  All ranks must make the same calls in the same order: the task
 * graph ensures that.  iz_die ends the job if a wait lasts longer than the
 * time-out, or if it is for a rank of this host whose process has ended.  In a
 * phase in which ranks use a disk, which may be slow, a rank of this host is
 * waited for as long as its process lives and is not stopped, and one of
 * another host 12 times as long. */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "codelets/ops/exec.h"

struct iz_coll {
    int rank, size;              /* in the run */
    int local_rank, local_size;  /* on this host */
    int sum_group;               /* ranks of a group: see
                                    iz_coll_reduce_scatter.  Set by the owner
                                    after open; divides size, 0 = size */
    double timeout_s;            /* set by the owner after open; 0 = none */
    _Atomic(const char *) phase; /* in which disks are used, for messages; NULL:
                                    none.  Set by the owner. */
    int64_t sent_bytes, received_bytes; /* payload counted by the collectives */
    /* Sent to ranks of other hosts by gathers, sums and copies, but NCCL's
     * gathers among all ranks. */
    int64_t far_bytes;
    uint64_t order_hash; /* of all collectives started: kind, bytes, name */
    /* [size + 1]: where each rank's shard starts.  The caller of a collective
     * with unequal shards fills it; the next such collective overwrites it. */
    int64_t *first;
    void *scratch; /* of reduce-scatters, iz_coll_scratch_bytes of their longest
                      shard.  Set by the owner, whose it is. */
    int64_t scratch_bytes;
    struct iz_coll_state *state; /* NULL: one rank of a simulation, which stands
                                    for all ranks */
    struct iz_coll_gpu *gpu;
};

/* Initialises MPI (a program started alone is rank 0 of 1) and sets the prefix
 * of iz_die's message and how iz_die ends the job.  Negative errno with the
 * reason printed. */
int iz_coll_open(struct iz_coll **out, int *argc, char ***argv);
/* The first rank of the host of rank r. */
int iz_coll_host(const struct iz_coll *c, int r);
/* The largest group of consecutive ranks that no host cuts, of equal groups. */
int iz_coll_host_group(const struct iz_coll *c);
int iz_coll_sum_group(const struct iz_coll *c);
/* Chooses how ranks of one host exchange data: by reading each other's memory
 * (wanted, and the default after open if the system allows it) or by messages.
 * All ranks must call it with the same value.  Returns NULL, or the reason why
 * memory cannot be read; ranks then send messages. */
const char *iz_coll_read_local(struct iz_coll *c, bool wanted);
/* Finalises MPI; accepts NULL and sets *c to NULL.  All ranks. */
void iz_coll_close(struct iz_coll **c);

/* In place: rank r owns bytes [r, r+1) * shard_bytes of `full`; afterwards
 * every rank has all.  `what` names the operation in messages. */
void iz_coll_all_gather(struct iz_coll *c, void *full, int64_t shard_bytes,
                        const char *what);

/* The same within groups of n consecutive ranks, n divides their number: the
 * rank at position i of its group owns bytes [i, i + 1) * shard_bytes.  All
 * ranks call it. */
void iz_coll_all_gather_among(struct iz_coll *c, void *full,
                              int64_t shard_bytes, int n, const char *what);

/* iz_coll_all_gather of unequal shards (MPI_Allgatherv): rank r owns the bytes
 * from c->first[r] to c->first[r + 1] - 1; `first` is equal on all ranks. */
void iz_coll_all_gatherv(struct iz_coll *c, void *full, const char *what);

/* For a copy of all shards in each group of n consecutive ranks: the rank at
 * position j of a group receives in `out`, in order, the shards of the size / n
 * ranks from j * size / n on.  own: this rank's shard, not in `out`. */
void iz_coll_refresh(struct iz_coll *c, void *out, const void *own,
                     int64_t shard_bytes, int n, const char *what);

/* A range of a buffer, in bytes, that one rank owns for a while. */
struct iz_coll_range {
    int64_t begin, end;
    int owner;
};

/* In place: rank r has the bytes [r, r + 1) * shard_bytes of `full`; afterwards
 * the owner of each range has all of it.  What others have of it is not moved
 * twice, and what lies in no range is not moved.  back: the owner has each
 * range; afterwards every rank has what lies in its shard, or with shard_bytes
 * = 0 all of it. */
void iz_coll_exchange(struct iz_coll *c, void *full, int64_t shard_bytes,
                      const struct iz_coll_range *list, int n, bool back,
                      const char *what);

/* What a reduce-scatter adds, and to where.  Rank r computes, for each element
 * i of its own shard, sum = ((full_0[i] + full_1[i]) + full_2[i]) + ... in
 * fp32, ranks in order, and then out[i] = accumulate ? out[i] + sum : sum,
 * rounded to `out_type`.  With several groups of sum_group consecutive ranks
 * each has such a sum, rounded to `wire`, and the groups' sums are added, in
 * order and in fp32. */
struct iz_coll_sum {
    char *full; /* size * shard elements (clobbered) */
    enum iz_dtype wire;
    /* Elements; -1: rank r's are those from c->first[r] to c->first[r + 1] - 1
     * of `full`, and `first` is equal on all ranks (not on a GPU). */
    int64_t shard;
    /* A shard; it may be this rank's own one inside `full` when accumulate is
     * false and out_type == wire. */
    char *out;
    enum iz_dtype out_type;
    bool accumulate;
    double *norm2; /* becomes iz_flat_norm2 of the final out, computed in the
                      same pass; NULL: nobody wants it */
    const char *what;
    /* Of iz_coll_gpu_reduce_scatter alone.  With NCCL the last n_apart elements
     * may have a separate sum on the GPU. */
    bool out_on_gpu;
    int64_t n_apart;
    void *apart;
    enum iz_dtype apart_type;
    bool accumulate_apart;
};

void iz_coll_reduce_scatter(struct iz_coll *c, const struct iz_coll_sum *s);

/* In place like iz_coll_all_gather, for a few doubles per rank. */
void iz_coll_gather_doubles(struct iz_coll *c, double *all, int per_rank,
                            const char *what);

/* Check that all ranks have started the same collectives in the same order.
 * tell: writes this rank's hash as two doubles, to append to a gather that
 * happens anyway.  hear: given the pairs of all ranks (stride `per`), returns
 * true if they agree; otherwise `out` lists the ranks that differ from rank 0,
 * such as "ranks 1, 3", cut to `size`. */
void iz_coll_tell_order(const struct iz_coll *c, double own[2]);
bool iz_coll_hear_order(const struct iz_coll *c, const double *all, int per,
                        char *out, size_t size);
/* Checks the order of collectives with a gather of its own.  Returns 0, or
 * -EPROTO with the differing ranks printed. */
int iz_coll_check_order(struct iz_coll *c);

/* Counts, and adds to order_hash, a collective that another library does.
 * bytes: the same on all ranks. */
void iz_coll_note(struct iz_coll *c, const char *what, int64_t bytes,
                  int64_t sent_bytes, int64_t received_bytes);

/* Collectives of GPU memory, through NCCL or through the host's collectives.
 * The caller passes the exec of the comm worker; the operation is complete when
 * all work enqueued there up to the return of the function is done. */
struct iz_coll_gpu {
    bool nccl;
    /* With NCCL: device memory for a unit's gradient in the wire type. Without:
     * pinned host memory for a unit, followed by a shard in fp32 if sums are
     * copied to the GPU.  Borrowed. */
    char *buffer;
    int64_t buffer_bytes;
    struct iz_nccl *comm;
};

void iz_coll_gpu_open(struct iz_coll *c, const struct iz_coll_gpu *g);
/* Connects the GPUs if g->nccl is set.  All ranks.  Negative errno with the
 * reason printed. */
int iz_coll_gpu_connect(struct iz_coll *c);
void iz_coll_gpu_close(struct iz_coll *c);

/* Like iz_coll_all_gather_among with `out` on the GPU.  `own` is this rank's
 * shard; it may be anywhere, not only at its place in `out`.  refreshes: like
 * iz_coll_refresh, with both on the GPU. */
void iz_coll_gpu_gather(struct iz_coll *c, struct iz_exec *x, void *out,
                        const void *own, int64_t shard_bytes, int n,
                        bool refreshes, const char *what);
/* Like iz_coll_reduce_scatter with `full` on the GPU, and `out` there too or on
 * the host; the same bits.  With NCCL nothing can be accumulated on the host;
 * norm2 is NULL unless the host sums into `out`. */
void iz_coll_gpu_reduce_scatter(struct iz_coll *c, struct iz_exec *x,
                                const struct iz_coll_sum *s);

/* For a caller that waits in a loop of its own since start_s (iz_coll_now, a
 * clock for waits, in which the time that this process was stopped is missing):
 * returns how long the wait has lasted.  It must be called again and again,
 * because it ends the job after the time-out, or once a rank of this host is
 * known to be gone. */
double iz_coll_now(void);
double iz_coll_waited(const struct iz_coll *c, double start_s,
                      const char *what);
/* The same in a call of a library that all ranks are in: none is at a disk. */
double iz_coll_called(const struct iz_coll *c, double start_s,
                      const char *what);

/* For a run that does not go on: members of a JSON object; how many this rank
 * has written (0: it can write none, -1: one more); asks the other ranks of the
 * host for theirs by SIGQUIT, and waits a second at most. */
struct iz_sink; /* codelets/base/sink.h */
void iz_coll_box(const struct iz_coll *c, struct iz_sink *s, int64_t zero_ns);
void iz_coll_boxes(struct iz_coll *c, int boxes);
void iz_coll_ask_boxes(const struct iz_coll *c);
/* Whether a process is another rank of this host. */
bool iz_coll_is_rank(const struct iz_coll *c, int64_t pid);

void iz_coll_barrier(struct iz_coll *c, const char *what);
/* Copies `bytes` bytes at p from rank `root` to all ranks. */
void iz_coll_broadcast(struct iz_coll *c, void *p, int64_t bytes, int root,
                       const char *what);
/* True on all ranks if `ok` is true on all ranks. */
bool iz_coll_all_ok(struct iz_coll *c, bool ok);
/* Returns the first rank that refuses, which should print why; -1 if none
 * does. */
int iz_coll_refuser(struct iz_coll *c, bool refuses);

/* Outside of steps: mine[n] of every rank, in order of ranks; malloc'ed.  All
 * ranks. */
int64_t *iz_agree_numbers(struct iz_coll *c, const int64_t *mine, int n,
                          const char *what);

/* The same result on all ranks: the error of the first rank that has one. */
int iz_agree(struct iz_coll *c, int err);

/* Bytes of scratch that reduce-scatters need for shards of at most
 * `shard_bytes`. */
int64_t iz_coll_scratch_bytes(int ranks, int64_t shard_bytes);
/* Bytes per peer and fragment of a reduce-scatter of such shards: whole blocks
 * of the norm, or all of a shard. */
int64_t iz_coll_fragment_bytes(int ranks, int64_t shard_bytes);
/* The fragments that a reduce-scatter uses.  If some ranks are on other hosts,
 * the fragments are shorter and more of them are in flight, in the same
 * scratch. */
struct iz_coll_pipeline {
    int64_t bytes;
    int in_flight;
};
struct iz_coll_pipeline iz_coll_pipeline(const struct iz_coll *c,
                                         int64_t shard_bytes);
