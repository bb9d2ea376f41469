/* SPDX-License-Identifier: Apache-2.0 */
/* See sample.h. */
#include "tests/runtime/ckpt/sample.h"

#include "codelets/base/mix.h"

const int64_t small[ARRAYS] = {1000, 5, 1, 0};
const int64_t large[ARRAYS] = {IZ_CKPT_BLOCK + 7, 2 * IZ_CKPT_BLOCK, 1, 3};

/* Any bits, not-a-numbers included. */
static uint32_t bits(const struct state *s, int64_t i)
{
    return (uint32_t)iz_mix((uint64_t)((s->part->first + i) * 64 + s->array) ^
                            (uint64_t)s->step << 40);
}

static void put(void *arg, int64_t from, const float *in, int64_t n)
{
    struct state *s = arg;
    s->wrong |= n < 1 || n > IZ_CKPT_BLOCK || from != s->put;
    s->put += n;
    for (int64_t i = 0; i < n; i++)
        s->wrong |= memcmp(&(uint32_t){bits(s, from + i)}, in + i, 4) != 0;
}

void run_set(struct run *r, const int64_t *total, const struct iz_coll *c,
             int64_t step)
{
    static const char *const name[ARRAYS] = {"wte/master", "h.0/m", "h.0/v",
                                             "ln/v"};
    *r = (struct run){
        .k = {.dir = folder,
              .array = r->array,
              .sink = r->sink,
              .n_arrays = ARRAYS,
              .names = r->name,
              .n_names = 2,
              .scalar = r->scalar,
              .n_scalars = 4,
              .of = {.model = MODEL},
              .optimizer = "adam",
              .rounding = "dice"},
        .name = {{"wte.weight", "wte/", 0, total[0], 1},
                 {"h.0.ln \"1\"", "h.0/", 0, 5, 1}},
        .scalar = {{"lr", 0.1 * (double)step},
                   {"scale", 0x1p-1070},
                   {"limit", -INFINITY},
                   {"zero", -0.0}},
    };
    for (int i = 0; i < ARRAYS; i++) {
        int64_t shard = (total[i] + c->size - 1) / c->size;
        int64_t first = shard * c->rank;
        first = first < total[i] ? first : total[i];
        int64_t rest = total[i] - first;
        r->state[i] = (struct state){&r->array[i], i, .step = step};
        r->sink[i] = (struct iz_ckpt_sink){put, &r->state[i]};
        r->array[i] =
            (struct iz_rank_range){.total = total[i],
                                   .first = first,
                                   .count = shard < rest ? shard : rest};
        snprintf(r->array[i].name, sizeof(r->array[i].name), "%s", name[i]);
    }
}

int64_t number_put(const struct run *r)
{
    int64_t n = 0;
    for (int i = 0; i < ARRAYS; i++)
        n += r->state[i].put;
    return n;
}

/* All elements and scalars came, as they were saved at `step`. */
static bool run_is(const struct run *r, int64_t step)
{
    bool right = r->scalar[0].value == 0.1 * (double)step &&
                 r->scalar[1].value == 0x1p-1070 && isinf(r->scalar[2].value) &&
                 signbit(r->scalar[3].value);
    for (int i = 0; i < ARRAYS; i++)
        right =
            right && r->state[i].put == r->array[i].count && !r->state[i].wrong;
    return right;
}

const char *in_step(int step, const char *name)
{
    return in_folder("checkpoints/step-%08d%s", step, name);
}

/* ---- saving and loading ---- */

static int write_blocks(struct iz_ckpt_writer *w, const struct iz_ckpt *k)
{
    static uint32_t block[IZ_CKPT_BLOCK];
    int err = iz_ckpt_writer_open(w);
    for (int i = 0; i < k->n_arrays; i++) {
        const struct iz_rank_range *p = &k->array[i];
        for (int64_t b = 0; b < iz_rank_range_blocks(p) && !err; b++) {
            for (int64_t e = 0; e < iz_rank_range_block_elems(p, b); e++)
                block[e] = bits(k->sink[i].arg, b * IZ_CKPT_BLOCK + e);
            err = iz_ckpt_writer_block(w, i, b, (const float *)block);
        }
    }
    return err;
}

/* As a run saves while training waits. */
int save(const struct iz_ckpt *k, int64_t step, struct iz_coll *c)
{
    struct iz_ckpt_writer w = {
        .k = k, .step = step, .rank = c->rank, .ranks = c->size};
    bool first = c->rank == 0;
    int err = iz_agree(c, first ? iz_ckpt_dir_sweep(k->dir) : 0);
    if (!err) {
        err = iz_ckpt_writer_close(&w, write_blocks(&w, k));
        err = iz_agree(c, err);
        if (!err)
            err = iz_agree(c, first ? iz_ckpt_commit(k, step, c->size) : 0);
        if (err && first)
            iz_ckpt_dir_abort(k->dir, step);
    }
    return err;
}

int save_alone(int64_t step, int keep_last)
{
    struct run r;
    run_set(&r, small, &alone, step);
    r.k.keep_last = keep_last;
    return save(&r.k, step, &alone);
}

static int load(struct run *r, int64_t step, struct iz_coll *c)
{
    for (int i = 0; i < r->k.n_scalars; i++)
        r->scalar[i].value = NAN;
    return iz_ckpt_load(&r->k, step, c);
}

int load_alone(int64_t step, int64_t saved)
{
    struct run r;
    run_set(&r, small, &alone, saved);
    int err = load(&r, step, &alone);
    assert_true(err ? number_put(&r) == 0 : run_is(&r, saved));
    return err;
}

int64_t latest(void)
{
    return iz_ckpt_dir_newest(folder, INT64_MAX);
}

int save_one(struct iz_coll *c, void *arg)
{
    const struct job *j = arg;
    struct run r;
    run_set(&r, j->total, c, j->step);
    return save(&r.k, j->step, c) != 0;
}

int load_one(struct iz_coll *c, void *arg)
{
    const struct job *j = arg;
    struct run r;
    run_set(&r, j->total, c, j->step);
    return load(&r, j->step, c) || !run_is(&r, j->step);
}
