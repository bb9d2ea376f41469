/* SPDX-License-Identifier: Apache-2.0 */
/* The GPU of a rank, without a type of CUDA: memory, pinned host memory, and
 * streams that copy.  A rank uses one GPU.  In a build without CUDA there is
 * none.  What fails while tasks run ends the job (iz_die). */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "codelets/base/build.h"

IZ_C_BEGIN

struct iz_device_info {
    char name[128];
    char pci[16];   /* "0000:41:00.0" */
    int capability; /* 90 for 9.0 */
    int64_t total_bytes, free_bytes;
};

/* GPUs that this process may use; 0 without a driver or without CUDA.  Why
 * there is none is one sentence, or "". */
int iz_device_count(void);
const char *iz_device_why_none(void);

/* Closes what iz_device_stream_open has opened, or NULL. */
void iz_device_stream_close(void *stream);

/* ---- with a GPU; in a build without CUDA these end the job ---- */

/* Makes `index` the GPU of the calling thread and fills *info.  Negative errno
 * with the reason printed. */
int iz_device_use(int index, struct iz_device_info *info);
/* Like iz_device_use, without printing.  Returns NULL, or CUDA's reason. */
const char *iz_device_why_not(int index, struct iz_device_info *info);

/* Only where it is, as above; false: CUDA does not say. */
bool iz_device_pci(int index, char pci[16]);

/* Device memory, set to zero; NULL with the reason printed. */
void *iz_device_take(int64_t bytes);
void iz_device_give(void *p);

/* Locks host memory and makes it known to the GPU, so that copies run beside
 * everything else.  NULL, or why not. */
const char *iz_device_pin(void *p, int64_t bytes);
void iz_device_unpin(void *p);

/* A queue of copies of the calling thread's GPU; NULL with the reason printed.
 */
void *iz_device_stream_open(void);
/* The stream of the GPU's worker, which calls this. */
void *iz_device_worker_stream(void);

/* *event happens after all that is enqueued so far; opened if it is NULL. */
void iz_device_record(void **event, void *stream);
/* Later work on the stream waits for the event as recorded now; NULL: for
 * nothing. */
void iz_device_follow(void *stream, void *event);
/* Accepts NULL. */
void iz_device_event_close(void *event);

/* Enqueue; any of the pointers may be host or device memory. */
void iz_device_copy(void *stream, void *dst, const void *src, int64_t bytes);
void iz_device_clear(void *stream, void *p, int64_t bytes);
/* Whether all that was enqueued is done. */
bool iz_device_done(void *stream);
/* Between two looks at it: a nap, longer with each turn from 0 on. */
void iz_device_nap(int turn);
/* Until it is: polls, with such naps. */
void iz_device_wait(void *stream);

IZ_C_END
