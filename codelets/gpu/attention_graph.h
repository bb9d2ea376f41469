/* SPDX-License-Identifier: Apache-2.0 */
/* Attention as cuDNN is told of it: a graph of small operations, for which the
 * library finds kernels. */
#pragma once

#include "codelets/gpu/cudnn_lib.h"
#include "codelets/ops/ops.h"

/* All that a graph depends on; no padding. */
struct iz_attention_key {
    int64_t samples, seq, heads, kv_heads, d, type, full;
    int64_t back; /* the gradient */
};

/* Of a forward of all samples, or of a backward of so many at once, because its
 * memory grows with them; 0: a forward. */
struct iz_attention_key iz_attention_key(const struct iz_attention *a,
                                         int64_t back);

/* Adds the operations to g; returns the descriptor of all. */
cudnnBackendDescriptor_t iz_attention_graph(struct iz_dnn_set *g,
                                            const struct iz_attention_key *k);

enum { IZ_ATTENTION_GIVEN = 13 };

/* Memory of the tensors that the library reads and writes, for one call. */
struct iz_attention_pack {
    int64_t n, id[IZ_ATTENTION_GIVEN];
    void *p[IZ_ATTENTION_GIVEN];
    float scale, lowest, one; /* are pointed to */
};

/* Of the samples from `sample` on.  dqkv and dy are those of a backward, delta
 * its scratch: a float for each row of each head. */
void iz_attention_pack(struct iz_attention_pack *to,
                       const struct iz_attention_key *k,
                       const struct iz_attention *a, int64_t sample,
                       struct iz_view dqkv, struct iz_view dy, void *delta);
