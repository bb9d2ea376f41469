/* SPDX-License-Identifier: Apache-2.0 */
/* The collectives, as one process per rank under mpirun or alone, by reading
 * memory, by messages, and with both as on several hosts.  Sums are compared
 * bit by bit with a serial sum in rank order.  With an argument the last rank
 * stops ("late") or dies ("killed") before a barrier, or before an all-gather
 * ("late-read", "killed-read"); with "late-deaf" MPI_Abort never returns
 * either, and with "late-disk" the rank may wait for its disk, with
 * "late-apart" in a container of its own (see late.sh). */
#include "tests/runtime/fixture.h"

#include <mpi.h>
#include <signal.h>
#include <time.h>

#include "codelets/base/mix.h"
#include "codelets/flat/dtype.h"
#include "codelets/flat/flat.h"
#include "runtime/comm/state.h"

static struct iz_coll *coll;

static const enum iz_dtype floats[] = {IZ_F32, IZ_BF16, IZ_F16};

static void *take(int64_t bytes)
{
    void *p = malloc((size_t)bytes + 1);
    assert_non_null(p);
    return p;
}

/* What all ranks together have, as long as the longest of all. */
#define LONGEST 8400001
static unsigned char *bytes;

static void bytes_open(void)
{
    bytes = take((int64_t)LONGEST * coll->size);
    for (int64_t i = 0; i < (int64_t)LONGEST * coll->size; i++)
        bytes[i] = (unsigned char)(iz_mix((uint64_t)i) >> 13);
}

/* Where the parts of the ranks start and end, in coll->first: `shard` each, or
 * of uneven ones those of number -1 - shard, `times` as long: none, a few, and
 * several fragments. */
static int64_t cut_parts(int64_t shard, int times)
{
    static const int64_t length[] = {0, 5, 40001, 1, 160003, 0, 64};
    coll->first[0] = 0;
    for (int r = 0; r < coll->size; r++)
        coll->first[r + 1] =
            coll->first[r] +
            (shard < 0 ? length[(r - 1 - shard) % 7] * times : shard);
    return coll->first[coll->size];
}

static void check_gather(int64_t shard)
{
    int64_t all = cut_parts(shard, 27), at = coll->first[coll->rank];
    int64_t own = coll->first[coll->rank + 1] - at, sent = coll->sent_bytes;
    int64_t received = coll->received_bytes;
    unsigned char *full = take(all);
    memset(full, 0x5a, (size_t)all + 1);
    memcpy(full + at, bytes + at, (size_t)own);
    iz_coll_all_gatherv(coll, full, "gather");
    assert_memory_equal(full, bytes, all);
    assert_int_equal(full[all], 0x5a);
    assert_int_equal(coll->sent_bytes - sent, (coll->size - 1) * own);
    assert_int_equal(coll->received_bytes - received, all - own);
    free(full);
}

/* A copy in each group, and a unit gathered from it: all shards in order. */
static void check_copy(int64_t shard, int n)
{
    int share = coll->size / n, at = coll->rank % n;
    int64_t all = shard * coll->size, part = shard * share;
    int64_t sent = coll->sent_bytes, received = coll->received_bytes;
    int64_t moved = (share - (coll->rank / share == at)) * shard;
    unsigned char *full = take(all), *want = take(all);
    memset(full, 0x5a, (size_t)all + 1);
    memset(want, 0x5a, (size_t)all + 1);
    memcpy(want + at * part, bytes + at * part, (size_t)part);
    iz_coll_refresh(coll, full + at * part, bytes + coll->rank * shard, shard,
                    n, "copy");
    assert_int_equal(coll->sent_bytes - sent, moved);
    assert_int_equal(coll->received_bytes - received, moved);
    assert_memory_equal(full, want, all + 1);
    sent = coll->sent_bytes;
    received = coll->received_bytes;
    iz_coll_all_gather_among(coll, full, part, n, "gather");
    assert_memory_equal(full, bytes, all);
    assert_int_equal(full[all], 0x5a);
    assert_int_equal(coll->sent_bytes - sent, (n - 1) * part);
    assert_int_equal(coll->received_bytes - received, (n - 1) * part);
    free(full);
    free(want);
}

/* A group of all, too.  Pieces between hosts are shorter. */
static void groups_have_copies_of_all_shards(void **state)
{
    static const int64_t shards[] = {0, 1, 7, 1500003, 4194304, LONGEST};
    int some = coll->local_size == coll->size ? N_OF(shards) : 4;
    for (int n = 1; n <= coll->size; n++)
        for (int k = 0; k < some && coll->size % n == 0; k++)
            check_copy(shards[k], n);
}

static float rounded(float x, enum iz_dtype t)
{
    float y;
    iz_cast(&y, t, &x, IZ_F32, 1);
    iz_cast(&x, IZ_F32, &y, t, 1);
    return x;
}

/* Numbers of each type whose sums depend on their order. */
enum { NUMBERS = 4096 };
static float number[3][NUMBERS];

static void numbers_open(void)
{
    for (int t = 0; t < 3; t++)
        for (int k = 0; k < NUMBERS; k++) {
            uint64_t h = iz_mix((uint64_t)k);
            float x = (float)((double)(h >> 11) * 0x1p-53 - 0.5);
            number[floats[t]][k] =
                rounded(x * (float)(1 << (h % 8)), floats[t]);
        }
}

/* Element i of the buffer of rank r. */
static float element(int r, int64_t i, enum iz_dtype t)
{
    return number[t][iz_mix((uint64_t)i * 64 + (uint64_t)r) % NUMBERS];
}

static void fill(void *p, int r, enum iz_dtype t, int64_t n)
{
    float *x = take(n * (int64_t)sizeof(*x));
    for (int64_t i = 0; i < n; i++)
        x[i] = element(r, i, t);
    iz_cast(p, t, x, IZ_F32, n);
    free(x);
}

/* The slow sum of what all ranks have at i: a group's is rounded. */
static float slow_sum(int64_t i, enum iz_dtype t)
{
    int g = iz_coll_sum_group(coll);
    volatile float sum = 0;
    for (int k = 0; k < coll->size; k += g) {
        volatile float x = element(k, i, t);
        for (int r = k + 1; r < k + g; r++)
            x = x + element(r, i, t);
        float y = g < coll->size ? rounded(x, t) : x;
        sum = k ? sum + y : y;
    }
    return sum;
}

struct reduce_case {
    int64_t shard; /* as of cut_parts */
    enum iz_dtype wire, out;
    bool accumulate, in_place;
};

static void check_reduce(const struct reduce_case *k)
{
    int64_t all = cut_parts(k->shard, 1), at = coll->first[coll->rank];
    int64_t n = coll->first[coll->rank + 1] - at, sent = coll->sent_bytes;
    int64_t wire = iz_dtype_bytes(k->wire), bytes = n * iz_dtype_bytes(k->out);
    char *full = take(all * wire), *own = take(bytes), *want = take(bytes);
    char *out = k->in_place ? full + at * wire : own;
    float *sum = take(n * (int64_t)sizeof(*sum));
    double norm2 = -1;
    struct iz_coll_sum s = {.full = full,
                            .wire = k->wire,
                            .shard = k->shard < 0 ? -1 : k->shard,
                            .out = out,
                            .out_type = k->out,
                            .accumulate = k->accumulate,
                            .norm2 = &norm2,
                            .what = "reduce"};
    fill(own, 99, k->out, n);
    fill(full, coll->rank, k->wire, all);
    for (int64_t i = 0; i < n; i++) {
        volatile float x = slow_sum(at + i, k->wire);
        sum[i] = k->accumulate ? element(99, i, k->out) + x : x;
    }
    iz_cast(want, k->out, sum, IZ_F32, n);
    iz_coll_reduce_scatter(coll, &s);
    assert_memory_equal(out, want, (size_t)bytes);
    assert_true(norm2 == iz_flat_norm2(want, k->out, n));
    assert_int_equal(coll->sent_bytes - sent, (all - n) * wire);
    free(full);
    free(own);
    free(want);
    free(sum);
}

/* Of all pairs of two; of nothing, which writes nothing; in many fragments,
 * whole ones only and with an odd last one; and in place. */
static void reduce_scatter_is_the_serial_sum(void **state)
{
    static const int64_t shards[] = {1, 7, 1023, 65537};
    static const struct reduce_case cases[] = {
        {0, IZ_F32, IZ_F32, false, false},
        {150001, IZ_F32, IZ_F32, true, false},
        {300001, IZ_BF16, IZ_F32, true, false},
        {262144, IZ_F32, IZ_BF16, false, false},
        {131073, IZ_F32, IZ_F32, false, false},
        {1, IZ_F16, IZ_F16, false, true},
        {150001, IZ_F32, IZ_F32, false, true},
        {300001, IZ_BF16, IZ_BF16, false, true},
    };
    for (int k = 0; k < 12; k++)
        check_reduce(&(struct reduce_case){shards[k % 4], floats[k % 3],
                                           floats[k / 4], (k / 4 + k % 4) % 2,
                                           false});
    for (int i = 0; i < N_OF(cases); i++)
        check_reduce(&cases[i]);
}

static void parts_may_have_different_lengths(void **state)
{
    for (int k = 0; k < 7; k++) {
        check_gather(-1 - k);
        check_reduce(
            &(struct reduce_case){-1 - k, floats[k % 3], IZ_F32, k % 2, false});
    }
}

/* Fragments are whole blocks of the norm, of fp32 and of 16 bits, or its order
 * would depend on them; and lie in the scratch. */
static void scratch_has_room_for_fragments(void **state)
{
    const int64_t mib = 1 << 20, longest = 1 << 30;
    assert_int_equal(iz_coll_scratch_bytes(1, longest), 0);
    assert_int_equal(iz_coll_scratch_bytes(2, 0), 0);
    assert_int_equal(iz_coll_scratch_bytes(2, 100), 2 * 128);
    assert_int_equal(iz_coll_scratch_bytes(3, longest), mib);
    for (struct iz_coll c = {.size = 2}; c.size <= 300; c.size++) {
        int64_t room = iz_coll_scratch_bytes(c.size, longest);
        assert_true(c.size > 129 || room <= 16 * mib);
        c.local_size = c.size; /* all on one host */
        struct iz_coll_pipeline near = iz_coll_pipeline(&c, longest);
        c.local_size = 1;
        struct iz_coll_pipeline far = iz_coll_pipeline(&c, longest);
        assert_int_equal(near.bytes, iz_coll_fragment_bytes(c.size, longest));
        assert_int_equal(near.bytes % (4 * IZ_NORM_BLOCK), 0);
        assert_int_equal(far.bytes % (4 * IZ_NORM_BLOCK), 0);
        assert_true(far.in_flight * far.bytes * (c.size - 1) <= room);
    }
}

static void broadcast_reaches_all(void **state)
{
    const int64_t n = 300001;
    unsigned char *p = take(n);
    for (int root = 0; root < coll->size; root++) {
        memset(p, 0, (size_t)n);
        if (coll->rank == root)
            memcpy(p, bytes + root, (size_t)n);
        iz_coll_broadcast(coll, p, n, root, "file");
        assert_memory_equal(p, bytes + root, n);
    }
    free(p);
}

static void one_refusal_is_seen_by_all(void **state)
{
    assert_true(iz_coll_all_ok(coll, true));
    for (int r = 0; r < coll->size; r++)
        assert_false(iz_coll_all_ok(coll, coll->rank != r));
    assert_int_equal(iz_coll_refuser(coll, false), -1);
    for (int r = 0; r < coll->size; r++)
        assert_int_equal(iz_coll_refuser(coll, coll->rank >= r), r);
}

static void order_hash_shows_a_different_order(void **state)
{
    uint64_t before = coll->order_hash;
    assert_int_equal(iz_coll_check_order(coll), 0);
    assert_true(coll->order_hash != before);
    before = coll->order_hash;
    iz_coll_barrier(coll, coll->rank == 0 ? "h.1" : "h.2");
    assert_int_equal(iz_coll_check_order(coll), coll->size == 1 ? 0 : -EPROTO);
    coll->order_hash = before;
    iz_coll_barrier(coll, "another");
    assert_int_equal(iz_coll_check_order(coll), 0);
    /* What another library does, as NCCL: sizes count too. */
    iz_coll_note(coll, "u.1", coll->rank == coll->size - 1 ? 64 : 32, 32, 32);
    assert_int_equal(iz_coll_check_order(coll), coll->size == 1 ? 0 : -EPROTO);
    coll->order_hash = before;
}

static void ranks_that_differ_are_named(void **state)
{
    struct iz_coll four = {.size = 4, .order_hash = 0x123456789abcdef0};
    double all[4][3];
    char who[64] = "", few[8];
    for (int r = 0; r < 4; r++)
        iz_coll_tell_order(&four, all[r]);
    assert_true(all[0][0] == 0x12345678 && all[0][1] == 0x9abcdef0);
    assert_true(iz_coll_hear_order(&four, all[0], 3, who, sizeof(who)));
    all[2][1] = 3;
    assert_false(iz_coll_hear_order(&four, all[0], 3, who, sizeof(who)));
    assert_string_equal(who, "rank 2");
    all[3][0] = 0;
    assert_false(iz_coll_hear_order(&four, all[0], 3, who, sizeof(who)));
    assert_string_equal(who, "ranks 2, 3");
    assert_false(iz_coll_hear_order(&four, all[0], 3, few, sizeof(few)));
    assert_string_equal(few, "ranks 2");
}

static bool deaf;

/* In the place of the library's own. */
int MPI_Abort(MPI_Comm comm, int status)
{
    while (deaf)
        pause();
    return PMPI_Abort(comm, status);
}

static int end_late(const char *how)
{
    char full[64] = {0};
    coll->timeout_s = 0.2;
    deaf = strcmp(how, "late-deaf") == 0;
    if (strcmp(how, "late-disk") == 0) {
        coll->phase = "a save";
        coll->state->seated = false; /* as if on another host */
    }
    if (strcmp(how, "late-apart") == 0) {
        coll->phase = "a save";
        coll->state->seat[coll->size - 1]->pid_space = 1; /* a container */
    }
    if (coll->rank == coll->size - 1) {
        if (strncmp(how, "killed", 6) == 0)
            raise(SIGKILL);
        for (;;)
            pause();
    }
    if (strstr(how, "read") != NULL)
        iz_coll_all_gather(coll, full, (int64_t)sizeof(full) / coll->size,
                           "the last unit");
    else
        iz_coll_barrier(coll, "the last barrier");
    return 0;
}

static void groups_are_added_first(void **state)
{
    for (int g = 1; g < coll->size; g++)
        if (coll->size % g == 0) {
            coll->sum_group = g;
            for (int t = 0; t < 3; t++) {
                check_reduce(&(struct reduce_case){t == 2 ? 150001 : -1 - t,
                                                   floats[t], IZ_F32, t == 1,
                                                   false});
                check_reduce(&(struct reduce_case){40001, floats[t], floats[t],
                                                   false, t != 1});
            }
        }
    coll->sum_group = 0;
}

/* ---- as on several hosts ---- */

static void need_memory(void)
{
    const char *why = iz_coll_read_local(coll, true);
    if (why) {
        print_message("%s\n", why);
        skip();
    }
}

/* Ranks [0, cut) on one host, the others on another: to the end. */
static void moves_between_hosts(void **state)
{
    struct iz_coll_state *s = coll->state;
    struct iz_seat **all = s->seat, **near;
    need_memory();
    near = s->seat = take(coll->size * (int64_t)sizeof(*near));
    for (int cut = 1; cut < coll->size; cut++) {
        for (int r = 0; r < coll->size; r++) {
            s->host[r] = r < cut ? 0 : cut;
            s->index[r] = r < cut ? r : r - cut;
            near[r] = (r < cut) == (coll->rank < cut) ? all[r] : NULL;
        }
        coll->local_size = coll->rank < cut ? cut : coll->size - cut;
        assert_int_equal(coll->size % iz_coll_host_group(coll), 0);
        assert_int_equal(cut % iz_coll_host_group(coll), 0);
        groups_have_copies_of_all_shards(NULL);
        reduce_scatter_is_the_serial_sum(NULL);
        parts_may_have_different_lengths(NULL);
        groups_are_added_first(NULL);
    }
    free(all);
}

/* ---- how ---- */

/* A rank that is never late does not show that the others wait for it. */
static void memory_is_read_when_it_is_ready(void **state)
{
    need_memory();
    for (int late = 0; late < coll->size; late++) {
        unsigned char full[64] = {0};
        if (coll->rank == late)
            nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL);
        full[coll->rank] = (unsigned char)(coll->rank + 1);
        iz_coll_all_gather(coll, full, 1, "late");
        for (int r = 0; r < coll->size; r++)
            assert_int_equal(full[r], r + 1);
        memset(full, 0, sizeof(full)); /* nobody may still be reading it */
    }
}

static int check_all(void)
{
    const struct CMUnitTest moves[] = {
        cmocka_unit_test(groups_have_copies_of_all_shards),
        cmocka_unit_test(reduce_scatter_is_the_serial_sum),
        cmocka_unit_test(parts_may_have_different_lengths),
        cmocka_unit_test(groups_are_added_first),
    };
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(memory_is_read_when_it_is_ready),
        cmocka_unit_test(scratch_has_room_for_fragments),
        cmocka_unit_test(broadcast_reaches_all),
        cmocka_unit_test(one_refusal_is_seen_by_all),
        cmocka_unit_test(order_hash_shows_a_different_order),
        cmocka_unit_test(ranks_that_differ_are_named),
        cmocka_unit_test(moves_between_hosts),
    };
    /* A rank that fails falls out of step; the others must not wait for ever.
     */
    coll->timeout_s = 60;
    bytes_open();
    numbers_open();
    int failed = 0;
    if (iz_coll_read_local(coll, true) == NULL)
        failed += cmocka_run_group_tests_name("by memory", moves, NULL, NULL);
    iz_coll_read_local(coll, false);
    failed += cmocka_run_group_tests_name("by messages", moves, NULL, NULL);
    return failed + cmocka_run_group_tests(tests, NULL, NULL);
}

int main(int argc, char **argv)
{
    if (iz_coll_open(&coll, &argc, &argv) != 0)
        return 1;
    coll->scratch_bytes = iz_coll_scratch_bytes(coll->size, 4 * LONGEST);
    coll->scratch = take(coll->scratch_bytes);
    int failed = argc > 1 ? end_late(argv[1]) : check_all();
    free(coll->scratch);
    iz_coll_close(&coll);
    return failed != 0;
}
