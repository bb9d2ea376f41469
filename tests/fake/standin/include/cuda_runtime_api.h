/* SPDX-License-Identifier: Apache-2.0 */
/* The part of the CUDA runtime that the stand-in (tests/fake) has, with
 * CUDA's names and meanings and layouts of its own: never mix it with NVIDIA's
 * headers or libraries. */
#pragma once

#include <stddef.h>

#define CUDART_VERSION 13000

#pragma GCC visibility push(default)

typedef enum cudaError {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorCudartUnloading = 4,
    cudaErrorDevicesUnavailable = 46,
    cudaErrorNoDevice = 100,
    cudaErrorInvalidDevice = 101,
    cudaErrorInvalidResourceHandle = 400,
    cudaErrorNotReady = 600,
    cudaErrorHostMemoryAlreadyRegistered = 712,
    cudaErrorHostMemoryNotRegistered = 713
} cudaError_t;

enum cudaMemcpyKind {
    cudaMemcpyHostToHost,
    cudaMemcpyHostToDevice,
    cudaMemcpyDeviceToHost,
    cudaMemcpyDeviceToDevice,
    cudaMemcpyDefault
};

enum cudaMemoryType { cudaMemoryTypeHost = 1, cudaMemoryTypeManaged = 3 };

enum { cudaComputeModeDefault, cudaComputeModeExclusive };

enum cudaDeviceAttr {
    cudaDevAttrMultiProcessorCount = 16,
    cudaDevAttrComputeMode = 20,
    cudaDevAttrPciBusId = 33,
    cudaDevAttrComputeCapabilityMajor = 75,
    cudaDevAttrComputeCapabilityMinor = 76
};

enum {
    cudaStreamNonBlocking = 1,
    cudaEventDisableTiming = 2,
    cudaHostAllocPortable = 1,
    cudaHostAllocMapped = 2,
    cudaHostRegisterPortable = 1,
    cudaHostRegisterMapped = 2
};

typedef struct CUstream_st *cudaStream_t;
typedef struct CUevent_st *cudaEvent_t;
typedef void (*cudaHostFn_t)(void *);

struct cudaDeviceProp {
    char name[256];
    size_t totalGlobalMem;
    int major, minor, multiProcessorCount, warpSize;
    int concurrentKernels, asyncEngineCount;
    int pciDomainID, pciBusID, pciDeviceID;
    int canMapHostMemory, unifiedAddressing, managedMemory;
    int pageableMemoryAccess;
};

struct cudaPointerAttributes {
    enum cudaMemoryType type;
    int device;
    void *devicePointer, *hostPointer;
};

struct cudaPitchedPtr {
    void *ptr;
    size_t pitch, xsize, ysize; /* bytes, bytes, rows */
};

struct cudaExtent {
    size_t width, height, depth; /* bytes, rows, planes */
};

struct cudaMemcpy3DPeerParms {
    struct cudaPitchedPtr srcPtr, dstPtr;
    int srcDevice, dstDevice;
    struct cudaExtent extent;
};

static inline struct cudaPitchedPtr make_cudaPitchedPtr(void *p, size_t pitch,
                                                        size_t x, size_t y)
{
    return (struct cudaPitchedPtr){p, pitch, x, y};
}

static inline struct cudaExtent make_cudaExtent(size_t w, size_t h, size_t d)
{
    return (struct cudaExtent){w, h, d};
}

/* Devices. */
cudaError_t cudaGetDeviceCount(int *n);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaGetDevice(int *device);
cudaError_t cudaDeviceReset(void);
cudaError_t cudaDeviceSynchronize(void);
cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer);
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags);
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr a, int dev);
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest);
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *prop, int device);
cudaError_t cudaGetLastError(void);
const char *cudaGetErrorString(cudaError_t e);

/* Memory. */
cudaError_t cudaMalloc(void **p, size_t n);
cudaError_t cudaFree(void *p);
cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes);
cudaError_t cudaHostAlloc(void **p, size_t n, unsigned flags);
cudaError_t cudaFreeHost(void *p);
cudaError_t cudaHostRegister(void *p, size_t n, unsigned flags);
cudaError_t cudaHostUnregister(void *p);
cudaError_t cudaHostGetDevicePointer(void **device, void *host, unsigned flags);
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a,
                                     const void *p);

/* Streams and events. */
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned flags);
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned flags,
                                         int priority);
cudaError_t cudaStreamDestroy(cudaStream_t s);
cudaError_t cudaStreamSynchronize(cudaStream_t s);
cudaError_t cudaStreamQuery(cudaStream_t s);
cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t f, void *arg);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t e);
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s);
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned flags);
cudaError_t cudaEventQuery(cudaEvent_t e);
cudaError_t cudaEventSynchronize(cudaEvent_t e);

/* Copies. */
cudaError_t cudaMemcpy(void *dst, const void *src, size_t n,
                       enum cudaMemcpyKind kind);
cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t n,
                            enum cudaMemcpyKind kind, cudaStream_t s);
cudaError_t cudaMemcpy2D(void *dst, size_t dst_pitch, const void *src,
                         size_t src_pitch, size_t width, size_t height,
                         enum cudaMemcpyKind kind);
cudaError_t cudaMemcpy2DAsync(void *dst, size_t dst_pitch, const void *src,
                              size_t src_pitch, size_t width, size_t height,
                              enum cudaMemcpyKind kind, cudaStream_t s);
cudaError_t cudaMemcpyPeer(void *dst, int dst_device, const void *src,
                           int src_device, size_t n);
cudaError_t cudaMemcpyPeerAsync(void *dst, int dst_device, const void *src,
                                int src_device, size_t n, cudaStream_t s);
cudaError_t cudaMemcpy3DPeer(const struct cudaMemcpy3DPeerParms *p);
cudaError_t cudaMemcpy3DPeerAsync(const struct cudaMemcpy3DPeerParms *p,
                                  cudaStream_t s);
cudaError_t cudaMemset(void *p, int value, size_t n);
cudaError_t cudaMemsetAsync(void *p, int value, size_t n, cudaStream_t s);

#pragma GCC visibility pop
