/* SPDX-License-Identifier: Apache-2.0 */
/* Parts of attention's kernels: products of fragments, and the order of blocks.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/codelets/gpu/emulated.h"
#include "tests/codelets/gpu/parts.h"

/* c against a b, which is exact but for sums in fp32. */
static void check_product(const struct tensor *c, const struct tensor *a,
                          const struct tensor *b)
{
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 8; j++) {
            double want = 0, got = (double)((float *)c->v.p)[i * 8 + j];
            for (int k = 0; k < 16; k++)
                want += a->d[i * 16 + k] * b->d[k * 8 + j];
            assert_true(fabs(got - want) < 16 * 16 * 0x1p-24);
        }
}

static void check_mma(enum iz_dtype t)
{
    struct tensor a = tensor_new(t, 16, 16, 1), b = tensor_new(t, 16, 8, 1);
    struct tensor bt = tensor_new(t, 8, 16, 1),
                  c = tensor_new(IZ_F32, 16, 8, 1);
    for (int i = 0; i < 128; i++)
        bt.d[i % 8 * 16 + i / 8] = b.d[i];
    tensor_store(&bt);
    mma_by_formulas(c.v.p, a.v.p, b.v.p, t, NULL);
    check_product(&c, &a, &b);
    memset(c.v.p, 0xff, 16 * 8 * sizeof(float));
    mma_by_loads(c.v.p, a.v.p, b.v.p, 0, t, NULL);
    check_product(&c, &a, &b);
    memset(c.v.p, 0xff, 16 * 8 * sizeof(float));
    mma_by_loads(c.v.p, a.v.p, bt.v.p, 1, t, NULL);
    check_product(&c, &a, &b);
    tensor_free(&a);
    tensor_free(&b);
    tensor_free(&bt);
    tensor_free(&c);
}

static void fragments_are_as_documented(void **state)
{
    check_mma(IZ_BF16);
    check_mma(IZ_F16);
}

/* Every tile of every head or group once; a chunk after the other, and in it
 * tile after tile. */
static void check_order(int tiles, int all, int chunk, int group)
{
    int n = all / group, blocks = tiles * n;
    int *at = fixture_take(3 * blocks * (int64_t)sizeof(*at));
    int *head = at, *tile = head + blocks, *after = tile + blocks;
    char *seen = calloc((size_t)blocks, 1);
    attention_order(head, tile, after, blocks, all, chunk, group);
    for (int i = 0; i < blocks; i++) {
        int part = head[i] / (chunk / group);
        assert_in_range(head[i], 0, n - 1);
        assert_in_range(tile[i], 0, tiles - 1);
        assert_int_equal(tile[i] + after[i], tiles - 1);
        assert_int_equal(seen[head[i] * tiles + tile[i]]++, 0);
        if (i == 0)
            continue;
        assert_true(part >= head[i - 1] / (chunk / group));
        if (part == head[i - 1] / (chunk / group))
            assert_true(tile[i] > tile[i - 1] ||
                        (tile[i] == tile[i - 1] && head[i] == head[i - 1] + 1));
    }
    free(seen);
    free(at);
}

static void blocks_take_chunks_of_heads(void **state)
{
    check_order(1, 1, 1, 1);
    check_order(7, 13, 13, 1);
    check_order(7, 13, 4, 1);
    check_order(3, 5, 1, 1);
    check_order(1, 33, 16, 1);
    check_order(16, 64, 16, 1);
    check_order(5, 21, 6, 3);
    check_order(5, 20, 8, 4);
    check_order(9, 12, 4, 4);
}

int kernels_attention(void)
{
    const struct CMUnitTest tests[] = {
        SEEDED(fragments_are_as_documented),
        SEEDED(blocks_take_chunks_of_heads),
    };
    return cmocka_run_group_tests_name("parts of attention", tests, NULL, NULL);
}
