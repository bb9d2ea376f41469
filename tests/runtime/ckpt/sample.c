/* SPDX-License-Identifier: Apache-2.0 */
/* See sample.h. */
#include "tests/runtime/ckpt/sample.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "codelets/base/mix.h"
#include "runtime/ckpt/dir.h"
#include "runtime/ckpt/write.h"
#include "runtime/comm/agree.h"

const int64_t small[ARRAYS] = {1000, 5, 1, 0};
const int64_t large[ARRAYS] = {IZ_BLOCK + 7, 2 * IZ_BLOCK, 1, 3};

/* Any bits, not-a-numbers included. */
static uint32_t bits(int array, int64_t i, int64_t step)
{
    return (uint32_t)iz_mix((uint64_t)(i * 64 + array) ^ (uint64_t)step << 40);
}

void get(void *arg, int64_t from, float *out, int64_t n)
{
    struct piece *p = arg;

    p->wrong += n < 1 || n > IZ_BLOCK || from < 0 || from + n > p->count;
    for (int64_t i = 0; i < n; i++) {
        uint32_t b = bits(p->array, p->first + from + i, p->step);

        memcpy(out + i, &b, 4);
    }
}

static void put(void *arg, int64_t from, const float *in, int64_t n)
{
    struct piece *p = arg;

    p->wrong += n < 1 || n > IZ_BLOCK || from != p->next;
    p->next = from + n;
    for (int64_t i = 0; i < n; i++) {
        uint32_t b;

        memcpy(&b, in + i, 4);
        p->wrong += b != bits(p->array, p->first + from + i, p->step);
    }
    p->put += n;
}

void run_set(struct run *r, const int64_t *total, int rank, int ranks,
             int64_t step)
{
    static const char *const name[ARRAYS] = {"wte/master", "h.0/m", "h.0/v",
                                             "ln/v"};

    memset(r, 0, sizeof(*r));
    for (int i = 0; i < ARRAYS; i++) {
        int64_t shard = (total[i] + ranks - 1) / ranks, first = shard * rank;
        struct iz_ckpt_part *p = &r->part[i];

        first = first < total[i] ? first : total[i];
        shard = shard < total[i] - first ? shard : total[i] - first;
        r->piece[i] = (struct piece){i, first, shard, 0, step, 0, 0};
        *p = (struct iz_ckpt_part){.total = total[i],
                                   .first = first,
                                   .count = shard,
                                   .put = put,
                                   .arg = &r->piece[i]};
        snprintf(p->name, sizeof(p->name), "%s", name[i]);
    }
    r->name[0] = (struct iz_ckpt_name){"wte.weight", "wte/", 0, total[0], 1};
    r->name[1] = (struct iz_ckpt_name){"h.0.ln \"1\"", "h.0/", 0, 5, 1};
    r->scalar[0] = (struct iz_ckpt_scalar){"lr", 0.1 * (double)step};
    r->scalar[1] = (struct iz_ckpt_scalar){"scale", 0x1p-1070};
    r->scalar[2] = (struct iz_ckpt_scalar){"limit", -INFINITY};
    r->scalar[3] = (struct iz_ckpt_scalar){"zero", -0.0};
    r->k = (struct iz_ckpt){.dir = folder,
                            .part = r->part,
                            .n_parts = ARRAYS,
                            .names = r->name,
                            .n_names = 2,
                            .scalar = r->scalar,
                            .n_scalars = 4,
                            .model_text = MODEL,
                            .optimizer = "adam"};
}

/* Every rank has the arrays whole. */
void run_replicate(struct run *r)
{
    for (int i = 0; i < ARRAYS; i++) {
        r->piece[i].first = r->part[i].first = 0;
        r->piece[i].count = r->part[i].count = r->part[i].total;
    }
}

int64_t wrong(const struct run *r)
{
    int64_t n = 0;

    for (int i = 0; i < ARRAYS; i++)
        n += r->piece[i].wrong;
    return n;
}

int64_t number_put(const struct run *r)
{
    int64_t n = 0;

    for (int i = 0; i < ARRAYS; i++)
        n += r->piece[i].put;
    return n;
}

/* All elements and scalars came, as they were saved at `step`. */
int run_is(const struct run *r, int64_t step)
{
    int64_t want = 0;

    for (int i = 0; i < ARRAYS; i++)
        want += r->part[i].count;
    return number_put(r) == want && wrong(r) == 0 &&
           r->scalar[0].value == 0.1 * (double)step &&
           r->scalar[1].value == 0x1p-1070 && isinf(r->scalar[2].value) &&
           signbit(r->scalar[3].value);
}

void scalars_forget(struct run *r)
{
    for (int i = 0; i < r->k.n_scalars; i++)
        r->scalar[i].value = NAN;
}

/* ---- saving ---- */

static int write_blocks(struct iz_ckpt_writer *w, const struct iz_ckpt *k)
{
    static float block[IZ_BLOCK];
    int err = iz_ckpt_writer_open(w);

    for (int i = 0; i < k->n_parts; i++) {
        const struct iz_piece *p = &w->piece[i];

        for (int64_t b = 0; b < iz_piece_blocks(p) && !err; b++) {
            get(k->part[i].arg, p->first - k->part[i].first + b * IZ_BLOCK,
                block, iz_piece_block_elems(p, b));
            err = iz_ckpt_writer_block(w, i, b, block);
        }
    }
    return err;
}

/* As a run saves while training waits. */
int save(const struct iz_ckpt *k, int64_t step, struct iz_coll *c)
{
    struct iz_piece piece[ARRAYS] = {0};
    struct iz_ckpt_writer w = {.k = k,
                               .piece = piece,
                               .step = step,
                               .rank = c->rank,
                               .ranks = c->size};
    struct iz_ckpt_file mine = {0};
    bool first = c->rank == 0;
    int err = iz_ckpt_shares(k, c, piece);

    if (!err)
        err = iz_agree(c, first ? iz_ckpt_dir_sweep(k->dir) : 0);
    if (!err) {
        err = iz_ckpt_writer_close(&w, write_blocks(&w, k), &mine);
        err = iz_agree(c, err);
        if (!err)
            err = iz_ckpt_gather_commit(k, step, c, &mine);
        if (err && first)
            iz_ckpt_dir_abort(k->dir, step);
    }
    for (int i = 0; i < k->n_parts; i++)
        free(piece[i].hash);
    return err;
}

/* ---- one rank ---- */

int save_alone(int64_t step, int keep_last)
{
    struct run r;

    run_set(&r, small, 0, 1, step);
    r.k.keep_last = keep_last;
    return save(&r.k, step, &alone);
}

int load_alone(int64_t step, int64_t contents)
{
    struct run r;
    int err;

    run_set(&r, small, 0, 1, contents);
    scalars_forget(&r);
    err = iz_ckpt_load(&r.k, step, &alone);
    if (err)
        assert_int_equal(number_put(&r), 0);
    else
        assert_true(run_is(&r, contents));
    return err;
}

int64_t latest(void)
{
    struct iz_ckpt k = {.dir = folder};
    int64_t step = -1;
    int err = iz_ckpt_latest(&k, &step);

    return err ? err : step;
}

/* ---- several ranks ---- */

int save_one(struct iz_coll *c, void *arg)
{
    const struct job *j = arg;
    struct run r;

    run_set(&r, j->total, c->rank, c->size, j->step);
    if (j->replicated)
        run_replicate(&r);
    return save(&r.k, j->step, c) == 0 && wrong(&r) == 0 ? 0 : 1;
}

int load_one(struct iz_coll *c, void *arg)
{
    const struct job *j = arg;
    struct run r;

    run_set(&r, j->total, c->rank, c->size, j->step);
    if (j->replicated)
        run_replicate(&r);
    scalars_forget(&r);
    return iz_ckpt_load(&r.k, j->step, c) == 0 && run_is(&r, j->step) ? 0 : 1;
}

void all_return(int n, int (*f)(struct iz_coll *, void *), void *arg, int want)
{
    int result[64];

    on_ranks(n, f, arg, result);
    for (int i = 0; i < n; i++)
        if (result[i] != want)
            fail_msg("rank %d returned %d, not %d: %s", i, result[i], want,
                     said);
}

/* ---- files ---- */

int64_t size_of(const char *path)
{
    struct stat st;

    return stat(path, &st) == 0 ? st.st_size : -1;
}

char *contents(const char *path, int64_t *bytes)
{
    FILE *f = fopen(path, "rb");
    char *p;

    if (!f)
        fail_msg("%s: %s", path, strerror(errno));
    *bytes = size_of(path);
    p = malloc((size_t)*bytes + 1);
    assert_int_equal(fread(p, 1, (size_t)*bytes, f), *bytes);
    p[*bytes] = '\0';
    fclose(f);
    return p;
}

void replace(const char *path, const char *p, int64_t bytes)
{
    FILE *f = fopen(path, "wb");

    assert_non_null(f);
    assert_int_equal(fwrite(p, 1, (size_t)bytes, f), bytes);
    fclose(f);
}
