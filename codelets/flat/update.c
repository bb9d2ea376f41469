/* SPDX-License-Identifier: Apache-2.0 */
/* Updates on the CPU, one pass over memory; the loops themselves are in
 * codelets/flat/loops.c. */
#include "codelets/flat/update.h"

#include <assert.h>
#include <stddef.h>

#include "codelets/flat/simd.h"

struct iz_update_range iz_update_range_of(const struct iz_hyper_at *s)
{
    return (struct iz_update_range){iz_hyper_consts(s), INT64_MAX};
}

struct iz_moments iz_update_state(const struct iz_update *u, int i)
{
    return (struct iz_moments){u->state[i], u->type,
                               iz_optimizer(u->optimizer)->state[i].which,
                               u->room - u->lacks[i].all};
}

int64_t iz_update_at(const struct iz_update *u, int i)
{
    return u->at - u->lacks[i].before;
}

/* Of the elements from i on; master and states are left out. */
static struct iz_streams streams_of(const struct iz_update *u, int64_t i)
{
    return (struct iz_streams){
        .g = (const char *)u->g + i * iz_dtype_bytes(u->g_type),
        .g_type = u->g_type,
        .d = u->d ? u->d + i : NULL,
        .out = u->out ? (char *)u->out + i * iz_dtype_bytes(u->out_type) : NULL,
        .out_type = u->out_type};
}

/* Elements [i, i + n), whose master is at p and whose states are fp32 from
 * state[] on.  The first of them is of range s or of a later one. */
static void update_range(const struct iz_update *u,
                         const struct iz_update_range *s, float *p,
                         float *const *state, int64_t i, int64_t n)
{
    for (int64_t begin = i, end = i + n, k; i < end; i += k) {
        struct iz_streams t = streams_of(u, i);
        t.p = p + (i - begin);
        for (int j = 0; j < IZ_STATES_MAX && state[j]; j++)
            t.state[j] = state[j] + (i - begin);
        if (u->lower)
            t.out = NULL;
        while (s->end <= i)
            s++;
        k = (s->end < end ? s->end : end) - i;
        iz_simd()->update[u->optimizer](&s->consts, &t, k);
    }
}

/* Elements that are widened at a time: they stay in the first-level cache, and
 * are enough for the loops over them to overlap in the processor. */
enum { TILE = 512 };

/* States in fewer bytes or a master in halves: of the elements from i on those
 * that lie in a tile of whole blocks.  How many they are. */
static int64_t update_tile(const struct iz_update *u,
                           const struct iz_update_range *s, int64_t i)
{
    int states = iz_optimizer(u->optimizer)->states;
    bool coded = u->type != IZ_MOMENT_F32;
    uint16_t *upper = u->out;
    _Alignas(64) float tile[IZ_STATES_MAX][TILE]; /* whole vectors */
    _Alignas(64) float master[TILE];
    int64_t skip = (u->at + i) % IZ_MOMENT_BLOCK, left = skip + u->n - i;
    int64_t room =
        (left + IZ_MOMENT_BLOCK - 1) / IZ_MOMENT_BLOCK * IZ_MOMENT_BLOCK;
    float *state[IZ_STATES_MAX] = {NULL};
    float *p = u->lower ? master : u->p + i;
    room = room < TILE ? room : TILE;
    int64_t n = (left < room ? left : room) - skip;
    for (int j = 0; j < states; j++) {
        struct iz_moments x = iz_update_state(u, j);
        int64_t from = iz_update_at(u, j) + i - skip;
        if (coded)
            iz_moment_load(tile[j], &x, from, room);
        state[j] = (coded ? tile[j] : (float *)x.p + from) + skip;
    }
    if (u->lower)
        iz_cast_join(master, upper + i, u->lower + i, n);
    update_range(u, s, p, state, i, n);
    if (u->lower)
        iz_cast_split(upper + i, u->lower + i, master, n);
    for (int j = 0; coded && j < states; j++) {
        struct iz_moments x = iz_update_state(u, j);
        iz_moment_store(&x, iz_update_at(u, j) + i - skip, tile[j], room,
                        u->key, u->first + i - skip);
    }
    return n;
}

/* The formula of a range if that is Adam's without L2 decay. */
static const struct iz_adam_consts *adam_of(const struct iz_update *u,
                                            const struct iz_update_range *s)
{
    bool muon = u->optimizer == IZ_OPTIMIZER_MUON;
    const struct iz_adam_consts *k =
        muon ? &s->consts.muon.adam : &s->consts.adam;
    bool adam = u->optimizer == IZ_OPTIMIZER_ADAM ||
                u->optimizer == IZ_OPTIMIZER_ADAMW ||
                (muon && !s->consts.muon.matrix);
    return adam && k->l2 == 0 ? k : NULL;
}

/* The whole blocks from element i on that Adam updates alike, in registers: how
 * many elements they are.  0: it is not so here. */
static int64_t update_blocks(const struct iz_update *u,
                             const struct iz_update_range *s, int64_t i)
{
    const struct iz_adam_consts *k = adam_of(u, s);
    int64_t end = s->end < u->n ? s->end : u->n;
    int64_t n = (end - i) / IZ_MOMENT_BLOCK * IZ_MOMENT_BLOCK;
    struct iz_streams t = streams_of(u, i);
    if (u->type == IZ_MOMENT_F32 || !k || (u->at + i) % IZ_MOMENT_BLOCK || !n)
        return 0;
    t.p = u->lower ? NULL : u->p + i;
    t.lower = u->lower ? u->lower + i : NULL;
    t.key = u->key;
    t.first = u->first + i;
    for (int j = 0; j < 2; j++) {
        struct iz_moments x = iz_update_state(u, j);
        int64_t at = iz_update_at(u, j) + i;
        bool fp8 = x.type == IZ_MOMENT_FP8;
        t.code[j] = (uint8_t *)x.p + (fp8 ? at : 2 * at);
        t.power[j] = fp8 ? (uint8_t *)x.p + x.n + at / IZ_MOMENT_BLOCK : NULL;
    }
    iz_simd()->adam_coded(k, &t, n);
    return n;
}

void iz_update(const struct iz_update *u)
{
    float *state[IZ_STATES_MAX] = {NULL};
    assert(u->n >= 0 && u->ranges > 0 && u->range[u->ranges - 1].end >= u->n);
    assert(!u->lower || (u->out && u->out_type == IZ_BF16 && !u->p));
    if (u->type == IZ_MOMENT_F32 && !u->lower) {
        for (int j = 0; j < iz_optimizer(u->optimizer)->states; j++)
            state[j] = (float *)u->state[j] + iz_update_at(u, j);
        update_range(u, u->range, u->p, state, 0, u->n);
        return;
    }
    const struct iz_update_range *s = u->range;
    for (int64_t i = 0, n; i < u->n; i += n) {
        while (s->end <= i)
            s++;
        n = update_blocks(u, s, i);
        n = n ? n : update_tile(u, s, i);
    }
}
