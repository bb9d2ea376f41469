/* SPDX-License-Identifier: Apache-2.0 */
/* The kinds of task: what traces call them, their colours and priorities. */
#include "codelets/task/task.h"

/* Okabe-Ito palette and shades of it: told apart with any colour vision. */
const struct iz_kind_info iz_kinds[IZ_KINDS] = {
    [IZ_BATCH] = {"batch", IZ_BATCH, 0x999999, 6000},
    [IZ_LOAD] = {"load", IZ_FETCH, 0x88ccee, 9000},
    [IZ_FETCH] = {"fetch", IZ_FETCH, 0x56b4e9, 9000},
    [IZ_FORWARD] = {"forward", IZ_FORWARD, 0x009e73, 4000},
    [IZ_BACKWARD] = {"backward", IZ_BACKWARD, 0x0072b2, 5000},
    [IZ_REDUCE] = {"reduce", IZ_REDUCE, 0xcc79a7, 8000},
    [IZ_OFFLOAD] = {"offload", IZ_OFFLOAD, 0x882255, 8500},
    [IZ_NORM] = {"norm", IZ_NORM, 0xf0e442, 4500},
    [IZ_CLIP] = {"clip", IZ_NORM, 0x000000, 9500},
    [IZ_ADAM] = {"adam", IZ_ADAM, 0xd55e00, 3000},
    [IZ_MUON] = {"muon", IZ_ADAM, 0xb04a00, 3100},
    [IZ_STORE] = {"store", IZ_OFFLOAD, 0xe69f00, 8000},
    [IZ_SNAPSHOT] = {"snapshot", IZ_SAVE, 0xaa4499, 3900},
    [IZ_SAVE] = {"save", IZ_SAVE, 0xddcc77, 7000},
    [IZ_EVAL] = {"eval", IZ_FORWARD, 0x66c2a5, 4000},
    [IZ_SAMPLE] = {"sample", IZ_FORWARD, 0x117733, 4000},
};
