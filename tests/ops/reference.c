/* SPDX-License-Identifier: Apache-2.0 */
/* The ops in double precision. */
#include "tests/ops/reference.h"

#include <math.h>
#include <stdlib.h>

void ref_matmul(const struct ref_matmul *p)
{
    for (int64_t i = 0; i < p->m; i++)
        for (int64_t j = 0; j < p->out; j++) {
            double s = p->b ? p->b[j] : 0;
            s += p->r ? p->r[i * p->out + j] : 0;
            for (int64_t k = 0; k < p->in; k++)
                s += p->a[i * p->in + k] *
                     p->w[p->out_in ? j * p->in + k : k * p->out + j];
            p->y[i * p->out + j] = s;
        }
}

void ref_layernorm(double *y, const double *a, const double *w, const double *b,
                   int64_t m, int64_t c)
{
    for (int64_t i = 0; i < m; i++, y += c, a += c) {
        double mean = 0, var = 0;
        for (int64_t j = 0; j < c; j++)
            mean += a[j] / (double)c;
        for (int64_t j = 0; j < c; j++)
            var += (a[j] - mean) * (a[j] - mean) / (double)c;
        for (int64_t j = 0; j < c; j++)
            y[j] = (a[j] - mean) / sqrt(var + 1e-5) * w[j] + b[j];
    }
}

double ref_gelu(double a)
{
    return a / 2 * (1 + tanh(sqrt(2 / M_PI) * (a + 0.044715 * a * a * a)));
}

/* One query row i of one head. */
static void attend(double *o, double *lse, const double *qkv, int64_t i,
                   int64_t d, int64_t c)
{
    double max = -INFINITY, sum = 0, *s = malloc((size_t)(i + 1) * sizeof *s);

    for (int64_t j = 0; j <= i; j++) {
        s[j] = 0;
        for (int64_t k = 0; k < d; k++)
            s[j] += qkv[i * 3 * c + k] * qkv[j * 3 * c + c + k];
        s[j] /= sqrt((double)d);
        max = fmax(max, s[j]);
    }
    for (int64_t j = 0; j <= i; j++)
        sum += s[j] = exp(s[j] - max);
    for (int64_t k = 0; k < d; k++) {
        o[k] = 0;
        for (int64_t j = 0; j <= i; j++)
            o[k] += s[j] / sum * qkv[j * 3 * c + 2 * c + k];
    }
    if (lse)
        *lse = max + log(sum);
    free(s);
}

void ref_attention(const struct ref_attention *p)
{
    int64_t d = p->c / p->heads;

    for (int64_t b = 0; b < p->samples; b++)
        for (int64_t h = 0; h < p->heads; h++)
            for (int64_t i = 0; i < p->seq; i++)
                attend(p->o + (b * p->seq + i) * p->c + h * d,
                       p->lse ? p->lse + (b * p->heads + h) * p->seq + i : NULL,
                       p->qkv + b * p->seq * 3 * p->c + h * d, i, d, p->c);
}

void ref_embedding(double *y, const int32_t *token, const double *wte,
                   const double *wpe, int64_t m, int64_t c, int64_t seq)
{
    for (int64_t t = 0; t < m; t++)
        for (int64_t j = 0; j < c; j++)
            y[t * c + j] =
                wte[token[t] * c + j] + (wpe ? wpe[t % seq * c + j] : 0);
}

static double row_loss(const double *a, const double *w, int32_t target,
                       int64_t c, int64_t v)
{
    double *s = malloc((size_t)v * sizeof *s), max = -INFINITY, sum = 0, loss;

    for (int64_t j = 0; j < v; j++) {
        s[j] = 0;
        for (int64_t k = 0; k < c; k++)
            s[j] += a[k] * w[j * c + k];
        max = fmax(max, s[j]);
    }
    for (int64_t j = 0; j < v; j++)
        sum += exp(s[j] - max);
    loss = max + log(sum) - s[target];
    free(s);
    return loss;
}

double ref_classifier(const double *a, const double *w, const int32_t *target,
                      int64_t m, int64_t c, int64_t v)
{
    double sum = 0;
    int64_t count = 0;

    for (int64_t i = 0; i < m; i++)
        if (target[i] >= 0) {
            sum += row_loss(a + i * c, w, target[i], c, v);
            count++;
        }
    return count ? sum / (double)count : 0;
}

void ref_gradient(double *grad, double (*f)(void *), void *arg, double *in,
                  int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        double x = in[i], h = 1e-5 * fmax(1, fabs(x)), up;

        in[i] = x + h;
        up = f(arg);
        in[i] = x - h;
        grad[i] = (up - f(arg)) / (2 * h);
        in[i] = x;
    }
}
