/* SPDX-License-Identifier: Apache-2.0 */
/* Writes down the place of every block. */
#include "tests/codelets/gpu/attention_order.h"

#include "codelets/kernels/attention.cuh"

static __global__ void places(int *head, int *tile, int *after,
                              struct iz_heads a)
{
    struct iz_attention_place here = iz_attention_place(a, a.group);

    head[blockIdx.x] = here.head;
    tile[blockIdx.x] = here.tile;
    after[blockIdx.x] = here.after;
}

void attention_order(int *head, int *tile, int *after, int blocks, int all,
                     int chunk, int group)
{
    struct iz_heads a = {};

    a.all = all;
    a.chunk = chunk;
    a.group = group;
    IZ_LAUNCH(places, blocks, 1, 0, NULL, head, tile, after, a);
}
