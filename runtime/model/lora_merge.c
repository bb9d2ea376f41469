/* SPDX-License-Identifier: Apache-2.0 */
/* Adapters added to the weights that they adapt, and norms of what that gives;
 * see lora.h. */
#include "runtime/model/lora.h"

#include <math.h>
#include <stdlib.h>

#include "codelets/base/int64.h"
#include "codelets/base/take.h"

struct merge {
    const struct iz_param *w, *a, *b;
    const float *av, *bv; /* their values */
    const float *gain;    /* of each output; NULL: none */
    int64_t *sums;        /* squares are added here, and nothing is merged */
    float scale;
};

static void add_square(int64_t sum[2], float v)
{
    double square = (double)v * v * 0x1p30;
    int64_t whole = (int64_t)square;
    sum[0] += whole;
    sum[1] += (int64_t)((square - (double)whole) * 0x1p40);
}

float iz_lora_norm(const int64_t sum[2])
{
    return (float)sqrt((double)sum[0] * 0x1p-30 + (double)sum[1] * 0x1p-70);
}

/* Row i of w, columns [from, from + n).  Rows of an expert meet its own parts
 * of a and b. */
static void merge_row(const struct merge *g, int64_t i, int64_t from,
                      float *out, int64_t n)
{
    int64_t rank = g->b->cols, in = g->a->cols, experts = g->a->rows / rank;
    int64_t outputs = g->b->rows / experts;
    int64_t e = experts > 1 ? i / (g->w->rows / experts) : 0;
    const float *av = g->av ? g->av + e * rank * in : NULL;
    const float *bv = g->av ? g->bv + e * outputs * rank : NULL;
    i -= e * (g->w->rows / experts);
    for (int64_t j = 0; j < n; j++) {
        int64_t o = (g->a->out_in ? i : from + j) - g->b->first;
        int64_t k = g->a->out_in ? from + j : i;
        float sum = 0;
        if (o < 0 || o >= outputs)
            continue;
        for (int64_t r = 0; r < rank && av; r++)
            sum += bv[o * rank + r] * av[r * in + k];
        sum = out[j] + g->scale * sum;
        if (g->sums)
            add_square(g->sums + 2 * o, sum);
        else
            out[j] = g->gain ? g->gain[o] * sum : sum;
    }
}

/* What of w, which begins at `at` in its array, is among the n elements from
 * `first` on. */
static void merge_range(const struct merge *g, int64_t at, int64_t first,
                        float *in, int64_t n)
{
    int64_t cols = g->w->cols;
    int64_t from = max64(first, at);
    int64_t end = min64(at + g->w->rows * cols, first + n);
    while (from < end) {
        int64_t i = (from - at) / cols, j = (from - at) % cols;
        int64_t k = min64(cols - j, end - from);
        merge_row(g, i, j, in + (from - first), k);
        from += k;
    }
}

int64_t iz_lora_first(const struct iz_unit *u)
{
    int64_t n = iz_unit_elems(u, IZ_PART_TRAINED);
    for (int i = iz_unit_base(u); i < iz_unit_own(u); i++)
        n -= u->param[i].rows * u->param[i].cols;
    return n;
}

/* sums: see iz_lora_squares; NULL: merges. */
static void walk(const struct iz_model *m, int unit, enum iz_unit_part part,
                 const float *adapters, int64_t first, float *in, int64_t n,
                 int64_t *sums)
{
    const struct iz_unit *u = &m->unit[unit];
    int64_t start = iz_lora_first(u);
    int64_t *offset = iz_take(u->n_params, sizeof(*offset), "offsets");
    iz_unit_offsets(u, (int64_t[IZ_PARTS]){0}, offset);
    for (int i = iz_unit_base(u); i < iz_unit_own(u);
         i += iz_model_adapter(m)) {
        const struct iz_param *a = &u->param[i];
        struct merge g = {.w = &u->param[a->adapts],
                          .a = a,
                          .b = a + 1,
                          .sums = sums,
                          .scale = iz_param_scale(m, a + 1)};
        if (adapters) {
            g.av = adapters + (offset[i] - start);
            g.bv = adapters + (offset[i + 1] - start);
        }
        if (adapters && m->adapter_dora)
            g.gain = adapters + (offset[i + 2] - start);
        if (iz_param_part(g.w) == part)
            merge_range(&g, offset[a->adapts], first, in, n);
        sums = sums ? sums + 2 * a[1].rows : NULL;
    }
    free(offset);
}

void iz_lora_merge(const struct iz_model *m, int unit, enum iz_unit_part part,
                   const float *adapters, int64_t first, float *in, int64_t n)
{
    walk(m, unit, part, adapters, first, in, n, NULL);
}

void iz_lora_squares(const struct iz_model *m, int unit, enum iz_unit_part part,
                     const float *adapters, int64_t first, float *in, int64_t n,
                     int64_t *sums)
{
    walk(m, unit, part, adapters, first, in, n, sums);
}

int64_t iz_lora_outputs(const struct iz_model *m, int unit)
{
    const struct iz_unit *u = &m->unit[unit];
    int64_t n = 0;
    for (int i = iz_unit_base(u); m->adapter_dora && i < iz_unit_own(u); i += 3)
        n += u->param[i + 2].cols;
    return n;
}

void iz_lora_gains(const struct iz_model *m, int unit, float *adapters,
                   const int64_t *sums)
{
    const struct iz_unit *u = &m->unit[unit];
    for (int i = iz_unit_base(u); i < iz_unit_own(u); i++) {
        int64_t n = u->param[i].rows * u->param[i].cols;
        bool magnitudes = (i - iz_unit_base(u)) % 3 == 2;
        for (int64_t o = 0; magnitudes && o < n; o++, sums += 2)
            adapters[o] /= iz_lora_norm(sums);
        adapters += n;
    }
}
