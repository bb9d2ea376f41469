/* SPDX-License-Identifier: Apache-2.0 */
/* Copies, sums, norms and updates on a GPU: the bits of the CPU. */
#include "tests/codelets/gpu/ops_gpu.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "codelets/flat/flat.h"
#include "codelets/gpu/flat_buffer.h"

enum { MOST_IN = 4, SIZES = 7 };

/* Sizes of less than, exactly and more than a thread's piece, a block's part
 * and a level of partial sums. */
static const int64_t sizes[SIZES] = {1,         7,       1024,   4099,
                                     (1 << 20), 1048583, 3000001};

/* n elements; the first `shift` of the memory are not part of them. */
static void *at(struct iz_view v, int shift)
{
    return v.p ? (char *)v.p + shift * iz_dtype_bytes(v.dtype) : NULL;
}

static struct tensor flat_new(enum iz_dtype t, int64_t n, int shift)
{
    return tensor_new(t, 1, n + shift, 4);
}

static struct iz_view copy_of(struct iz_view v)
{
    int64_t bytes = iz_view_bytes(v);
    void *p = fixture_take(bytes);

    memcpy(p, v.p, (size_t)bytes);
    v.p = p;
    return v;
}

static void run(struct tensor *t, int n,
                void (*op)(struct iz_exec *, const struct iz_view *,
                           const void *),
                const void *arg, unsigned reads, unsigned writes)
{
    gpu_run(&(struct gpu_op){.run = op,
                             .arg = arg,
                             .t = t,
                             .n = n,
                             .reads = reads,
                             .writes = writes,
                             .act = IZ_F32});
}

/* ---- copies ------------------------------------------------------------- */

static void copy_and_clear(struct iz_exec *x, const struct iz_view *v,
                           const void *arg)
{
    int64_t part = *(const int64_t *)arg, all = iz_view_bytes(v[0]);

    if (x->dry)
        return;
    iz_buffer_copy(x, v[1].p, v[0].p, all);
    iz_buffer_clear(x, v[1].p, part);
}

static void copies_move_every_byte(void **state)
{
    (void)state;
    fixture_seed();
    for (int i = 0; i < SIZES; i++) {
        struct tensor t[2] = {flat_new(IZ_BF16, sizes[i], 0),
                              flat_new(IZ_BF16, sizes[i], 0)};
        int64_t part = sizes[i] / 3;
        struct iz_view want = copy_of(t[0].v);

        memset(want.p, 0, (size_t)part);
        run(t, 2, copy_and_clear, &part, 1, 2);
        fixture_same_bits("a copy", t[1].v, want);
        free(want.p);
        tensor_free(&t[0]);
        tensor_free(&t[1]);
    }
}

/* ---- sums --------------------------------------------------------------- */

struct sum {
    int64_t n;
    enum iz_dtype out, in;
    int n_in, shift;
    bool accumulate;
};

/* v[0]: out; then the inputs. */
static void sum(struct iz_exec *x, const struct iz_view *v, const void *arg)
{
    const struct sum *s = arg;
    const void *in[MOST_IN];

    if (x->dry)
        return;
    for (int i = 0; i < s->n_in; i++)
        in[i] = at(v[1 + i], s->shift);
    iz_buffer_sum(x, at(v[0], s->shift), s->out, s->accumulate, in, s->n_in,
                  s->in, s->n);
    memset(in, 0xff, sizeof in); /* a call keeps nothing of its arguments */
}

static void check_sum(const struct sum *s)
{
    struct tensor t[1 + MOST_IN] = {flat_new(s->out, s->n, s->shift)};
    const void *in[MOST_IN];
    struct iz_view want = copy_of(t[0].v);

    for (int i = 0; i < s->n_in; i++) {
        t[1 + i] = flat_new(s->in, s->n, s->shift);
        in[i] = at(t[1 + i].v, s->shift);
    }
    iz_flat_sum(at(want, s->shift), s->out, s->accumulate, in, s->n_in, s->in,
                s->n);
    run(t, 1 + s->n_in, sum, s, ~0u, 1);
    fixture_same_bits("a sum", t[0].v, want);
    free(want.p);
    for (int i = 0; i <= s->n_in; i++)
        tensor_free(&t[i]);
}

static void sum_has_the_bits_of_the_cpu(void **state)
{
    (void)state;
    fixture_seed();
    for (int k = 0; k < 3 * 3 * 3 * 2; k++)
        for (int i = 0; i < 4; i++)
            check_sum(&(struct sum){
                sizes[i], fixture_types[k % 3], fixture_types[k / 3 % 3],
                k / 9 % 3 ? k / 9 % 3 * 2 : 1, k % 2, k / 27});
    for (int t = 0; t < 3; t++)
        check_sum(&(struct sum){sizes[SIZES - 1], IZ_F32, fixture_types[t], 2,
                                0, true});
}

/* ---- norm --------------------------------------------------------------- */

struct norm2 {
    int64_t n;
    int shift;
    double *result; /* pinned */
};

static void norm2(struct iz_exec *x, const struct iz_view *v, const void *arg)
{
    const struct norm2 *s = arg;
    int64_t mark = iz_work_mark(x);

    if (x->dry) {
        iz_work(x, IZ_U8, 1, iz_flat_norm2_scratch_bytes(s->n));
        iz_work_release(x, mark);
    } else {
        iz_buffer_norm2(x, s->result, at(v[0], s->shift), v[0].dtype, s->n);
    }
}

static void norm_has_the_bits_of_the_cpu(void **state)
{
    double *result = gpu_pinned(sizeof *result);

    (void)state;
    fixture_seed();
    for (int k = 0; k < 3 * 2 * SIZES; k++) {
        struct norm2 s = {sizes[k / 6], k / 3 % 2, result};
        struct tensor t = flat_new(fixture_types[k % 3], s.n, s.shift);

        *result = -1;
        run(&t, 1, norm2, &s, 1, 0);
        assert_true(*result == iz_flat_norm2(at(t.v, s.shift), t.v.dtype, s.n));
        tensor_free(&t);
    }
    gpu_unpin(result);
}

struct squares {
    int64_t n;
    double *sums; /* pinned */
};

static void squares(struct iz_exec *x, const struct iz_view *v, const void *arg)
{
    const struct squares *s = arg;

    if (!x->dry)
        iz_buffer_squares(x, s->sums, v[0].p, v[0].dtype, s->n);
}

static void squares_have_the_bits_of_the_cpu(void **state)
{
    enum { MOST = 70001, BLOCKS = MOST / IZ_NORM_BLOCK + 2 };
    static const int64_t n[] = {1, 1024, 1025, MOST};
    double *sums = gpu_pinned(BLOCKS * sizeof *sums), want[BLOCKS];

    (void)state;
    fixture_seed();
    for (int k = 0; k < 3 * 4; k++) {
        struct squares s = {n[k / 3], sums};
        struct tensor t = flat_new(fixture_types[k % 3], s.n, 0);
        int64_t blocks = iz_norm_blocks(s.n);

        sums[blocks] = want[blocks] = 77;
        run(&t, 1, squares, &s, 1, 0);
        iz_flat_squares(want, t.v.p, t.v.dtype, s.n);
        assert_memory_equal(sums, want, (size_t)(blocks + 1) * sizeof *sums);
        tensor_free(&t);
    }
    gpu_unpin(sums);
}

/* ---- updates ------------------------------------------------------------ */

enum { P, M, V, G, OUT, WIDE_TENSORS };

struct wide {
    int64_t n;
    enum iz_dtype g, out;
    int shift;
    bool copies;
    struct iz_step a;
};

static void update_wide(struct iz_exec *x, const struct iz_view *v,
                        const void *arg)
{
    const struct wide *k = arg;
    int s = k->shift;

    struct iz_alike all = iz_alike_of(&k->a);

    if (!x->dry)
        iz_buffer_update(
            x, &(struct iz_update){.optimizer = k->a.hyper.type,
                                   .g_type = k->g,
                                   .out_type = k->out,
                                   .n = k->n,
                                   .p = at(v[P], s),
                                   .state = {at(v[M], s), at(v[V], s)},
                                   .g = at(v[G], s),
                                   .out = k->copies ? at(v[OUT], s) : NULL,
                                   .span = &all,
                                   .spans = 1});
}

/* Every fifth element has no gradient and a state that is about to become
 * subnormal. */
static void prepare(struct tensor *t)
{
    for (int64_t i = 0; i < iz_view_len(t[P].v); i++) {
        t[V].d[i] = fabs(t[V].d[i]);
        if (i % 5 == 0) {
            t[M].d[i] = -1.2e-38;
            t[V].d[i] = 1.2e-38;
            t[G].d[i] = 0;
        }
    }
    tensor_store(&t[M]);
    tensor_store(&t[V]);
    tensor_store(&t[G]);
}

static void check_update(const struct wide *k)
{
    const enum iz_dtype type[WIDE_TENSORS] = {IZ_F32, IZ_F32, IZ_F32, k->g,
                                              k->out};
    struct tensor t[WIDE_TENSORS];
    struct iz_view w[WIDE_TENSORS];
    struct iz_exec cpu = {.backend = IZ_CPU};
    int s = k->shift;

    for (int i = 0; i < WIDE_TENSORS; i++)
        t[i] = flat_new(type[i], k->n, s);
    prepare(t);
    for (int i = 0; i < WIDE_TENSORS; i++)
        w[i] = copy_of(t[i].v);
    update_wide(&cpu, w, k);
    run(t, WIDE_TENSORS, update_wide, k, ~0u,
        1u << P | 1u << M | 1u << V | 1u << OUT);
    for (int i = 0; i < WIDE_TENSORS; i++) {
        fixture_same_bits("update", t[i].v, w[i]);
        tensor_free(&t[i]);
        free(w[i].p);
    }
}

static void updates_have_the_bits_of_the_cpu(void **state)
{
    struct iz_step a = {.hyper = {.lr = 1e-3,
                                  .beta1 = 0.9,
                                  .beta2 = 0.95,
                                  .eps = 1e-8,
                                  .weight_decay = 0.1},
                        .grad_scale = 0.37f};

    (void)state;
    fixture_seed();
    for (int k = 0; k < 3 * 3 * 2 * 2; k++) {
        a.hyper.adamw = k / 18;
        a.hyper.bias_correction = k % 2;
        a.t = 1 + k;
        a.hyper.type = (enum iz_optimizer_type)(k % IZ_OPTIMIZERS);
        for (int i = 0; i < 4; i++)
            check_update(&(struct wide){sizes[i], fixture_types[k % 3],
                                        fixture_types[k / 3 % 3], k / 9 % 2,
                                        k % 5 != 4, a});
    }
    check_update(
        &(struct wide){sizes[SIZES - 1], IZ_BF16, IZ_BF16, 0, true, a});
}

/* ---- states in fewer bytes --------------------------------------------- */

enum { NP, STATE, NG, NOUT, NARROW_TENSORS };

struct narrow {
    int64_t n; /* a multiple of IZ_MOMENT_BLOCK */
    enum iz_moment_type type;
    enum iz_dtype g, out;
    bool copies;
    const struct iz_alike *span;
    int spans;
    enum iz_optimizer_type optimizer;
};

/* m and v one behind the other, as in a chunk. */
static struct iz_moments moment_in(const struct narrow *k, struct iz_view state,
                                   enum iz_moment which)
{
    return (struct iz_moments){(char *)state.p +
                                   which * iz_moment_bytes(k->type, k->n),
                               k->type, which, k->n};
}

static void update_narrow(struct iz_exec *x, const struct iz_view *v,
                          const void *arg)
{
    const struct narrow *k = arg;

    if (x->dry)
        return;
    iz_buffer_update(
        x, &(struct iz_update){.optimizer = k->optimizer,
                               .type = k->type,
                               .g_type = k->g,
                               .out_type = k->out,
                               .n = k->n,
                               .room = k->n,
                               .p = v[NP].p,
                               .state = {moment_in(k, v[STATE], IZ_MOMENT_M).p,
                                         moment_in(k, v[STATE], IZ_MOMENT_V).p},
                               .g = v[NG].p,
                               .out = k->copies ? v[NOUT].p : NULL,
                               .key = 9,
                               .first = 6400,
                               .span = k->span,
                               .spans = k->spans});
}

/* Values that the type holds, every third block zero, magnitudes of 24 binades
 * between blocks. */
static void fill_state(const struct narrow *k, struct iz_view state)
{
    float block[IZ_MOMENT_BLOCK];

    for (int w = 0; w < 2; w++) {
        struct iz_moments a = moment_in(k, state, (enum iz_moment)w);

        for (int64_t b = 0; b < k->n; b += IZ_MOMENT_BLOCK) {
            int at = (int)(b / IZ_MOMENT_BLOCK % 24);

            for (int i = 0; i < IZ_MOMENT_BLOCK; i++) {
                float f = ldexpf((float)fixture_uniform(), at - 20);

                block[i] = at % 3 ? (w ? fabsf(f) : f) : 0;
            }
            iz_moment_store(&a, b, block, IZ_MOMENT_BLOCK, 1, b);
        }
    }
}

static void check_narrow(const struct narrow *k)
{
    struct tensor t[NARROW_TENSORS] = {
        flat_new(IZ_F32, k->n, 0),
        flat_new(IZ_BF16, iz_moment_bytes(k->type, k->n), 0),
        flat_new(k->g, k->n, 0), flat_new(k->out, k->n, 0)};
    struct iz_view w[NARROW_TENSORS];
    struct iz_exec cpu = {.backend = IZ_CPU};

    fill_state(k, t[STATE].v);
    for (int i = 0; i < NARROW_TENSORS; i++)
        w[i] = copy_of(t[i].v);
    update_narrow(&cpu, w, k);
    run(t, NARROW_TENSORS, update_narrow, k, ~0u,
        1u << NP | 1u << STATE | 1u << NOUT);
    for (int i = 0; i < NARROW_TENSORS; i++) {
        if (i == STATE)
            assert_memory_equal(t[i].v.p, w[i].p, (size_t)iz_view_bytes(w[i]));
        else
            fixture_same_bits("update with narrow states", t[i].v, w[i]);
        tensor_free(&t[i]);
        free(w[i].p);
    }
}

static void narrow_updates_have_the_bits_of_the_cpu(void **state)
{
    static const int64_t blocks[] = {1, 3, 17, 1027};

    (void)state;
    fixture_seed();
    for (int k = 0; k < 2 * 3 * 3; k++) {
        enum iz_optimizer_type o = (enum iz_optimizer_type)(k % IZ_OPTIMIZERS);
        struct iz_step a = {.hyper = {.type = o,
                                      .lr = 1e-3,
                                      .beta1 = 0.9,
                                      .beta2 = 0.95,
                                      .eps = 1e-8,
                                      .weight_decay = 0.1,
                                      .adamw = true,
                                      .bias_correction = true},
                            .t = 3,
                            .grad_scale = 0.37f};
        struct iz_alike span[3] = {iz_alike_of(&a)};

        span[0].end = 37;
        a.hyper.weight_decay = 0;
        span[1] = iz_alike_of(&a);
        span[1].end = 999;
        a.hyper.lr = 1e-4;
        span[2] = iz_alike_of(&a);
        for (int i = 0; i < 4; i++)
            check_narrow(
                &(struct narrow){blocks[i] * IZ_MOMENT_BLOCK,
                                 k % 2 ? IZ_MOMENT_FP8 : IZ_MOMENT_BF16,
                                 fixture_types[k / 2 % 3], fixture_types[k / 6],
                                 k % 5 != 4, span, 3, o});
    }
}

int ops_gpu_flat(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(copies_move_every_byte),
        cmocka_unit_test(sum_has_the_bits_of_the_cpu),
        cmocka_unit_test(norm_has_the_bits_of_the_cpu),
        cmocka_unit_test(squares_have_the_bits_of_the_cpu),
        cmocka_unit_test(updates_have_the_bits_of_the_cpu),
        cmocka_unit_test(narrow_updates_have_the_bits_of_the_cpu),
    };

    return cmocka_run_group_tests_name("gpu flat", tests, NULL, NULL);
}
