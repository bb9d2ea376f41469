/* SPDX-License-Identifier: Apache-2.0 */
/* What tests and emulated kernels may ask of the stand-in for CUDA: a library
 * with CUDA's interface on the memory and threads of the host.  Programs know
 * nothing of it; they use CUDA's own calls.
 *
 * Its environment: IZ_STANDIN_DEVICES (1), IZ_STANDIN_MEM_MB per device (512),
 * IZ_STANDIN_CAPABILITY (90) of the devices, IZ_STANDIN_JITTER_US (0): each
 * operation of a stream first waits a random time up to this,
 * IZ_STANDIN_PAGEABLE=abort: asynchronous copies from or to memory that is not
 * pinned end the program instead of being counted,
 * IZ_STANDIN_STATS: a file to which a line of JSON is added at exit.  What goes
 * wrong on purpose in the stand-in for NCCL:
 * IZ_STANDIN_FAULT=RANK:GROUP:SIGNAL, that rank's process gets the signal (a
 * number) when a stream begins its group of calls with this number;
 * IZ_STANDIN_SILENT=1, ncclCommGetAsyncError tells of no rank that is gone, as
 * NCCL between GPUs of one host; IZ_STANDIN_BLOCKS=NAME, the function of this
 * name never returns; IZ_STANDIN_BUSY=N,
 * others have filled device N; IZ_STANDIN_NO_PINNING=1, cudaHostRegister finds
 * no memory. */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "codelets/base/build.h"

#pragma GCC visibility push(default)

/* Counters of this process, which change as streams work. */
enum iz_standin_count {
    IZ_STANDIN_H2D, /* bytes of copies */
    IZ_STANDIN_D2H,
    IZ_STANDIN_H2D_COPIES,
    IZ_STANDIN_KERNELS,  /* functions that streams were given */
    IZ_STANDIN_PAGEABLE, /* asynchronous copies that were not */
    IZ_STANDIN_BYTES,    /* of device memory, now */
    IZ_STANDIN_PINNED,   /* ranges, now */
    IZ_STANDIN_COUNTS
};
extern _Atomic int64_t iz_standin_count[IZ_STANDIN_COUNTS];

/* Where the byte at a device address can be reached; any other address is
 * returned unchanged. */
void *iz_standin_host(const void *p);

/* The same for the n bytes that a kernel touches: ends the program unless they
 * lie in one live allocation of device memory, or of pinned memory that is
 * mapped for devices. */
void *iz_standin_kernel(const void *p, size_t n);

/* Whether n bytes of host memory are pinned. */
bool iz_standin_pinned(const void *p, size_t n);

/* A copy of n bytes that the caller owns. */
void *iz_standin_dup(const void *p, size_t n);

IZ_NORETURN void iz_standin_die(const char *fmt, ...) IZ_PRINTF(1, 2);

#pragma GCC visibility pop
