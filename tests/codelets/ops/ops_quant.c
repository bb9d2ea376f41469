/* SPDX-License-Identifier: Apache-2.0 */
/* Quantised weights into a slot on a GPU: the bits of the CPU, which
 * tests/codelets/flat has for itself. */
#include "tests/codelets/ops/scene.h"

#include "codelets/buffer/flat_buffer.h"
#include "codelets/flat/nf4.h"

struct quant {
    enum iz_quant format;
    int64_t n;
    enum iz_dtype type;
    int shift;
};

/* v[0]: the weights; v[1]: the groups. */
static void quant_load(struct iz_exec *x, const struct iz_view *v,
                       const void *arg)
{
    const struct quant *k = arg;
    if (!x->dry)
        iz_buffer_quant(x, k->format, v[0].p, k->type, v[1].p, k->n);
}

/* Any bytes are codes; a block of the first group of 4 bits has each code of a
 * scale. */
static void quant_fill(enum iz_quant format, void *p, int64_t groups)
{
    struct iz_nf4_group *in_4 = p;
    struct iz_int8_group *in_8 = p;
    for (int64_t i = 0; i < groups * iz_quant_bytes(format); i++)
        ((uint8_t *)p)[i] = (uint8_t)fixture_below(256);
    for (int b = 0; format == IZ_QUANT_NF4 && b < IZ_QUANT_SCALES; b++)
        in_4[0].scale[b] = (uint8_t)b;
    for (int64_t i = 0; i < groups; i++)
        if (format == IZ_QUANT_NF4) {
            in_4[i].most = (float)(i + 1) * 0.013f;
            in_4[i].mean = 0.07f / (float)(i + 1);
        } else {
            for (int b = 0; b < IZ_QUANT_SCALES; b++)
                in_8[i].scale[b] = (float)fixture_below(1000) * 0.0007f;
        }
}

static void check_quant(struct quant k)
{
    int64_t groups = iz_quant_groups(k.n);
    struct scene s = {.n = 2,
                      .late = BIT(0),
                      .late_by = k.shift,
                      .t = {tensor_new(k.type, 1, k.n, 4),
                            bytes_new(groups * iz_quant_bytes(k.format))},
                      .exact = true};
    quant_fill(k.format, s.t[1].v.p, groups);
    scene_run(&s, &(struct pass){quant_load, 2, 1}, &k);
    scene_free(&s);
}

static void quantised_weights_have_the_bits_of_the_cpu(void **state)
{
    enum { G = IZ_QUANT_GROUP };
    static const int64_t n[] = {1, 7, 64, 200, 4099, G, G + 8, 3 * G - 5};
    for (int k = 0; k < 2 * 3 * 2; k++)
        for (int i = 0; i < COUNT(n); i++)
            check_quant((struct quant){k % 2 ? IZ_QUANT_NF4 : IZ_QUANT_INT8,
                                       n[i], fixture_types[k / 2 % 3], k / 6});
}

int ops_quant(void)
{
    const struct CMUnitTest tests[] = {
        SEEDED(quantised_weights_have_the_bits_of_the_cpu),
    };
    if (backend.x.backend == IZ_CPU)
        return 0;
    return cmocka_run_group_tests_name("quant", tests, NULL, NULL);
}
