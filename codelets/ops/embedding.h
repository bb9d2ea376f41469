/* SPDX-License-Identifier: Apache-2.0 */
/* Where the parts of the scratch of the embedding's gradient lie on a GPU. */
#pragma once

#include <stdint.h>

enum {
    IZ_EMBEDDING_PIECE = 128, /* positions that one sum covers at most */
    IZ_EMBEDDING_SLOT = 64    /* see embedding.cu */
};

/* Offsets in bytes, aligned to 64. */
struct iz_embedding_scratch {
    int64_t keys, other; /* [n] sorted pairs of token and position */
    int64_t first;       /* int32 [vocab + 1] */
    int64_t sums;        /* fp32 [slots, c]: sums of pieces */
    int64_t slots, total;
};

static inline int64_t iz_embedding_pad(int64_t bytes)
{
    return (bytes + 63) / 64 * 64;
}

static inline struct iz_embedding_scratch
iz_embedding_scratch_of(int64_t n, int64_t vocab, int64_t c)
{
    struct iz_embedding_scratch s;
    s.keys = 0;

    s.other = s.keys + iz_embedding_pad(n * 8);
    s.first = s.other + iz_embedding_pad(n * 8);
    s.sums = s.first + iz_embedding_pad((vocab + 1) * 4);
    s.slots = n / IZ_EMBEDDING_SLOT + 1;
    s.total = s.sums + iz_embedding_pad(s.slots * c * 4);
    return s;
}
