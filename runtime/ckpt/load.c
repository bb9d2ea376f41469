/* SPDX-License-Identifier: Apache-2.0 */
/* Loading: each rank reads the blocks that hold its elements, whichever rank
 * wrote them: once to check them all, and once more to put them, if anybody
 * takes them. */
#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "codelets/base/int64.h"
#include "codelets/base/take.h"
#include "runtime/base/durable.h"
#include "runtime/base/progress.h"
#include "runtime/base/text.h"
#include "runtime/ckpt/ckpt.h"

struct load {
    struct iz_ckpt *k;
    int64_t step;
    char dir[IZ_CKPT_PATH];
    struct iz_ckpt_index *index;
    float *block;
    int64_t *done; /* per array: elements found so far */
    bool put;      /* false: everything is read and checked, nothing is put */
    struct iz_progress progress;
};

/* Takes from a file what array i still lacks.  Files come in order of ranks,
 * and so do the elements in them. */
static int array_take(struct load *l, int i, const struct iz_rank_file *f,
                      const struct iz_rank_range *p)
{
    const struct iz_rank_range *array = &l->k->array[i];
    int64_t at = array->first + l->done[i], end = array->first + array->count;
    int err = 0;
    if (p->first > at)
        return 0; /* a gap: reported when all files have been seen */
    if (end > p->first + p->count)
        end = p->first + p->count;
    while (at < end && !err) {
        int64_t b = (at - p->first) / IZ_CKPT_BLOCK;
        int64_t from = p->first + b * IZ_CKPT_BLOCK;
        int64_t n = min64(end - from, IZ_CKPT_BLOCK) - (at - from);
        err = iz_rank_file_read(f, p, b, l->block);
        if (!err && l->put)
            l->k->sink[i].put(l->k->sink[i].arg, at - array->first,
                              l->block + (at - from), n);
        at += n;
        l->done[i] = at - array->first;
        iz_progress_add(&l->progress, 4 * n);
    }
    return err;
}

static int file_take(struct load *l, const struct iz_rank_file *f)
{
    int err = 0;
    for (int i = 0; i < l->k->n_arrays && !err; i++) {
        const struct iz_rank_range *p =
            iz_rank_file_find(f, l->k->array[i].name);
        if (!p || p->total != l->k->array[i].total)
            err =
                iz_st_fault(&f->st, "has not the arrays that index.json gives");
        else
            err = array_take(l, i, f, p);
    }
    return err;
}

static int file_open(const struct load *l, int rank, struct iz_rank_file **f)
{
    struct iz_ckpt_file want = l->index->file[rank];
    int err = iz_ckpt_file_open(f, l->dir, l->step, rank, l->index->ranks);
    if (err)
        return err;
    if ((*f)->st.bytes != want.bytes)
        return iz_st_fault(
            &(*f)->st, "has not the size that index.json gives (truncated?)");
    if ((*f)->st.header_hash != want.header_hash)
        return iz_st_fault(
            &(*f)->st,
            "damaged: the header has not the hash that index.json gives");
    return 0;
}

/* All elements of this rank's arrays were in the files. */
static int arrays_complete(const struct load *l)
{
    for (int i = 0; i < l->k->n_arrays; i++) {
        const struct iz_rank_range *array = &l->k->array[i];
        if (l->done[i] == array->count)
            continue;
        return iz_text_refuse(
            stderr,
            "checkpoint: %s: the files lack elements of %s from %" PRId64,
            l->dir, array->name, array->first + l->done[i]);
    }
    return 0;
}

static int files_take(struct load *l, bool put)
{
    int64_t bytes = 0;
    int err = 0;
    assert(l->done);
    l->put = put;
    for (int i = 0; i < l->k->n_arrays; i++)
        bytes += 4 * l->k->array[i].count;
    iz_progress_begin(
        &l->progress,
        put ? "loading the checkpoint" : "checking the checkpoint", bytes);
    memset(l->done, 0, (size_t)l->k->n_arrays * sizeof(*l->done));
    for (int q = 0; q < l->index->ranks && !err; q++) {
        struct iz_rank_file *f = NULL;
        err = file_open(l, q, &f);
        if (!err)
            err = file_take(l, f);
        iz_rank_file_close(&f);
    }
    iz_progress_end(&l->progress);
    return err ? err : arrays_complete(l);
}

static int load_open(struct load *l)
{
    int err = iz_ckpt_dir_find(l->k->dir, l->step, l->dir);
    if (err) {
        fprintf(stderr,
                "izar: checkpoint: no complete one of step %" PRId64
                " in %s/checkpoints\n",
                l->step, l->k->dir);
        return err;
    }
    err = iz_ckpt_index_open(&l->index, l->dir, false);
    if (!err && l->index->step != l->step)
        err = iz_durable_refuse("checkpoint", l->index->path,
                                "is of another step", EINVAL);
    if (!err)
        err = iz_ckpt_index_check(l->index, l->k);
    l->block = iz_take(IZ_CKPT_BLOCK, sizeof(*l->block), "a checkpoint");
    l->done = iz_take(l->k->n_arrays, sizeof(*l->done), "a checkpoint");
    return err;
}

/* What every rank would find alike, and report alike: the first one looks
 * alone. */
static int load_check(struct load *l)
{
    int err = load_open(l);
    for (int q = 0; !err && q < l->index->ranks; q++) {
        struct iz_rank_file *f = NULL;
        err = file_open(l, q, &f);
        iz_rank_file_close(&f);
    }
    return err;
}

/* Index intact and all files there with their sizes. */
static bool usable(const char *dir, int64_t step, char path[IZ_CKPT_PATH])
{
    struct iz_ckpt_index *x = NULL;
    bool ok = iz_ckpt_dir_find(dir, step, path) == 0;
    ok = ok && iz_ckpt_index_open(&x, path, true) == 0;
    ok = ok && iz_ckpt_files_bytes(path, x->ranks, x->file, NULL) >= 0;
    iz_ckpt_index_close(&x);
    return ok;
}

/* Never taken by itself: the user decides whether to lose the steps between. */
static void suggest(const char *dir, int64_t step)
{
    char path[IZ_CKPT_PATH];
    while ((step = iz_ckpt_dir_newest(dir, step)) >= 0)
        if (usable(dir, step, path)) {
            fprintf(
                stderr,
                "izar: checkpoint: the previous one, %s, looks complete: move "
                "the newer ones away to resume from it\n",
                path);
            return;
        }
}

int iz_ckpt_load(struct iz_ckpt *k, int64_t step, struct iz_coll *c)
{
    struct load l = {.k = k, .step = step};
    int err = iz_agree(c, c->rank == 0 ? load_check(&l) : 0);
    if (!err)
        err = iz_agree(c, c->rank == 0 ? 0 : load_open(&l));
    if (!err)
        err = iz_agree(c, files_take(&l, false));
    if (!err && k->sink)
        err = iz_agree(c, files_take(&l, true));
    if (!err)
        iz_ckpt_index_scalars(l.index, k);
    else if (c->rank == 0)
        suggest(k->dir, step);
    iz_ckpt_index_close(&l.index);
    free(l.block);
    free(l.done);
    return err;
}
