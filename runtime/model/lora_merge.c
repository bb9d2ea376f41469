/* SPDX-License-Identifier: Apache-2.0 */
/* Adapters added to the weights that they adapt, and norms of what that gives;
 * see lora.h. */
#include "runtime/model/lora.h"

#include <math.h>
#include <stdlib.h>

#include "codelets/base/build.h"
#include "codelets/base/int64.h"
#include "codelets/base/take.h"

enum { TILE = 1024 }; /* elements merged at a time */

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

IZ_SIMD static void add_times(float *restrict sum, const float *restrict a,
                              float b, int64_t n)
{
    for (int64_t j = 0; j < n; j++)
        sum[j] += b * a[j];
}

/* Row i of w, n columns from `from` on, which are at most TILE: all lie in one
 * output, or begin with output o and each has its own.  An element's products
 * are added in the order of ranks. */
static void merge_tile(const struct merge *g, const float *av, const float *bv,
                       int64_t i, int64_t from, int64_t o, float *out,
                       int64_t n)
{
    int64_t rank = g->b->cols, in = g->a->cols, one = g->a->out_in ? 0 : 1;
    float sum[TILE] = {0};
    for (int64_t r = 0; r < rank && av; r++)
        if (g->a->out_in)
            add_times(sum, av + r * in + from, bv[o * rank + r], n);
        else
            for (int64_t j = 0; j < n; j++)
                sum[j] += bv[(o + j) * rank + r] * av[r * in + i];
    for (int64_t j = 0; j < n; j++, o += one) {
        float v = out[j] + g->scale * sum[j];
        if (g->sums)
            add_square(g->sums + 2 * o, v);
        else
            out[j] = g->gain ? g->gain[o] * v : v;
    }
}

/* Row i of w, columns [from, from + n).  Rows of an expert meet its own parts
 * of a and b; outputs of another adapter are left alone. */
static void merge_row(const struct merge *g, int64_t i, int64_t from,
                      float *out, int64_t n)
{
    int64_t rank = g->b->cols, in = g->a->cols, experts = g->a->rows / rank;
    int64_t outputs = g->b->rows / experts, first = g->b->first;
    int64_t e = experts > 1 ? i / (g->w->rows / experts) : 0;
    const float *av = g->av ? g->av + e * rank * in : NULL;
    const float *bv = g->av ? g->bv + e * outputs * rank : NULL;
    int64_t begin = from, end = from + n;
    i -= e * (g->w->rows / experts);
    if (!g->a->out_in) {
        begin = max64(from, first);
        end = min64(end, first + outputs);
    } else if (i < first || i >= first + outputs) {
        return;
    }
    for (int64_t at = begin, k; at < end; at += k) {
        k = min64(end - at, TILE);
        merge_tile(g, av, bv, i, at, (g->a->out_in ? i : at) - first,
                   out + (at - from), k);
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
