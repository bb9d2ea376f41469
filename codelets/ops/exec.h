/* SPDX-License-Identifier: Apache-2.0 */
/* What a layer function sees while it runs inside a task: where to compute,
 * scratch memory, and counters.  A layer is written once against this and the
 * functions of ops.h; in a dry run every op only counts, which is how the
 * planner learns the bytes and flops of a layer from the layer itself. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "codelets/base/build.h"
#include "codelets/flat/dtype.h"

IZ_C_BEGIN

enum iz_backend { IZ_CPU, IZ_CUDA };

struct iz_adapter; /* codelets/ops/ops.h */

/* A row-major matrix [rows, cols] without gaps.  Borrowed memory; p is NULL in
 * a dry run and for a gradient that nobody wants. */
struct iz_view {
    void *p;
    enum iz_dtype dtype;
    int64_t rows, cols;
    struct iz_adapter *adapter; /* of a weight that has one */
    /* For a view of some rows of a sparse table: the numbers of these rows,
     * ascending (codelets/flat/touched_rows.h).  NULL otherwise. */
    const int32_t *row;
    /* Of a parameter: elements that follow its own ones, and are parameters
     * too. */
    int64_t room;
    bool odd; /* p may be no multiple of 16 bytes */
};

/* Bump allocator over memory owned by somebody else. */
struct iz_arena {
    char *base;
    int64_t size, used, peak; /* bytes; size is INT64_MAX in a dry run */
};

/* What a worker does: something lasts latency plus the longer of its flops and
 * its bytes, and the squares that it adds on the way. */
struct iz_rate {
    double flops_per_s, bytes_per_s, latency_s;
    /* Of products inside attention, [cuDNN's][backward], and of those that are
     * summed in fp32 over chunks; 0: flops_per_s. */
    double attention_flops_per_s[2][2], sum_flops_per_s;
    double squares_per_s;    /* of elements in the cache; 0: at no cost */
    double moments_per_s[3]; /* elements with such states (enum iz_moment_type)
                              * that are updated; 0: at no cost */
    double all_bytes_per_s;  /* what the busy workers share; 0: no limit */
    /* Of a copy that begins beside one the other way, or while more than half
     * of the host's workers are busy; 0: bytes_per_s. */
    double both_bytes_per_s, busy_bytes_per_s;
    /* Of a GPU that computes: of what it copies beside that from the host, and
     * to it. */
    double bus_bytes_per_s[2];
};

/* What ops cost. */
struct iz_cost {
    double flops, bytes; /* bytes = compulsory traffic */
    double seconds;      /* one after the other, at known rates */
    double bus_bytes[2]; /* copied beside them from the host, and to it */
};

/* *to += times *n. */
static inline void iz_cost_add(struct iz_cost *to, const struct iz_cost *n,
                               double times)
{
    to->flops += times * n->flops;
    to->bytes += times * n->bytes;
    to->seconds += times * n->seconds;
    for (int i = 0; i < 2; i++)
        to->bus_bytes[i] += times * n->bus_bytes[i];
}

/* One sentence; "": nothing was refused. */
struct iz_refusal {
    char why[512];
};

/* How a worker computes what could be computed otherwise, with other bits. */
struct iz_numerics {
    bool tf32;          /* fp32 products may round their operands to tf32 */
    bool bf16_products; /* on the CPU: products with bf16 weights are of bf16 */
    bool cudnn;         /* on a GPU: attention's forward is cuDNN's */
    bool cudnn_bwd;     /* ... and its backward */
    int capability;     /* compute capability of the GPU, 90 for 9.0 */
    /* On a GPU: of fp32 logits that the classifier computes at a time, if 8
     * rows do not have more.  Sums over chunks depend on it. */
    int64_t logits_bytes;
    /* Rows of a sample that a block handles at a time; 0: all.  Sums over rows
     * depend on it. */
    int64_t chunk_rows;
    /* ... and on a GPU: what a unit reads of the one before it, and writes for
     * the next, is in host memory. */
    bool host_boundaries;
};

struct iz_exec {
    enum iz_backend backend; /* whose kernels, whose scratch */
    bool dry;                /* only count */
    struct iz_numerics numerics;
    bool rows_vary;    /* those of products, from one call to the next */
    enum iz_dtype act; /* type of activations: fp32 on the CPU */
    /* In a dry run by a GPU's worker: the libraries prepare for the operations
     * that are counted, and the first refusal is recorded here.  NULL: the
     * libraries are not involved. */
    struct iz_refusal *ask;
    /* On a GPU: the CUDA stream that work is enqueued on, and the handles of
     * its libraries (struct iz_cuda).  A mover, which copies, has a stream too.
     */
    void *stream;
    struct iz_cuda *cuda;
    void *beside[2]; /* streams of copies from and to the host; or NULL */
    /* The task's number on this worker: what it has read of device memory may
     * be another in the next one. */
    uint64_t task;
    struct iz_arena work; /* scratch of this task */
    struct iz_arena save; /* what forward keeps for backward */
    bool
        widens; /* widened activations are not kept: see iz_exec_save_widened */
    bool keeps_nothing;  /* in chunks of rows: what is saved is scratch, too */
    struct iz_cost cost; /* counted by every op */
    bool attends;        /* attention was among the ops */
    const char *why_own; /* ... which cuDNN cannot compute; NULL: it may */
    struct iz_rate rate; /* of a dry run that counts seconds */
};

/* Takes a matrix from the scratch arena; 64-byte aligned, not cleared, valid
 * until released or the task ends.  iz_die when the arena is too small: the dry
 * run and the run then disagree. */
struct iz_view iz_exec_work(struct iz_exec *x, enum iz_dtype t, int64_t rows,
                            int64_t cols);
int64_t iz_exec_mark(const struct iz_exec *x);
void iz_exec_release(struct iz_exec *x, int64_t mark);

/* Takes a matrix from the arena that lives from forward to backward.  Forward
 * and backward of a layer must make the same calls in the same order. */
struct iz_view iz_exec_save(struct iz_exec *x, enum iz_dtype t, int64_t rows,
                            int64_t cols);

/* Like iz_exec_save, for an activation that is much wider than what it is
 * computed from.  With x->widens it is scratch of the task instead, to the
 * task's end, and the layer's backward computes it again before it uses it. */
struct iz_view iz_exec_save_widened(struct iz_exec *x, enum iz_dtype t,
                                    int64_t rows, int64_t cols);

/* An exec for a dry run, all counters zero. */
struct iz_exec iz_exec_dry(enum iz_backend b, enum iz_dtype act);

/* Whether an op has to work, and with the kernels of b. */
static inline bool iz_exec_runs(const struct iz_exec *x, enum iz_backend b)
{
    return !x->dry && x->backend == b;
}

/* Whether boundaries between units are in memory that is not the GPU's. */
static inline bool iz_exec_host_boundaries(const struct iz_exec *x)
{
    return x->numerics.host_boundaries && x->backend == IZ_CUDA;
}

/* Adds to the counters. */
void iz_exec_count(struct iz_exec *x, double flops, double bytes);
/* Like iz_exec_count, for products inside attention. */
void iz_exec_count_attention(struct iz_exec *x, bool cudnn, bool back,
                             double flops, double bytes);
/* Like iz_exec_count, for products of 16 bits that are summed in fp32. */
void iz_exec_count_sum(struct iz_exec *x, double flops, double bytes);

static inline int64_t iz_view_len(struct iz_view v)
{
    return v.rows * v.cols;
}

static inline int64_t iz_view_bytes(struct iz_view v)
{
    return v.rows * v.cols * iz_dtype_bytes(v.dtype);
}

/* The rows [from, from + n) of v. */
static inline struct iz_view iz_view_rows(struct iz_view v, int64_t from,
                                          int64_t n)
{
    v.rows = n;
    if (v.p)
        v.p = (char *)v.p + from * v.cols * iz_dtype_bytes(v.dtype);
    return v;
}

IZ_C_END
