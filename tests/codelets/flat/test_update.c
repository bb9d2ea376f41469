/* SPDX-License-Identifier: Apache-2.0 */
/* Every optimizer against its formula in double, and with its bits, which are
 * the same on every machine and at every SIMD level of the processor; with its
 * states in fp32 and in fewer bytes, and cut into pieces anywhere. */
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "codelets/base/mix.h"
#include "codelets/flat/update.h"
#include "tests/codelets/flat/flat_test.h"

/* How an optimizer is asked to update. */
struct row {
    double lr, beta1, beta2, eps, decay;
    bool adamw, corrected;
    float scale; /* of gradients */
};

/* An update.  The formula changes an element e: p, its states, and last the
 * direction that Muon takes. */
struct kind {
    enum iz_optimizer_type type;
    int states, rows;
    struct row row[6];
    void (*formula)(const struct iz_hyper_at *s, double *e, double g);
    uint64_t bits; /* see bits_are_known */
};
enum { DIRECTION = 1 + IZ_STATES_MAX, ELEMENT };

/* ---- Adam --------------------------------------------------------------- */

static double adam_rest(const struct iz_hyper_at *s, double beta)
{
    return s->hyper.bias_correction ? 1 - pow(beta, (double)s->t) : 1;
}

static void adam_formula(const struct iz_hyper_at *s, double *e, double g)
{
    const struct iz_hyper *h = &s->hyper;
    double *p = e, *m = e + 1, *v = e + 2;
    if (h->adamw)
        *p -= h->lr * h->weight_decay * *p;
    else
        g += h->weight_decay * *p;
    *m = h->beta1 * *m + (1 - h->beta1) * g;
    *v = h->beta2 * *v + (1 - h->beta2) * g * g;
    *p -= h->lr * (*m / adam_rest(s, h->beta1)) /
          (sqrt(*v / adam_rest(s, h->beta2)) + h->eps);
}

/* ---- Lion --------------------------------------------------------------- */

static double sign(double x)
{
    return x > 0 ? 1 : x < 0 ? -1 : 0;
}

/* arXiv:2302.06675, algorithm 2. */
static void lion_formula(const struct iz_hyper_at *s, double *e, double g)
{
    const struct iz_hyper *h = &s->hyper;
    double u = sign(h->beta1 * e[1] + (1 - h->beta1) * g);
    e[0] -= h->lr * (u + h->weight_decay * e[0]);
    e[1] = h->beta2 * e[1] + (1 - h->beta2) * g;
}

/* ---- Muon --------------------------------------------------------------- */

static void direction_formula(const struct iz_hyper_at *s, double *e, double g)
{
    double mu = s->hyper.momentum;
    e[1] = mu * e[1] + (1 - mu) * g;
    e[DIRECTION] = s->hyper.nesterov ? mu * e[1] + (1 - mu) * g : e[1];
}

static void along_formula(const struct iz_hyper_at *s, double *e, double g)
{
    const struct iz_hyper *h = &s->hyper;
    e[0] = e[0] * (1 - h->lr * h->weight_decay) - h->lr * g;
}

/* Whole optimizers, Muon's of what is no matrix, and then the passes over
 * matrices: the first one where v belongs to others, and without v. */
static const struct kind kinds[] = {
    {IZ_OPTIMIZER_ADAM,
     2,
     6,
     {{1e-3, 0.9, 0.999, 1e-8, 0, true, true, 1},
      {1e-3, 0.9, 0.999, 1e-8, 0.1, true, true, 1},
      {1e-2, 0.9, 0.95, 1e-6, 0.1, false, true, 1},
      {3e-4, 0.8, 0.99, 1e-8, 0.01, true, false, 1},
      {3e-4, 0.8, 0.99, 1e-8, 0.01, false, false, 1},
      {1e-3, 0.9, 0.999, 1e-8, 0.1, true, true, 1.0f / 4096}},
     adam_formula,
     0x7cedfad38ad68fb3u},
    {IZ_OPTIMIZER_MUON,
     2,
     2,
     {{1e-3, 0.9, 0.999, 1e-8, 0, true, true, 1},
      {3e-4, 0.8, 0.99, 1e-8, 0.01, false, true, 1.0f / 4096}},
     adam_formula,
     0x7762334d5e2bbf57u},
    {IZ_OPTIMIZER_LION,
     1,
     2,
     {{1e-3, 0.9, 0.99, 0, 0, false, false, 1},
      {3e-3, 0.95, 0.98, 0, 0.3, false, false, 1.0f / 4096}},
     lion_formula,
     0xf93b3386ecf163du},
    {IZ_OPTIMIZER_MUON,
     2,
     2,
     {{0, 0.9, 0, 0, 0, false, true, 0.25f},
      {0, 0.9, 0, 0, 0, false, false, 1}},
     direction_formula,
     0xe5f1eff473104e9cu},
    {IZ_OPTIMIZER_DIRECTION,
     1,
     2,
     {{0, 0.9, 0, 0, 0, false, true, 0.25f},
      {0, 0.9, 0, 0, 0, false, false, 1}},
     direction_formula,
     0x8f47e7e2b75f5198u},
    {IZ_OPTIMIZER_ALONG,
     0,
     2,
     {{0.02, 0, 0, 0, 0, false, false, 1},
      {0.02, 0, 0, 0, 0.1, false, false, 1}},
     along_formula,
     0xac65f4bf84f07eecu},
};
enum { KINDS = sizeof(kinds) / sizeof(kinds[0]), WHOLE = 3 };

static struct iz_hyper_at step_of(const struct kind *k, int row)
{
    const struct row *r = &k->row[row];
    return (struct iz_hyper_at){.hyper = {.type = k->type,
                                          .lr = r->lr,
                                          .beta1 = r->beta1,
                                          .beta2 = r->beta2,
                                          .eps = r->eps,
                                          .weight_decay = r->decay,
                                          .adamw = r->adamw,
                                          .bias_correction = r->corrected,
                                          .momentum = r->beta1,
                                          .nesterov = r->corrected,
                                          .adam_rate = 1},
                                .t = 1,
                                .matrix = k->formula == direction_formula,
                                .grad_scale = r->scale};
}

/* ---- arrays ------------------------------------------------------------- */

/* The arrays of an update, those that its kind has.  First those of an element
 * e; states have whole blocks. */
enum { P, M, V, D = DIRECTION, G, OUT, ARRAYS };
struct arrays {
    const struct kind *kind;
    int64_t n, room;
    enum iz_moment_type type;
    enum iz_dtype g_type, out_type;
    bool alone;      /* without OUT */
    uint16_t *lower; /* of the master, instead of P; or NULL */
    void *of[ARRAYS];
    size_t bytes[ARRAYS];
};

static struct arrays arrays_new(const struct kind *k, int64_t n,
                                enum iz_moment_type type, enum iz_dtype g,
                                enum iz_dtype out)
{
    int64_t room = (n + IZ_MOMENT_BLOCK) / IZ_MOMENT_BLOCK * IZ_MOMENT_BLOCK;
    size_t each = (size_t)n, state = (size_t)iz_moment_bytes(type, room);
    struct arrays a = {.kind = k,
                       .n = n,
                       .room = room,
                       .type = type,
                       .g_type = g,
                       .out_type = out};
    a.bytes[P] = each * 4;
    a.bytes[M] = k->states > 0 ? state : 0;
    a.bytes[V] = k->states > 1 ? state : 0;
    a.bytes[D] = k->formula == direction_formula ? each * 4 : 0;
    a.bytes[G] = each * (size_t)iz_dtype_bytes(g);
    a.bytes[OUT] = each * (size_t)iz_dtype_bytes(out);
    for (int i = 0; i < ARRAYS; i++) {
        if (!a.bytes[i])
            continue;
        assert_int_equal(posix_memalign(&a.of[i], 64, a.bytes[i]), 0);
        memset(a.of[i], 0, a.bytes[i]);
    }
    flat_fill(a.of[P], IZ_F32, n, 2.0);
    return a;
}

static void arrays_free(struct arrays *a)
{
    for (int i = 0; i < ARRAYS; i++)
        free(a->of[i]);
}

/* Gradients of very different sizes, some zero. */
static void new_gradients(struct arrays *a, double scale)
{
    for (int64_t i = 0; i < a->n; i++) {
        float f = i % 7 == 3 ? 0.0f : random_float(scale * (double)(1 + i % 5));
        iz_cast(fixture_at(a->of[G], a->g_type, i), a->g_type, &f, IZ_F32, 1);
    }
}

/* Elements [from, from + n). */
static void update(const struct arrays *a, const struct iz_hyper_at *s,
                   int64_t from, int64_t n)
{
    struct iz_update_range all = iz_update_range_of(s);
    float *p = a->of[P], *d = a->of[D];
    iz_update(&(struct iz_update){
        .optimizer = s->hyper.type,
        .type = a->type,
        .g_type = a->g_type,
        .out_type = a->out_type,
        .n = n,
        .at = from,
        .room = a->room,
        .p = a->lower ? NULL : p + from,
        .lower = a->lower ? a->lower + from : NULL,
        .state = {a->of[M], a->of[V]},
        .g = fixture_at(a->of[G], a->g_type, from),
        .d = d ? d + from : NULL,
        .out = a->alone ? NULL : fixture_at(a->of[OUT], a->out_type, from),
        .key = (uint64_t)s->t,
        .first = 6400 + from,
        .range = &all,
        .ranges = 1});
}

/* ---- cases -------------------------------------------------------------- */

static void check_formula(const struct kind *k, struct iz_hyper_at s,
                          enum iz_dtype g, enum iz_dtype out, int64_t n)
{
    static const double within[ELEMENT][2] = {
        [P] = {2e-6, 2e-6}, [M] = {1e-6}, [V] = {1e-12, 1e-5}, [D] = {1e-6}};
    struct arrays a = arrays_new(k, n, IZ_MOMENT_F32, g, out);
    double *want = take((size_t)(ELEMENT * n) * sizeof(*want));
    for (int64_t i = 0; i < ELEMENT * n; i++)
        want[i] = i % ELEMENT == P ? ((float *)a.of[P])[i / ELEMENT] : 0;
    for (s.t = 1; s.t <= 50; s.t++) {
        new_gradients(&a, 0.1 / s.grad_scale);
        for (int64_t i = 0; i < n; i++)
            k->formula(&s, want + ELEMENT * i,
                       fixture_get(a.of[G], g, i) * s.grad_scale);
        update(&a, &s, 0, n);
    }
    for (int64_t i = 0; i < ELEMENT * n; i++) {
        const double *bound = within[i % ELEMENT];
        const float *got = a.of[i % ELEMENT];
        assert_true(!got || fabs(got[i / ELEMENT] - want[i]) <
                                bound[0] + bound[1] * fabs(want[i]));
    }
    free(want);
    arrays_free(&a);
}

/* The sign of a sum that rounds to about 0 is anybody's: none of these does.
 * Other lengths and pairs of types are those of the known bits. */
static void updates_follow_their_formula(void **state)
{
    for (const struct kind *k = kinds; k < kinds + KINDS; k++)
        for (int c = 0; c < k->rows * 3; c++)
            check_formula(k, step_of(k, c / 3), fixture_types[c % 3],
                          fixture_types[c / 3 % 3], 333);
}

static uint64_t add_bits(uint64_t h, const void *x, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++)
        h = iz_mix(h + ((const unsigned char *)x)[i]);
    return h;
}

/* Every pair of types of gradient, copy and state, with each of them every
 * length: within a vector, a tile and several; in whole blocks, where a state
 * has fewer bytes. */
static void bits_are_known(void **state)
{
    static const int64_t some[] = {1, 33, 2077}, blocks[] = {1, 3, 10};
    static const int order[] = {P, OUT, M, V, D};
    random_again();
    for (const struct kind *k = kinds; k < kinds + KINDS; k++) {
        uint64_t h = 0;
        for (int c = 0; c < 27 * k->rows; c++) {
            int g = c % 3, out = c / 3 % 3, size = c / 9 % 3;
            int type = (g + out + size) % 3;
            int64_t n = type == IZ_MOMENT_F32 ? some[size]
                                              : blocks[size] * IZ_MOMENT_BLOCK;
            struct arrays a = arrays_new(k, n, (enum iz_moment_type)type,
                                         fixture_types[g], fixture_types[out]);
            struct iz_hyper_at s = step_of(k, c / 27);
            for (s.t = 1; s.t <= 5; s.t++) {
                new_gradients(&a, 0.1 / s.grad_scale);
                update(&a, &s, 0, n);
            }
            for (int i = 0; i < 5; i++)
                h = add_bits(h, a.of[order[i]], a.bytes[order[i]]);
            arrays_free(&a);
        }
        if (h != k->bits)
            fail_msg("kind %d has the bits %#" PRIx64, (int)(k - kinds), h);
    }
}

/* What is beside the elements before `end` is as it was, which is 0. */
static void check_untouched(const struct arrays *a, int64_t end)
{
    for (int64_t i = end; i < a->n; i++)
        assert_true(fixture_get(a->of[OUT], a->out_type, i) == 0 &&
                    (!a->of[D] || fixture_get(a->of[D], IZ_F32, i) == 0));
}

/* The master as it is, with and without a copy; or in halves, where it is
 * changed. */
enum way { COPIED, ALONE, HALVES };

/* At once, and in pieces of up to `most` elements in some way: the same bits.
 * Elements of fp8 share a power, so that a block of them is cut nowhere. */
static void check_pieces(const struct kind *k, int64_t size,
                         enum iz_moment_type type, enum iz_dtype g,
                         int64_t most, int steps, enum way way)
{
    enum iz_dtype out = way == COPIED ? g : IZ_BF16;
    struct arrays a = arrays_new(k, size, type, g, out);
    struct arrays b = arrays_new(k, size, type, g, out);
    int64_t unit = type == IZ_MOMENT_FP8 ? IZ_MOMENT_BLOCK : 1;
    struct iz_hyper_at s = step_of(k, 1);
    memcpy(b.of[P], a.of[P], a.bytes[P]);
    a.alone = b.alone = way == ALONE;
    if (way == HALVES && !b.of[D]) {
        b.lower = take((size_t)size * 2);
        iz_cast_split(b.of[OUT], b.lower, b.of[P], size);
    }
    for (s.t = 1; s.t <= steps; s.t++) {
        new_gradients(&a, 1 / s.grad_scale);
        memcpy(b.of[G], a.of[G], a.bytes[G]);
        update(&a, &s, 0, size);
        for (int64_t at = 0, n; at < size; at += n) {
            n = unit * random_piece(most / unit, size);
            n = n < size - at ? n : size - at;
            update(&b, &s, at, n);
            if (s.t == 1 && !b.lower)
                check_untouched(&b, at + n);
        }
    }
    if (b.lower)
        iz_cast_join(b.of[P], b.of[OUT], b.lower, size);
    free(b.lower);
    for (int i = 0; i < ARRAYS; i++)
        if (a.of[i])
            assert_memory_equal(a.of[i], b.of[i], a.bytes[i]);
    arrays_free(&a);
    arrays_free(&b);
}

/* Also within a block of a state in bf16, whose other elements stay. */
static void bits_do_not_depend_on_pieces(void **state)
{
    for (int c = 0; c < KINDS * 3 * 3 * 3; c++)
        check_pieces(&kinds[c / 27], 5003, (enum iz_moment_type)(c % 3),
                     fixture_types[c / 3 % 3], 700, 3, (enum way)(c / 9 % 3));
}

/* So large that its copy goes past the caches, which one in bf16 does, against
 * pieces that stay. */
static void a_large_update_has_the_same_bits(void **state)
{
    for (int c = 0; c < 3; c++)
        check_pieces(&kinds[0], (1 << 18) + 70, (enum iz_moment_type)c, IZ_BF16,
                     500 * IZ_MOMENT_BLOCK, 1, COPIED);
}

/* Without gradients m decays to zero instead of staying subnormal, and an
 * element whose m is 0 stays where it is. */
static void states_come_to_rest(void **state)
{
    for (const struct kind *k = kinds; k < kinds + WHOLE; k++) {
        struct arrays a = arrays_new(k, 1, IZ_MOMENT_F32, IZ_F32, IZ_F32);
        struct iz_hyper_at s = step_of(k, 0);
        float *p = a.of[P], *m = a.of[M], *v = a.of[V];
        *m = 1;
        if (v)
            *v = 1;
        for (s.t = 1; s.t <= (v ? 2000 : 9000); s.t++)
            update(&a, &s, 0, 1);
        assert_true(*m == 0 && (!v || *v > 0.1f));
        float before = *p;
        update(&a, &s, 0, 1);
        assert_true(*p == before);
        arrays_free(&a);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(updates_follow_their_formula),
        cmocka_unit_test(bits_are_known),
        cmocka_unit_test(bits_do_not_depend_on_pieces),
        cmocka_unit_test(a_large_update_has_the_same_bits),
        cmocka_unit_test(states_come_to_rest),
    };
    return levels_run("update", tests, sizeof(tests) / sizeof(tests[0]));
}
