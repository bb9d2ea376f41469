/* SPDX-License-Identifier: Apache-2.0 */
/* The vision transformer in double precision, an image at a time. */
#include "tests/models/vit_double.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* out[n] = in[m] w[m][n] + b[n]. */
static void apply(double *out, const double *in, const double *w,
                  const double *b, int m, int n)
{
    for (int j = 0; j < n; j++) {
        out[j] = b[j];
        for (int i = 0; i < m; i++)
            out[j] += in[i] * w[i * n + j];
    }
}

static void normalise(double *out, const double *in, double *const *wb, int n)
{
    double mean = 0, var = 0;

    for (int i = 0; i < n; i++)
        mean += in[i] / n;
    for (int i = 0; i < n; i++)
        var += (in[i] - mean) * (in[i] - mean) / n;
    for (int i = 0; i < n; i++)
        out[i] = wb[0][i] * (in[i] - mean) / sqrt(var + 1e-5) + wb[1][i];
}

/* Row t of the first block: the class token, or a patch in raster order. */
static void embed(const struct iz_vit_config *c, double *const *p, double *z,
                  const unsigned char *image, int t)
{
    int side = c->image / c->patch, area = c->patch * c->patch;

    for (int j = 0; j < c->width; j++)
        z[j] = p[0][(t > 0) * c->width + j] + p[1][t * c->width + j];
    for (int i = 0; t > 0 && i < c->channels * area; i++) {
        int y = (t - 1) / side * c->patch + i % area / c->patch;
        int x = (t - 1) % side * c->patch + i % c->patch;
        int at = (i / area * c->image + y) * c->image + x;

        for (int j = 0; j < c->width; j++)
            z[j] += (image[at] / 127.5 - 1) * p[2][i * c->width + j];
    }
}

/* Head h of query t over all rows of qkv [n, 3 width]. */
static void attend(const struct iz_vit_config *c, double *out,
                   const double *qkv, int n, int t, int h)
{
    int d = c->width / c->heads, ld = 3 * c->width;
    const double *q = qkv + t * ld + h * d;
    double total = 0;

    memset(out, 0, (size_t)d * sizeof(*out));
    for (int s = 0; s < n; s++) {
        const double *k = qkv + s * ld + c->width + h * d, *v = k + c->width;
        double score = 0;

        for (int i = 0; i < d; i++)
            score += q[i] * k[i];
        score = exp(score / sqrt(d));
        total += score;
        for (int i = 0; i < d; i++)
            out[i] += score * v[i];
    }
    for (int i = 0; i < d; i++)
        out[i] /= total;
}

static double gelu(double a)
{
    return a / 2 * (1 + tanh(sqrt(2 / acos(-1)) * (a + 0.044715 * a * a * a)));
}

static void add(double *z, const double *a, int n)
{
    for (int i = 0; i < n; i++)
        z[i] += a[i];
}

/* All n rows of z through a block; a has room for (4 + 3 n) width + hidden. */
static void block(const struct iz_vit_config *c, double *const *p, double *z,
                  int n, double *a)
{
    int w = c->width, f = c->hidden ? c->hidden : 4 * w;
    double *b = a + w, *u = b + w, *qkv = u + f;

    for (int t = 0; t < n; t++) {
        normalise(a, z + t * w, p, w);
        apply(qkv + t * 3 * w, a, p[2], p[3], w, 3 * w);
    }
    for (int t = 0; t < n; t++) {
        for (int h = 0; h < c->heads; h++)
            attend(c, a + h * (w / c->heads), qkv, n, t, h);
        apply(b, a, p[4], p[5], w, w);
        add(z + t * w, b, w);
        normalise(a, z + t * w, p + 6, w);
        apply(u, a, p[8], p[9], w, f);
        for (int i = 0; i < f; i++)
            u[i] = gelu(u[i]);
        apply(b, u, p[10], p[11], f, w);
        add(z + t * w, b, w);
    }
}

static double image_loss(const struct iz_vit_config *c, double *const *p,
                         const unsigned char *record)
{
    int side = c->image / c->patch, n = 1 + side * side, w = c->width;
    int f = c->hidden ? c->hidden : 4 * w;
    double *z = calloc((size_t)(n * w + (4 + 3 * n) * w + f), sizeof(*z));
    double *a = z + n * w, sum = 0, at = 0;

    for (int t = 0; t < n; t++)
        embed(c, p, z + t * w, record + 1, t);
    for (int l = 0; l < c->layers; l++)
        block(c, p + 3 + 12 * l, z, n, a);
    p += 3 + 12 * c->layers;
    normalise(a, z, p, w);
    for (int v = 0; v < c->classes; v++) {
        double s = 0;

        for (int i = 0; i < w; i++)
            s += a[i] * p[2][v * w + i];
        if (v == record[0])
            at = s;
        sum += exp(s);
    }
    free(z);
    return log(sum) - at;
}

double vit_double_loss(const struct iz_vit_config *c, double *const *param,
                       const unsigned char *records, int samples)
{
    int bytes = 1 + c->channels * c->image * c->image;
    double sum = 0;

    for (int i = 0; i < samples; i++)
        sum += image_loss(c, param, records + (size_t)i * (size_t)bytes);
    return sum / samples;
}
