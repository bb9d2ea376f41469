/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/codelets/gpu/parts.h"

#include "codelets/kernels/attention.cuh"

static __global__ void places(int (*place)[3], struct iz_heads a)
{
    struct iz_attention_place here = iz_attention_place(a, a.group);
    place[blockIdx.x][0] = here.head;
    place[blockIdx.x][1] = here.tile;
    place[blockIdx.x][2] = here.after;
}

void attention_places(int (*place)[3], int blocks, int all, int chunk,
                      int group)
{
    struct iz_heads a = {};
    a.all = all;
    a.chunk = chunk;
    a.group = group;
    IZ_LAUNCH(places, blocks, 1, 0, NULL, place, a);
}
