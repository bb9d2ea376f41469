/* SPDX-License-Identifier: Apache-2.0 */
/* Checkpoints as a run sees them: what was saved comes back at any number of
 * ranks, and neither a crash nor a failure costs the last good one. */
#include "tests/runtime/ckpt/sample.h"

#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include "tests/runtime/disk.h"

/* Of arrays of several blocks; others are in tests/e2e/ckpt/test_resume.py. */
static void other_ranks_load_what_was_saved(void **state)
{
    for (int saved = 1; saved <= 3; saved++) {
        struct job j = {large, saved};
        all_return(saved, save_one, &j, 0);
        all_return(4 - saved, load_one, &j, 0);
        all_return(saved + 1, load_one, &j, 0);
    }
}

/* A rank whose part of the first array begins later, and is longer. */
struct misfit {
    int rank, later, longer;
};

static int save_differently(struct iz_coll *c, void *arg)
{
    const struct misfit *m = arg;
    struct run r;
    run_set(&r, small, c, 1);
    r.array[0].first += c->rank == m->rank ? m->later : 0;
    r.array[0].count += c->rank == m->rank ? m->longer : 0;
    return -save(&r.k, 1, c);
}

static void ranks_that_do_not_fit_together_are_refused(void **state)
{
    static struct misfit misfits[] = {
        {1, 0, -1}, {1, 1, 0}, {2, 0, -1}, {2, -10, 10}};
    for (int i = 0; i < N_OF(misfits); i++) {
        all_return(3, save_differently, &misfits[i], EINVAL);
        assert_said("ranges of wte/master do not lie end to end over 1000");
    }
    assert_int_equal(latest(), -ENOENT);
}

/* ---- the files ---- */

static void a_step_saved_again_has_the_new_contents(void **state)
{
    struct run r;
    assert_int_equal(save_alone(7, 0), 0);
    run_set(&r, small, &alone, 8); /* step 8's values, under step 7's name */
    assert_int_equal(save(&r.k, 7, &alone), 0);
    assert_int_equal(load_alone(7, 8), 0);
    assert_int_equal(size_of(in_step(7, ".old")), -1);
    assert_int_equal(size_of(in_step(7, ".tmp")), -1);
}

static void only_the_last_ones_are_kept(void **state)
{
    assert_int_equal(latest(), -ENOENT);
    for (int64_t step = 1; step <= 5; step++)
        assert_int_equal(save_alone(step, 0), 0);
    assert_int_equal(save_alone(4, 2), 0); /* does not touch what is newer */
    assert_true(size_of(in_step(5, "/index.json")) > 0);
    assert_true(size_of(in_step(3, "/index.json")) > 0);
    assert_int_equal(size_of(in_step(2, "")), -1);
    assert_int_equal(save_alone(123456789, 1), 0);
    assert_int_equal(size_of(in_step(5, "")), -1);
    assert_int_equal(latest(), 123456789);
    assert_int_equal(load_alone(123456789, 123456789), 0);
    assert_fails(load_alone(6, 6), -ENOENT, "no complete one of step 6");
}

static void what_a_crash_left_is_cleared(void **state)
{
    assert_int_equal(save_alone(1, 0), 0);
    assert_int_equal(save_alone(2, 0), 0);
    /* Between the two renames of a replacement, while writing the next. */
    rename(in_step(2, ""), in_step(2, ".old"));
    mkdir(in_step(3, ".tmp"), 0700);
    write_text(in_step(3, ".tmp/index.json"), "x");
    mkdir(in_step(9, ""), 0700); /* without an index */
    assert_int_equal(latest(), 2);
    assert_int_equal(load_alone(2, 2), 0);
    assert_int_equal(save_alone(4, 0), 0);
    assert_int_equal(size_of(in_step(3, ".tmp")), -1);
    assert_int_equal(size_of(in_step(2, ".old")), -1);
    assert_int_equal(load_alone(2, 2), 0);
    assert_int_equal(latest(), 4);
}

/* ---- what does not fit the run ---- */

/* Which of these a run has of its own; and what is said of that. */
static const struct other_run {
    const char *model, *optimizer, *rounding, *array, *place, *scalar;
    int64_t more, cols;
    int fewer_scalars;
    const char *words;
} others[] = {
    {.model = "{\"width\":128,\"layers\":2,\"rope\":1e4}",
     .words = "model.width differs: the checkpoint has 64, the run 128"},
    {.model = "{\"width\":64,\"layers\":2,\"rope\":1e4,\"tied\":true}",
     .words = "model.tied differs: the checkpoint has nothing, the run true"},
    {.model = "{\"width\":64, \"rope\":1e4}",
     .words = "model.layers differs: the checkpoint has 2, the run nothing"},
    {.optimizer = "lion",
     .words = "has the states of optimizer adam, in this run optimizer.type "
              "has those of lion"},
    {.rounding = "coins",
     .words = "its states were rounded by dice, this program rounds those of "
              "run.state_dtype by coins"},
    {.more = 1,
     .words = "arrays.wte/master.total differs: the checkpoint has 1000, the "
              "run 1001"},
    {.array = "h.1/m",
     .words = "arrays.h.0/m differs: the checkpoint has {\"name\":\"h.0/m\","
              "\"total\":5}, the run nothing"},
    {.cols = 4,
     .words =
         "parameters.h.0.ln \"1\".shape differs: the checkpoint has [5,1], "
         "the run [1,5]"},
    {.place = "h.0.frozen/",
     .words = "parameters.h.0.ln \"1\".array differs: the checkpoint has "
              "\"h.0/\", the run \"h.0.frozen/\": other tensors are frozen"},
    {.scalar = "momentum",
     .words = "scalars.scale differs: the checkpoint has {\"hex\":\"0x"},
    {.fewer_scalars = 1,
     .words = "scalars.zero differs: the checkpoint has {\"hex\":\"-0x0p+0\","
              "\"decimal\":\"-0\"}, the run nothing"},
};

static void a_foreign_run_is_told_what_differs(void **state)
{
    assert_int_equal(save_alone(4, 0), 0);
    assert_int_equal(save_alone(5, 0), 0);
    for (int i = 0; i < N_OF(others); i++) {
        const struct other_run *o = &others[i];
        struct run r;
        run_set(&r, small, &alone, 5);
        r.k.of.model = o->model ? o->model : r.k.of.model;
        r.k.optimizer = o->optimizer ? o->optimizer : r.k.optimizer;
        r.k.rounding = o->rounding ? o->rounding : r.k.rounding;
        r.array[0].total = r.array[0].count += o->more;
        if (o->array)
            snprintf(r.array[1].name, 64, "%s", o->array);
        if (o->place)
            snprintf(r.name[1].array, 64, "%s", o->place);
        r.name[1].rows -= o->cols;
        r.name[1].cols += o->cols;
        if (o->scalar)
            snprintf(r.scalar[1].name, 48, "%s", o->scalar);
        r.k.n_scalars -= o->fewer_scalars;
        assert_fails(iz_ckpt_load(&r.k, 5, &alone), -EINVAL, o->words);
        assert_int_equal(number_put(&r), 0);
        assert_said("step-00000005/index.json");
        assert_said("step-00000004, looks complete");
    }
    assert_int_equal(load_alone(5, 5), 0);
}

/* ---- failing saves ---- */

/* Rank 1 may not write files of more than a few hundred KiB, or it is on a host
 * that does not share the folder. */
static int save_badly(struct iz_coll *c, void *arg)
{
    bool apart = *(bool *)arg;
    struct rlimit limit = {300 << 10, 300 << 10};
    const char *other = in_folder("host%d", c->rank);
    struct run r;
    run_set(&r, apart ? small : large, c, 6);
    r.k.keep_last = 1;
    signal(SIGXFSZ, SIG_IGN);
    if (c->rank == 1 && apart)
        r.k.dir = other;
    else if (c->rank == 1)
        setrlimit(RLIMIT_FSIZE, &limit);
    return -save(&r.k, 6, c);
}

static void a_save_that_fails_on_one_rank_leaves_the_last_one(void **state)
{
    assert_int_equal(save_alone(5, 1), 0);
    for (int apart = 0; apart < 2; apart++) {
        all_return(3, save_badly, &(bool){apart}, apart ? ENOENT : EFBIG);
        assert_said(apart ? "rank-00001-of-00003.safetensors: No such file"
                          : "rank-00001-of-00003.safetensors: cannot write");
        assert_int_equal(size_of(in_step(6, ".tmp")), -1);
        assert_int_equal(latest(), 5);
        assert_int_equal(load_alone(5, 5), 0);
    }
}

static int save_of(const char *id, int64_t step)
{
    struct run r;
    run_set(&r, small, &alone, step);
    r.k.of.id = id;
    r.k.of.identity = "lr 0.1\npath \"a \\\"b\\\"\"\n";
    r.k.keep_last = 2;
    return save(&r.k, step, &alone);
}

/* Neither removed, nor one of those that are kept. */
static void a_checkpoint_of_another_run_stays(void **state)
{
    char id[IZ_CKPT_ID], *identity;
    assert_int_equal(save_of("00000000000000aa", 1), 0);
    assert_int_equal(save_of("00000000000000bb", 2), 0);
    assert_int_equal(save_of("00000000000000aa", 3), 0);
    assert_int_equal(load_alone(1, 1), 0);
    assert_int_equal(save_of("00000000000000aa", 4), 0);
    assert_int_equal(size_of(in_step(1, "")), -1);
    assert_int_equal(iz_ckpt_whose(folder, 2, id, &identity), 0);
    assert_string_equal(id, "00000000000000bb");
    assert_string_equal(identity, "lr 0.1\npath \"a \\\"b\\\"\"\n");
    free(identity);
    assert_int_equal(iz_ckpt_whose(folder, 1, id, &identity), -ENOENT);
}

static void a_place_that_is_none_is_named(void **state)
{
    write_text(in_folder("checkpoints"), "x");
    assert_int_equal(latest(), -ENOENT);
    assert_fails(save_alone(1, 0), -ENOTDIR, "/checkpoints: ");
}

static int save_step(int i)
{
    return save_alone(i, 0);
}

static void
a_checkpoint_has_its_name_when_all_of_it_is_on_the_disk(void **state)
{
    assert_durable_or_refused(save_step, "checkpoints/step-%08d");
}

/* A part of it that is gone, after a crash, must not look complete. */
static void a_checkpoint_loses_its_name_before_its_files(void **state)
{
    assert_int_equal(save_alone(1, 0), 0);
    disk_begin(-1);
    assert_int_equal(save_alone(2, 1), 0);
    disk_end();
    assert_int_equal(size_of(in_step(1, "")), -1);
    assert_renamed_durably(in_step(1, ""));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        CASE(other_ranks_load_what_was_saved),
        CASE(ranks_that_do_not_fit_together_are_refused),
        CASE(a_step_saved_again_has_the_new_contents),
        CASE(only_the_last_ones_are_kept),
        CASE(what_a_crash_left_is_cleared),
        CASE(a_foreign_run_is_told_what_differs),
        CASE(a_save_that_fails_on_one_rank_leaves_the_last_one),
        CASE(a_checkpoint_of_another_run_stays),
        CASE(a_place_that_is_none_is_named),
        CASE(a_checkpoint_has_its_name_when_all_of_it_is_on_the_disk),
        CASE(a_checkpoint_loses_its_name_before_its_files),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
