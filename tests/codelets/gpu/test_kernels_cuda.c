/* SPDX-License-Identifier: Apache-2.0 */
/* Every op with emulated kernels, which run blocks and threads in another order
 * each time.
 *
 * usage: test_kernels_cuda [parts | GROUP ...] */
#include <string.h>

#include "codelets/ops/gpu_ops.h"
#include "tests/codelets/gpu/emulated.h"
#include "tests/codelets/gpu/parts.h"

/* The order of attention's blocks, of which small cases have one chunk: a chunk
 * after the other, and in it tile after tile. */
static void blocks_take_chunks_of_heads(void **state)
{
    static const struct {
        int tiles, all, chunk, group;
    } cases[] = {{1, 1, 1, 1},  {7, 13, 13, 1}, {7, 13, 4, 1},
                 {3, 5, 1, 1},  {1, 33, 16, 1}, {16, 64, 16, 1},
                 {5, 21, 6, 3}, {5, 20, 8, 4},  {9, 12, 4, 4}};
    for (int c = 0; c < COUNT(cases); c++) {
        int group = cases[c].group, heads = cases[c].all / group;
        int chunk = cases[c].chunk / group, tiles = cases[c].tiles;
        int place[1024][3], (*at)[3] = place;
        attention_places(place, tiles * heads, cases[c].all, cases[c].chunk,
                         group);
        for (int first = 0; first < heads; first += chunk)
            for (int t = 0; t < tiles; t++)
                for (int h = first; h < heads && h < first + chunk; h++, at++) {
                    assert_int_equal((*at)[0], h);
                    assert_int_equal((*at)[1], t);
                    assert_int_equal((*at)[2], tiles - 1 - t);
                }
    }
}

int main(int argc, char **argv)
{
    bool parts = argc > 1 && !strcmp(argv[1], "parts");
    const struct CMUnitTest own[] = {
        cmocka_unit_test(blocks_take_chunks_of_heads),
    };
    int failed = 0;
    backend_renew(NULL);
    if (!parts)
        failed += ops_groups(argc, argv);
    if (parts || argc == 1)
        failed +=
            cmocka_run_group_tests_name("parts of attention", own, NULL, NULL) +
            kernels_library();
    iz_cuda_close(&backend.x.cuda);
    return failed;
}
