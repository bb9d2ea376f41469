/* SPDX-License-Identifier: Apache-2.0 */
/* GPT-2 in double precision, token by token with a cache of keys and values. */
#include "tests/models/gpt2_double.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    LN1_W,
    LN1_B,
    ATTN_W,
    ATTN_B,
    PROJ_W,
    PROJ_B,
    LN2_W,
    LN2_B,
    FC_W,
    FC_B,
    OUT_W,
    OUT_B,
    PER_LAYER
};

/* out[n] = in[m] w[m][n] + b[n] */
static void affine(double *out, const double *in, const double *w,
                   const double *b, int m, int n)
{
    memcpy(out, b, (size_t)n * sizeof(*out));
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j++)
            out[j] += in[i] * w[i * n + j];
}

static void normalise(double *out, const double *in, const double *w,
                      const double *b, int n)
{
    double sum = 0, square = 0, mean;

    for (int i = 0; i < n; i++)
        sum += in[i];
    mean = sum / n;
    for (int i = 0; i < n; i++)
        square += pow(in[i] - mean, 2);
    for (int i = 0; i < n; i++)
        out[i] = w[i] * (in[i] - mean) / sqrt(square / n + 1e-5) + b[i];
}

/* One head at position t: kv holds q, k and v of all positions so far. */
static void attend(double *out, const double *kv, int t, int width, int d)
{
    double total = 0;

    memset(out, 0, (size_t)d * sizeof(*out));
    for (int s = 0; s <= t; s++) {
        double score = 0, weight;
        for (int i = 0; i < d; i++)
            score += kv[3 * t * width + i] * kv[3 * s * width + width + i];
        weight = exp(score / sqrt(d));
        total += weight;
        for (int i = 0; i < d; i++)
            out[i] += weight * kv[3 * s * width + 2 * width + i];
    }
    for (int i = 0; i < d; i++)
        out[i] /= total;
}

/* z [width] is the residual stream at position t; a has room for 4 width. */
static void layer(const struct gpt2_double *g, double **p, double *z,
                  double *cache, int t, double *a, double *b)
{
    int c = g->width, d = c / g->heads;

    normalise(a, z, p[LN1_W], p[LN1_B], c);
    affine(cache + 3 * t * c, a, p[ATTN_W], p[ATTN_B], c, 3 * c);
    for (int h = 0; h < g->heads; h++)
        attend(a + h * d, cache + h * d, t, c, d);
    affine(b, a, p[PROJ_W], p[PROJ_B], c, c);
    for (int i = 0; i < c; i++)
        z[i] += b[i];
    normalise(b, z, p[LN2_W], p[LN2_B], c);
    affine(a, b, p[FC_W], p[FC_B], c, 4 * c);
    for (int i = 0; i < 4 * c; i++)
        a[i] *= 0.5 + 0.5 * tanh(0.79788456080286536 *
                                 (a[i] + 0.044715 * pow(a[i], 3)));
    affine(b, a, p[OUT_W], p[OUT_B], 4 * c, c);
    for (int i = 0; i < c; i++)
        z[i] += b[i];
}

static double token_loss(const struct gpt2_double *g, const double *z,
                         int target, double *logits)
{
    double sum = 0, at = 0;

    for (int v = 0; v < g->vocab; v++) {
        double s = 0;
        for (int i = 0; i < g->width; i++)
            s += z[i] * g->param[0][v * g->width + i];
        if (v == target)
            at = s;
        if (logits)
            logits[v] = s;
        sum += exp(s);
    }
    return log(sum) - at;
}

static double sample_loss(const struct gpt2_double *g, const int32_t *input,
                          const int32_t *target, int row, double *logits)
{
    int c = g->width;
    size_t cache = (size_t)(3 * c * g->seq);
    double *room =
        calloc((size_t)(10 * c) + cache * (size_t)g->layers, sizeof(*room));
    double *z = room, *a = z + c, *b = a + 4 * c, *kv = b + 4 * c, sum = 0;
    double **ln_f = g->param + 2 + PER_LAYER * g->layers;

    for (int t = 0; t < g->seq; t++) {
        for (int i = 0; i < c; i++)
            z[i] = g->param[0][input[t] * c + i] + g->param[1][t * c + i];
        for (int l = 0; l < g->layers; l++)
            layer(g, g->param + 2 + PER_LAYER * l, z, kv + cache * (size_t)l, t,
                  a, b);
        normalise(a, z, ln_f[0], ln_f[1], c);
        double loss = token_loss(g, a, target[t], t == row ? logits : NULL);
        sum += target[t] < 0 ? 0 : loss;
    }
    free(room);
    return sum;
}

double gpt2_double_loss(const struct gpt2_double *g, const int32_t *input,
                        const int32_t *target, int samples, int row,
                        double *logits)
{
    double sum = 0;
    int count = 0;

    for (int b = 0; b < samples; b++)
        sum += sample_loss(g, input + b * g->seq, target + b * g->seq, row,
                           b == 0 ? logits : NULL);
    for (int i = 0; i < samples * g->seq; i++)
        count += target[i] >= 0;
    return sum / count;
}
