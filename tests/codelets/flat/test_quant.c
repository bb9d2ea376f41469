/* SPDX-License-Identifier: Apache-2.0 */
/* Weights in fewer bits at every SIMD level: 8 by their definition in double
 * precision; 4 as bitsandbytes makes them of a matrix, and back; the same bits
 * however long the group. */
#include <math.h>
#include <string.h>

#include "codelets/flat/nf4.h"
#include "tests/codelets/flat/flat_test.h"

enum {
    N = IZ_QUANT_GROUP,
    BLOCK = IZ_QUANT_BLOCK,
    SCALES = IZ_QUANT_SCALES,
    SOME = 7 * 64 + 14
};

static float x[N], y[N], scale[SCALES];

/* ---- 8 bits ---- */

static struct iz_int8_group in_8;

static void quantise_8(int64_t n)
{
    iz_quant_codes(IZ_QUANT_INT8, &in_8, scale, x, n);
    iz_quant_scales(IZ_QUANT_INT8, &in_8, scale, n, 0);
}

static double most_of(int64_t block, int64_t n)
{
    double most = 0;
    for (int64_t i = block * BLOCK; i < n && i < (block + 1) * BLOCK; i++)
        most = fmax(most, fabs((double)x[i]));
    return most;
}

/* Rounded once to a type of 16 bits. */
static void check_half(enum iz_dtype t, int64_t n)
{
    static uint16_t half[N], want[N];
    iz_quant_load(IZ_QUANT_INT8, half, t, &in_8, n);
    iz_cast(want, t, y, IZ_F32, n);
    assert_memory_equal(half, want, (size_t)n * sizeof(*half));
}

static void a_weight_is_its_code_times_the_scale(void **state)
{
    static const int64_t n[] = {1, 63, 64, 65, 1000, N - 1, N};
    for (size_t k = 0; k < sizeof(n) / sizeof(n[0]); k++) {
        flat_fill(x, IZ_F32, N, 2.0);
        quantise_8(n[k]);
        iz_quant_load(IZ_QUANT_INT8, y, IZ_F32, &in_8, n[k]);
        for (int64_t i = 0; i < n[k]; i++) {
            double most = most_of(i / BLOCK, n[k]), step = most / 127;
            assert_true(fabs((double)in_8.scale[i / BLOCK] - step) <=
                        1e-7 * step);
            /* Half a step away at most, but for rounding. */
            assert_true(fabs((double)y[i] - (double)x[i]) <= 0.50001 * step);
            assert_true(y[i] == (float)in_8.code[i] * in_8.scale[i / BLOCK]);
        }
        for (int64_t i = n[k]; i < N; i++)
            assert_int_equal(in_8.code[i], 0);
        check_half(IZ_BF16, n[k]);
        check_half(IZ_F16, n[k]);
    }
}

static void zeros_and_the_smallest_stay_finite(void **state)
{
    static const float least[] = {0, 1e-45f, 1e-40f, 1e-37f, 1e-30f};
    for (size_t k = 0; k < sizeof(least) / sizeof(least[0]); k++) {
        for (int i = 0; i < 200; i++)
            x[i] = i % 3 ? least[k] : -least[k];
        quantise_8(200);
        iz_quant_load(IZ_QUANT_INT8, y, IZ_F32, &in_8, 200);
        for (int i = 0; i < 200; i++)
            assert_true(fabsf(y[i]) <= 1.00001f * least[k]);
    }
}

/* ---- 4 bits ---- */

static struct iz_nf4_group g;

/* Of bitsandbytes: the values of all codes of a scale; a group of SOME weights,
 * and what it loads. */
static struct reference {
    float dynamic[256], most, mean, fp32[SOME];
    uint16_t bf16[SOME], fp16[SOME];
    uint8_t scale[8], code[SOME / 2];
} reference;

static bool read_reference(void)
{
    FILE *f = fopen("tests/codelets/flat/nf4_reference.bin", "rb");
    size_t n = f ? fread(&reference, sizeof(reference), 1, f) : 0;
    return n == 1 && !fclose(f);
}

/* As in nf4_reference.py. */
static float nf4_weight(int i)
{
    uint32_t u = (uint32_t)i * 2654435761u + 12345u;
    return (float)(((double)(u >> 8) / 16777216 - 0.5) / (1 + i / 64));
}

/* A matrix of one group. */
static void quantise(const float *w, int64_t n)
{
    double sum = iz_nf4_codes(&g, scale, w, n);
    iz_nf4_scales(&g, scale, n, iz_quant_mean(&sum, n));
}

static void a_group_is_that_of_bitsandbytes(void **state)
{
    for (int i = 0; i < SOME; i++)
        x[i] = nf4_weight(i);
    quantise(x, SOME);
    assert_memory_equal(g.code, reference.code, sizeof(reference.code));
    assert_memory_equal(g.scale, reference.scale, sizeof(reference.scale));
    assert_memory_equal(&g.most, &reference.most, 4);
    assert_memory_equal(&g.mean, &reference.mean, 4);
}

static void its_weights_are_those_of_bitsandbytes(void **state)
{
    float out[SOME];
    memset(&g, 0, sizeof(g));
    memcpy(g.code, reference.code, sizeof(reference.code));
    memcpy(g.scale, reference.scale, sizeof(reference.scale));
    g.most = reference.most;
    g.mean = reference.mean;
    iz_nf4_load(out, IZ_F32, &g, SOME);
    assert_memory_equal(out, reference.fp32, sizeof(reference.fp32));
    iz_nf4_load(out, IZ_BF16, &g, SOME);
    assert_memory_equal(out, reference.bf16, sizeof(reference.bf16));
    iz_nf4_load(out, IZ_F16, &g, SOME);
    assert_memory_equal(out, reference.fp16, sizeof(reference.fp16));
}

/* Code 15 is 1, so with most 1 and mean 0 each block shows its scale. */
static void every_code_of_a_scale_is_known(void **state)
{
    memset(&g, 0, sizeof(g));
    memset(g.code, 0xff, sizeof(g.code));
    g.most = 1;
    for (int i = 0; i < SCALES; i++)
        g.scale[i] = (uint8_t)i;
    iz_nf4_load(x, IZ_F32, &g, N);
    for (int i = 0; i < SCALES; i++)
        assert_memory_equal(&x[i * BLOCK], &reference.dynamic[i], 4);
}

/* Weights that are all equal, or zero, and the smallest numbers. */
static void equal_weights_are_kept(void **state)
{
    const float values[] = {0, -0.0f, 1, -3e-5f, 1e-42f, 3e38f};
    for (size_t k = 0; k < sizeof(values) / sizeof(values[0]); k++) {
        float out[200];
        for (int i = 0; i < 200; i++)
            x[i] = values[k];
        quantise(x, 200);
        iz_nf4_load(out, IZ_F32, &g, 200);
        for (int i = 0; i < 200; i++)
            assert_true(values[k] < 1e-38f && values[k] > -1e-38f
                            ? fabsf(out[i]) <= fabsf(values[k])
                            : out[i] == values[k]);
    }
}

/* Of all 256 codes none is nearer to a scale than its own. */
static void check_scales(void)
{
    for (int b = 0; b < SCALES; b++) {
        float v = (scale[b] - g.mean) * (1.0f / g.most);
        double own = fabs((double)v - (double)reference.dynamic[g.scale[b]]);
        for (int c = 0; c < 256; c++)
            assert_true(fabs((double)v - (double)reference.dynamic[c]) >=
                        own * (1 - 1e-6));
    }
}

/* The first level's bits are those of the others; and a block depends on no
 * other but through the mean and the magnitude. */
static void bits_depend_on_no_level_and_no_length(void **state)
{
    static struct iz_nf4_group first, part;
    static bool has_first;
    float some[SCALES];
    random_again();
    flat_fill(x, IZ_F32, N, 1.0);
    for (int i = 0; i < N; i++)
        x[i] *= expf(random_float(6.0));
    quantise(x, N);
    check_scales();
    if (has_first)
        assert_memory_equal(&g, &first, sizeof(g));
    first = g;
    has_first = true;
    for (int64_t n = 64; n < N; n += random_piece(5000, 5000)) {
        iz_nf4_codes(&part, some, x, n);
        assert_memory_equal(part.code, g.code, (size_t)n / 64 * 32);
        assert_memory_equal(some, scale, (size_t)n / 64 * sizeof(float));
        for (size_t i = ((size_t)n + 1) / 2; i < sizeof(part.code); i++)
            assert_int_equal(part.code[i], 0);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_weight_is_its_code_times_the_scale),
        cmocka_unit_test(zeros_and_the_smallest_stay_finite),
        cmocka_unit_test(a_group_is_that_of_bitsandbytes),
        cmocka_unit_test(its_weights_are_those_of_bitsandbytes),
        cmocka_unit_test(every_code_of_a_scale_is_known),
        cmocka_unit_test(equal_weights_are_kept),
        cmocka_unit_test(bits_depend_on_no_level_and_no_length),
    };
    if (!read_reference())
        return 1;
    return levels_run("quant", tests, sizeof(tests) / sizeof(tests[0]));
}
