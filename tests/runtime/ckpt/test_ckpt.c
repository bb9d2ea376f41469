/* SPDX-License-Identifier: Apache-2.0 */
/* Checkpoints as a run sees them: what was saved comes back at any number of
 * ranks, and neither a crash nor a full disk costs the last good one. */
#include "tests/runtime/ckpt/sample.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "runtime/ckpt/ckpt.h"
#include "runtime/ckpt/dir.h"
#include "tests/runtime/disk.h"

static void any_number_of_ranks_loads_what_any_other_saved(void **state)
{
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

static void what_all_ranks_have_is_written_once(void **state)
{
    struct job j = {large, 1, true};
    int64_t bytes = 0;

    all_return(3, save_one, &j, 0);
    for (int i = 0; i < 3; i++) {
        char name[128];

        snprintf(name, sizeof(name),
                 "checkpoints/step-00000001/rank-%05d-of-00003.safetensors", i);
        assert_true(size_of(in_folder(name)) > 3 << 20);
        bytes += size_of(in_folder(name));
    }
    assert_true(bytes < 4 * (large[0] + large[1] + 10) + (1 << 16));
}

/* How rank 1 of 3 differs. */
enum { OTHER_NAME, SHORTER, LATER, OVERLAPPING };

static int save_differently(struct iz_coll *c, void *arg)
{
    int how = *(int *)arg;
    struct run r;

    run_set(&r, small, c->rank, c->size, 1);
    if (c->rank == 1 && how == OTHER_NAME)
        r.part[1].name[0] = 'x';
    r.part[0].count -= c->rank == 1 && how == SHORTER;
    r.part[0].first += c->rank == 1 && how == LATER;
    if (how == OVERLAPPING && c->rank == 2) {
        r.part[0].first -= 10;
        r.part[0].count += 10;
    }
    return -save(&r.k, 1, c);
}

static void ranks_that_do_not_fit_together_are_refused(void **state)
{
    for (int how = OTHER_NAME; how <= OVERLAPPING; how++) {
        all_return(3, save_differently, &how, EINVAL);
        assert_said(how == OTHER_NAME
                        ? "ranks differ in their lists of arrays"
                        : "pieces of wte/master do not lie end to end");
    }
    assert_int_equal(latest(), -ENOENT);
}

static int save_short(struct iz_coll *c, void *arg)
{
    struct run r;

    run_set(&r, small, c->rank, c->size, 1);
    r.part[0].count -=
        c->rank == c->size - 1; /* the last element is nobody's */
    return -save(&r.k, 1, c);
}

static void an_element_of_no_rank_is_refused(void **state)
{
    all_return(2, save_short, NULL, EINVAL);
    assert_said("pieces of wte/master do not lie end to end over 1000");
}

/* ---- the files ---- */

static void a_rank_file_is_safetensors(void **state)
{
    struct run r;
    uint64_t length;
    int64_t bytes;
    char *p;
    float v;

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

    assert_int_equal(save_alone(7, 0), 0);
    run_set(&r, small, 0, 1, 8); /* step 8's values under the name of step 7 */
    assert_int_equal(save(&r.k, 7, &alone), 0);
    assert_int_equal(load_alone(7, 8), 0);
    assert_int_equal(size_of(in_folder("checkpoints/step-00000007.old")), -1);
    assert_int_equal(size_of(in_folder("checkpoints/step-00000007.tmp")), -1);
}

static void only_the_last_ones_are_kept(void **state)
{
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
    r.k.optimizer = "lion";
    refused(&r, "has the states of optimizer adam, in this run "
                "optimizer.type has those of lion");
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
    assert_int_equal(save_alone(4, 0), 0);
    listen_begin();
    assert_int_equal(load_alone(6, 6), -ENOENT);
    listen_end();
    assert_said("no complete one of step 6");
    assert_said("step-00000004, looks complete");
}

/* ---- failing saves ---- */

/* Rank 1 may not write files of more than a few hundred KiB. */
static int save_limited(struct iz_coll *c, void *arg)
{
    struct rlimit limit = {300 << 10, 300 << 10};
    struct run r;

    signal(SIGXFSZ, SIG_IGN);
    if (c->rank == 1)
        setrlimit(RLIMIT_FSIZE, &limit);
    run_set(&r, large, c->rank, c->size, 6);
    return -save(&r.k, 6, c);
}

static void a_save_that_fails_on_one_rank_leaves_the_last_one(void **state)
{
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

    strcpy(own, folder);
    strcpy(folder, mount_small("small", 2048, 0));
    run_set(&r, large, 0, 1, 6);
    err = save_alone(5, 1);
    listen_begin();
    if (!err)
        err = save(&r.k, 6, &alone);
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

    replace(in_folder("checkpoints"), "x", 1);
    assert_int_equal(latest(), -ENOENT);
    listen_begin();
    err = save_alone(1, 0);
    listen_end();
    assert_int_equal(err, -ENOTDIR);
    assert_said("/checkpoints: ");
    unlink(in_folder("checkpoints"));
}

static int save_step(int i)
{
    int err;

    listen_begin();
    err = save_alone(i, 0);
    listen_end();
    return err;
}

static const char *name_of_step(int i)
{
    static char path[256];

    snprintf(path, sizeof(path), "%s/checkpoints/step-%08d", folder, i);
    return path;
}

static void
a_checkpoint_has_its_name_when_all_of_it_is_on_the_disk(void **state)
{
    assert_durable_or_refused(save_step, name_of_step);
}

/* A part of it that is gone, after a crash, must not look complete. */
static void a_checkpoint_loses_its_name_before_its_files(void **state)
{
    assert_int_equal(save_alone(1, 0), 0);
    disk_begin(-1);
    assert_int_equal(save_alone(2, 1), 0);
    disk_end();
    assert_int_equal(size_of(name_of_step(1)), -1);
    assert_renamed_durably(name_of_step(1));
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

    assert_int_equal(save_alone(1, 0), 0);
    /* A busy machine needs more of them until enough saves came through. */
    for (int i = 0; i < 30 || (after <= 10 && i < 3000); i++) {
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
        for (int64_t s = after; s >= 0; s = iz_ckpt_dir_newest(folder, s))
            assert_int_equal(load_alone(s, s), 0);
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
        CASE(an_element_of_no_rank_is_refused),
        CASE(a_rank_file_is_safetensors),
        CASE(a_step_saved_again_has_the_new_contents),
        CASE(only_the_last_ones_are_kept),
        CASE(what_a_crash_left_is_cleared),
        CASE(a_foreign_run_is_told_what_differs),
        CASE(a_missing_step_is_told),
        CASE(a_save_that_fails_on_one_rank_leaves_the_last_one),
        CASE(a_full_disk_leaves_the_last_one),
        CASE(a_place_that_is_none_is_named),
        CASE(a_checkpoint_has_its_name_when_all_of_it_is_on_the_disk),
        CASE(a_checkpoint_loses_its_name_before_its_files),
        CASE(a_kill_at_any_time_leaves_a_checkpoint),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
