/* SPDX-License-Identifier: Apache-2.0 */
/* Stand-in for the CUDA runtime: copies and fills.  All of them are operations
 * of a stream; the synchronous ones wait for it.  And the functions that it
 * lacks. */
#include "tests/fake/standin/cudart.h"

#include <stdlib.h>
#include <string.h>

struct copy {
    void *dst;
    const void *src;
    size_t n;
};

struct fill {
    void *p;
    int value;
    size_t n;
};

/* Where a side of the copy can be reached; only device memory is checked,
 * because a synchronous copy may use any host memory. */
static void *side(const void *p, size_t n)
{
    return iz_standin_device_of(p) >= 0 ? iz_standin_kernel(p, n)
                                        : iz_standin_host(p);
}

static void run_copy(void *arg)
{
    struct copy *c = arg;
    bool up = iz_standin_device_of(c->dst) >= 0;
    memcpy(side(c->dst, c->n), side(c->src, c->n), c->n);
    if (up != (iz_standin_device_of(c->src) >= 0)) {
        iz_standin_count[up ? IZ_STANDIN_H2D : IZ_STANDIN_D2H] += (int64_t)c->n;
        iz_standin_count[IZ_STANDIN_H2D_COPIES] += up;
    }
    free(c);
}

/* Whether CUDA would really copy there beside the caller. */
static bool side_async(const void *p, size_t n)
{
    return iz_standin_device_of(p) >= 0 || iz_standin_pinned(p, n);
}

/* In effect synchronous with host memory that is not pinned, as CUDA is. */
static cudaError_t copy(struct copy c, cudaStream_t s, bool async)
{
    if (!c.n)
        return cudaSuccess;
    if (async && !(side_async(c.dst, c.n) && side_async(c.src, c.n))) {
        iz_standin_count[IZ_STANDIN_PAGEABLE]++;
        if (iz_standin_settings.abort_pageable)
            iz_standin_die("asynchronous copy of %zu bytes from %p to %p, "
                           "where host memory is not pinned",
                           c.n, c.src, c.dst);
        async = false;
    }
    cudaError_t e = iz_standin_push(s, run_copy, iz_standin_dup(&c, sizeof(c)));
    if (!e && !async)
        iz_standin_drain(s);
    return e;
}

cudaError_t cudaMemcpy(void *dst, const void *src, size_t n,
                       enum cudaMemcpyKind kind)
{
    return copy((struct copy){dst, src, n}, NULL, false);
}

cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t n,
                            enum cudaMemcpyKind kind, cudaStream_t s)
{
    return copy((struct copy){dst, src, n}, s, true);
}

static void run_fill(void *arg)
{
    struct fill *f = arg;
    memset(iz_standin_kernel(f->p, f->n), f->value, f->n);
    free(f);
}

cudaError_t cudaMemsetAsync(void *p, int value, size_t n, cudaStream_t s)
{
    struct fill f = {p, value, n};
    if (!n)
        return cudaSuccess;
    return iz_standin_push(s, run_fill, iz_standin_dup(&f, sizeof(f)));
}

cudaError_t cudaMemset(void *p, int value, size_t n)
{
    cudaError_t e = cudaMemsetAsync(p, value, n, NULL);
    if (!e)
        iz_standin_drain(NULL);
    return e;
}

/* ---- what StarPU is linked with, and does not call for this program ---- */

static cudaError_t lacking(void)
{
    iz_standin_die("a function of CUDA that it does not have is called");
}

#pragma GCC diagnostic ignored "-Wattribute-alias"
#define LACKING(f) __typeof__(f) f __attribute__((alias("lacking")))
LACKING(cudaDeviceCanAccessPeer);
LACKING(cudaDeviceEnablePeerAccess);
LACKING(cudaEventSynchronize);
LACKING(cudaFreeHost);
LACKING(cudaHostAlloc);
LACKING(cudaHostGetDevicePointer);
LACKING(cudaMemcpy2D);
LACKING(cudaMemcpy2DAsync);
LACKING(cudaMemcpy3DPeer);
LACKING(cudaMemcpy3DPeerAsync);
LACKING(cudaMemcpyPeer);
LACKING(cudaMemcpyPeerAsync);
LACKING(cudaPointerGetAttributes);
