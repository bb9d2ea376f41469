/* SPDX-License-Identifier: Apache-2.0 */
/* Checkpoints as a run sees them: what was saved comes back at any number of
 * ranks, and a crash, a full disk or a damaged file never costs the last good
 * one. */
#include "tests/files/fixture.h"

#include <dirent.h>
#include <errno.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "runtime/ckpt.h"
#include "runtime/hash.h"
#include "runtime/safetensors.h"

#define ARRAYS 4
#define MODEL "{\"layers\": 2, \"width\": 64, \"rope\": 1e4}"

/* The arrays of a run; small in most tests, of more than a block in some. */
static const int64_t small[ARRAYS] = {1000, 5, 1, 0};
static const int64_t large[ARRAYS] = {IZ_CKPT_PIECE + 7, 2 * IZ_CKPT_PIECE, 1,
                                      3};

/* A run's state on one rank: get computes it, put compares. */
struct piece {
    int array;
    int64_t first, count, next;
    int64_t step;
    int64_t put, wrong;
};

struct run {
    struct iz_ckpt k;
    struct iz_ckpt_part part[ARRAYS];
    struct iz_ckpt_name name[2];
    struct iz_ckpt_scalar scalar[4];
    struct piece piece[ARRAYS];
};

/* Any bits, not-a-numbers included. */
static uint32_t bits(int array, int64_t i, int64_t step)
{
    return (uint32_t)iz_hash_mix((uint64_t)(i * 64 + array) ^ (uint64_t)step
                                                                  << 40);
}

static void get(void *arg, int64_t from, float *out, int64_t n)
{
    struct piece *p = arg;

    p->wrong += n < 1 || n > IZ_CKPT_PIECE || from < 0 || from + n > p->count;
    for (int64_t i = 0; i < n; i++) {
        uint32_t b = bits(p->array, p->first + from + i, p->step);

        memcpy(out + i, &b, 4);
    }
}

static void put(void *arg, int64_t from, const float *in, int64_t n)
{
    struct piece *p = arg;

    p->wrong += n < 1 || n > IZ_CKPT_PIECE || from != p->next;
    p->next = from + n;
    for (int64_t i = 0; i < n; i++) {
        uint32_t b;

        memcpy(&b, in + i, 4);
        p->wrong += b != bits(p->array, p->first + from + i, p->step);
    }
    p->put += n;
}

static void run_set(struct run *r, const int64_t *total, int rank, int ranks,
                    int64_t step)
{
    static const char *const name[ARRAYS] = {"wte/master", "h.0/m", "h.0/v",
                                             "ln/v"};

    memset(r, 0, sizeof *r);
    for (int i = 0; i < ARRAYS; i++) {
        int64_t shard = (total[i] + ranks - 1) / ranks, first = shard * rank;
        struct iz_ckpt_part *p = &r->part[i];

        first = first < total[i] ? first : total[i];
        shard = shard < total[i] - first ? shard : total[i] - first;
        r->piece[i] = (struct piece){i, first, shard, 0, step, 0, 0};
        *p = (struct iz_ckpt_part){.total = total[i],
                                   .first = first,
                                   .count = shard,
                                   .get = get,
                                   .put = put,
                                   .arg = &r->piece[i]};
        snprintf(p->name, sizeof p->name, "%s", name[i]);
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
                            .model_text = MODEL};
}

/* Every rank has the arrays whole. */
static void run_replicate(struct run *r)
{
    for (int i = 0; i < ARRAYS; i++) {
        r->piece[i].first = r->part[i].first = 0;
        r->piece[i].count = r->part[i].count = r->part[i].total;
    }
}

static int64_t wrong(const struct run *r)
{
    int64_t n = 0;

    for (int i = 0; i < ARRAYS; i++)
        n += r->piece[i].wrong;
    return n;
}

static int64_t number_put(const struct run *r)
{
    int64_t n = 0;

    for (int i = 0; i < ARRAYS; i++)
        n += r->piece[i].put;
    return n;
}

/* All elements and scalars came, as they were saved at `step`. */
static int run_is(const struct run *r, int64_t step)
{
    int64_t want = 0;

    for (int i = 0; i < ARRAYS; i++)
        want += r->part[i].count;
    return number_put(r) == want && wrong(r) == 0 &&
           r->scalar[0].value == 0.1 * (double)step &&
           r->scalar[1].value == 0x1p-1070 && isinf(r->scalar[2].value) &&
           signbit(r->scalar[3].value);
}

static void scalars_forget(struct run *r)
{
    for (int i = 0; i < r->k.n_scalars; i++)
        r->scalar[i].value = NAN;
}

/* ---- one rank ---- */

static int save_alone(int64_t step, int keep_last)
{
    struct run r;

    run_set(&r, small, 0, 1, step);
    r.k.keep_last = keep_last;
    return iz_ckpt_save(&r.k, step, &alone);
}

static int load_alone(int64_t step, int64_t contents)
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

static int64_t latest(void)
{
    struct iz_ckpt k = {.dir = folder};
    int64_t step = -1;
    int err = iz_ckpt_latest(&k, &step);

    return err ? err : step;
}

/* ---- several ranks ---- */

struct job {
    const int64_t *total;
    int64_t step;
    bool replicated;
};

static int save_one(struct iz_coll *c, void *arg)
{
    const struct job *j = arg;
    struct run r;

    run_set(&r, j->total, c->rank, c->size, j->step);
    if (j->replicated)
        run_replicate(&r);
    return iz_ckpt_save(&r.k, j->step, c) == 0 && wrong(&r) == 0 ? 0 : 1;
}

static int load_one(struct iz_coll *c, void *arg)
{
    const struct job *j = arg;
    struct run r;

    run_set(&r, j->total, c->rank, c->size, j->step);
    if (j->replicated)
        run_replicate(&r);
    scalars_forget(&r);
    return iz_ckpt_load(&r.k, j->step, c) == 0 && run_is(&r, j->step) ? 0 : 1;
}

static void all_return(int n, int (*f)(struct iz_coll *, void *), void *arg,
                       int want)
{
    int result[64];

    on_ranks(n, f, arg, result);
    for (int i = 0; i < n; i++)
        if (result[i] != want)
            fail_msg("rank %d returned %d, not %d: %s", i, result[i], want,
                     said);
}

static void any_number_of_ranks_loads_what_any_other_saved(void **state)
{
    (void)state;
    for (int replicated = 0; replicated < 2; replicated++)
        for (int s = 1; s <= 4; s++)
            for (int l = 1; l <= 4; l++) {
                /* Large arrays once per number of writers. */
                struct job j = {l == s % 4 + 1 ? large : small, 10 * s + l,
                                replicated != 0};

                all_return(s, save_one, &j, 0);
                j.replicated = l % 2 != 0;
                all_return(l, load_one, &j, 0);
            }
}

static int64_t size_of(const char *path)
{
    struct stat st;

    return stat(path, &st) == 0 ? st.st_size : -1;
}

static void what_all_ranks_have_is_written_once(void **state)
{
    struct job j = {large, 1, true};
    int64_t bytes = 0;

    (void)state;
    all_return(3, save_one, &j, 0);
    for (int i = 0; i < 3; i++) {
        char name[128];

        snprintf(name, sizeof name,
                 "checkpoints/step-00000001/rank-%05d-of-00003.safetensors", i);
        assert_true(size_of(in_folder(name)) > 3 << 20);
        bytes += size_of(in_folder(name));
    }
    assert_true(bytes < 4 * (large[0] + large[1] + 10) + (1 << 16));
}

static int save_differently(struct iz_coll *c, void *arg)
{
    struct run r;

    run_set(&r, small, c->rank, c->size, 1);
    if (*(int *)arg == 0 && c->rank == 1)
        r.part[1].name[0] = 'x';
    if (*(int *)arg == 1 && c->rank == 1)
        r.part[0].count--;
    return -iz_ckpt_save(&r.k, 1, c);
}

static void ranks_that_do_not_fit_together_are_refused(void **state)
{
    int kind = 0;

    (void)state;
    all_return(3, save_differently, &kind, EINVAL);
    assert_said("ranks differ in their lists of arrays");
    kind = 1;
    all_return(3, save_differently, &kind, EINVAL);
    assert_said("pieces of wte/master do not lie end to end");
    assert_int_equal(latest(), -ENOENT);
}

/* ---- the files ---- */

static char *contents(const char *path, int64_t *bytes)
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

static void replace(const char *path, const char *p, int64_t bytes)
{
    FILE *f = fopen(path, "wb");

    assert_non_null(f);
    assert_int_equal(fwrite(p, 1, (size_t)bytes, f), bytes);
    fclose(f);
}

static void a_rank_file_is_safetensors(void **state)
{
    struct run r;
    uint64_t length;
    int64_t bytes;
    char *p;
    float v;

    (void)state;
    run_set(&r, small, 0, 1, 3);
    assert_int_equal(save_alone(3, 0), 0);
    p = contents(
        in_folder("checkpoints/step-00000003/rank-00000-of-00001.safetensors"),
        &bytes);
    memcpy(&length, p, 8);
    assert_int_equal(8 + length + 4 * 1006, bytes);
    assert_int_equal((8 + length) % 8, 0);
    assert_int_equal(strncmp(p + 8, "{\"__metadata__\":{\"", 18), 0);
    assert_non_null(strstr(p + 8,
                           "\"wte/master\":{\"dtype\":\"F32\",\"shape\":[1000],"
                           "\"data_offsets\":[0,4000]}"));
    assert_non_null(strstr(p + 8, "\"h.0/v\":{\"dtype\":\"F32\",\"shape\":[1],"
                                  "\"data_offsets\":[4020,4024]}"));
    get(&r.piece[1], 4, &v, 1);
    assert_memory_equal(p + 8 + length + 4016, &v, 4);
    free(p);
}

static void a_step_saved_again_has_the_new_contents(void **state)
{
    struct run r;

    (void)state;
    assert_int_equal(save_alone(7, 0), 0);
    run_set(&r, small, 0, 1, 8); /* step 8's values under the name of step 7 */
    assert_int_equal(iz_ckpt_save(&r.k, 7, &alone), 0);
    assert_int_equal(load_alone(7, 8), 0);
    assert_int_equal(size_of(in_folder("checkpoints/step-00000007.old")), -1);
    assert_int_equal(size_of(in_folder("checkpoints/step-00000007.tmp")), -1);
}

static void only_the_last_ones_are_kept(void **state)
{
    (void)state;
    assert_int_equal(latest(), -ENOENT);
    for (int64_t step = 1; step <= 5; step++)
        assert_int_equal(save_alone(step, 0), 0);
    assert_int_equal(save_alone(4, 2), 0); /* does not touch what is newer */
    assert_true(size_of(in_folder("checkpoints/step-00000005/index.json")) > 0);
    assert_true(size_of(in_folder("checkpoints/step-00000003/index.json")) > 0);
    assert_int_equal(size_of(in_folder("checkpoints/step-00000002")), -1);
    assert_int_equal(save_alone(123456789, 1), 0);
    assert_int_equal(size_of(in_folder("checkpoints/step-00000005")), -1);
    assert_int_equal(latest(), 123456789);
    assert_int_equal(load_alone(123456789, 123456789), 0);
}

static void what_a_crash_left_is_cleared(void **state)
{
    (void)state;
    assert_int_equal(save_alone(1, 0), 0);
    assert_int_equal(save_alone(2, 0), 0);
    /* Between the two renames of a replacement, while writing the next. */
    rename(in_folder("checkpoints/step-00000002"),
           in_folder("checkpoints/step-00000002.old"));
    mkdir(in_folder("checkpoints/step-00000003.tmp"), 0700);
    replace(in_folder("checkpoints/step-00000003.tmp/index.json"), "x", 1);
    mkdir(in_folder("checkpoints/step-00000009"), 0700); /* without an index */
    assert_int_equal(latest(), 2);
    assert_int_equal(load_alone(2, 2), 0);
    assert_int_equal(save_alone(4, 0), 0);
    assert_int_equal(size_of(in_folder("checkpoints/step-00000003.tmp")), -1);
    assert_int_equal(size_of(in_folder("checkpoints/step-00000002.old")), -1);
    assert_int_equal(load_alone(2, 2), 0);
    assert_int_equal(latest(), 4);
}

/* ---- what does not fit the run ---- */

static void refused(struct run *r, const char *words)
{
    int err;

    listen_begin();
    err = iz_ckpt_load(&r->k, 5, &alone);
    listen_end();
    assert_int_equal(err, -EINVAL);
    assert_int_equal(number_put(r), 0);
    assert_said("step-00000005/index.json");
    assert_said(words);
    assert_said("step-00000004, looks complete");
}

static void a_foreign_run_is_told_what_differs(void **state)
{
    struct run r;

    (void)state;
    assert_int_equal(save_alone(4, 0), 0);
    assert_int_equal(save_alone(5, 0), 0);
    run_set(&r, small, 0, 1, 5);
    r.k.model_text = "{\"width\":128,\"layers\":2,\"rope\":1e4}";
    refused(&r, "model.width differs: the checkpoint has 64, the run 128");
    r.k.model_text = "{\"width\":64,\"layers\":2,\"rope\":1e4,\"tied\":true}";
    refused(&r, "model.tied differs: the checkpoint has nothing, the run true");
    r.k.model_text = "{\"width\":64, \"rope\":1e4}";
    refused(&r, "model.layers differs: the checkpoint has 2, the run nothing");
    run_set(&r, small, 0, 1, 5);
    r.part[0].total = r.part[0].count = 1001;
    refused(&r, "array wte/master has 1000 elements, in this run 1001");
    run_set(&r, small, 0, 1, 5);
    snprintf(r.part[1].name, 64, "h.1/m");
    refused(&r, "array h.0/m is not part of this run");
    run_set(&r, small, 0, 1, 5);
    r.name[1].rows = 1;
    r.name[1].cols = 5;
    refused(&r, "parameter 1 (h.0.ln \"1\", [1, 5] in h.0/)");
    run_set(&r, small, 0, 1, 5);
    snprintf(r.scalar[1].name, 48, "momentum");
    refused(&r, "scalar momentum is missing");
    run_set(&r, small, 0, 1, 5);
    r.k.n_scalars = 3;
    refused(&r, "4 scalars, this run has 3");
    assert_int_equal(load_alone(5, 5), 0);
}

static void a_missing_step_is_told(void **state)
{
    (void)state;
    assert_int_equal(save_alone(4, 0), 0);
    listen_begin();
    assert_int_equal(load_alone(6, 6), -ENOENT);
    listen_end();
    assert_said("no complete one of step 6");
    assert_said("step-00000004, looks complete");
}

/* ---- damage ---- */

static const char *const files[] = {"rank-00000-of-00002.safetensors",
                                    "rank-00001-of-00002.safetensors",
                                    "index.json"};

static const char *file_of(int i)
{
    char name[128];

    snprintf(name, sizeof name, "checkpoints/step-00000005/%s", files[i]);
    return in_folder(name);
}

static void save_two(void)
{
    struct job j = {small, 5, false};

    assert_int_equal(save_alone(4, 0), 0);
    all_return(2, save_one, &j, 0);
}

/* The load fails, names the file and the checkpoint before it, and puts
 * nothing. */
static void damage_is_named(int i)
{
    int err;

    listen_begin();
    err = load_alone(5, 5);
    listen_end();
    assert_true(err < 0);
    assert_said(files[i]);
    assert_said("step-00000004, looks complete");
}

static void every_flipped_bit_is_named(void **state)
{
    (void)state;
    save_two();
    for (int i = 0; i < N_OF(files); i++) {
        int64_t bytes;
        char *p = contents(file_of(i), &bytes);

        for (int n = 0; n < 150; n++) {
            int64_t at = (int64_t)(random_next() % (uint64_t)bytes);
            char bit = (char)(1 << random_next() % 8);

            p[at] = (char)(p[at] ^ bit);
            replace(file_of(i), p, bytes);
            damage_is_named(i);
            p[at] = (char)(p[at] ^ bit);
        }
        replace(file_of(i), p, bytes);
        free(p);
    }
    assert_int_equal(load_alone(5, 5), 0);
}

static void every_other_length_is_named(void **state)
{
    (void)state;
    save_two();
    for (int i = 0; i < N_OF(files); i++) {
        int64_t bytes;
        char *p = contents(file_of(i), &bytes);

        for (int n = 0; n < 50; n++) {
            int64_t left = (int64_t)(random_next() % (uint64_t)bytes);

            replace(file_of(i), p, n < 10 ? n : n == 10 ? bytes + 1 : left);
            damage_is_named(i);
        }
        replace(file_of(i), p, bytes);
        free(p);
    }
    assert_int_equal(load_alone(5, 5), 0);
}

static void a_missing_or_foreign_file_is_named(void **state)
{
    struct job j = {small, 3, false};
    int64_t bytes;
    char *p;

    (void)state;
    save_two();
    all_return(2, save_one, &j, 0); /* an older step, as if copied together */
    p = contents(file_of(0), &bytes);
    unlink(file_of(0));
    damage_is_named(0);
    assert_said("No such file");
    mkdir(file_of(0), 0700);
    damage_is_named(0);
    assert_said("not a regular file");
    rmdir(file_of(0));
    replace(file_of(0), p, bytes);
    free(p);
    p = contents(in_folder("checkpoints/step-00000003/"
                           "rank-00001-of-00002.safetensors"),
                 &bytes);
    replace(file_of(1), p, bytes);
    damage_is_named(1);
    free(p);
}

static int load_damaged(struct iz_coll *c, void *arg)
{
    struct run r;
    int err;

    run_set(&r, arg, c->rank, c->size, 5);
    err = iz_ckpt_load(&r.k, 5, c);
    return number_put(&r) == 0 ? -err : 1;
}

static void damage_that_one_rank_sees_fails_on_all(void **state)
{
    struct job j = {large, 5, false};
    int64_t bytes;
    char *p;

    (void)state;
    all_return(2, save_one, &j, 0);
    p = contents(file_of(1), &bytes);
    p[bytes - 1] ^= 1;
    replace(file_of(1), p, bytes);
    free(p);
    all_return(3, load_damaged, (void *)(uintptr_t)large, EINVAL);
    assert_said("rank-00001-of-00002.safetensors: damaged: tensor ln/v");
}

/* The reader by itself, on headers that no index vouches for. */
static void no_header_breaks_the_reader(void **state)
{
    static const char *const words[] = {
        "99999999999999999",    "-1", "[",    "}",      "\"", "0",
        "18446744073709551615", ",",  "null", "\\u0000"};
    static float block[IZ_BLOCK];
    int64_t bytes;
    int opened = 0;
    char *p, *q;

    (void)state;
    assert_int_equal(save_alone(5, 0), 0);
    rename(
        in_folder("checkpoints/step-00000005/rank-00000-of-00001.safetensors"),
        in_folder("x"));
    p = contents(in_folder("x"), &bytes);
    q = malloc((size_t)bytes);
    for (int n = 0; n < 3000; n++) {
        struct iz_safetensors *s;
        int64_t header = bytes - 4 * 1006;

        memcpy(q, p, (size_t)bytes);
        for (uint64_t k = random_next() % 3 + 1; k-- > 0;) {
            const char *w = words[random_next() % N_OF(words)];
            int64_t at = (int64_t)(random_next() % (uint64_t)(header - 20));

            if (random_next() % 3)
                memcpy(q + at, w, strlen(w));
            else
                q[at] = (char)random_next();
        }
        replace(in_folder("x"), q, random_next() % 4 ? bytes : header);
        listen_begin();
        if (iz_safetensors_open(&s, in_folder("x")) == 0) {
            opened++;
            for (int i = 0; i < s->n_pieces; i++)
                for (int64_t b = 0; b < iz_piece_blocks(&s->piece[i]); b++)
                    iz_safetensors_read(s, &s->piece[i], b, block);
        }
        listen_end();
        if (!s)
            assert_said("/x: ");
        iz_safetensors_close(&s);
    }
    assert_true(opened > 0 && opened < 3000);
    free(p);
    free(q);
}

/* ---- failing saves ---- */

/* Rank 1 may not write files of more than a few hundred KiB. */
static int save_limited(struct iz_coll *c, void *arg)
{
    struct rlimit limit = {300 << 10, 300 << 10};
    struct run r;

    (void)arg;
    signal(SIGXFSZ, SIG_IGN);
    if (c->rank == 1)
        setrlimit(RLIMIT_FSIZE, &limit);
    run_set(&r, large, c->rank, c->size, 6);
    return -iz_ckpt_save(&r.k, 6, c);
}

static void a_save_that_fails_on_one_rank_leaves_the_last_one(void **state)
{
    (void)state;
    assert_int_equal(save_alone(5, 1), 0);
    all_return(3, save_limited, NULL, EFBIG);
    assert_said(
        "step-00000006.tmp/rank-00001-of-00003.safetensors: cannot write");
    assert_said("File too large");
    assert_int_equal(size_of(in_folder("checkpoints/step-00000006.tmp")), -1);
    assert_int_equal(latest(), 5);
    assert_int_equal(load_alone(5, 5), 0);
}

static void a_full_disk_leaves_the_last_one(void **state)
{
    char own[64];
    struct run r;
    int err;

    (void)state;
    strcpy(own, folder);
    strcpy(folder, mount_small("small", 2048, 0));
    run_set(&r, large, 0, 1, 6);
    err = save_alone(5, 1);
    listen_begin();
    if (!err)
        err = iz_ckpt_save(&r.k, 6, &alone);
    listen_end();
    assert_int_equal(err, -ENOSPC);
    assert_said("bytes are free): No space left on device");
    assert_int_equal(latest(), 5);
    assert_int_equal(load_alone(5, 5), 0);
    assert_int_equal(save_alone(7, 1), 0); /* there is room again */
    strcpy(folder, own);
}

static void a_place_that_is_none_is_named(void **state)
{
    int err;

    (void)state;
    replace(in_folder("checkpoints"), "x", 1);
    assert_int_equal(latest(), -ENOENT);
    listen_begin();
    err = save_alone(1, 0);
    listen_end();
    assert_int_equal(err, -ENOTDIR);
    assert_said("/checkpoints: ");
    unlink(in_folder("checkpoints"));
}

/* Saves for ever, as a run does, some steps twice. */
static void save_without_end(void)
{
    for (int64_t step = latest() + 1;; step++)
        if (save_alone(step, 2) != 0 ||
            (step % 3 == 0 && save_alone(step, 2) != 0))
            _exit(1);
}

static void a_kill_at_any_time_leaves_a_checkpoint(void **state)
{
    int64_t before = 1, after = 0;

    (void)state;
    assert_int_equal(save_alone(1, 0), 0);
    for (int i = 0; i < 30; i++) {
        struct timespec t = {0, (long)(random_next() % 40000000)};
        pid_t pid = fork();
        int status;

        if (pid == 0)
            save_without_end();
        nanosleep(&t, NULL);
        assert_int_equal(kill(pid, SIGKILL), 0);
        waitpid(pid, &status, 0);
        assert_true(WIFSIGNALED(status)); /* no save failed */
        after = latest();
        assert_true(after >= before);
        assert_int_equal(load_alone(after, after), 0);
        before = after;
    }
    assert_true(after > 10); /* it did save between the kills */
}

#define CASE(f) cmocka_unit_test_setup_teardown(f, make_folder, remove_folder)

int main(void)
{
    const struct CMUnitTest tests[] = {
        CASE(any_number_of_ranks_loads_what_any_other_saved),
        CASE(what_all_ranks_have_is_written_once),
        CASE(ranks_that_do_not_fit_together_are_refused),
        CASE(a_rank_file_is_safetensors),
        CASE(a_step_saved_again_has_the_new_contents),
        CASE(only_the_last_ones_are_kept),
        CASE(what_a_crash_left_is_cleared),
        CASE(a_foreign_run_is_told_what_differs),
        CASE(a_missing_step_is_told),
        CASE(every_flipped_bit_is_named),
        CASE(every_other_length_is_named),
        CASE(a_missing_or_foreign_file_is_named),
        CASE(damage_that_one_rank_sees_fails_on_all),
        CASE(no_header_breaks_the_reader),
        CASE(a_save_that_fails_on_one_rank_leaves_the_last_one),
        CASE(a_full_disk_leaves_the_last_one),
        CASE(a_place_that_is_none_is_named),
        CASE(a_kill_at_any_time_leaves_a_checkpoint),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
