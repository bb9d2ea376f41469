/* SPDX-License-Identifier: Apache-2.0 */
/* The kinds of task: what traces call them, their colours and priorities. */
#include "codelets/task/task.h"

/* Okabe-Ito palette and shades of it: told apart with any colour vision. */
const struct iz_kind_info iz_kinds[IZ_KINDS] = {
    [IZ_BATCH] = {"batch", "batch", 0x999999, 6000},
    [IZ_LOAD] = {"load", "fetch", 0x88ccee, 9000},
    [IZ_FETCH] = {"fetch", "fetch", 0x56b4e9, 9000},
    [IZ_FORWARD] = {"forward", "forward", 0x009e73, 4000},
    [IZ_BACKWARD] = {"backward", "backward", 0x0072b2, 5000},
    [IZ_REDUCE] = {"reduce", "reduce", 0xcc79a7, 8000},
    [IZ_OFFLOAD] = {"offload", "offload", 0x882255, 8500},
    [IZ_NORM] = {"norm", "norm", 0xf0e442, 4500},
    [IZ_CLIP] = {"clip", "norm", 0x000000, 9500},
    [IZ_ADAM] = {"adam", "adam", 0xd55e00, 3000},
    [IZ_MUON] = {"muon", "adam", 0xb04a00, 3100},
    [IZ_STORE] = {"store", "offload", 0xe69f00, 8000},
    [IZ_SNAPSHOT] = {"snapshot", "save", 0xaa4499, 3900},
    [IZ_SAVE] = {"save", "save", 0xddcc77, 7000},
    [IZ_EVAL] = {"eval", "forward", 0x66c2a5, 4000},
    [IZ_SAMPLE] = {"sample", "forward", 0x117733, 4000},
};
