/* SPDX-License-Identifier: Apache-2.0 */
/* The loss of pairs against double precision, and its gradients against central
 * differences of that. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/codelets/ops/reference.h"
#include "tests/codelets/ops/scene.h"

enum { A, REF, W, REF_W, TARGET, DA, DW, LOSS, TOLD, TENSORS };
enum { SAMPLES = 6, ROWS = 5, COLS = 7, VOCAB = 11 };

struct pairs {
    struct scene s;
    struct iz_preference p;
    bool evaluates; /* without gradients */
};

static const float loss_scale = 4;
static const double weight = 0.75; /* of the chosen targets here */
static float cap;                  /* of what follows */

static void preference(struct iz_exec *x, const struct iz_view *v,
                       const void *arg)
{
    const struct pairs *k = arg;
    struct iz_classifier c = {.a = v[A],
                              .w = v[W],
                              .target = v[TARGET].p,
                              .da = k->evaluates ? IZ_NONE : v[DA],
                              .dw = k->evaluates ? IZ_NONE : v[DW],
                              .loss_scale = loss_scale,
                              .loss = v[LOSS].p,
                              .cap = cap,
                              .samples = SAMPLES};
    iz_preference(x, &c,
                  &(struct iz_pairs){.loss = &k->p,
                                     .a = v[REF],
                                     .w = v[REF_W],
                                     .weight = weight,
                                     .aux = v[TOLD].p});
}

/* log p of a sample's targets, and how many there are. */
static double logp_of(const struct pairs *k, int rows, int matrix, int sample,
                      double *count)
{
    const int32_t *target = (int32_t *)k->s.t[TARGET].v.p + sample * ROWS;
    double sum = 0;
    *count = 0;
    for (int r = 0; r < ROWS; r++) {
        const double *a = k->s.t[rows].d + (sample * ROWS + r) * COLS;
        double all = 0, own = 0;
        for (int v = 0; v < VOCAB; v++) {
            double l = 0;
            for (int i = 0; i < COLS; i++)
                l += a[i] * k->s.t[matrix].d[v * COLS + i];
            l = cap != 0 ? cap * tanh(l / cap) : l;
            all += exp(l);
            own = v == target[r] ? l : own;
        }
        if (target[r] >= 0) {
            sum += own - log(all);
            ++*count;
        }
    }
    return sum;
}

/* Of the loss, times its scale; figures are those of TRL in
 * tests/e2e/step/test_preferences.py. */
static double objective(void *arg)
{
    const struct pairs *k = arg;
    const double n = SAMPLES / 2, beta = k->p.beta;
    double loss = 0, chosen = 0, loss_tokens = 0;
    for (int i = 0; i < SAMPLES; i += 2) {
        double d = 0, off = -1 / (2 * beta), many;
        for (int j = 0; j < 2; j++) {
            double own = logp_of(k, A, W, i + j, &many);
            double l = own - logp_of(k, REF, REF_W, i + j, &many);
            d += (j ? -beta : beta) * l;
            off += (j ? -1 : 1) * l / fmax(many, 1);
            chosen -= j ? 0 : own;
            loss_tokens += j ? 0 : many;
        }
        loss +=
            (k->p.type == IZ_LOSS_DPO ? -log(1 / (1 + exp(-d))) : off * off) /
            n;
    }
    return loss_scale * (loss + k->p.sft * weight * chosen / loss_tokens);
}

static struct pairs pairs_new(struct iz_preference p)
{
    struct pairs k = {
        .s = {.n = TENSORS,
              .pinned = BIT(TARGET) | BIT(LOSS) | BIT(TOLD),
              .t = {[A] = tensor_new(IZ_F32, SAMPLES * ROWS, COLS, 1),
                    [REF] = tensor_new(IZ_F32, SAMPLES * ROWS, COLS, 1),
                    [W] = tensor_new(IZ_F32, VOCAB, COLS, 1),
                    [REF_W] = tensor_new(IZ_F32, VOCAB, COLS, 1),
                    [TARGET] = bytes_new(4 * SAMPLES * ROWS),
                    [DA] = tensor_new(IZ_F32, SAMPLES * ROWS, COLS, 1),
                    [DW] = tensor_new(IZ_F32, VOCAB, COLS, 1),
                    [LOSS] = bytes_new(sizeof(double)),
                    [TOLD] = bytes_new(sizeof(struct iz_aux))}},
        .p = p};
    int32_t *target = k.s.t[TARGET].v.p;
    for (int i = 0; i < SAMPLES * ROWS; i++) /* sample 1 has no target */
        target[i] = i / ROWS == 1 || i % 4 == 0 ? -1 : (i * 5) % VOCAB;
    return k;
}

/* Figures are added to those that were told before. */
static void run(struct pairs *k, unsigned gradients)
{
    const struct pass pass = {preference,
                              BIT(A) | BIT(REF) | BIT(W) | BIT(REF_W) |
                                  BIT(TARGET) | BIT(TOLD),
                              BIT(LOSS) | BIT(TOLD) | gradients};
    struct iz_aux *aux = k->s.t[TOLD].v.p;
    double want = objective(k) / loss_scale;
    *aux = (struct iz_aux){.pairs = 2, .pair[IZ_REWARDS_MARGINS] = 8};
    k->evaluates = !gradients;
    scene_run(&k->s, &pass, k);
    assert_true(fabs(*(double *)k->s.t[LOSS].v.p - want) <=
                1e-5 * (1 + fabs(want)));
    assert_true(fabs(aux->pair[IZ_REWARDS_MARGINS] - 8 -
                     aux->pair[IZ_REWARDS_CHOSEN] +
                     aux->pair[IZ_REWARDS_REJECTED]) < 1e-5);
    assert_true(aux->pairs == 2 + SAMPLES / 2);
}

static void check_pairs(struct iz_preference p)
{
    struct pairs k = pairs_new(p);
    struct tensor *t = k.s.t;
    ref_gradient(tensor_want(&t[DA]), objective, &k, t[A].d,
                 SAMPLES * ROWS * COLS);
    ref_gradient(tensor_want(&t[DW]), objective, &k, t[W].d, VOCAB * COLS);
    run(&k, BIT(DA) | BIT(DW));
    fixture_close("da", &t[DA], 1e-4);
    fixture_close("dw", &t[DW], 1e-4);
    run(&k, 0);
    scene_free(&k.s);
}

static void losses_agree_with_central_differences(void **state)
{
    static const struct iz_preference p[] = {{IZ_LOSS_DPO, 0.1, 0},
                                             {IZ_LOSS_DPO, 3, 0.5},
                                             {IZ_LOSS_IPO, 0.1, 0},
                                             {IZ_LOSS_IPO, 3, 0.5}};
    for (int i = 0; i < 2 * COUNT(p); i++) {
        cap = i < COUNT(p) ? 0 : 0.5f;
        check_pairs(p[i % COUNT(p)]);
    }
    cap = 0;
}

/* On a GPU: a sample begins in one chunk of rows and ends in another. */
static void chunks_of_rows_make_no_difference(void **state)
{
    int64_t bytes = backend.x.numerics.logits_bytes;
    backend.x.numerics.logits_bytes = 7 * 4 * (int64_t)VOCAB;
    check_pairs((struct iz_preference){IZ_LOSS_DPO, 0.3, 0.5});
    backend.x.numerics.logits_bytes = bytes;
}

int ops_preference(void)
{
    const struct CMUnitTest tests[] = {
        SEEDED(losses_agree_with_central_differences),
        SEEDED(chunks_of_rows_make_no_difference),
    };
    if (!backend_multiplies())
        return 0;
    return cmocka_run_group_tests_name("preference", tests, NULL, NULL);
}
