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

/* The arrays of an update; those of states have whole blocks. */
struct arrays {
    const struct kind *kind;
    int64_t n, room;
    enum iz_moment_type type;
    enum iz_dtype g_type, out_type;
    float *p;
    uint16_t *lower; /* of the master, instead of p; or NULL */
    void *state[IZ_STATES_MAX], *g, *out;
    float *d; /* of what gives a direction and changes no p; or NULL */
};

static size_t state_bytes(const struct arrays *a)
{
    return (size_t)iz_moment_bytes(a->type, a->room);
}

static struct arrays arrays_new(const struct kind *k, int64_t n,
                                enum iz_moment_type type, enum iz_dtype g,
                                enum iz_dtype out)
{
    int64_t room = (n + IZ_MOMENT_BLOCK) / IZ_MOMENT_BLOCK * IZ_MOMENT_BLOCK;
    struct arrays a = {k, n, room, type, g, out, .p = take((size_t)n * 4)};
    for (int i = 0; i < k->states; i++)
        a.state[i] = memset(take(state_bytes(&a)), 0, state_bytes(&a));
    a.g = memset(take((size_t)n * 4), 0, (size_t)n * 4);
    if (k->formula == direction_formula)
        a.d = memset(take((size_t)n * 4), 0, (size_t)n * 4);
    a.out = aligned_alloc(64, ((size_t)n * 4 + 63) / 64 * 64); /* for streams */
    assert_non_null(a.out);
    memset(a.out, 0, (size_t)n * 4);
    flat_fill(a.p, IZ_F32, n, 2.0);
    return a;
}

static struct arrays arrays_copy(const struct arrays *a)
{
    struct arrays c =
        arrays_new(a->kind, a->n, a->type, a->g_type, a->out_type);
    memcpy(c.p, a->p, (size_t)a->n * 4);
    return c;
}

static void arrays_free(struct arrays *a)
{
    free(a->p);
    for (int i = 0; i < a->kind->states; i++)
        free(a->state[i]);
    free(a->g);
    free(a->d);
    free(a->out);
}

static void arrays_equal(struct arrays *a, struct arrays *b)
{
    assert_memory_equal(a->p, b->p, (size_t)a->n * 4);
    for (int i = 0; i < a->kind->states; i++)
        assert_memory_equal(a->state[i], b->state[i], state_bytes(a));
    assert_memory_equal(a->out, b->out,
                        (size_t)(a->n * iz_dtype_bytes(a->out_type)));
    if (a->d)
        assert_memory_equal(a->d, b->d, (size_t)a->n * 4);
    arrays_free(a);
    arrays_free(b);
}

/* Gradients of very different sizes, some zero. */
static void new_gradients(struct arrays *a, double scale)
{
    for (int64_t i = 0; i < a->n; i++) {
        float f = i % 7 == 3 ? 0.0f : random_float(scale * (double)(1 + i % 5));
        iz_cast(fixture_at(a->g, a->g_type, i), a->g_type, &f, IZ_F32, 1);
    }
}

static struct iz_update update_of(const struct arrays *a,
                                  const struct iz_hyper_at *s,
                                  const struct iz_update_range *all,
                                  int64_t from, int64_t n)
{
    return (struct iz_update){
        .optimizer = s->hyper.type,
        .type = a->type,
        .g_type = a->g_type,
        .out_type = a->out_type,
        .n = n,
        .at = from,
        .room = a->room,
        .p = a->lower ? NULL : a->p + from,
        .lower = a->lower ? a->lower + from : NULL,
        .state = {a->state[0], a->state[1]},
        .g = fixture_at(a->g, a->g_type, from),
        .d = a->d ? a->d + from : NULL,
        .out = a->out ? fixture_at(a->out, a->out_type, from) : NULL,
        .key = (uint64_t)s->t,
        .first = 6400 + from,
        .range = all,
        .ranges = 1};
}

/* Elements [from, from + n). */
static void update(const struct arrays *a, const struct iz_hyper_at *s,
                   int64_t from, int64_t n)
{
    struct iz_update_range all = iz_update_range_of(s);
    struct iz_update u = update_of(a, s, &all, from, n);
    iz_update(&u);
}

/* ---- cases -------------------------------------------------------------- */

static void check_formula(const struct kind *k, struct iz_hyper_at s,
                          enum iz_dtype g, enum iz_dtype out, int64_t n)
{
    struct arrays a = arrays_new(k, n, IZ_MOMENT_F32, g, out);
    double *want = take((size_t)(ELEMENT * n) * sizeof(*want));
    for (int64_t i = 0; i < ELEMENT * n; i++)
        want[i] = i % ELEMENT ? 0 : a.p[i / ELEMENT];
    for (s.t = 1; s.t <= 50; s.t++) {
        new_gradients(&a, 0.1 / s.grad_scale);
        for (int64_t i = 0; i < n; i++)
            k->formula(&s, want + ELEMENT * i,
                       fixture_get(a.g, g, i) * s.grad_scale);
        update(&a, &s, 0, n);
    }
    for (int64_t i = 0; i < n; i++) {
        const double *w = want + ELEMENT * i;
        assert_true(fabs(a.p[i] - w[0]) < 2e-6 + 2e-6 * fabs(w[0]));
        if (k->states)
            assert_true(fabs(((float *)a.state[0])[i] - w[1]) < 1e-6);
        if (k->states > 1)
            assert_true(fabs(((float *)a.state[1])[i] - w[2]) <
                        1e-12 + 1e-5 * w[2]);
        if (a.d)
            assert_true(fabs(a.d[i] - w[DIRECTION]) < 1e-6);
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
            h = add_bits(h, a.p, (size_t)n * 4);
            h = add_bits(h, a.out, (size_t)(n * iz_dtype_bytes(a.out_type)));
            for (int i = 0; i < k->states; i++)
                h = add_bits(h, a.state[i], state_bytes(&a));
            if (a.d)
                h = add_bits(h, a.d, (size_t)n * 4);
            arrays_free(&a);
        }
        if (h != k->bits)
            fail_msg("kind %d has the bits %#" PRIx64, (int)(k - kinds), h);
    }
}

/* At once, and in pieces of up to `most` elements with the master as it is or
 * in halves, where it is changed: the same bits.  Elements of fp8 share a
 * power, so that a block of them is cut nowhere. */
static void check_pieces(struct arrays a, int64_t most, int steps, bool halves)
{
    int64_t unit = a.type == IZ_MOMENT_FP8 ? IZ_MOMENT_BLOCK : 1;
    struct arrays b = arrays_copy(&a);
    struct iz_hyper_at s = step_of(a.kind, 1);
    halves = halves && !a.d;
    if (halves) {
        b.lower = take((size_t)b.n * 2);
        iz_cast_split(b.out, b.lower, b.p, b.n);
    }
    for (s.t = 1; s.t <= steps; s.t++) {
        new_gradients(&a, 1 / s.grad_scale);
        memcpy(b.g, a.g, (size_t)a.n * 4);
        update(&a, &s, 0, a.n);
        for (int64_t at = 0, n; at < a.n; at += n) {
            n = unit * random_piece(most / unit, a.n);
            n = n < a.n - at ? n : a.n - at;
            update(&b, &s, at, n);
        }
    }
    if (halves) {
        iz_cast_join(b.p, b.out, b.lower, b.n);
        free(b.lower);
    }
    arrays_equal(&a, &b);
}

/* Also within a block of a state in bf16, whose other elements stay. */
static void bits_do_not_depend_on_pieces(void **state)
{
    for (int c = 0; c < KINDS * 3 * 3; c++) {
        const struct kind *k = &kinds[c / 9];
        enum iz_moment_type type = (enum iz_moment_type)(c % 3);
        enum iz_dtype g = fixture_types[c / 3 % 3];
        check_pieces(arrays_new(k, 5003, type, g, IZ_F16), 700, 3, false);
        check_pieces(arrays_new(k, 5003, type, g, IZ_BF16), 1400, 3, true);
    }
}

/* So large that its copy goes past the caches, against pieces that stay. */
static void a_large_update_has_the_same_bits(void **state)
{
    for (int c = 0; c < 3; c++)
        check_pieces(arrays_new(&kinds[0], (1 << 18) + 70,
                                (enum iz_moment_type)c, IZ_BF16, IZ_BF16),
                     500 * IZ_MOMENT_BLOCK, 1, false);
}

/* Cut at any length up to a few tiles of the loop, whole ones and begun ones;
 * with a copy and without. */
static void updates_touch_n_elements_only(void **state)
{
    enum { MOST = 520 };
    for (int c = 0; c < KINDS * 2 * MOST; c++) {
        struct arrays a = arrays_new(&kinds[c / 2 / MOST], MOST, IZ_MOMENT_F32,
                                     IZ_F32, IZ_F32);
        struct arrays b = arrays_copy(&a), whole = a, cut = b;
        struct iz_hyper_at s = step_of(a.kind, 0);
        int n = c / 2 % MOST;
        new_gradients(&a, 1);
        memcpy(b.g, a.g, MOST * 4);
        if (c % 2)
            whole.out = cut.out = NULL;
        update(&whole, &s, 0, MOST);
        update(&cut, &s, 0, n);
        for (int i = n; i < MOST; i++)
            assert_true(((float *)b.out)[i] == 0 && (!b.d || b.d[i] == 0));
        update(&cut, &s, n, MOST - n);
        arrays_equal(&a, &b);
    }
}

/* Without gradients m decays to zero instead of staying subnormal, and an
 * element whose m is 0 stays where it is. */
static void states_come_to_rest(void **state)
{
    for (const struct kind *k = kinds; k < kinds + WHOLE; k++) {
        struct arrays a = arrays_new(k, 1, IZ_MOMENT_F32, IZ_F32, IZ_F32);
        struct iz_hyper_at s = step_of(k, 0);
        for (int i = 0; i < k->states; i++)
            *(float *)a.state[i] = 1;
        for (s.t = 1; s.t <= (k->states > 1 ? 2000 : 9000); s.t++)
            update(&a, &s, 0, 1);
        assert_true(*(float *)a.state[0] == 0);
        assert_true(k->states == 1 || *(float *)a.state[1] > 0.1f);
        float before = *a.p;
        update(&a, &s, 0, 1);
        assert_true(*a.p == before);
        arrays_free(&a);
    }
}

static void what_is_not_finite_shows(void **state)
{
    for (const struct kind *k = kinds; k < kinds + WHOLE; k++) {
        struct arrays a = arrays_new(k, 64, IZ_MOMENT_F32, IZ_F32, IZ_F32);
        struct iz_hyper_at s = step_of(k, 0);
        new_gradients(&a, 1);
        ((float *)a.g)[5] = NAN;
        ((float *)a.g)[6] = INFINITY;
        update(&a, &s, 0, 64);
        for (int i = 0; i < 64; i++) {
            /* Lion takes the sign of infinity, Adam divides it by itself */
            assert_true(isnan(a.p[i]) == (i == 5 || (i == 6 && k->states > 1)));
            assert_true(isfinite(((float *)a.state[0])[i]) ==
                        (i != 5 && i != 6));
        }
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
        cmocka_unit_test(updates_touch_n_elements_only),
        cmocka_unit_test(states_come_to_rest),
        cmocka_unit_test(what_is_not_finite_shows),
    };
    return levels_run("update", tests, sizeof(tests) / sizeof(tests[0]), 0);
}
