/* SPDX-License-Identifier: Apache-2.0 */
/* Stand-in for the CUDA runtime: settings, devices and their properties,
 * errors, statistics. */
#define _GNU_SOURCE
#include "tests/fake/standin/cudart.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

pthread_mutex_t iz_standin_lock = PTHREAD_MUTEX_INITIALIZER;
_Atomic int64_t iz_standin_count[IZ_STANDIN_COUNTS];
struct iz_standin_settings iz_standin_settings;

static _Thread_local int current;
static _Thread_local cudaError_t last_error;

void iz_standin_die(const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    fputs("stand-in: ", stderr);
    vfprintf(stderr, fmt, args);
    fputc('\n', stderr);
    va_end(args);
    abort();
}

void *iz_standin_dup(const void *p, size_t n)
{
    void *copy = malloc(n);
    if (!copy)
        iz_standin_die("no memory");
    return memcpy(copy, p, n);
}

/* ---- settings and statistics -------------------------------------------- */

static int setting(const char *name, int usual)
{
    const char *s = getenv(name);
    return s && *s ? atoi(s) : usual;
}

static void print_stats(void)
{
    static const char *const name[] = {
        "h2d_bytes", "d2h_bytes",    "h2d_copies",   "kernels",
        "pageable",  "leaked_bytes", "leaked_pinned"};
    FILE *f = fopen(iz_standin_settings.stats_path, "a");
    if (!f) {
        perror(iz_standin_settings.stats_path);
        return;
    }
    for (int i = 0; i < IZ_STANDIN_COUNTS; i++)
        fprintf(f, "%s\"%s\": %" PRId64, i ? ", " : "{", name[i],
                iz_standin_count[i]);
    fputs("}\n", f);
    fclose(f);
}

/* When the library is loaded. */
static void __attribute__((constructor)) settings_read(void)
{
    struct iz_standin_settings *s = &iz_standin_settings;
    const char *pageable = getenv("IZ_STANDIN_PAGEABLE");
    s->devices = setting("IZ_STANDIN_DEVICES", 1);
    s->busy = setting("IZ_STANDIN_BUSY", IZ_STANDIN_MAX_DEVICES);
    s->mem_bytes = (int64_t)setting("IZ_STANDIN_MEM_MB", 512) << 20;
    s->capability = setting("IZ_STANDIN_CAPABILITY", 90);
    s->jitter_us = setting("IZ_STANDIN_JITTER_US", 0);
    s->no_pinning = setting("IZ_STANDIN_NO_PINNING", 0);
    s->abort_pageable = pageable && strcmp(pageable, "abort") == 0;
    s->stats_path = getenv("IZ_STANDIN_STATS");
    iz_standin_map_devices();
    if (s->stats_path && *s->stats_path)
        atexit(print_stats);
}

/* ---- calls -------------------------------------------------------------- */

cudaError_t iz_standin_error(cudaError_t e)
{
    if (e)
        last_error = e;
    return e;
}

cudaError_t cudaGetLastError(void)
{
    cudaError_t e = last_error;
    last_error = cudaSuccess;
    return e;
}

const char *cudaGetErrorString(cudaError_t e)
{
    static _Thread_local char text[32];
    snprintf(text, sizeof(text), "error %d", (int)e);
    return e == cudaErrorMemoryAllocation ? "out of memory" : text;
}

/* ---- devices ------------------------------------------------------------ */

static bool exists(int device)
{
    return device >= 0 && device < iz_standin_settings.devices;
}

int iz_standin_device(void)
{
    return current;
}

cudaError_t cudaGetDeviceCount(int *n)
{
    *n = iz_standin_settings.devices;
    return iz_standin_error(*n ? cudaSuccess : cudaErrorNoDevice);
}

cudaError_t cudaSetDevice(int device)
{
    if (!exists(device))
        return iz_standin_error(cudaErrorInvalidDevice);
    current = device;
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int *device)
{
    *device = current;
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize(void)
{
    iz_standin_drain_device(current);
    return cudaSuccess;
}

/* StarPU calls it when it has measured copies and freed their buffers. */
cudaError_t cudaDeviceReset(void)
{
    return cudaDeviceSynchronize();
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *prop, int device)
{
    if (!exists(device))
        return iz_standin_error(cudaErrorInvalidDevice);
    *prop = (struct cudaDeviceProp){
        .name = "stand-in",
        .totalGlobalMem = (size_t)iz_standin_settings.mem_bytes,
        .major = iz_standin_settings.capability / 10,
        .minor = iz_standin_settings.capability % 10,
        .multiProcessorCount = 1,
        .warpSize = 32,
        .concurrentKernels = 1,
        .asyncEngineCount = 2,
        .pciBusID = device + 1,
        .canMapHostMemory = 1,
        .unifiedAddressing = 1};
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr a, int dev)
{
    struct cudaDeviceProp p;
    cudaError_t e = cudaGetDeviceProperties(&p, dev);
    if (e)
        return e;
    *value = a == cudaDevAttrMultiProcessorCount      ? p.multiProcessorCount
             : a == cudaDevAttrPciBusId               ? p.pciBusID
             : a == cudaDevAttrComputeCapabilityMajor ? p.major
             : a == cudaDevAttrComputeCapabilityMinor ? p.minor
                                                      : cudaComputeModeDefault;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest)
{
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}
