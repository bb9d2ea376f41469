/* SPDX-License-Identifier: Apache-2.0 */
/* Llama in double precision, token by token with a cache of keys and values. */
#include "tests/models/llama_double.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { NORM1, QKV_W, OUT_W, NORM2, GATE_UP_W, DOWN_W, REST };

static int per_layer(const struct llama_double *g)
{
    return REST + g->qkv_bias + 2 * g->qk_norm;
}

/* out[n] = w[n][m] in[m] + b[n]; b may be NULL. */
static void apply(double *out, const double *in, const double *w,
                  const double *b, int m, int n)
{
    for (int j = 0; j < n; j++) {
        out[j] = b ? b[j] : 0;
        for (int i = 0; i < m; i++)
            out[j] += w[j * m + i] * in[i];
    }
}

static void normalise(double *out, const double *in, const double *w, int n,
                      double eps)
{
    double square = 0;

    for (int i = 0; i < n; i++)
        square += in[i] * in[i] / n;
    for (int i = 0; i < n; i++)
        out[i] = w[i] * (in[i] / sqrt(square + eps));
}

/* Radians per token of the pair (i, i + d/2). */
static double frequency(const struct llama_double *g, int i)
{
    double f = 1 / pow(g->theta, 2. * i / g->head_dim);
    double turns = g->original_seq * f / (2 * acos(-1.0)), mix;

    if (g->factor == 1 || turns > g->high_freq)
        return f;
    if (turns < g->low_freq)
        return f / g->factor;
    mix = (turns - g->low_freq) / (g->high_freq - g->low_freq);
    return (1 - mix) * (f / g->factor) + mix * f;
}

static void turn(const struct llama_double *g, double *head, int t)
{
    int half = g->head_dim / 2;

    for (int i = 0; i < half; i++) {
        double angle = t * frequency(g, i), a = head[i], b = head[i + half];
        head[i] = a * cos(angle) - b * sin(angle);
        head[i + half] = a * sin(angle) + b * cos(angle);
    }
}

/* Head h at position t: kv holds q, k and v of all positions so far. */
static void attend(const struct llama_double *g, double *out, const double *kv,
                   int t, int h)
{
    int d = g->head_dim, ld = (g->heads + 2 * g->kv_heads) * d;
    int shared = h / (g->heads / g->kv_heads);
    const double *q = kv + t * ld + h * d;
    double total = 0;

    memset(out, 0, (size_t)d * sizeof(*out));
    for (int s = 0; s <= t; s++) {
        const double *k = kv + s * ld + (g->heads + shared) * d;
        const double *v = k + g->kv_heads * d;
        double score = 0, weight;
        for (int i = 0; i < d; i++)
            score += q[i] * k[i];
        weight = exp(score / sqrt(d));
        total += weight;
        for (int i = 0; i < d; i++)
            out[i] += weight * v[i];
    }
    for (int i = 0; i < d; i++)
        out[i] /= total;
}

/* Queries, keys and values of position t from the normalised stream a. */
static void project(const struct llama_double *g, double **p, double *qkv,
                    const double *a, int t)
{
    int d = g->head_dim, n = g->heads + 2 * g->kv_heads;
    double **norms = p + REST + g->qkv_bias;

    apply(qkv, a, p[QKV_W], g->qkv_bias ? p[REST] : NULL, g->width, n * d);
    for (int h = 0; h < g->heads + g->kv_heads; h++) {
        double *head = qkv + h * d;
        if (g->qk_norm)
            normalise(head, head, norms[h >= g->heads], d, g->eps);
        turn(g, head, t);
    }
}

/* z [width] is the residual stream at position t; a and b are scratch. */
static void layer(const struct llama_double *g, double **p, double *z,
                  double *cache, int t, double *a, double *b)
{
    int c = g->width, d = g->head_dim, f = g->ffn;

    normalise(a, z, p[NORM1], c, g->eps);
    project(g, p, cache + t * (g->heads + 2 * g->kv_heads) * d, a, t);
    for (int h = 0; h < g->heads; h++)
        attend(g, a + h * d, cache, t, h);
    apply(b, a, p[OUT_W], NULL, g->heads * d, c);
    for (int i = 0; i < c; i++)
        z[i] += b[i];
    normalise(a, z, p[NORM2], c, g->eps);
    apply(b, a, p[GATE_UP_W], NULL, c, 2 * f);
    for (int i = 0; i < f; i++)
        b[i] = b[i] / (1 + exp(-b[i])) * b[f + i];
    apply(a, b, p[DOWN_W], NULL, f, c);
    for (int i = 0; i < c; i++)
        z[i] += a[i];
}

static double token_loss(const struct llama_double *g, const double *z,
                         const double *w, int target, double *logits)
{
    double sum = 0, at = 0;

    for (int v = 0; v < g->vocab; v++) {
        double s = 0;
        for (int i = 0; i < g->width; i++)
            s += z[i] * w[v * g->width + i];
        if (v == target)
            at = s;
        if (logits)
            logits[v] = s;
        sum += exp(s);
    }
    return log(sum) - at;
}

static double sample_loss(const struct llama_double *g, const int32_t *input,
                          const int32_t *target, int row, double *logits)
{
    int c = g->width, n = (g->heads + 2 * g->kv_heads) * g->head_dim;
    int most = c + n + 2 * g->ffn;
    size_t cache = (size_t)(n * g->seq);
    double *room = calloc((size_t)(c + 2 * most) + cache * (size_t)g->layers,
                          sizeof(*room));
    double *z = room, *a = z + c, *b = a + most, *kv = b + most, sum = 0;
    double **end = g->param + 1 + per_layer(g) * g->layers;

    for (int t = 0; t < g->seq; t++) {
        memcpy(z, g->param[0] + input[t] * c, (size_t)c * sizeof(*z));
        for (int l = 0; l < g->layers; l++)
            layer(g, g->param + 1 + per_layer(g) * l, z, kv + cache * (size_t)l,
                  t, a, b);
        normalise(a, z, end[0], c, g->eps);
        double loss = token_loss(g, a, g->tied ? g->param[0] : end[1],
                                 target[t], t == row ? logits : NULL);
        sum += target[t] < 0 ? 0 : loss;
    }
    free(room);
    return sum;
}

double llama_double_loss(const struct llama_double *g, const int32_t *input,
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
