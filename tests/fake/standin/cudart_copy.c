/* SPDX-License-Identifier: Apache-2.0 */
/* Stand-in for the CUDA runtime: copies and fills.  All of them are operations
 * of a stream; the synchronous ones wait for it. */
#include "tests/fake/standin/cudart.h"

#include <stdlib.h>
#include <string.h>

/* planes x rows x bytes, with the distances of rows and planes. */
struct copy {
    void *dst;
    const void *src;
    size_t width, height, depth;
    size_t dst_row, dst_plane, src_row, src_plane;
};

struct fill {
    void *p;
    int value;
    size_t n;
};

static enum iz_standin_way way_of(const void *dst, const void *src)
{
    bool to = iz_standin_device_of(dst) >= 0;
    bool from = iz_standin_device_of(src) >= 0;

    return to && from ? IZ_STANDIN_D2D
           : to       ? IZ_STANDIN_H2D
           : from     ? IZ_STANDIN_D2H
                      : IZ_STANDIN_H2H;
}

static bool kind_fits(enum cudaMemcpyKind kind, enum iz_standin_way way)
{
    static const enum iz_standin_way ways[] = {
        [cudaMemcpyHostToHost] = IZ_STANDIN_H2H,
        [cudaMemcpyHostToDevice] = IZ_STANDIN_H2D,
        [cudaMemcpyDeviceToHost] = IZ_STANDIN_D2H,
        [cudaMemcpyDeviceToDevice] = IZ_STANDIN_D2D};

    return kind == cudaMemcpyDefault || ways[kind] == way;
}

/* Bytes from the first one that a side of the copy touches to the last. */
static size_t span(const struct copy *c, size_t row, size_t plane)
{
    return (c->depth - 1) * plane + (c->height - 1) * row + c->width;
}

/* Where a side of the copy can be reached; only device memory is checked,
 * because a synchronous copy may use any host memory. */
static char *side(const void *p, size_t n)
{
    return iz_standin_device_of(p) >= 0 ? iz_standin_kernel(p, n)
                                        : iz_standin_host(p);
}

static void run_copy(void *arg)
{
    struct copy *c = arg;
    enum iz_standin_way way = way_of(c->dst, c->src);
    char *dst = side(c->dst, span(c, c->dst_row, c->dst_plane));
    const char *src = side(c->src, span(c, c->src_row, c->src_plane));

    for (size_t z = 0; z < c->depth; z++)
        for (size_t y = 0; y < c->height; y++)
            memcpy(dst + z * c->dst_plane + y * c->dst_row,
                   src + z * c->src_plane + y * c->src_row, c->width);
    iz_standin_counts.bytes[way] += (int64_t)(c->width * c->height * c->depth);
    iz_standin_counts.copies[way]++;
    free(c);
}

static bool side_async(const void *p, size_t n)
{
    return iz_standin_device_of(p) >= 0 || iz_standin_pinned(p, n);
}

/* Whether CUDA would really do the copy beside the caller. */
static bool is_async(const struct copy *c)
{
    return side_async(c->dst, span(c, c->dst_row, c->dst_plane)) &&
           side_async(c->src, span(c, c->src_row, c->src_plane));
}

static void count_pageable(const struct copy *c)
{
    iz_standin_counts.pageable++;
    if (iz_standin_settings.abort_pageable)
        iz_standin_die("asynchronous copy of %zu bytes from %p to %p, where "
                       "host memory is not pinned",
                       c->width * c->height * c->depth, c->src, c->dst);
}

/* Copies on a stream; in effect synchronous with host memory that is not
 * pinned, as CUDA does. */
static cudaError_t copy(const struct copy *c, enum cudaMemcpyKind kind,
                        cudaStream_t s, bool async)
{
    iz_standin_enter();
    if (!c->width || !c->height || !c->depth)
        return cudaSuccess;
    if (!kind_fits(kind, way_of(c->dst, c->src)))
        return iz_standin_error(cudaErrorInvalidValue);
    if (async && !is_async(c)) {
        count_pageable(c);
        async = false;
    }
    cudaError_t e = iz_standin_push(s, run_copy, iz_standin_dup(c, sizeof(*c)));
    if (!e && !async)
        iz_standin_drain(s);
    return e;
}

static struct copy line(void *dst, const void *src, size_t n)
{
    return (struct copy){
        .dst = dst, .src = src, .width = n, .height = 1, .depth = 1};
}

static struct copy box(struct cudaPitchedPtr dst, struct cudaPitchedPtr src,
                       struct cudaExtent n)
{
    return (struct copy){.dst = dst.ptr,
                         .src = src.ptr,
                         .width = n.width,
                         .height = n.height,
                         .depth = n.depth,
                         .dst_row = dst.pitch,
                         .dst_plane = dst.pitch * dst.ysize,
                         .src_row = src.pitch,
                         .src_plane = src.pitch * src.ysize};
}

cudaError_t cudaMemcpy(void *dst, const void *src, size_t n,
                       enum cudaMemcpyKind kind)
{
    struct copy c = line(dst, src, n);

    return copy(&c, kind, NULL, false);
}

cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t n,
                            enum cudaMemcpyKind kind, cudaStream_t s)
{
    struct copy c = line(dst, src, n);

    return copy(&c, kind, s, true);
}

static struct copy rectangle(void *dst, size_t dst_pitch, const void *src,
                             size_t src_pitch, size_t width, size_t height)
{
    return (struct copy){.dst = dst,
                         .src = src,
                         .width = width,
                         .height = height,
                         .depth = 1,
                         .dst_row = dst_pitch,
                         .src_row = src_pitch};
}

cudaError_t cudaMemcpy2D(void *dst, size_t dst_pitch, const void *src,
                         size_t src_pitch, size_t width, size_t height,
                         enum cudaMemcpyKind kind)
{
    struct copy c = rectangle(dst, dst_pitch, src, src_pitch, width, height);

    return copy(&c, kind, NULL, false);
}

cudaError_t cudaMemcpy2DAsync(void *dst, size_t dst_pitch, const void *src,
                              size_t src_pitch, size_t width, size_t height,
                              enum cudaMemcpyKind kind, cudaStream_t s)
{
    struct copy c = rectangle(dst, dst_pitch, src, src_pitch, width, height);

    return copy(&c, kind, s, true);
}

cudaError_t cudaMemcpy3D(const struct cudaMemcpy3DParms *p)
{
    struct copy c = box(p->dstPtr, p->srcPtr, p->extent);

    return copy(&c, p->kind, NULL, false);
}

cudaError_t cudaMemcpy3DAsync(const struct cudaMemcpy3DParms *p, cudaStream_t s)
{
    struct copy c = box(p->dstPtr, p->srcPtr, p->extent);

    return copy(&c, p->kind, s, true);
}

cudaError_t cudaMemcpyPeer(void *dst, int dst_device, const void *src,
                           int src_device, size_t n)
{
    return cudaMemcpy(dst, src, n, cudaMemcpyDeviceToDevice);
}

cudaError_t cudaMemcpyPeerAsync(void *dst, int dst_device, const void *src,
                                int src_device, size_t n, cudaStream_t s)
{
    return cudaMemcpyAsync(dst, src, n, cudaMemcpyDeviceToDevice, s);
}

cudaError_t cudaMemcpy3DPeer(const struct cudaMemcpy3DPeerParms *p)
{
    struct copy c = box(p->dstPtr, p->srcPtr, p->extent);

    return copy(&c, cudaMemcpyDeviceToDevice, NULL, false);
}

cudaError_t cudaMemcpy3DPeerAsync(const struct cudaMemcpy3DPeerParms *p,
                                  cudaStream_t s)
{
    struct copy c = box(p->dstPtr, p->srcPtr, p->extent);

    return copy(&c, cudaMemcpyDeviceToDevice, s, true);
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

    iz_standin_enter();
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
