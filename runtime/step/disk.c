/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/step/disk.h"

#include <string.h>

#include "codelets/base/int64.h"
#include "codelets/flat/touched_rows.h"
#include "runtime/engine/access.h"
#include "runtime/step/submit.h"
#include "runtime/step/touched.h"

struct io_arg {
    struct iz_io io;
    struct iz_touched_in rows;
    bool store;
    bool whole; /* all of a chunk that is touched at all */
};

/* Not whole pages, of a part of a packed array. */
static void read_between(struct iz_nvme *file, char *to, int64_t offset,
                         int64_t bytes)
{
    enum { ROOM = 1 << 16 };
    _Alignas(IZ_NVME_ALIGN) char page[ROOM];
    for (int64_t n; bytes > 0; to += n, offset += n, bytes -= n) {
        int64_t skip = offset % IZ_NVME_ALIGN;
        n = min64(bytes, ROOM - skip);
        iz_nvme_read(file, page, offset - skip,
                     round_up(skip + n, IZ_NVME_ALIGN));
        memcpy(to, page + skip, (size_t)n);
    }
}

/* Bytes [from, to) of the chunk. */
static void move(const struct io_arg *a, char *buffer, int64_t from, int64_t to)
{
    const struct iz_io *io = &a->io;
    char *p = buffer + io->at + from;
    bool pages = (io->at | io->offset | io->bytes) % IZ_NVME_ALIGN == 0;
    if (!a->store && !pages)
        read_between(io->file, p, io->offset + from, to - from);
    else if (a->store)
        iz_nvme_write(io->file, p, io->offset + from, to - from);
    else
        iz_nvme_read(io->file, p, io->offset + from, to - from);
}

/* What lies between two touched rows is read and written with them where that
 * is less than a disk moves while it finds the next one. */
#define IO_GAP ((int64_t)128 << 10)

/* The pages of touched rows of one array, in a few pieces. */
static void move_rows(const struct io_arg *a, char *buffer,
                      const struct iz_touched *r,
                      const struct iz_state_bytes *y)
{
    const struct iz_io *io = &a->io;
    struct iz_touched_range p = {0};
    int64_t from = 0, to = 0;
    while (iz_touched_next(r, io->first, io->first + io->count, &p)) {
        int64_t i = p.flat - io->first;
        int64_t begin = y->at + i * y->bytes / y->per;
        int64_t end = y->at + ((i + p.n) * y->bytes + y->per - 1) / y->per;
        begin -= begin % IZ_NVME_ALIGN;
        end += -end & (IZ_NVME_ALIGN - 1);
        if (begin > to + IO_GAP) {
            move(a, buffer, from, to);
            from = begin;
        } else if (to == 0) {
            from = begin;
        }
        to = end;
    }
    move(a, buffer, from, to);
}

/* buf: buffer, token, list of touched rows. */
static void run_io(struct iz_exec *x, void **buf, const void *arg)
{
    const struct io_arg *a = arg;
    const struct iz_io *io = &a->io;
    if (!a->rows.cols) {
        move(a, buf[0], 0, io->bytes);
        return;
    }
    struct iz_touched r = iz_touched_get(&a->rows, buf[2]);
    struct iz_touched_range p = {0};
    if (a->whole) {
        if (iz_touched_next(&r, io->first, io->first + io->count, &p))
            move(a, buf[0], 0, io->bytes);
        return;
    }
    for (int i = 0; i < io->arrays; i++)
        move_rows(a, buf[0], &r, &io->array[i]);
}

/* At most, for the scheduler. */
static double io_bytes(const struct iz_engine *e, int unit,
                       const struct iz_io *a)
{
    const struct iz_plan_unit *g = e->unit[unit].plan;
    int64_t pages = g->rows * a->arrays * (IZ_NVME_ALIGN + IO_GAP);
    bool rows = g->rows && a->arrays > 0;
    return (double)(rows && pages < a->bytes ? pages : a->bytes);
}

void iz_disk_io(struct iz_engine *e, enum iz_kind kind, int unit,
                starpu_data_handle_t buffer, enum starpu_data_access_mode mode,
                starpu_data_handle_t token, struct iz_io a)
{
    /* Without arrays all is moved; a checksum is that of a whole region. */
    struct io_arg arg = {.io = a,
                         .store = kind == IZ_STORE,
                         .whole = e->config->run.nvme_checksum};
    struct iz_task t = iz_task_of(e, kind, IZ_ON_IO, run_io, unit);
    iz_access_let_go(e);
    iz_task_add(&t, buffer, mode);
    iz_task_add(&t, token, kind == IZ_LOAD ? STARPU_R : STARPU_W);
    if (a.arrays > 0) {
        arg.rows = iz_touched_in(e, unit);
        iz_task_add(&t, iz_touched_list(e, unit), STARPU_R);
    }
    t.priority_offset =
        a.priority_offset ? a.priority_offset : iz_step_in_order(unit);
    t.bytes = io_bytes(e, unit, &a);
    iz_step_submit(e, &t, &arg, sizeof(arg));
}
