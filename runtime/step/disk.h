/* SPDX-License-Identifier: Apache-2.0 */
/* Chunks between files and buffers. */
#pragma once

#include "runtime/engine/engine.h"

/* Bytes between a file and `at` in a buffer. */
struct iz_io {
    struct iz_nvme *file;
    int64_t offset, bytes, at;
    /* For a sparse table: the chunk's elements, and its arrays.  Only pages
     * with touched rows are read and written. */
    int64_t first, count;
    struct iz_state_bytes array[IZ_STATE_BYTES];
    int priority_offset; /* of an update; 0: that of the unit */
    int arrays;
};

/* The token stands for the region of the file: a load reads it and a store
 * writes it, so that a load waits for the store before it.  mode: of the
 * buffer. */
void iz_disk_io(struct iz_engine *e, enum iz_kind kind, int unit,
                starpu_data_handle_t buffer, enum starpu_data_access_mode mode,
                starpu_data_handle_t token, struct iz_io a);
