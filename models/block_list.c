/* SPDX-License-Identifier: Apache-2.0 */
/* Which parameters a unit has, in which order. */
#include "models/block_modules.h"

/* What the weight of a module, or its bias, needs. */
static bool has_place(const struct iz_block *b, int kind,
                      struct iz_block_place p)
{
    enum { NEVER = 1 << 30 };
    static const unsigned needs[MODULES][2] = {
        [NORM_1] = {IZ_HAS_BEFORE, IZ_HAS_BEFORE | IZ_HAS_NORM_BIAS},
        [QKV] = {0, IZ_HAS_QKV_BIAS},
        [ATTN_PROJ] = {0, IZ_HAS_PROJ_BIAS},
        [NORM_2] = {IZ_HAS_BEFORE, IZ_HAS_BEFORE | IZ_HAS_NORM_BIAS},
        [FC] = {0, IZ_HAS_MLP_BIAS},
        [MLP_PROJ] = {0, IZ_HAS_MLP_BIAS},
        [Q_NORM] = {IZ_HAS_QK_NORM, NEVER},
        [K_NORM] = {IZ_HAS_QK_NORM, NEVER},
        [ROUTER] = {0, IZ_HAS_ROUTER_BIAS},
        [BEHIND_1] = {IZ_HAS_BEHIND, IZ_HAS_BEHIND | IZ_HAS_NORM_BIAS},
        [BEHIND_2] = {IZ_HAS_BEHIND, IZ_HAS_BEHIND | IZ_HAS_NORM_BIAS},
        [SINKS] = {IZ_HAS_SINKS, NEVER},
        [CHOICE] = {NEVER, IZ_HAS_CHOICE},
        [SHARED_FC] = {0, NEVER},
        [SHARED_PROJ] = {0, NEVER},
        [SHARED_GATE] = {IZ_HAS_SHARED_GATE, NEVER}};
    bool norm = p.module == NORM_1 || p.module == NORM_2 ||
                p.module == BEHIND_1 || p.module == BEHIND_2;
    bool shared = p.module >= SHARED_FC;
    unsigned need = needs[p.module][p.bias];
    if (kind == KIND_HEAD && p.module == FC)
        return p.bias && b->has & IZ_HAS_HEAD_BIAS;
    if (kind == KIND_HEAD)
        return p.module == NORM_1 && !(b->has & IZ_HAS_BARE) &&
               (!p.bias || b->has & IZ_HAS_NORM_BIAS);
    if (kind == KIND_BLOCK &&
        (shared || p.module == ROUTER || p.module == CHOICE))
        return false;
    if (shared && !b->experts.shared)
        return false;
    if (kind == KIND_ROUTER && (p.module == FC || p.module == MLP_PROJ))
        return false;
    if ((norm && b->has & IZ_HAS_BARE) ||
        (p.module == NORM_2 && b->has & IZ_HAS_ONE_NORM))
        return false;
    return (b->has & need) == need;
}

int iz_block_list(struct iz_block_place list[BLOCK_MOST],
                  const struct iz_block *b, int kind)
{
#define LATER                                                                  \
    {SINKS, 0}, {SINKS, 1}, {CHOICE, 0}, {CHOICE, 1}, {SHARED_FC, 0},          \
        {SHARED_FC, 1}, {SHARED_PROJ, 0}, {SHARED_PROJ, 1}, {SHARED_GATE, 0},  \
    {                                                                          \
        SHARED_GATE, 1                                                         \
    }
    /* With biases behind their weights, or behind all weights. */
    static const struct iz_block_place orders[2][BLOCK_MOST] = {
        {{NORM_1, 0},   {QKV, 0},      {ATTN_PROJ, 0}, {NORM_2, 0},
         {FC, 0},       {MLP_PROJ, 0}, {QKV, 1},       {Q_NORM, 0},
         {K_NORM, 0},   {ROUTER, 0},   {NORM_1, 1},    {ATTN_PROJ, 1},
         {NORM_2, 1},   {FC, 1},       {MLP_PROJ, 1},  {BEHIND_1, 0},
         {BEHIND_2, 0}, {BEHIND_1, 1}, {BEHIND_2, 1},  {Q_NORM, 1},
         {K_NORM, 1},   {ROUTER, 1},   LATER},
        {{NORM_1, 0},    {NORM_1, 1},    {QKV, 0},      {QKV, 1},
         {ATTN_PROJ, 0}, {ATTN_PROJ, 1}, {NORM_2, 0},   {NORM_2, 1},
         {FC, 0},        {FC, 1},        {MLP_PROJ, 0}, {MLP_PROJ, 1},
         {Q_NORM, 0},    {Q_NORM, 1},    {K_NORM, 0},   {K_NORM, 1},
         {ROUTER, 0},    {ROUTER, 1},    {BEHIND_1, 0}, {BEHIND_1, 1},
         {BEHIND_2, 0},  {BEHIND_2, 1},  LATER}};
#undef LATER
    const struct iz_block_place *order = orders[b->has & IZ_HAS_IN_OUT];
    int n = 0;
    for (int i = 0; i < BLOCK_MOST; i++)
        if (has_place(b, kind, order[i]))
            list[n++] = order[i];
    return n;
}
