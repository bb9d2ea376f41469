/* SPDX-License-Identifier: Apache-2.0 */
/* Reads and writes parameters and states where they live, when no task runs. */
#include "runtime/engine/access.h"

#include <assert.h>
#include <stdlib.h>

#include "codelets/base/die.h"
#include "codelets/base/int64.h"
#include "codelets/base/mix.h"
#include "codelets/base/take.h"
#include "codelets/gpu/device.h"
#include "runtime/comm/coll.h"
#include "runtime/engine/bounce.h"
#include "runtime/plan/matrices.h"

/* What the first buffer of a kind holds of a file. */
static void move_held(struct iz_engine *e, enum iz_staging_kind what,
                      bool store)
{
    bool state = what == IZ_STAGING_STATE;
    struct iz_nvme *file = state ? e->file.state : e->file.param;
    struct iz_staging_ring *s = &e->staging[what];
    int64_t at = state ? s->held->state_at : s->held->param_at;
    int64_t bytes = state ? s->held->state_bytes : s->held->param_bytes;
    if (store)
        iz_nvme_write(file, s->buffer[0].p, at, bytes);
    else
        iz_nvme_read(file, s->buffer[0].p, at, bytes);
    s->changed = false;
}

static void let_go(struct iz_engine *e, enum iz_staging_kind what)
{
    if (e->staging[what].changed)
        move_held(e, what, true);
    e->staging[what].held = NULL;
}

/* A chunk's states or its parameters in memory, about to be changed or not.
 * What is on disk comes into a buffer, which holds it until another one is
 * asked for. */
static char *chunk_bytes(struct iz_engine *e, struct iz_chunk *k,
                         enum iz_staging_kind what, bool change)
{
    char *there = what == IZ_STAGING_STATE ? (char *)k->state : k->param;
    struct iz_staging_ring *s = &e->staging[what];
    if (there)
        return there;
    if (s->held != k) {
        let_go(e, what);
        s->held = k;
        move_held(e, what, false);
    }
    s->changed |= change;
    return s->buffer[0].p;
}

void iz_access_let_go(struct iz_engine *e)
{
    let_go(e, IZ_STAGING_STATE);
    let_go(e, IZ_STAGING_PARAM);
}

/* Elements of a state between the host and a GPU at a time: their codes, and in
 * fp8 the powers, have room in the pinned buffer. */
enum { CODES = 1 << 20 };

static_assert(2 * CODES <= IZ_BOUNCE_BYTES, "bf16");
static_assert(CODES % IZ_MOMENT_BLOCK == 0, "whole blocks");

/* Blocks of a state that lies on the GPU, those from element `at` on, as an
 * array in the pinned buffer: copied there, or back from there. */
static void copy_codes(struct iz_engine *e, const struct iz_moments *code,
                       const struct iz_moments *x, int64_t at, bool back)
{
    int64_t size = x->type == IZ_MOMENT_BF16 ? 2 : 1;
    char *gpu[2] = {(char *)x->p + at * size,
                    (char *)x->p + x->n + at / IZ_MOMENT_BLOCK};
    char *host[2] = {code->p, (char *)code->p + code->n};
    int64_t bytes[2] = {code->n * size, code->n / IZ_MOMENT_BLOCK};
    for (int i = 0; i < (x->type == IZ_MOMENT_FP8 ? 2 : 1); i++)
        iz_device_copy(e->bounce.stream, back ? gpu[i] : host[i],
                       back ? host[i] : gpu[i], bytes[i]);
    iz_device_wait(e->bounce.stream);
}

/* iz_moment_get of [at, at + n), or iz_moment_put with this key and first,
 * wherever the chunk is: on a GPU, whole blocks around that part are copied. */
static void move_moments(struct iz_engine *e, enum iz_home h,
                         const struct iz_moments *x, int64_t at, float *host,
                         int64_t n, bool put, uint64_t key, int64_t first)
{
    for (int64_t i = 0, k = n; i < n; i += k) {
        struct iz_moments code = *x;
        int64_t from = at;
        if (iz_bounce_on_gpu(e, h)) {
            from = (at + i) % IZ_MOMENT_BLOCK;
            k = min64(n - i, CODES - from);
            code.p = e->bounce.buffer;
            code.n = round_up(from + k, IZ_MOMENT_BLOCK);
            copy_codes(e, &code, x, at + i - from, false);
        }
        if (put)
            iz_moment_put(&code, from, host + i, k, key, first + i);
        else
            iz_moment_get(host + i, &code, from, k);
        if (put && iz_bounce_on_gpu(e, h))
            copy_codes(e, &code, x, at + i - from, true);
    }
}

/* n parameters of a chunk from element `at` on, in their type on one side. */
static void move_params(struct iz_engine *e, struct iz_chunk *k, int64_t at,
                        float *host, int64_t n, bool put)
{
    enum iz_home h = k->param_home;
    enum iz_dtype type = e->plan.param_type;
    int64_t size = iz_dtype_bytes(type);
    char *param = chunk_bytes(e, k, IZ_STAGING_PARAM, put) + at * size;
    for (int64_t i = 0, m; i < n; i += m) {
        m = min64(n - i, IZ_BOUNCE_BYTES / size);
        char *place = param + i * size, *way = iz_bounce_way(e, h, 0, place);
        if (put)
            iz_cast_params(way, type, host + i, m);
        iz_bounce_pass(e, place, way, m * size, put);
        if (!put)
            iz_cast(host + i, IZ_F32, way, type, m);
    }
}

/* n masters of a chunk from element `at` on, whose lower halves are in its
 * states, and whose upper ones are its parameters.  Each has half of the pinned
 * buffer. */
static void move_halves(struct iz_engine *e, struct iz_chunk *k, int64_t at,
                        float *host, int64_t n, bool put)
{
    const int64_t size = sizeof(uint16_t), half = IZ_BOUNCE_BYTES / 2;
    char *low = chunk_bytes(e, k, IZ_STAGING_STATE, put) + at * size;
    char *high = chunk_bytes(e, k, IZ_STAGING_PARAM, put) + at * size;
    for (int64_t i = 0, m; i < n; i += m) {
        char *place[2] = {low + i * size, high + i * size};
        char *way[2] = {iz_bounce_way(e, k->home, 0, place[0]),
                        iz_bounce_way(e, k->param_home, 1, place[1])};
        m = min64(n - i, half / size);
        if (put)
            iz_cast_split((uint16_t *)way[1], (uint16_t *)way[0], host + i, m);
        for (int p = 0; p < 2; p++)
            iz_bounce_pass(e, place[p], way[p], m * size, put);
        if (!put)
            iz_cast_join(host + i, (uint16_t *)way[1], (uint16_t *)way[0], m);
    }
}

struct iz_quant_groups iz_owned_groups(const struct iz_engine *e, int unit)
{
    const struct iz_plan_quant *q = &e->unit[unit].plan->quant;
    struct iz_owned words = iz_owned_of_array(e, unit, IZ_QUANT_WORDS);
    int64_t each = iz_quant_bytes(q->format) / 4;
    return (struct iz_quant_groups){words.begin / each, words.end / each};
}

/* Of a quantised part, whose shards are whole groups. */
static struct iz_owned owned_values(const struct iz_engine *e, int unit)
{
    const struct iz_plan_unit *p = e->unit[unit].plan;
    const struct iz_unit *u = &e->model->unit[unit];
    struct iz_owned q = {
        .array = IZ_QUANT_VALUES, .n = p->quant.n, .at = p->n + p->frozen.n};
    if (!q.n)
        return q;
    struct iz_quant_groups g = iz_owned_groups(e, unit);
    iz_unit_quant_group(u, g.first, &q.first);
    iz_unit_quant_group(u, g.last, &q.last);
    q.begin = q.first;
    q.end = q.last;
    return q;
}

/* Words of what is quantised a rank owns of its shard alone. */
struct iz_owned iz_owned_of_array(const struct iz_engine *e, int unit,
                                  enum iz_array a)
{
    const struct iz_plan_unit *p = e->unit[unit].plan;
    const struct iz_plan_frozen trained = {
        .n = p->n, .shard = p->shard, .owned = p->owned};
    const struct iz_plan_frozen *f = a == IZ_QUANT_WORDS ? &p->quant.words
                                     : a == IZ_FROZEN    ? &p->frozen
                                                         : &trained;
    int64_t own = f->shard * e->plan.rank;
    int64_t first = e->plan.zero.state.whole && a != IZ_QUANT_WORDS ? 0 : own;
    if (a == IZ_QUANT_VALUES)
        return owned_values(e, unit);
    return (struct iz_owned){.array = a,
                             .n = f->n,
                             .first = first,
                             .last = min64(first + f->owned, f->n),
                             .begin = min64(own, f->n),
                             .end = min64(own + f->shard, f->n),
                             .at = a == IZ_FROZEN ? p->n : 0};
}

struct iz_owned iz_owned_of(const struct iz_engine *e, int unit,
                            enum iz_unit_part part)
{
    static const enum iz_array arrays[IZ_PARTS] = {IZ_MASTER, IZ_FROZEN,
                                                   IZ_QUANT_VALUES};
    return iz_owned_of_array(e, unit, arrays[part]);
}

int64_t iz_engine_array(const struct iz_engine *e, int unit, enum iz_array a,
                        int64_t at)
{
    const struct iz_optimizer *o = iz_optimizer(e->plan.optimizer.type);
    bool packed = a >= IZ_STATE && o->state[a - IZ_STATE].of_elements;
    return packed ? at - iz_plan_lacks(&e->plan, e->unit[unit].plan, at) : at;
}

struct iz_extent iz_engine_extent(const struct iz_engine *e, int unit,
                                  enum iz_array a, int64_t at, int64_t n)
{
    const struct iz_unit_memory *g = &e->unit[unit];
    struct iz_chunks chunks = iz_unit_chunks(g, iz_array_part(a));
    struct iz_chunk *k = chunks.list;
    int64_t first = iz_owned_of_array(e, unit, a).first, begin, end;
    for (;; k++) {
        assert(k < chunks.list + chunks.n);
        begin = iz_engine_array(e, unit, a, first + k->first);
        end = iz_engine_array(e, unit, a, first + k->first + k->count);
        if (at < end)
            break;
    }
    struct iz_state_layout l = iz_chunk_states(e, unit, k);
    bool state = a >= IZ_STATE || (a == IZ_MASTER && l.master);
    return (struct iz_extent){
        .chunk = k,
        .states = l,
        .state = state,
        .home = state ? k->home : k->param_home,
        .base = a >= IZ_STATE ? l.at[a - IZ_STATE] : 0,
        .room = a >= IZ_STATE ? l.room - iz_state_lacks(&l, (int)a - IZ_STATE)
                              : l.room,
        .at = at - begin,
        .n = min64(end - at, n)};
}

/* In fp32 the parameters are the master.  Parameters are rounded to their type
 * on the way. */
static void move_array(struct iz_engine *e, int unit, enum iz_array a,
                       int64_t from, float *host, int64_t n, bool put)
{
    bool coded = a >= IZ_STATE && e->plan.optimizer.moments != IZ_MOMENT_F32;
    uint64_t key = iz_mix_text(iz_mix(e->config->run.seed), "put moments");
    for (struct iz_extent p; n > 0; from += p.n, host += p.n, n -= p.n) {
        p = iz_engine_extent(e, unit, a, from, n);
        bool halves = a == IZ_MASTER && p.states.lower;
        enum iz_staging_kind what =
            p.state ? IZ_STAGING_STATE : IZ_STAGING_PARAM;
        if (a == IZ_FROZEN) {
            move_params(e, p.chunk, p.at, host, p.n, put);
        } else if (halves) {
            move_halves(e, p.chunk, p.at, host, p.n, put);
        } else if (coded) {
            struct iz_moments x =
                iz_state_array(&p.states, chunk_bytes(e, p.chunk, what, put),
                               (int)a - IZ_STATE);
            move_moments(e, p.home, &x, p.at, host, p.n, put,
                         iz_mix(key + (uint64_t)(unit * IZ_STATES_MAX + (int)a -
                                                 IZ_STATE)),
                         from);
        } else {
            char *at = chunk_bytes(e, p.chunk, what, put) + p.base + p.at * 4;
            iz_bounce_move(e, p.home, at, (char *)host, p.n * 4, put);
        }
        if (put && p.state && a == IZ_MASTER && !halves)
            move_params(e, p.chunk, p.at, host, p.n, true);
    }
}

/* The groups that elements [from, from + n) lie in. */
static struct iz_quant_groups groups_of(const struct iz_unit *u, int64_t from,
                                        int64_t n)
{
    struct iz_quant_matrix m = {0};
    struct iz_quant_groups g = {-1, 0};
    while (iz_unit_next_quant(u, &m)) {
        int64_t first = max64(from - m.first, 0);
        int64_t last = min64(from + n - m.first, m.n);
        if (first >= last)
            continue;
        if (g.first < 0)
            g.first = m.group + first / IZ_QUANT_GROUP;
        g.last = m.group + iz_quant_groups(last);
    }
    return g;
}

static void get_values(struct iz_engine *e, int unit, int64_t from, float *out,
                       int64_t n)
{
    const struct iz_unit *u = &e->model->unit[unit];
    enum iz_dtype type = e->plan.param_type;
    struct iz_quant_groups g = groups_of(u, from, n);
    enum iz_quant format = e->unit[unit].plan->quant.format;
    int64_t size = iz_quant_bytes(format), words = size / 4, first;
    float values[IZ_QUANT_GROUP];
    char *group = malloc((size_t)((g.last - g.first) * size));
    if (!group)
        iz_die("%s: no memory to read quantised parameters", u->name);
    move_array(e, unit, IZ_QUANT_WORDS, g.first * words, (float *)group,
               (g.last - g.first) * words, false);
    for (int64_t i = g.first, k; n > 0; i++, from += k, out += k, n -= k) {
        int64_t count = iz_unit_quant_group(u, i, &first);
        k = min64(first + count - from, n);
        iz_quant_load(format, values, type, group + (i - g.first) * size,
                      count);
        iz_cast(out, IZ_F32,
                (char *)values + (from - first) * iz_dtype_bytes(type), type,
                k);
    }
    free(group);
}

void iz_access_get(struct iz_engine *e, int unit, enum iz_array a, int64_t from,
                   float *out, int64_t n)
{
    if (a == IZ_QUANT_VALUES)
        get_values(e, unit, from, out, n);
    else
        move_array(e, unit, a, from, out, n, false);
}

void iz_access_put(struct iz_engine *e, int unit, enum iz_array a, int64_t from,
                   const float *in, int64_t n)
{
    move_array(e, unit, a, from, (float *)(uintptr_t)in, n, true);
}

float *iz_access_gather(struct iz_engine *e, int unit)
{
    const struct iz_plan_unit *p = e->unit[unit].plan;
    int64_t base = p->shard * e->plan.rank;
    float *all =
        iz_take(p->padded, sizeof(*all), "the trained parameters of %s",
                e->model->unit[unit].name);
    iz_access_get(e, unit, IZ_MASTER, base, all + base, p->shard);
    if (e->plan.ranks > 1)
        iz_coll_all_gather(e->coll, all, p->shard * (int64_t)sizeof(*all),
                           "trained parameters");
    return all;
}
