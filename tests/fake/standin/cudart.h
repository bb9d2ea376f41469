/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of the stand-in's CUDA runtime share. */
#pragma once

#include <pthread.h>

#include <cuda_runtime_api.h>

#include "tests/fake/standin/standin.h"

#define IZ_STANDIN_MAX_DEVICES 16

/* Guards memory, streams and events. */
extern pthread_mutex_t iz_standin_lock;

/* Settings of the environment, fixed when the library is loaded. */
struct iz_standin_settings {
    int devices, capability;
    int busy; /* a device that others have filled; the most: none */
    int64_t mem_bytes, jitter_us;
    bool abort_pageable, no_pinning;
    const char *stats_path;
};
extern struct iz_standin_settings iz_standin_settings;

void iz_standin_map_devices(void);

/* The device of this thread. */
int iz_standin_device(void);

/* The device whose memory p points into, or -1. */
int iz_standin_device_of(const void *p);

/* Remembers an error for cudaGetLastError; returns it. */
cudaError_t iz_standin_error(cudaError_t e);

/* Lets the stream call run(arg), after what is in it. */
cudaError_t iz_standin_push(cudaStream_t s, void (*run)(void *), void *arg);

/* Waits for all that is in a stream, or in all streams of a device. */
void iz_standin_drain(cudaStream_t s);
void iz_standin_drain_device(int device);
