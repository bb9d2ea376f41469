/* SPDX-License-Identifier: Apache-2.0 */
/* The GPU through the CUDA runtime; see device.h. */
#include "codelets/gpu/device.h"

#include <cuda_runtime_api.h>
#include <errno.h>
#include <starpu.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "codelets/base/die.h"
#include "codelets/base/units.h"

static const char *text(cudaError_t e)
{
    return cudaGetErrorString(e);
}

static void device_check(cudaError_t e, const char *what)
{
    if (e != cudaSuccess)
        iz_die("CUDA: %s: %s", what, text(e));
}

int iz_device_count(void)
{
    int n = 0;
    return cudaGetDeviceCount(&n) == cudaSuccess ? n : 0;
}

const char *iz_device_why_none(void)
{
    int n = 0;
    cudaError_t e = cudaGetDeviceCount(&n);
    if (e != cudaSuccess)
        return text(e);
    return n ? "" : "no GPU is visible";
}

static void write_pci(const struct cudaDeviceProp *p, char pci[16])
{
    snprintf(pci, 16, "%04x:%02x:%02x.0", (unsigned)p->pciDomainID & 0xffff,
             (unsigned)p->pciBusID & 0xff, (unsigned)p->pciDeviceID & 0xff);
}

bool iz_device_pci(int index, char pci[16])
{
    struct cudaDeviceProp p;
    if (cudaGetDeviceProperties(&p, index) != cudaSuccess)
        return false;
    write_pci(&p, pci);
    return true;
}

const char *iz_device_why_not(int index, struct iz_device_info *info)
{
    struct cudaDeviceProp p;
    size_t free_bytes = 0, total = 0;
    cudaError_t e = cudaSetDevice(index);
    if (e == cudaSuccess && info)
        e = cudaMemGetInfo(&free_bytes, &total);
    if (e == cudaSuccess && info)
        e = cudaGetDeviceProperties(&p, index);
    if (e != cudaSuccess)
        return text(e);
    if (!info)
        return NULL;
    memset(info, 0, sizeof(*info));
    snprintf(info->name, sizeof(info->name), "%.*s",
             (int)sizeof(info->name) - 1, p.name);
    write_pci(&p, info->pci);
    info->capability = p.major * 10 + p.minor;
    info->total_bytes = (int64_t)total;
    info->free_bytes = (int64_t)free_bytes;
    return NULL;
}

int iz_device_use(int index, struct iz_device_info *info)
{
    const char *why = iz_device_why_not(index, info);
    if (!why)
        return 0;
    fprintf(stderr, "izar: GPU %d: %s\n", index, why);
    return -ENODEV;
}

void *iz_device_take(int64_t bytes)
{
    void *p = NULL;
    cudaError_t e = cudaMalloc(&p, (size_t)bytes);
    if (e == cudaSuccess)
        e = cudaMemset(p, 0, (size_t)bytes);
    if (e == cudaSuccess)
        e = cudaDeviceSynchronize();
    if (e == cudaSuccess)
        return p;
    fprintf(stderr, "izar: allocating %.1f MiB on the GPU failed: %s\n",
            iz_units_mib(bytes), text(e));
    return NULL;
}

void iz_device_give(void *p)
{
    device_check(cudaFree(p), "cudaFree");
}

const char *iz_device_pin(void *p, int64_t bytes)
{
    /* Mapped: kernels read tokens there and write losses. */
    cudaError_t e = cudaHostRegister(
        p, (size_t)bytes, cudaHostRegisterPortable | cudaHostRegisterMapped);
    return e == cudaSuccess ? NULL : text(e);
}

void iz_device_unpin(void *p)
{
    device_check(cudaHostUnregister(p), "cudaHostUnregister");
}

void *iz_device_stream_open(void)
{
    cudaStream_t s = NULL;
    int least, first;
    cudaError_t e = cudaDeviceGetStreamPriorityRange(&least, &first);
    if (e == cudaSuccess)
        e = cudaStreamCreateWithPriority(&s, cudaStreamNonBlocking, first);
    if (e == cudaSuccess)
        return s;
    fprintf(stderr, "izar: cudaStreamCreate: %s\n", text(e));
    return NULL;
}

void iz_device_stream_close(void *stream)
{
    if (stream)
        device_check(cudaStreamDestroy(stream), "cudaStreamDestroy");
}

void iz_device_event_close(void *event)
{
    if (event)
        device_check(cudaEventDestroy(event), "cudaEventDestroy");
}

void iz_device_record(void **event, void *stream)
{
    cudaEvent_t e = *event;
    if (!e)
        device_check(cudaEventCreateWithFlags(&e, cudaEventDisableTiming),
                     "cudaEventCreate");
    *event = e;
    device_check(cudaEventRecord(e, stream), "cudaEventRecord");
}

void iz_device_follow(void *stream, void *event)
{
    if (event)
        device_check(cudaStreamWaitEvent(stream, event, 0),
                     "cudaStreamWaitEvent");
}

void *iz_device_worker_stream(void)
{
    return starpu_cuda_get_local_stream();
}

void iz_device_copy(void *stream, void *dst, const void *src, int64_t bytes)
{
    device_check(
        cudaMemcpyAsync(dst, src, (size_t)bytes, cudaMemcpyDefault, stream),
        "cudaMemcpyAsync");
}

void iz_device_clear(void *stream, void *p, int64_t bytes)
{
    device_check(cudaMemsetAsync(p, 0, (size_t)bytes, stream),
                 "cudaMemsetAsync");
}

bool iz_device_done(void *stream)
{
    cudaError_t e = cudaStreamQuery(stream);
    if (e != cudaErrorNotReady)
        device_check(e, "a copy or kernel");
    return e == cudaSuccess;
}

/* A copy takes milliseconds: naps of a few microseconds cost it nothing and
 * leave the core to others (movers have no timer slack: see open_mover).  They
 * grow by a 64th of the first each turn: the last of a wait of 10 ms is one of
 * 40 us, and to wait for a rank that is stuck takes no core. */
void iz_device_nap(int turn)
{
    const long first = 5000, most = 1000000;
    long ns = turn < 64 * (most / first) ? first + first * turn / 64 : most;
    nanosleep(&(struct timespec){.tv_nsec = ns}, NULL);
}

void iz_device_wait(void *stream)
{
    for (int turn = 0; !iz_device_done(stream); turn++)
        iz_device_nap(turn);
}
