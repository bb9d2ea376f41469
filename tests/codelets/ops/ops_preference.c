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

/* The loss; the sums of the figures of all pairs. */
static double want_loss(const struct pairs *k, double *out)
{
    const double n = SAMPLES / 2, beta = k->p.beta;
    double loss = 0, chosen = 0, loss_tokens = 0;
    memset(out, 0, IZ_PAIR_FIGURES * sizeof(*out));
    for (int i = 0; i < SAMPLES; i += 2) {
        double l[2], many[2];
        double c = logp_of(k, A, W, i, &many[0]);
        double r = logp_of(k, A, W, i + 1, &many[1]);
        l[0] = beta * (c - logp_of(k, REF, REF_W, i, &many[0]));
        l[1] = beta * (r - logp_of(k, REF, REF_W, i + 1, &many[1]));
        double d = l[0] - l[1], off = -1 / (2 * beta);
        for (int j = 0; j < 2; j++)
            off += (j ? -1 : 1) * l[j] / beta / fmax(many[j], 1);
        loss +=
            (k->p.type == IZ_LOSS_DPO ? -log(1 / (1 + exp(-d))) : off * off) /
            n;
        chosen -= c;
        loss_tokens += many[0];
        out[IZ_REWARDS_CHOSEN] += l[0];
        out[IZ_REWARDS_REJECTED] += l[1];
        out[IZ_REWARDS_ACCURACIES] += d > 0;
        out[IZ_REWARDS_MARGINS] += d;
        out[IZ_LOGPS_CHOSEN] += c;
        out[IZ_LOGPS_REJECTED] += r;
    }
    return loss + k->p.sft * weight * chosen / loss_tokens;
}

static double objective(void *arg)
{
    double out[IZ_PAIR_FIGURES];
    return loss_scale * want_loss(arg, out);
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

static void assert_near(double is, double want)
{
    assert_true(fabs(is - want) <= 1e-5 * (1 + fabs(want)));
}

/* Figures are added to those that were told before. */
static void run(struct pairs *k, unsigned gradients)
{
    const struct pass pass = {preference,
                              BIT(A) | BIT(REF) | BIT(W) | BIT(REF_W) |
                                  BIT(TARGET) | BIT(TOLD),
                              BIT(LOSS) | BIT(TOLD) | gradients};
    struct iz_aux *aux = k->s.t[TOLD].v.p;
    double want[IZ_PAIR_FIGURES];
    *aux = (struct iz_aux){.pairs = 2, .pair[IZ_REWARDS_MARGINS] = 8};
    k->evaluates = !gradients;
    scene_run(&k->s, &pass, k);
    assert_near(*(double *)k->s.t[LOSS].v.p, want_loss(k, want));
    want[IZ_REWARDS_MARGINS] += 8;
    for (int i = 0; i < IZ_PAIR_FIGURES; i++)
        assert_near(aux->pair[i], want[i]);
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
