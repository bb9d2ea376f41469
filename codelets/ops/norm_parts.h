/* SPDX-License-Identifier: Apache-2.0 */
/* What the two normalisations share. */
#pragma once

#include <stdint.h>

#include "codelets/flat/dtype.h"

/* Blocks of a GPU that add up the gradients of the weights of `all` rows or
 * pieces of `cols` elements: two per SM of an H100, or four where a thread of a
 * block has 16 bytes of a row and too little is on its way with two. */
static inline int64_t iz_norm_layer_parts(int64_t all, int64_t cols,
                                          enum iz_dtype t)
{
    int64_t bytes = cols * iz_dtype_bytes(t);
    int64_t parts = bytes > 2048 && bytes <= 4096 ? 528 : 264;

    return all < parts ? all : parts;
}
