/* SPDX-License-Identifier: Apache-2.0 */
/* A build without CUDA has no GPU. */
#include <errno.h>
#include <stddef.h>

#include "codelets/gpu/device.h"

int iz_device_count(void)
{
    return 0;
}

const char *iz_device_why_none(void)
{
    return "this program was built without CUDA";
}

int iz_device_use(int index, struct iz_device_info *info)
{
    return -ENODEV;
}

const char *iz_device_why_not(int index, struct iz_device_info *info)
{
    return iz_device_why_none();
}

bool iz_device_pci(int index, char pci[16])
{
    return false;
}

void *iz_device_take(int64_t bytes)
{
    return NULL;
}

void iz_device_give(void *p)
{
}

const char *iz_device_pin(void *p, int64_t bytes)
{
    return iz_device_why_none();
}

void iz_device_unpin(void *p)
{
}

void *iz_device_stream_open(void)
{
    return NULL;
}

void iz_device_stream_close(void *stream)
{
}

void *iz_device_worker_stream(void)
{
    return NULL;
}

void iz_device_copy(void *stream, void *dst, const void *src, int64_t bytes)
{
}

void iz_device_clear(void *stream, void *p, int64_t bytes)
{
}

bool iz_device_done(void *stream)
{
    return true;
}

void iz_device_wait(void *stream)
{
}
