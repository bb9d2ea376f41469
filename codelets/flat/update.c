/* SPDX-License-Identifier: Apache-2.0 */
/* Updates on the CPU, one pass over memory; the loops themselves are in
 * codelets/flat/loops.c. */
#include "codelets/flat/update.h"

#include <assert.h>
#include <stddef.h>

#include "codelets/flat/simd.h"

struct iz_alike iz_alike_of(const struct iz_step *s)
{
    return (struct iz_alike){iz_consts_of(s), INT64_MAX};
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

/* Elements [i, i + n), whose master is at p and whose states are fp32 from
 * state[] on.  The first of them is of span s or of a later one; returns the
 * span of the last. */
static const struct iz_alike *update_range(const struct iz_update *u,
                                           const struct iz_alike *s, float *p,
                                           float *const *state, int64_t i,
                                           int64_t n)
{
    int64_t g_size = iz_dtype_bytes(u->g_type);
    int64_t out_size = iz_dtype_bytes(u->out_type);
    for (int64_t begin = i, end = i + n, k; i < end; i += k) {
        struct iz_streams t = {.p = p + (i - begin),
                               .g = (const char *)u->g + i * g_size,
                               .g_type = u->g_type,
                               .out_type = u->out_type};
        for (int j = 0; j < IZ_STATES_MAX && state[j]; j++)
            t.state[j] = state[j] + (i - begin);
        if (u->d)
            t.d = u->d + i;
        if (u->out && !u->lower)
            t.out = (char *)u->out + i * out_size;
        while (s->end <= i)
            s++;
        k = (s->end < end ? s->end : end) - i;
        iz_simd()->update[u->optimizer](&s->consts, &t, k);
    }
    return s;
}

/* Elements that are widened at a time: they stay in the first-level cache, and
 * are enough for the loops over them to overlap in the processor. */
enum { TILE = 512 };

/* States in fewer bytes or a master in halves, a tile of whole blocks at a
 * time. */
static void update_in_tiles(const struct iz_update *u)
{
    const struct iz_alike *s = u->span;
    int states = iz_optimizer(u->optimizer)->states;
    bool coded = u->type != IZ_MOMENT_F32;
    uint16_t *upper = u->out;
    _Alignas(64) float tile[IZ_STATES_MAX][TILE]; /* whole vectors */
    _Alignas(64) float master[TILE];
    for (int64_t i = 0, n; i < u->n; i += n) {
        int64_t skip = (u->at + i) % IZ_MOMENT_BLOCK;
        int64_t left = skip + u->n - i;
        int64_t room =
            (left + IZ_MOMENT_BLOCK - 1) / IZ_MOMENT_BLOCK * IZ_MOMENT_BLOCK;
        float *state[IZ_STATES_MAX] = {NULL};
        float *p = u->lower ? master : u->p + i;
        room = room < TILE ? room : TILE;
        n = (left < room ? left : room) - skip;
        for (int j = 0; j < states; j++) {
            struct iz_moments x = iz_update_state(u, j);
            int64_t from = iz_update_at(u, j) + i - skip;
            if (coded)
                iz_moment_load(tile[j], &x, from, room);
            state[j] = (coded ? tile[j] : (float *)x.p + from) + skip;
        }
        if (u->lower)
            iz_join_halves(master, upper + i, u->lower + i, n);
        s = update_range(u, s, p, state, i, n);
        if (u->lower)
            iz_split(upper + i, u->lower + i, master, n);
        for (int j = 0; coded && j < states; j++) {
            struct iz_moments x = iz_update_state(u, j);
            iz_moment_store(&x, iz_update_at(u, j) + i - skip, tile[j], room,
                            u->key + (uint64_t)j, u->first + i - skip);
        }
    }
}

void iz_update(const struct iz_update *u)
{
    float *state[IZ_STATES_MAX] = {NULL};
    assert(u->n >= 0 && u->spans > 0 && u->span[u->spans - 1].end >= u->n);
    assert(!u->lower || (u->out && u->out_type == IZ_BF16 && !u->p));
    if (u->type != IZ_MOMENT_F32 || u->lower) {
        update_in_tiles(u);
        return;
    }
    for (int j = 0; j < iz_optimizer(u->optimizer)->states; j++)
        state[j] = (float *)u->state[j] + iz_update_at(u, j);
    update_range(u, u->span, u->p, state, 0, u->n);
}
