/* SPDX-License-Identifier: Apache-2.0 */
/* See llama_twin.h. */
#include "tests/models/llama_twin.h"

#include <stdlib.h>

void twin_product(double *y, double *r, double *a, double *w, double *b,
                  int64_t m, int64_t in, int64_t out)
{
    ref_matmul(
        &(struct ref_matmul){y, r, a, w, b, .m = m, in, out, .out_in = true});
}

double *twin_take(int64_t n)
{
    return calloc((size_t)n, sizeof(double));
}

void llama_twin_attention(const struct iz_llama_config *c, double *const *p,
                          double *x, double *h, int samples)
{
    int kv = c->kv_heads ? c->kv_heads : c->heads;
    int d = c->head_dim ? c->head_dim : c->width / c->heads;
    int64_t m = (int64_t)samples * c->seq, o = c->heads * d,
            ld = o + 2 * kv * d;
    double *qkv = twin_take(m * (ld + o)), *y = qkv + m * ld;
    double *const *norms = p + REST + c->qkv_bias;
    struct iz_rope rope = {.seq = c->seq,
                           .heads = c->heads + kv,
                           .d = d,
                           .theta = c->rope_theta,
                           .factor = c->rope_scaling_factor,
                           .low_freq_factor = c->rope_scaling_low_freq_factor,
                           .high_freq_factor = c->rope_scaling_high_freq_factor,
                           .original_seq = c->rope_scaling_original_seq};
    ref_norm(h, x, p[NORM_1], NULL, m, c->width, c->norm_eps);
    twin_product(qkv, NULL, h, p[QKV], c->qkv_bias ? p[REST] : NULL, m,
                 c->width, ld);
    for (int64_t i = 0; c->qk_norm && i < m * rope.heads; i++) {
        int64_t head = i % rope.heads;
        double *a = qkv + i / rope.heads * ld + head * d;
        ref_norm(a, a, norms[head >= c->heads], NULL, 1, d, c->norm_eps);
    }
    ref_rope(qkv, m, ld, &rope, false);
    ref_attention(&(struct ref_attention){.o = y,
                                          .qkv = qkv,
                                          .samples = samples,
                                          .seq = c->seq,
                                          .heads = c->heads,
                                          .c = o,
                                          .kv_heads = kv});
    twin_product(x, x, y, p[ATTN_PROJ], NULL, m, o, c->width);
    ref_norm(h, x, p[NORM_2], NULL, m, c->width, c->norm_eps);
    free(qkv);
}

void llama_twin_mlp(const struct iz_llama_config *c, double *const *p,
                    double *x, double *h, int64_t m)
{
    double *u = twin_take(m * 3 * c->ffn), *g = u + m * 2 * c->ffn;
    twin_product(u, NULL, h, p[GATE_UP], NULL, m, c->width, 2 * c->ffn);
    for (int64_t i = 0; i < m * c->ffn; i++) {
        const double *row = u + i / c->ffn * 2 * c->ffn;
        g[i] = ref_swiglu(row[i % c->ffn], row[c->ffn + i % c->ffn]);
    }
    twin_product(x, x, g, p[DOWN], NULL, m, c->ffn, c->width);
    free(u);
}
