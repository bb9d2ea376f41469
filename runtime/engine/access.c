/* SPDX-License-Identifier: Apache-2.0 */
/* Reads and writes parameters and states where they live, when no task runs. */
#include "runtime/engine/access.h"

#include <assert.h>
#include <string.h>

#include "codelets/gpu/device.h"
#include "runtime/engine/groups.h"

static bool on_gpu(const struct iz_engine *e, enum iz_home h)
{
    return e->plan.target.gpu && h == IZ_HOME_NONE;
}

/* Through a pinned buffer to and from the GPU. */
static void copy_up(struct iz_engine *e, char *gpu, const char *host,
                    int64_t bytes)
{
    for (int64_t i = 0; i < bytes; i += IZ_BOUNCE_BYTES) {
        int64_t n = bytes - i < IZ_BOUNCE_BYTES ? bytes - i : IZ_BOUNCE_BYTES;
        memcpy(e->bounce, host + i, (size_t)n);
        iz_device_copy(e->stream, gpu + i, e->bounce, n);
        iz_device_wait(e->stream);
    }
}

static void copy_down(struct iz_engine *e, char *host, const char *gpu,
                      int64_t bytes)
{
    for (int64_t i = 0; i < bytes; i += IZ_BOUNCE_BYTES) {
        int64_t n = bytes - i < IZ_BOUNCE_BYTES ? bytes - i : IZ_BOUNCE_BYTES;
        iz_device_copy(e->stream, e->bounce, gpu + i, n);
        iz_device_wait(e->stream);
        memcpy(host + i, e->bounce, (size_t)n);
    }
}

/* To a place whose home is h. */
static void put_bytes(struct iz_engine *e, enum iz_home h, void *dst,
                      const void *src, int64_t bytes)
{
    if (on_gpu(e, h))
        copy_up(e, dst, src, bytes);
    else
        memcpy(dst, src, (size_t)bytes);
}

static void get_bytes(struct iz_engine *e, enum iz_home h, void *dst,
                      const void *src, int64_t bytes)
{
    if (on_gpu(e, h))
        copy_down(e, dst, src, bytes);
    else
        memcpy(dst, src, (size_t)bytes);
}

/* The chunk's state arrays or parameters in memory, read from disk if need be
 * into the staging buffer `at` bytes in. */
static char *chunk_state(struct iz_engine *e, int group, struct iz_chunk *k)
{
    if (k->state)
        return (char *)k->state;
    iz_nvme_read(e->state_file, e->staging[IZ_STAGING_STATE].buffer[0].p,
                 k->state_at,
                 iz_plan_chunk_bytes(&e->plan, e->group[group].plan));
    return e->staging[IZ_STAGING_STATE].buffer[0].p;
}

static char *chunk_param(struct iz_engine *e, int group, struct iz_chunk *k)
{
    struct iz_group *g = &e->group[group];
    int64_t size = iz_dtype_bytes(e->plan.param_type);
    if (g->param)
        return (char *)g->param + k->param_first * size;
    iz_nvme_read(e->param_file, e->staging[IZ_STAGING_PARAM].buffer[0].p,
                 k->param_at, k->filed * size);
    return e->staging[IZ_STAGING_PARAM].buffer[0].p;
}

static void store_state(struct iz_engine *e, int group, struct iz_chunk *k)
{
    if (!k->state)
        iz_nvme_write(e->state_file, e->staging[IZ_STAGING_STATE].buffer[0].p,
                      k->state_at,
                      iz_plan_chunk_bytes(&e->plan, e->group[group].plan));
}

static void store_param(struct iz_engine *e, int group, struct iz_chunk *k)
{
    if (!e->group[group].param)
        iz_nvme_write(e->param_file, e->staging[IZ_STAGING_PARAM].buffer[0].p,
                      k->param_at,
                      k->filed * iz_dtype_bytes(e->plan.param_type));
}

/* Whether an array is kept in fewer bytes than it is read and written in. */
static bool engine_access_narrow(const struct iz_engine *e, enum iz_array a)
{
    return a >= IZ_STATE && e->plan.moments != IZ_MOMENT_F32;
}

/* Whether the chunk has a master beside its parameters. */
static bool separate(const struct iz_engine *e, int group,
                     const struct iz_chunk *k)
{
    return iz_chunk_states(e, group, k).master;
}

/* A state of a chunk. */
static struct iz_moments chunk_moments(struct iz_engine *e, int group,
                                       struct iz_chunk *k, enum iz_array a)
{
    struct iz_state_layout l = iz_chunk_states(e, group, k);

    return iz_state_array(&l, chunk_state(e, group, k), (int)a - IZ_STATE);
}

/* Elements of a state between the host and a GPU at a time: their codes, and in
 * fp8 the powers, have room in the pinned buffer. */
enum { NARROW = 1 << 20 };

static_assert(2 * NARROW <= IZ_BOUNCE_BYTES, "bf16");
static_assert(NARROW % IZ_MOMENT_BLOCK == 0, "whole blocks");

/* Blocks of a state that lies on the GPU, those from element `at` on, as an
 * array in the pinned buffer: copied there, or back from there. */
static void copy_codes(struct iz_engine *e, const struct iz_moments *near,
                       const struct iz_moments *x, int64_t at, bool back)
{
    int64_t size = x->type == IZ_MOMENT_BF16 ? 2 : 1;
    char *gpu[2] = {(char *)x->p + at * size,
                    (char *)x->p + x->n + at / IZ_MOMENT_BLOCK};
    char *host[2] = {near->p, (char *)near->p + near->n};
    int64_t bytes[2] = {near->n * size, near->n / IZ_MOMENT_BLOCK};

    for (int i = 0; i < (x->type == IZ_MOMENT_FP8 ? 2 : 1); i++)
        iz_device_copy(e->stream, back ? gpu[i] : host[i],
                       back ? host[i] : gpu[i], bytes[i]);
    iz_device_wait(e->stream);
}

/* The part of [at, at + n) of such an array that is copied at a time: *near is
 * its blocks, `at` its first element in them.  Returns its elements. */
static int64_t narrow_part(struct iz_engine *e, struct iz_moments *near,
                           const struct iz_moments *x, int64_t at, int64_t n,
                           int64_t *from)
{
    int64_t room;

    *from = at % IZ_MOMENT_BLOCK;
    n = n < NARROW - *from ? n : NARROW - *from;
    room =
        (*from + n + IZ_MOMENT_BLOCK - 1) / IZ_MOMENT_BLOCK * IZ_MOMENT_BLOCK;
    *near = (struct iz_moments){e->bounce, x->type, x->which, room};
    copy_codes(e, near, x, at - *from, false);
    return n;
}

/* iz_moment_get and iz_moment_put wherever the chunk is. */
static void get_moments(struct iz_engine *e, enum iz_home h, float *out,
                        const struct iz_moments *x, int64_t at, int64_t n)
{
    struct iz_moments near;

    if (!on_gpu(e, h)) {
        iz_moment_get(out, x, at, n);
        return;
    }
    for (int64_t i = 0, k, from; i < n; i += k) {
        k = narrow_part(e, &near, x, at + i, n - i, &from);
        iz_moment_get(out + i, &near, from, k);
    }
}

static void put_moments(struct iz_engine *e, enum iz_home h,
                        const struct iz_moments *x, int64_t at, const float *in,
                        int64_t n)
{
    struct iz_moments near;

    if (!on_gpu(e, h)) {
        iz_moment_put(x, at, in, n);
        return;
    }
    for (int64_t i = 0, k, from; i < n; i += k) {
        k = narrow_part(e, &near, x, at + i, n - i, &from);
        iz_moment_put(&near, from, in + i, k);
        copy_codes(e, &near, x, at + i - from, true);
    }
}

/* Where an array of a chunk lies; in fp32 the parameters are the master. */
static float *chunk_array(struct iz_engine *e, int group, struct iz_chunk *k,
                          enum iz_array a)
{
    if (a >= IZ_STATE)
        return chunk_moments(e, group, k, a).p;
    return (float *)(separate(e, group, k) ? chunk_state(e, group, k)
                                           : chunk_param(e, group, k));
}

/* Home of what chunk_array finds. */
static enum iz_home array_home(const struct iz_engine *e, int group,
                               const struct iz_chunk *k, enum iz_array a)
{
    return a == IZ_MASTER && !separate(e, group, k) ? e->plan.zero.param_home
                                                    : k->home;
}

/* Calls for every chunk that [from, from + n) touches. */
struct piece {
    struct iz_chunk *chunk;
    int64_t at, n, done; /* in the chunk; length; elements before it */
};

static bool next_piece(struct iz_chunk *chunks, int64_t from, int64_t n,
                       struct piece *p)
{
    p->done += p->n;
    if (p->done >= n)
        return false;
    int64_t pos = from + p->done;
    p->chunk = &chunks[pos / chunks->filed];
    p->at = pos % chunks->filed;
    p->n = p->chunk->count - p->at;
    if (p->n > n - p->done)
        p->n = n - p->done;
    return true;
}

enum { CAST = 8192 }; /* elements at a time */

static void get_frozen(struct iz_engine *e, int group, const struct piece *p,
                       float *out)
{
    char buf[CAST * 4];
    int64_t size = iz_dtype_bytes(e->plan.param_type);
    const char *param = chunk_param(e, group, p->chunk) + p->at * size;
    for (int64_t i = 0; i < p->n; i += CAST) {
        int64_t n = p->n - i < CAST ? p->n - i : CAST;
        get_bytes(e, e->plan.zero.param_home, buf, param + i * size, n * size);
        iz_cast(out + i, IZ_F32, buf, e->plan.param_type, n);
    }
}

void iz_access_get(struct iz_engine *e, int group, enum iz_array a,
                   int64_t from, float *out, int64_t n)
{
    struct iz_group *g = &e->group[group];
    struct piece p = {0};
    if (a == IZ_FROZEN) {
        while (next_piece(g->frozen, from, n, &p))
            get_frozen(e, group, &p, out + p.done);
        return;
    }
    while (next_piece(g->chunk, from, n, &p)) {
        if (engine_access_narrow(e, a)) {
            struct iz_moments x = chunk_moments(e, group, p.chunk, a);
            get_moments(e, p.chunk->home, out + p.done, &x, p.at, p.n);
            continue;
        }
        const float *src = chunk_array(e, group, p.chunk, a);
        get_bytes(e, array_home(e, group, p.chunk, a), out + p.done, src + p.at,
                  p.n * 4);
    }
}

/* Rounds to the type of the parameters on the way. */
static void put_param(struct iz_engine *e, int group, const struct piece *p,
                      const float *in)
{
    char buf[CAST * 4];
    int64_t size = iz_dtype_bytes(e->plan.param_type);
    char *param = chunk_param(e, group, p->chunk) + p->at * size;
    for (int64_t i = 0; i < p->n; i += CAST) {
        int64_t n = p->n - i < CAST ? p->n - i : CAST;
        iz_cast(buf, e->plan.param_type, in + i, IZ_F32, n);
        put_bytes(e, e->plan.zero.param_home, param + i * size, buf, n * size);
    }
}

void iz_access_put(struct iz_engine *e, int group, enum iz_array a,
                   int64_t from, const float *in, int64_t n)
{
    struct iz_group *g = &e->group[group];
    struct piece p = {0};
    while (a == IZ_FROZEN && next_piece(g->frozen, from, n, &p)) {
        put_param(e, group, &p, in + p.done);
        store_param(e, group, p.chunk);
    }
    while (a != IZ_FROZEN && next_piece(g->chunk, from, n, &p)) {
        if (engine_access_narrow(e, a)) {
            struct iz_moments x = chunk_moments(e, group, p.chunk, a);
            put_moments(e, p.chunk->home, &x, p.at, in + p.done, p.n);
            store_state(e, group, p.chunk);
            continue;
        }
        float *dst = chunk_array(e, group, p.chunk, a);
        put_bytes(e, array_home(e, group, p.chunk, a), dst + p.at, in + p.done,
                  p.n * 4);
        if (a != IZ_MASTER || separate(e, group, p.chunk))
            store_state(e, group, p.chunk);
        if (a != IZ_MASTER)
            continue;
        if (separate(e, group, p.chunk))
            put_param(e, group, &p, in + p.done);
        store_param(e, group, p.chunk);
    }
}
