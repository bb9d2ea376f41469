/* SPDX-License-Identifier: Apache-2.0 */
/* The ops in double precision. */
#include "tests/codelets/ops/reference.h"

#include <complex.h>
#include <math.h>
#include <stdlib.h>

void ref_matmul(const struct ref_matmul *p)
{
    for (int64_t i = 0; i < p->m; i++) {
        double *y = p->y + i * p->out;
        for (int64_t j = 0; j < p->out; j++)
            y[j] = (p->b ? p->b[j] : 0) + (p->r ? p->r[i * p->out + j] : 0);
        for (int64_t k = 0; k < p->in; k++)
            for (int64_t j = 0; j < p->out; j++)
                y[j] += p->a[i * p->in + k] *
                        p->w[p->out_in ? j * p->in + k : k * p->out + j];
    }
}

/* Mean, which is 0 unless `centred`, and 1 / deviation of a row. */
static void moments(double *mean, double *s, const double *a, int64_t c,
                    double eps, bool centred)
{
    double var = 0;
    *mean = 0;
    for (int64_t j = 0; centred && j < c; j++)
        *mean += a[j] / (double)c;
    for (int64_t j = 0; j < c; j++)
        var += (a[j] - *mean) * (a[j] - *mean) / (double)c;
    *s = 1 / sqrt(var + eps);
}

void ref_norm(double *y, const double *a, const double *w, const double *b,
              int64_t m, int64_t c, double eps)
{
    double mean, s;
    for (int64_t i = 0; i < m; i++, y += c, a += c) {
        moments(&mean, &s, a, c, eps, b != NULL);
        for (int64_t j = 0; j < c; j++)
            y[j] = (a[j] - mean) * s * w[j] + (b ? b[j] : 0);
    }
}

void ref_norm_gradient(double *dx, double *dw, double *db, const double *a,
                       const double *dy, const double *w, int64_t c)
{
    double mean, s, sum = 0, sum_hat = 0;
    moments(&mean, &s, a, c, 1e-5, db != NULL);
    for (int64_t j = 0; j < c; j++) {
        double hat = (a[j] - mean) * s;
        sum_hat += dy[j] * w[j] * hat / (double)c;
        dw[j] += dy[j] * hat;
        if (!db)
            continue;
        sum += dy[j] * w[j] / (double)c;
        db[j] += dy[j];
    }
    for (int64_t j = 0; j < c; j++)
        dx[j] = s * (dy[j] * w[j] - sum - (a[j] - mean) * s * sum_hat);
}

double ref_gelu(double a)
{
    return a / 2 * (1 + tanh(sqrt(2 / M_PI) * (a + 0.044715 * a * a * a)));
}

double ref_activation(enum iz_activation act, double a)
{
    return act == IZ_GELU_TANH  ? ref_gelu(a)
           : act == IZ_GELU_ERF ? a / 2 * erfc(-a / sqrt(2))
           : act == IZ_SILU     ? a / (1 + exp(-a))
           : act == IZ_SWISH_7  ? fmin(a, 7) / (1 + exp(-1.702 * fmin(a, 7)))
           : a < 0              ? 0
           : act == IZ_RELU     ? a
                                : a * a;
}

/* Towards zero: where two forms meet, it is that of the smaller number, whose
 * form the numbers right above 7 would see there, too. */
double ref_activation_gradient(enum iz_activation act, double a)
{
    if (act == IZ_SWISH_7 && a > 7)
        return 0;
    double h = a != 0 ? 1e-6 * a : 1e-300;
    return (3 * ref_activation(act, a) - 4 * ref_activation(act, a - h) +
            ref_activation(act, a - 2 * h)) /
           (2 * h);
}

double ref_up(enum iz_activation act, double u)
{
    return act == IZ_SWISH_7 ? fmax(fmin(u, 7), -7) + 1 : u;
}

/* A ramp over the numbers of frequencies, between those that turn beta_fast and
 * beta_slow times; linear scaling keeps none. */
static double yarn_kept(const struct iz_rope *r, int i)
{
    double n = iz_rope_turned(r), at[2];
    if (r->scaling == IZ_ROPE_LINEAR)
        return 0;
    for (int k = 0; k < 2; k++) {
        double turns = k ? r->low_freq_factor : r->high_freq_factor;
        at[k] =
            n / (2 * log(r->theta)) * log(r->original_seq / (turns * 2 * M_PI));
        at[k] = r->fractions ? at[k] : k ? ceil(at[k]) : floor(at[k]);
    }
    double low = fmax(at[0], 0), high = fmin(at[1], n - 1);
    return i <= low ? 1 : i >= high ? 0 : (high - i) / (high - low);
}

/* The frequency of column i of a head, radians per token: by wavelengths, case
 * by case, as it is usually written. */
static double rope_frequency(const struct iz_rope *r, int i)
{
    double f = exp(-2. * i / iz_rope_turned(r) * log(r->theta)),
           wave = 2 * M_PI / f;
    double low = r->original_seq / r->low_freq_factor;
    double high = r->original_seq / r->high_freq_factor;
    if (r->factor != 1 && r->scaling != IZ_ROPE_LLAMA3)
        return f / r->factor * (1 - yarn_kept(r, i)) + f * yarn_kept(r, i);
    if (r->factor == 1 || wave < high)
        return f;
    if (wave > low)
        return f / r->factor;
    double smooth = (r->original_seq / wave - r->low_freq_factor) /
                    (r->high_freq_factor - r->low_freq_factor);
    return (1 - smooth) * f / r->factor + smooth * f;
}

void ref_rope(double *a, int64_t m, int64_t ld, const struct iz_rope *r,
              bool back)
{
    for (int64_t t = 0; t < m; t++, a += ld)
        for (int i = 0; i < r->heads * r->d; i++) {
            int k = i % r->d, half = iz_rope_turned(r) / 2;
            if (k >= half)
                continue;
            int64_t at = (r->first + t) % r->seq;
            double turn = (double)at * rope_frequency(r, k);
            double *lo = a + i + (r->pairs ? k : 0);
            double *hi = lo + (r->pairs ? 1 : half);
            double complex z = *lo + *hi * I;
            z *= cexp((back ? -turn : turn) * I) *
                 (r->amplitude != 0 ? (double)r->amplitude : 1);
            if (i < r->queries * r->d)
                z *= 1 + r->query_beta *
                             log1p((double)(at / (int64_t)r->original_seq));
            *lo = creal(z);
            *hi = cimag(z);
        }
}

/* A query q of one head that sees n keys: k, v are its rows 0, ld apart. */
static void attend(double *o, const double *q, const double *k, const double *v,
                   int64_t n, int64_t d, int64_t ld)
{
    double max = -INFINITY, sum = 0, *s = malloc((size_t)n * sizeof(*s));
    for (int64_t j = 0; j < n; j++) {
        s[j] = 0;
        for (int64_t x = 0; x < d; x++)
            s[j] += q[x] * k[j * ld + x];
        s[j] /= sqrt((double)d);
        max = fmax(max, s[j]);
    }
    for (int64_t j = 0; j < n; j++)
        sum += s[j] = exp(s[j] - max);
    for (int64_t x = 0; x < d; x++) {
        o[x] = 0;
        for (int64_t j = 0; j < n; j++)
            o[x] += s[j] / sum * v[j * ld + x];
    }
    free(s);
}

void ref_attention(const struct ref_attention *p)
{
    int64_t d = p->c / p->heads, ld = 3 * p->c;
    for (int64_t b = 0; b < p->samples; b++)
        for (int64_t h = 0; h < p->heads; h++)
            for (int64_t i = 0; i < p->seq; i++) {
                const double *row = p->qkv + b * p->seq * ld;
                const double *k = row + p->c + h * d;
                attend(p->o + (b * p->seq + i) * p->c + h * d,
                       row + i * ld + h * d, k, k + p->c, p->seq, d, ld);
            }
}

/* By whole matrices of products, of which the lower triangle is taken. */
void ref_interact(double *y, const double *z, const double *e, int64_t m,
                  int64_t n, int64_t d)
{
    for (int64_t s = 0; s < m; s++, z += d, e += n * d) {
        for (int64_t k = 0; k < d; k++)
            *y++ = z[k];
        for (int64_t ij = 0; ij < (n + 1) * (n + 1); ij++) {
            int64_t i = ij / (n + 1), j = ij % (n + 1);
            double sum = 0;
            for (int64_t k = 0; k < d; k++)
                sum += (i ? e[(i - 1) * d + k] : z[k]) *
                       (j ? e[(j - 1) * d + k] : z[k]);
            if (j < i)
                *y++ = sum;
        }
    }
}

static double row_loss(const double *a, const double *w, int32_t target,
                       int64_t c, int64_t v)
{
    double *s = malloc((size_t)v * sizeof(*s)), max = -INFINITY, sum = 0, loss;
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
