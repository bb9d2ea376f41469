/* SPDX-License-Identifier: Apache-2.0 */
/* How ranks of a host divide the processors that they may use, and what is said
 * of it. */
#include "tests/runtime/fixture.h"

#include "runtime/machine/cores.h"
#include "runtime/machine/cores_share.h"

/* The ranks' sets as lists, and those that come out; "": they are refused. */
static const struct {
    const char *sets[6], *shares;
} cases[] = {
    /* Equal sets are cut in order of rank. */
    {{"0-7"}, "0-7"},
    {{"0-7", "0-7"}, "0-3 4-7"},
    {{"0-4", "0-4", "0-4"}, "0 1-2 3-4"},
    {{"0,2,4,6", "0,2,4,6"}, "0,2 4,6"},
    /* Sets apart stay as they are. */
    {{"4-7", "0-3"}, "4-7 0-3"},
    {{"4-7", "0-3", "4-7"}, "4-5 0-3 6-7"},
    /* A set inside another is left to who has no other: of a GPU whose place is
     * not known, beside one that is near a few cores. */
    {{"0-7", "0-3"}, "4-7 0-3"},
    {{"0-3", "0-7"}, "0-3 4-7"},
    {{"0-3", "0-3", "0-7"}, "0-1 2-3 4-7"},
    {{"0-7", "0", "0-3"}, "4-7 0 1-3"},
    /* Where the outer ones have less, they take of it. */
    {{"0-7", "0-5"}, "0-1,6-7 2-5"},
    {{"0-8", "0-5", "0-8"}, "0-1,6 2-4 5,7-8"},
    /* Fewer processors than ranks are taken in turn. */
    {{"0", "0", "0"}, "0 0 0"},
    {{"0-1", "0-1", "0-1", "0-1", "0-1"}, "0 1 0 0 1"},
    {{"0", "0", "0-3"}, "0 0 1-3"},
    /* Sets that overlap in part are refused: those of ranks 1 and 2. */
    {{"0-7", "0-3", "2-5"}, ""},
};

static void every_rank_has_its_share(void **state)
{
    for (int k = 0; k < N_OF(cases); k++) {
        const char *const *lists = cases[k].sets;
        int crossing[2] = {-1, -1}, n = 0, r;
        hwloc_bitmap_t set[6];
        char out[256] = "";
        size_t used = 0;
        for (; lists[n]; n++) {
            set[n] = hwloc_bitmap_alloc();
            assert_int_equal(hwloc_bitmap_list_sscanf(set[n], lists[n]), 0);
        }
        r = iz_share_out(set, n, crossing);
        assert_int_equal(r, *cases[k].shares ? 0 : -EINVAL);
        for (int i = 0; i < n; i++) {
            char text[64];
            hwloc_bitmap_list_snprintf(text, sizeof(text), set[i]);
            if (r)
                assert_string_equal(text, lists[i]);
            else
                used += (size_t)snprintf(out + used, sizeof(out) - used, "%s%s",
                                         i ? " " : "", text);
            hwloc_bitmap_free(set[i]);
        }
        assert_string_equal(out, cases[k].shares);
        assert_true(!r || (crossing[0] == 1 && crossing[1] == 2));
    }
}

/* ---- what is said of it ---- */

/* A rank of 8 on its host, with two cores and a GPU of 16 and 8. */
static struct iz_binding eighth(int rank)
{
    int i = rank % 8;
    struct iz_binding b = {.host = rank - i,
                           .workers = 1,
                           .cores = 2,
                           .gpu = i,
                           .host_cores = 16,
                           .first = 2 * i,
                           .last = 2 * i + 1,
                           .nodes = UINT64_C(1) << i / 4};
    snprintf(b.name, sizeof(b.name), "host%d", rank / 8);
    snprintf(b.list, sizeof(b.list), "%d-%d", b.first, b.last);
    return b;
}

static const char *print(const struct iz_binding *b, int n)
{
    static char text[16384];
    FILE *f = fmemopen(text, sizeof(text), "w");
    assert_non_null(f);
    iz_binding_print(b, n, f);
    fclose(f);
    return text;
}

static void ranks_that_move_on_alike_are_one_line(void **state)
{
    static struct iz_binding b[512];
    int lines = 0;
    for (int r = 0; r < 512; r++)
        b[r] = eighth(r);
    assert_string_equal(print(b, 8),
                        "      ranks 0-7: 1 worker each on cores 0-1 ... 14-15 "
                        "of 16, GPUs 0 ... 7, NUMA nodes 0-1\n");
    const char *text = print(b, 512);
    for (const char *at = text; (at = strchr(at, '\n')); at++)
        lines++;
    assert_int_equal(lines, 64);
    assert_non_null(strstr(text, "      ranks 504-511 on host63: "));
}

static void a_rank_out_of_line_has_one_of_its_own(void **state)
{
    struct iz_binding b[4];
    for (int r = 0; r < 4; r++)
        b[r] = eighth(r);
    b[2].gpu = 3;
    assert_string_equal(
        print(b, 4),
        "      ranks 0-1: 1 worker each on cores 0-1 and 2-3 of 16, GPUs 0 "
        "and 1, NUMA node 0\n"
        "      ranks 2-3: 1 worker each on cores 4-5 and 6-7 of 16, GPU 3, "
        "NUMA node 0\n");
    b[1].shared = true;
    b[1].nodes = 5;
    assert_string_equal(
        print(b, 2),
        "      rank 0: 1 worker on cores 0-1 of 16, GPU 0, NUMA node 0\n"
        "      rank 1: 1 worker on cores 2-3 of 16, GPU 1, NUMA nodes 0,2, "
        "shared with other ranks\n");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_rank_has_its_share),
        cmocka_unit_test(ranks_that_move_on_alike_are_one_line),
        cmocka_unit_test(a_rank_out_of_line_has_one_of_its_own),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
