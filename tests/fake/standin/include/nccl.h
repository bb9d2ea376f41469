/* SPDX-License-Identifier: Apache-2.0 */
/* The part of NCCL that the stand-in (tests/fake) has, with NCCL's names
 * and meanings. */
#pragma once

#include <cuda_runtime_api.h>

#define NCCL_UNIQUE_ID_BYTES 128

#pragma GCC visibility push(default)

typedef struct ncclComm *ncclComm_t;

typedef struct {
    char internal[NCCL_UNIQUE_ID_BYTES];
} ncclUniqueId;

typedef enum {
    ncclSuccess = 0,
    ncclUnhandledCudaError = 1,
    ncclInvalidArgument = 4,
    ncclInvalidUsage = 5,
    ncclRemoteError = 6
} ncclResult_t;

typedef enum { ncclUint8 = 1 } ncclDataType_t;

const char *ncclGetErrorString(ncclResult_t r);
const char *ncclGetLastError(ncclComm_t c);

ncclResult_t ncclGetUniqueId(ncclUniqueId *id);
ncclResult_t ncclCommInitRank(ncclComm_t *c, int ranks, ncclUniqueId id,
                              int rank);
ncclResult_t ncclCommDestroy(ncclComm_t c);
ncclResult_t ncclCommGetAsyncError(ncclComm_t c, ncclResult_t *r);

ncclResult_t ncclGroupStart(void);
ncclResult_t ncclGroupEnd(void);

/* count: elements that each rank sends. */
ncclResult_t ncclAllGather(const void *src, void *dst, size_t count,
                           ncclDataType_t type, ncclComm_t c, cudaStream_t s);
ncclResult_t ncclSend(const void *src, size_t count, ncclDataType_t type,
                      int peer, ncclComm_t c, cudaStream_t s);
ncclResult_t ncclRecv(void *dst, size_t count, ncclDataType_t type, int peer,
                      ncclComm_t c, cudaStream_t s);

#pragma GCC visibility pop
