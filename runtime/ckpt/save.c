/* SPDX-License-Identifier: Apache-2.0 */
/* Saving, as tasks or while training waits; see save.h.  Of the tasks every
 * order is one of data:
 *   snapshot  reads a chunk's state, writes a buffer
 *   write     reads the buffer, reads `file`
 *   seal      reads and writes `file`, reads `scalars`
 *   commit    reads `scalars`
 * and the first task of a save, which opens the file and copies the scalars,
 * writes both, so that two saves never mix. */
#include "runtime/ckpt/save.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "codelets/base/die.h"
#include "codelets/base/int64.h"
#include "codelets/base/take.h"
#include "codelets/buffer/flat_buffer.h"
#include "runtime/base/progress.h"
#include "runtime/ckpt/engine_arrays.h"
#include "runtime/engine/access.h"
#include "runtime/engine/alloc.h"
#include "runtime/step/disk.h"
#include "runtime/step/submit.h"

/* A unit has at most 64 chunks, and a block may begin and end inside of one. */
#define CHUNKS_MAX 72

struct iz_ckpt_saver {
    struct iz_engine *e;
    struct iz_arrays arrays; /* its scalars: of the step that is saved */
    struct iz_ckpt_writer writer;
    starpu_data_handle_t file, scalars;
    int64_t pending;            /* step being saved, 0: none */
    _Atomic int64_t committing; /* step of which this rank has not ended that */
    int64_t failed;  /* first step whose loss was not finite, 0: none */
    _Atomic int err; /* of a task; nothing is written after it */
    _Atomic int64_t done;
};

/* What became of a block between an array and its file. */
struct block_arg {
    struct iz_ckpt_saver *s;
    int array;
    int64_t block;
};

struct step_arg {
    struct iz_ckpt_saver *s;
    int64_t step;
};

static bool good(const struct iz_ckpt_saver *s)
{
    return atomic_load(&s->err) == 0;
}

static void fail(struct iz_ckpt_saver *s, int err)
{
    int none = 0;
    if (err)
        atomic_compare_exchange_strong(&s->err, &none, err);
}

/* ---- from the states into a buffer ---- */

struct source {
    int64_t base;  /* byte at which the array begins in its buffer */
    int64_t at, n; /* elements of it */
    int64_t room;  /* that it has */
};

struct snapshot_arg {
    int n;
    int64_t at; /* element of the buffer at which the first one goes */
    enum iz_moment_type type;
    enum iz_moment which;
    struct source source[CHUNKS_MAX];
};

/* buf: buffer, then what holds the chunks. */
static void run_snapshot(struct iz_exec *x, void **buf, const void *arg)
{
    const struct snapshot_arg *a = arg;
    float *out = (float *)buf[0] + a->at;
    for (int i = 0; i < a->n; i++) {
        const struct source *s = &a->source[i];
        char *array = (char *)buf[1 + i] + s->base;
        struct iz_moments m = {array, a->type, a->which, s->room};
        if (a->type == IZ_MOMENT_F32)
            iz_buffer_copy(x, out, array + 4 * s->at, 4 * s->n);
        else
            iz_moment_get(out, &m, s->at, s->n);
        out += s->n;
    }
}

/* Elements of one array of a unit, and where they lie. */
struct range {
    struct iz_engine *e;
    int unit;
    enum iz_array array;
    int64_t from, n;
};

/* Those from element `done` of the range on that lie together. */
static struct iz_extent extent_at(const struct range *r, int64_t done)
{
    return iz_engine_extent(r->e, r->unit, r->array, r->from + done,
                            r->n - done);
}

static starpu_data_handle_t handle_of(const struct iz_extent *p)
{
    return p->state ? p->chunk->state_handle : p->chunk->param_handle;
}

/* Copies to `buffer` from what lives there. */
static struct iz_task snapshot_task(const struct range *r, enum iz_home home,
                                    void (*run)(struct iz_exec *, void **,
                                                const void *),
                                    starpu_data_handle_t buffer, bool first)
{
    bool gpu = r->e->plan.target.gpu && home == IZ_HOME_NONE;
    struct iz_task t = iz_task_of(r->e, IZ_SNAPSHOT,
                                  gpu ? IZ_ON_D2H : IZ_ON_HOST, run, r->unit);
    t.priority_offset = iz_step_in_order(r->unit);
    iz_task_add(&t, buffer, first ? STARPU_W : STARPU_RW);
    return t;
}

/* From element `done` of the range on as far as the chunks have the same home,
 * so that one place can copy them; returns the elements done then. */
static int64_t snapshot_home(const struct range *r, starpu_data_handle_t buffer,
                             int64_t done)
{
    int64_t begin = done;
    enum iz_home home = extent_at(r, done).home;
    struct iz_task t = snapshot_task(r, home, run_snapshot, buffer, done == 0);
    struct snapshot_arg a = {.at = done,
                             .type = r->array == IZ_MASTER
                                         ? IZ_MOMENT_F32
                                         : r->e->plan.optimizer.moments};
    if (r->array >= IZ_STATE)
        a.which = iz_optimizer(r->e->plan.optimizer.type)
                      ->state[r->array - IZ_STATE]
                      .which;
    for (; done < r->n; a.n++) {
        struct iz_extent p = extent_at(r, done);
        if (p.home != home)
            break;
        if (a.n == CHUNKS_MAX)
            iz_die("checkpoint: a block of more than %d chunks", CHUNKS_MAX);
        a.source[a.n] = (struct source){p.base, p.at, p.n, p.room};
        iz_task_add(&t, handle_of(&p), STARPU_R);
        done += p.n;
    }
    t.bytes = 4.0 * (double)(done - begin);
    iz_step_submit(r->e, &t, &a,
                   offsetof(struct snapshot_arg, source) +
                       (size_t)a.n * sizeof(struct source));
    return done;
}

/* ---- frozen parameters ---- */

/* They are in the type of parameters, or words of quantised ones: the bytes of
 * n elements go to the end of the room that as many fp32 have in a buffer, in
 * whole pages, and are widened from there. */
static int64_t raw_size(const struct range *r)
{
    return r->array == IZ_FROZEN ? iz_dtype_bytes(r->e->plan.param_type) : 4;
}

static int64_t raw_at(int64_t n, int64_t size)
{
    return (4 - size) * round_up(n * size, IZ_NVME_ALIGN) / size;
}

static void widen_frozen(const struct iz_engine *e, char *buffer, int64_t n)
{
    enum { BLOCK = 1024 };
    int64_t size = iz_dtype_bytes(e->plan.param_type);
    const char *raw = buffer + raw_at(n, size);
    char block[4 * BLOCK];
    if (e->plan.param_type == IZ_F32)
        return;
    for (int64_t i = 0; i < n; i += BLOCK) {
        int64_t k = min64(n - i, BLOCK);
        memcpy(block, raw + i * size, (size_t)(k * size));
        iz_cast(buffer + 4 * i, IZ_F32, block, e->plan.param_type, k);
    }
}

struct raw_arg {
    const char *from;
    int64_t at, bytes;
};

/* buf: buffer.  Nobody writes what is read. */
static void run_raw(struct iz_exec *x, void **buf, const void *arg)
{
    const struct raw_arg *a = arg;
    iz_buffer_copy(x, (char *)buf[0] + a->at, a->from, a->bytes);
}

static void frozen_memory(const struct range *r, starpu_data_handle_t buffer)
{
    struct iz_extent p = extent_at(r, 0);
    int64_t size = raw_size(r);
    struct raw_arg a = {.from = p.chunk->param + p.at * size,
                        .at = raw_at(r->n, size),
                        .bytes = r->n * size};
    struct iz_task t =
        snapshot_task(r, r->e->plan.zero.frozen.home, run_raw, buffer, true);
    t.bytes = (double)a.bytes;
    iz_step_submit(r->e, &t, &a, sizeof(a));
}

/* ---- from the disk ---- */

/* A file holds whole chunks, so that what is read beyond the end of the last
 * one is padding.  What a packed array has may lie anywhere, and is all that is
 * read. */
static void snapshot_disk(const struct range *r, starpu_data_handle_t buffer)
{
    int64_t size = raw_size(r), to = raw_at(r->n, size);
    struct iz_extent p;
    for (int64_t done = 0; done < r->n; done += p.n) {
        p = extent_at(r, done);
        struct iz_io io = {
            .file = p.state ? r->e->file.state : r->e->file.param,
            .offset = (p.state ? p.chunk->state_at : p.chunk->param_at) +
                      p.base + size * p.at,
            .bytes = size * p.n,
            .at = to + size * done};
        if (io.offset % IZ_NVME_ALIGN == 0 && io.at % IZ_NVME_ALIGN == 0)
            io.bytes = round_up(io.bytes, IZ_NVME_ALIGN);
        iz_disk_io(r->e, IZ_LOAD, r->unit, buffer, done ? STARPU_RW : STARPU_W,
                   handle_of(&p), io);
    }
}

static void submit_snapshot(const struct range *r, starpu_data_handle_t buffer)
{
    bool frozen = r->array < IZ_MASTER;
    enum iz_home home =
        frozen ? r->e->plan.zero.frozen.home : extent_at(r, 0).home;
    if (home == IZ_HOME_NVME)
        snapshot_disk(r, buffer);
    else if (frozen)
        frozen_memory(r, buffer);
    else
        for (int64_t done = 0; done < r->n;)
            done = snapshot_home(r, buffer, done);
}

/* ---- from a buffer to the file ---- */

/* buf: buffer, file. */
static void run_write(struct iz_exec *x, void **buf, const void *arg)
{
    const struct block_arg *a = arg;
    if (a->s->arrays.arg[a->array].array == IZ_FROZEN)
        widen_frozen(a->s->e, buf[0],
                     iz_rank_range_block_elems(&a->s->arrays.k.array[a->array],
                                               a->block));
    if (good(a->s))
        fail(a->s,
             iz_ckpt_writer_block(&a->s->writer, a->array, a->block, buf[0]));
}

static void submit_block(struct iz_ckpt_saver *s, int array, int64_t block)
{
    const struct iz_arrays_range *p = &s->arrays.arg[array];
    struct iz_engine *e = s->e;
    struct iz_staging *staging = iz_engine_next_staging(e, IZ_STAGING_CKPT);
    struct block_arg a = {s, array, block};
    bool frozen = p->array == IZ_FROZEN;
    struct range r = {
        e, p->unit, p->array, p->first + block * IZ_CKPT_BLOCK,
        iz_rank_range_block_elems(&s->arrays.k.array[array], block)};
    submit_snapshot(&r, staging->handle);
    struct iz_task t = iz_task_of(e, IZ_SAVE, IZ_ON_IO, run_write, p->unit);
    iz_task_add(&t, staging->handle, frozen ? STARPU_RW : STARPU_R);
    iz_task_add(&t, s->file, STARPU_R);
    t.priority_offset = iz_step_in_order(p->unit);
    t.bytes = 4.0 * (double)r.n;
    t.step--;
    iz_step_submit(e, &t, &a, sizeof(a));
}

/* ---- the file as a whole ---- */

/* c: which of the step's numbers resuming needs. */
static void begin_file(struct iz_ckpt_saver *s, const struct iz_control *c,
                       int64_t step)
{
    iz_arrays_scalars(s->e, c, step, s->arrays.k.scalar);
    s->writer = (struct iz_ckpt_writer){.k = &s->arrays.k,
                                        .step = step,
                                        .rank = s->e->plan.rank,
                                        .ranks = s->e->plan.ranks,
                                        .fd = -1};
    if (good(s))
        fail(s, iz_ckpt_writer_open(&s->writer));
}

/* buf: control. */
static void run_begin(struct iz_exec *x, void **buf, const void *arg)
{
    const struct step_arg *a = arg;
    begin_file(a->s, buf[0], a->step);
}

static void run_seal(struct iz_exec *x, void **buf, const void *arg)
{
    const struct step_arg *a = arg;
    struct iz_ckpt_saver *s = a->s;
    fail(s, iz_ckpt_writer_close(&s->writer, atomic_load(&s->err)));
    atomic_store(&s->e->events.sealed, good(s) ? a->step : -1);
}

static void run_commit(struct iz_exec *x, void **buf, const void *arg)
{
    const struct step_arg *a = arg;
    struct iz_ckpt_saver *s = a->s;
    int err = iz_ckpt_commit(&s->arrays.k, a->step, s->e->plan.ranks);
    fail(s, err);
    if (err)
        atomic_store(&s->e->events.sealed, -1);
    else {
        atomic_store(&s->committing, 0);
        atomic_store(&s->done, a->step);
    }
}

/* file, scalars: how they are accessed. */
static void submit_step(struct iz_ckpt_saver *s, int64_t step,
                        void (*run)(struct iz_exec *, void **, const void *),
                        starpu_data_handle_t control,
                        enum starpu_data_access_mode file,
                        enum starpu_data_access_mode scalars)
{
    struct step_arg a = {s, step};
    struct iz_task t = iz_task_of(s->e, IZ_SAVE, IZ_ON_IO, run, -1);
    iz_task_add(&t, control, STARPU_R);
    iz_task_add(&t, file == STARPU_NONE ? NULL : s->file, file);
    iz_task_add(&t, s->scalars, scalars);
    t.step = (int)step - 1;
    iz_step_submit(s->e, &t, &a, sizeof(a));
}

/* ---- public ---- */

int iz_ckpt_save_open(struct iz_ckpt_saver **out, struct iz_engine *e,
                      const struct iz_ckpt_of *of)
{
    struct iz_ckpt_saver *s = *out = iz_take(1, sizeof(*s), "a checkpoint");
    s->e = e;
    iz_graph_wait(e->graph); /* whose tasks move bytes between ranks too */
    iz_arrays_open(&s->arrays, e, of, false);
    int err = iz_agree(
        e->coll, e->plan.rank == 0 ? iz_ckpt_dir_sweep(s->arrays.k.dir) : 0);
    if (err)
        return err;
    starpu_void_data_register(&s->file);
    starpu_void_data_register(&s->scalars);
    return 0;
}

void iz_ckpt_save_close(struct iz_ckpt_saver **out)
{
    struct iz_ckpt_saver *s = *out;
    if (!s)
        return;
    iz_graph_wait(s->e->graph);
    int64_t left[] = {s->pending, atomic_load(&s->committing)};
    for (int i = 0; i < 2; i++)
        if (left[i] && s->e->plan.rank == 0)
            iz_ckpt_dir_abort(s->arrays.k.dir, left[i]);
    if (s->file)
        starpu_data_unregister(s->file);
    if (s->scalars)
        starpu_data_unregister(s->scalars);
    iz_arrays_close(&s->arrays);
    free(s);
    *out = NULL;
}

void iz_ckpt_save_begin(struct iz_ckpt_saver *s)
{
    struct iz_engine *e = s->e;
    s->pending = e->step;
    atomic_store(&e->events.sealed, 0);
    submit_step(s, e->step, run_begin, e->scalar.control_handle, STARPU_W,
                STARPU_W);
    for (int i = 0; i < s->arrays.k.n_arrays; i++)
        for (int64_t b = 0; b < iz_rank_range_blocks(&s->arrays.k.array[i]);
             b++)
            submit_block(s, i, b);
    submit_step(s, e->step, run_seal, NULL, STARPU_RW, STARPU_R);
}

bool iz_ckpt_save_pending(const struct iz_ckpt_saver *s)
{
    return s->pending != 0;
}

int iz_ckpt_save_event(struct iz_ckpt_saver *s, const struct iz_event *v)
{
    if (v->eval)
        return 0;
    if (v->failure && !s->failed)
        s->failed = v->step;
    if (v->sealed < 0)
        return -EIO;
    if (!s->pending || v->sealed != s->pending ||
        (s->failed && s->failed <= s->pending))
        return 0;
    if (s->e->plan.rank == 0) {
        atomic_store(&s->committing, s->pending);
        submit_step(s, s->pending, run_commit, NULL, STARPU_NONE, STARPU_R);
    }
    s->pending = 0;
    return 0;
}

int iz_ckpt_save_finish(struct iz_ckpt_saver *s)
{
    struct iz_engine *e = s->e;
    iz_graph_wait(e->graph);
    int err = iz_agree(e->coll, atomic_load(&s->err));
    if (err || !s->pending || (s->failed && s->failed <= s->pending))
        return err;
    if (e->plan.rank == 0)
        err = iz_ckpt_commit(&s->arrays.k, s->pending, e->plan.ranks);
    err = iz_agree(e->coll, err);
    if (!err) {
        atomic_store(&s->done, s->pending);
        s->pending = 0;
    }
    return err;
}

/* All blocks through one buffer. */
static void copy_blocks(struct iz_ckpt_saver *s, float *block)
{
    struct iz_progress progress;
    int64_t bytes = 0;
    for (int i = 0; i < s->arrays.k.n_arrays; i++)
        bytes += 4 * s->arrays.k.array[i].count;
    iz_progress_begin(&progress, "saving", bytes);
    for (int i = 0; i < s->arrays.k.n_arrays; i++)
        for (int64_t b = 0;
             b < iz_rank_range_blocks(&s->arrays.k.array[i]) && good(s); b++) {
            const struct iz_arrays_range *p = &s->arrays.arg[i];
            int64_t n = iz_rank_range_block_elems(&s->arrays.k.array[i], b);
            iz_access_get(s->e, p->unit, p->array, p->first + b * IZ_CKPT_BLOCK,
                          block, n);
            fail(s, iz_ckpt_writer_block(&s->writer, i, b, block));
            iz_progress_add(&progress, 4 * n);
        }
    iz_progress_end(&progress);
}

int iz_ckpt_save_now(struct iz_ckpt_saver *s)
{
    struct iz_engine *e = s->e;
    float *block = iz_take(IZ_CKPT_BLOCK, sizeof(*block), "a checkpoint");
    iz_graph_wait(e->graph);
    s->pending = e->step;
    begin_file(s, &e->scalar.control, e->step);
    copy_blocks(s, block);
    free(block);
    run_seal(NULL, NULL, &(struct step_arg){s, e->step});
    return iz_ckpt_save_finish(s);
}

int64_t iz_ckpt_save_done(struct iz_ckpt_saver *s)
{
    return atomic_exchange(&s->done, 0);
}
