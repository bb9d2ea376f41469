/* SPDX-License-Identifier: Apache-2.0 */
/* The mathematics a layer may call inside a task.  Every op counts its flops
 * and bytes, takes its scratch from the work arena and gives it back, and in a
 * dry run does nothing else.
 *
 * Activations have the type x->act (fp32 on the CPU), weights and their
 * gradients fp32, bf16 or fp16; sums are formed in fp32 in a fixed order, so
 * equal inputs give equal bits on every worker.  Flops are those of matrix
 * products only, so that they compare with the usual 6 N per token.  NaN is
 * never hidden, infinity only by what a formula caps or clamps.  M = number of
 * rows (tokens of all samples), C = width.
 *
 * A view with rows = 0 is an absent argument.  A weight gradient whose p is
 * NULL outside a dry run is not computed. */
#pragma once

#include <math.h>
#include <stdbool.h>
#include <stdint.h>

#include "codelets/ops/exec.h"

IZ_C_BEGIN

#define IZ_NONE ((struct iz_view){0})

/* Where documents of a sample are apart, ops that know positions get `begins`,
 * int32 [M]: of each row the row of its sample at which its document begins;
 * absent: a sample is one document.  This is row t of a sample, counted within
 * its document.  On a GPU the array lies in pinned host memory. */
static inline int64_t iz_op_position(const int32_t *begins, int64_t row,
                                     int64_t seq)
{
    return row % seq - (begins ? begins[row] : 0);
}

/* Whether the gradient v is to be computed. */
static inline bool iz_view_wanted(const struct iz_exec *x, struct iz_view v)
{
    return v.rows && (v.p || x->dry);
}

/* w [in,out], or [out,in] when `out_in`; b [1,out] or absent.  dw and db are
 * written by iz_matmul_dw only; with `add` it adds to dw, which is then fp32.
 * scale: of the product, 0 for 1; only of a forward without b. */
struct iz_linear {
    struct iz_view w, b, dw, db;
    bool out_in, add;
    float scale;
};

/* Each element is 0 with probability p, or else multiplied by 1 / (1 - p).
 * Which, a hash of the key and of the element's place says: its column, and its
 * row among those of all samples of a training, of which `samples` are here,
 * from number `sample` on. */
struct iz_drop {
    double p; /* 0: no dropout */
    uint64_t key;
    int64_t sample;
    int samples;
};

/* y = c + a with dropout; c may be absent or y itself. */
void iz_dropout(struct iz_exec *x, struct iz_view y, struct iz_view c,
                struct iz_view a, const struct iz_drop *d);

/* What a product with the weight w adds: y += scale (x a^T) b^T, with a
 * [rank,in] and b [out,rank] (LoRA, arXiv 2106.09685), and x with dropout.  b
 * may have fewer rows: those of the outputs from `first` on.  The three
 * products below do so for every w that has some, and write da and db with dw;
 * of an adapter without a, they only tell how w lies.  With m [1,out] its
 * outputs are multiplied by that over the norm of their weights, those of the
 * adapter included, which is a constant to the gradients (DoRA).  All adapters
 * of a weight have one, or none has. */
struct iz_adapter {
    struct iz_view a, b, da, db;
    struct iz_drop drop;
    float scale;
    int64_t first;
    struct iz_view m, dm;
    struct iz_adapter *next; /* of the same weight; NULL: none */
    bool seen, out_in; /* set by iz_matmul_dw: by a linear layer, as there */
    int64_t experts;   /* ... and by iz_experts_dw: of so many; 0: of none */
};

/* y = r + a w + b: a [M,in], y and r [M,out]; r may be absent or y itself. */
void iz_matmul_fwd(struct iz_exec *x, struct iz_view y, struct iz_view r,
                   struct iz_view a, const struct iz_linear *l);
/* da = dy w^T. */
void iz_matmul_da(struct iz_exec *x, struct iz_view da, struct iz_view dy,
                  const struct iz_linear *l);
/* dw = a^T dy, db = sum of the rows of dy. */
void iz_matmul_dw(struct iz_exec *x, struct iz_view dy, struct iz_view a,
                  const struct iz_linear *l);

/* An adapter with magnitudes. */
struct iz_magnitude {
    struct iz_view w, a, b, m;
    float scale;
    int64_t first;
    bool out_in;
    bool only; /* what other outputs are multiplied by is written, too: 1 */
};

/* gain [1,out of w] fp32: what outputs are multiplied by; inverse fp32: 1 /
 * norm of those of the adapter. */
void iz_magnitude_gain(struct iz_exec *x, struct iz_view gain,
                       struct iz_view inverse, const struct iz_magnitude *g);
/* y = r + b + gain u; r and b may be absent, y may be r or u. */
void iz_magnitude_apply(struct iz_exec *x, struct iz_view y, struct iz_view r,
                        struct iz_view u, struct iz_view gain,
                        struct iz_view b);
/* dm [1,n] = inverse times the sum of the rows of dy u, n columns from `first`
 * on. */
void iz_magnitude_dm(struct iz_exec *x, struct iz_view dm, struct iz_view dy,
                     struct iz_view u, struct iz_view inverse, int64_t first);

/* LayerNorm, or RMSNorm, which has no mean.  w b dw db [1,C], where absent ones
 * stand for ones and zeros; mean and rstd fp32 [M,1] are written by forward. */
struct iz_norm_layer {
    struct iz_view w, b, dw, db, mean, rstd;
    float eps;
    bool plus_one; /* a row is multiplied by 1 + w */
};

/* y = (a - mean) / sqrt(var + eps) w + b, or a / sqrt(mean of a^2 + eps) w, by
 * row; all [M,C].  again: the same bits from the saved mean and rstd. */
void iz_norm_layer_fwd(struct iz_exec *x, struct iz_view y, struct iz_view a,
                       const struct iz_norm_layer *n, bool again);
/* dx = r + d(norm layer)/da dy, dw, db; dx may be r or dy, r may be absent. */
void iz_norm_layer_bwd(struct iz_exec *x, struct iz_view dx, struct iz_view r,
                       struct iz_view dy, struct iz_view a,
                       const struct iz_norm_layer *n);

/* Activations: a/2 (1 + tanh(sqrt(2/pi) (a + 0.044715 a^3))), a/2 (1 +
 * erf(a / sqrt(2))), a / (1 + exp(-a)), max(a, 0) and its square. */
enum iz_activation {
    IZ_GELU_TANH,
    IZ_GELU_ERF,
    IZ_SILU,
    IZ_RELU,
    IZ_RELU2,
    IZ_SWISH_7, /* gated alone, g and u in turns: c / (1 + exp(-1.702 c)) (d +
                 * 1), c = min(g, 7), d = u between -7 and 7 (gpt-oss) */
    IZ_ACTIVATIONS
};

/* y = act(a), all [M,F]; or gated, y = act(g) u, where a row of a [M,2F] holds
 * g, then u.  With da also da from dy.  Either y may be a and da may be dy; or
 * gated, da may be a and y may be dy. */
void iz_activation_apply(struct iz_exec *x, struct iz_view da, struct iz_view y,
                         struct iz_view dy, struct iz_view a,
                         enum iz_activation act);

/* RMSNorm for each head of a packed row: normalises, in place, the columns of
 * a [M,ld] from `first` on, C at a time.  kept [M,heads C] gets the old values.
 * rstd fp32 [M,heads].  back: a are gradients, which become those of the old
 * values, and dw. */
void iz_norm_head(struct iz_exec *x, struct iz_view a, struct iz_view kept,
                  const struct iz_norm_layer *n, int64_t first, bool back);

enum { IZ_ROPE_MOST = 256 }; /* columns of a head */

/* Rotary positions of the first n = `turned` columns of the first `heads` heads
 * of d columns, n even.  Columns i and i + n/2, or with `pairs` 2i and 2i + 1,
 * turn by t theta^(-2i/n), t being the row's position.  With a
 * factor other than 1, frequencies that turn at most low_freq_factor times in
 * original_seq tokens are divided by it, those that turn at least
 * high_freq_factor times are kept, and between them the two are mixed: by how
 * often they turn (Llama 3), or by their number i (YaRN, arXiv 2309.00071,
 * whose beta_slow and beta_fast these are).  Linear: all are divided. */
enum iz_rope_scaling { IZ_ROPE_LLAMA3, IZ_ROPE_LINEAR, IZ_ROPE_YARN };

struct iz_rope {
    int64_t seq;
    int heads, d;
    double theta;
    double factor, low_freq_factor, high_freq_factor, original_seq;
    int turned; /* 0: d */
    bool pairs;
    enum iz_rope_scaling scaling;
    bool fractions;  /* YaRN: the numbers between which it mixes are no whole
                      * ones */
    float amplitude; /* of what is turned; 0: 1 */
    /* The first heads, which are queries, are also multiplied by 1 +
     * query_beta log(1 + floor(t / original_seq)). */
    int queries;
    double query_beta;
    int64_t first; /* row of a sample that the first one is */
};

/* Turns the heads of a [M,ld] in place, the other way where `back`: the
 * gradient of a rotation is the rotation back. */
void iz_rope(struct iz_exec *x, struct iz_view a, struct iz_view begins,
             const struct iz_rope *r, bool back);

static inline int iz_rope_turned(const struct iz_rope *r)
{
    return r->turned ? r->turned : r->d;
}

/* The n/2 frequencies of r: full circles per token; and the factor of sines and
 * cosines.  The CPU and the GPU share this arithmetic. */
struct iz_rope_turns {
    double f[IZ_ROPE_MOST / 2];
    float amplitude;
};
void iz_rope_turns_of(struct iz_rope_turns *out, const struct iz_rope *r);
/* Of queries at position t, where there is a query_beta. */
IZ_EITHER float iz_rope_query_factor(int64_t t, double beta, double original)
{
    return (float)(1 + beta * log(1 + floor((double)t / original)));
}

/* Every row of M chooses the k most probable of E experts, of equal ones those
 * with the lowest numbers.  There are so always kM rows by expert: in ascending
 * order of experts, and of one expert in ascending order of rows. */
struct iz_routes {
    struct iz_view p;      /* fp32 [M,E]: logits, then their softmax, or with
                            * `sigmoid` 1 / (1 + exp(-logit)) */
    struct iz_view lse;    /* fp32 [M,1]: log of their sum of exponentials; 0
                            * with `sigmoid` */
    struct iz_view weight; /* fp32 [M,k]: p of the chosen, by their sum if
                            * `normalise`, times scale (0: 1) */
    /* fp32 [1,E] or absent: added to p for choosing alone.  Of the experts, in
     * so many groups of neighbours (0: one), only those of the best `kept`
     * groups are chosen: with the largest sum of their two best. */
    struct iz_view choice;
    int groups, kept;
    bool sigmoid;
    float scale;
    struct iz_view place;  /* int32 [M,k]: of the chosen, the row by expert */
    struct iz_view chosen; /* int32 [M,k]: its number; they ascend */
    struct iz_view end;    /* int32 [1,E]: behind its last row by expert */
    bool normalise;
    /* Of the ops below the router's: the experts whose weights are here, so
     * many from this one on (0: all).  What is said of rows by expert is then
     * said of theirs; no other is read or written. */
    int64_t first, here;
};

static inline int64_t iz_route_experts_here(const struct iz_routes *r)
{
    return r->here ? r->here : r->end.cols;
}

enum { IZ_EXPERTS_MOST = 1024, IZ_GROUPS_MOST = 32 };

/* Of a pair of texts, by TRL's names: rewards are beta l (see iz_preference),
 * IPO's too; logps are log p. */
enum iz_pair_figure {
    IZ_REWARDS_CHOSEN,
    IZ_REWARDS_REJECTED,
    IZ_REWARDS_ACCURACIES, /* 1 where the chosen one has more, else 0 */
    IZ_REWARDS_MARGINS,
    IZ_LOGPS_CHOSEN,
    IZ_LOGPS_REJECTED,
    IZ_PAIR_FIGURES
};

/* Auxiliary metrics, beside the loss: the sum of the units' own losses, and of
 * experts the fewest and the most rows that one had, 1 being as many as all
 * would have if they had the same; of pairs, sums of their figures. */
struct iz_aux {
    double loss, least, most;
    double balance, z; /* B and Z below, of so many routers */
    double routers;
    double pairs, pair[IZ_PAIR_FIGURES];
};
void iz_aux_add(struct iz_aux *to, const struct iz_aux *t);

/* Fills r from its logits. */
void iz_route_fwd(struct iz_exec *x, const struct iz_routes *r);
/* Adds to `aux` (NULL: to none) B, Z, and to the loss balance B + z Z.  B = E
 * times the sum over experts of (its rows / M) (mean of its p), as in the
 * Switch Transformer (arXiv 2101.03961), k where all is even; Z = mean of lse^2
 * (ST-MoE, arXiv 2202.08906). */
void iz_route_aux(struct iz_exec *x, struct iz_aux *aux,
                  const struct iz_routes *r, double balance, double z);
/* dlogits [M,E], of the type of activations, of the gradient dweight fp32 [M,k]
 * of weight, and of balance B + z Z, which must be 0 with `sigmoid`. */
void iz_route_bwd(struct iz_exec *x, struct iz_view dlogits,
                  struct iz_view dweight, const struct iz_routes *r,
                  float balance, float z);
/* y [kM,C]: rows of a [M,C] by expert. */
void iz_experts_dispatch(struct iz_exec *x, struct iz_view y, struct iz_view a,
                         const struct iz_routes *r);
/* y [M,C] = c + the sum of a row's rows by expert a [kM,C]: times their weights
 * in ascending order of experts, or with `back` as they are and in descending
 * order.  So experts may come one after the other, or the other way round, with
 * the same sums in fp32; in 16 bits each call rounds.  y may be c, and c
 * absent: zeros. */
void iz_experts_combine(struct iz_exec *x, struct iz_view y, struct iz_view c,
                        struct iz_view a, const struct iz_routes *r, bool back);
/* The three products with the weights of the experts here, one below the other
 * in l->w [experts out,in]: each with its rows by expert.  One without rows has
 * a dw of zeros.  Operands are fp32 where others' may be bf16.  b [1,experts
 * out]; l->out_in.  An adapter has a matrix of each expert, too, one below the
 * other: a [experts rank,in], b [experts outputs,rank]; it has no dropout. */
void iz_experts_fwd(struct iz_exec *x, struct iz_view y, struct iz_view a,
                    const struct iz_linear *l, const struct iz_routes *r);
void iz_experts_da(struct iz_exec *x, struct iz_view da, struct iz_view dy,
                   const struct iz_linear *l, const struct iz_routes *r);
void iz_experts_dw(struct iz_exec *x, struct iz_view dy, struct iz_view a,
                   const struct iz_linear *l, const struct iz_routes *r);
/* Gated activations of rows by expert. */
void iz_experts_gated(struct iz_exec *x, struct iz_view da, struct iz_view y,
                      struct iz_view dy, struct iz_view a,
                      enum iz_activation act, const struct iz_routes *r);
/* For y = weight g: dweight [M,k] from g and dg, the gradient of y by expert
 * [kM,F]; then g and du [kM,2F], which is linear in dg, are multiplied by
 * weight. */
void iz_experts_weigh_bwd(struct iz_exec *x, struct iz_view dweight,
                          struct iz_view g, struct iz_view du,
                          struct iz_view dg, const struct iz_routes *r);
/* For y = weight (g + b), b [1,experts C] being that of a row's expert: dweight
 * += what b says, from dy by expert [kM,C]; then dy is multiplied by weight. */
void iz_experts_bias_bwd(struct iz_exec *x, struct iz_view dweight,
                         struct iz_view dy, struct iz_view b,
                         const struct iz_routes *r);

/* Self-attention of M / seq samples.  Every row of qkv [M,W] holds the queries
 * of the heads, d columns each, then kv_heads keys, then kv_heads values; heads
 * / kv_heads neighbours share a key and its value.
 *
 * With kv: of M rows of one sample, those from `first` on.  A loop over all of
 * them forward, then back from the last to the first, is one call without kv.
 */
struct iz_attention {
    struct iz_view qkv; /* [M,W], W = (heads + 2 kv_heads) d; with kv queries
                         * alone are read */
    struct iz_view o;   /* [M,C], C = heads d; written by forward, read by
                         * backward */
    struct iz_view lse; /* fp32 [M / seq * heads, seq], with kv [heads,M]: log
                         * of the sum of exponentials; written by forward, read
                         * by backward */
    /* Keys, then values, of the rows of the sample from 0 on, of qkv's type, or
     * absent: they are in qkv.  Only those that a row sees are read. */
    struct iz_view kv;  /* [seq or less, 2 kv_heads d] */
    struct iz_view dkv; /* fp32, as many; backward adds to it */
    int64_t first;      /* 0 without kv */
    int64_t seq;
    int heads;
    int kv_heads; /* 0: as many as heads */
    bool full;    /* a row sees all keys of its sample; else none after it */
    struct iz_view begins; /* of whole samples: nor, if it is there, those
                            * before its document; not with `full` */
    int window;  /* nor, unless it is 0, those up to row t - window; not with
                  * `full` */
    float scale; /* of q k^T; 0: 1 / sqrt(d) */
    float cap;   /* a score s is cap tanh(s / cap); 0: s */
    /* [1,heads] or absent: scores of a key that every row sees, which has no
     * value and is not scaled or capped.  With kv dsinks are fp32, and backward
     * adds to them. */
    struct iz_view sinks, dsinks;
};

/* Rows of a sample that are computed. */
static inline int64_t iz_attention_rows(const struct iz_attention *a)
{
    return a->kv.rows ? a->o.rows : a->seq;
}

/* Keys of a sample, up to the last that a row sees. */
static inline int64_t iz_attention_end(const struct iz_attention *a)
{
    return a->full ? a->seq : a->first + iz_attention_rows(a);
}

/* Of kv_heads. */
static inline int iz_attention_keys(const struct iz_attention *a)
{
    return a->kv_heads ? a->kv_heads : a->heads;
}

/* Whether documents or a window hide keys from rows after them. */
static inline bool iz_attention_hides(const struct iz_attention *a)
{
    return a->begins.rows || (a->window && a->window < a->seq);
}

/* Of q k^T, as the fields say. */
static inline float iz_attention_scale(const struct iz_attention *a)
{
    float d = (float)(a->o.cols / a->heads);
    return a->scale != 0 ? a->scale : 1 / sqrtf(d);
}

/* o = softmax(scale q k^T, causal unless `full`) v. */
void iz_attention_fwd(struct iz_exec *x, const struct iz_attention *a);
/* dqkv [M,W] and dsinks from dy = gradient of o; with kv of dqkv the queries
 * alone. */
void iz_attention_bwd(struct iz_exec *x, struct iz_view dqkv, struct iz_view dy,
                      const struct iz_attention *a);

/* A table [V,C] that may be a part of a longer one: it has the rows first to
 * first + V - 1 of that.  w and dw may be views of some of its rows: of those
 * at least that are read. */
struct iz_table {
    struct iz_view w, dw;
    const int32_t *row; /* [M], of the longer one */
    int64_t first;
    bool vocabulary; /* of tokens: all rows are here, iz_die on others */
    struct iz_view wpe,
        dwpe; /* [seq,C], added to the rows of its position; or absent */
    struct iz_view begins;
};

/* y[t] = row[t] of the table where it is here, else r[t], + wpe: y and r [M,C];
 * r may be y, or absent: zeros. */
void iz_table_fwd(struct iz_exec *x, struct iz_view y, struct iz_view r,
                  const struct iz_table *t);
/* Overwrites dw and dwpe; rows of dy are added in ascending t. */
void iz_table_bwd(struct iz_exec *x, struct iz_view dy,
                  const struct iz_table *t);

/* y = a, rounded to y's type; y may be a of the same type.  a may be numbers of
 * a sample. */
void iz_convert(struct iz_exec *x, struct iz_view y, struct iz_view a);
/* y += a, rounded to y's type. */
void iz_op_add(struct iz_exec *x, struct iz_view y, struct iz_view a);
/* y = cap tanh(scale a / cap), or scale a where cap = 0; y may be a. */
void iz_op_scale(struct iz_exec *x, struct iz_view y, struct iz_view a,
                 float scale, float cap);
/* The columns of a from `from` on, as many as `cols`, into those of y from `to`
 * on, rounded to its type, which is a's unless a is fp32; both have as many
 * rows.
 */
void iz_op_columns(struct iz_exec *x, struct iz_view y, int64_t to,
                   struct iz_view a, int64_t from, int64_t cols);
/* v = 0, if it is wanted. */
void iz_op_clear(struct iz_exec *x, struct iz_view v);
/* y = a, to the byte; they do not overlap. */
void iz_op_copy(struct iz_exec *x, struct iz_view y, struct iz_view a);

/* Rows of a matrix that a task takes some at a time.  Where a GPU computes and
 * the matrix is in host memory (iz_exec_host_boundaries), they pass through two
 * buffers of scratch, and are copied beside what is computed; else they are
 * used where they are. */
struct iz_staged {
    struct iz_view all, buffer[2]; /* without rows: there are none */
    int64_t first[2];              /* of the rows that a buffer has; -1: none */
    int turn;                      /* the buffer that was taken last */
    void *used, *loaded[2], *stored[2]; /* events */
};

/* Of `rows` at most at a time.  Scratch until it is closed, by which time all
 * that was stored has left for the matrix. */
struct iz_staged iz_staged_open(struct iz_exec *x, struct iz_view all,
                                int64_t rows);
void iz_staged_close(struct iz_exec *x, struct iz_staged *s);
/* The rows [at, at + n) as they are; the n_next ones from `next` on are loaded
 * meanwhile, 0: none. */
struct iz_view iz_staged_load(struct iz_exec *x, struct iz_staged *s,
                              int64_t at, int64_t n, int64_t next,
                              int64_t n_next);
/* Room for these rows, which nobody has loaded. */
struct iz_view iz_staged_room(struct iz_exec *x, struct iz_staged *s,
                              int64_t at, int64_t n);
/* Those that load or room gave last have been written. */
void iz_staged_store(struct iz_exec *x, struct iz_staged *s, int64_t at,
                     int64_t n);

/* Products of all pairs of vectors of a sample (Naumov et al. 2019): v_0 is its
 * row of z [M,D], v_1 ... v_N are its rows of e [M N,D].  A row of
 * y [M,D + N (N + 1) / 2] is v_0, then v_i . v_j, i = 1 ... N, j = 0 ... i - 1.
 */
void iz_interact_fwd(struct iz_exec *x, struct iz_view y, struct iz_view z,
                     struct iz_view e);
/* dz and de from dy; neither may be another argument. */
void iz_interact_bwd(struct iz_exec *x, struct iz_view dz, struct iz_view de,
                     struct iz_view dy, struct iz_view z, struct iz_view e);

/* Of a sample: the sum of the losses of its targets, and their number. */
struct iz_sample_loss {
    double sum, targets;
};

/* Logits a w^T + b and the cross-entropy with the targets, a chunk of rows at a
 * time, so that the logits are never whole.  The loss is the mean over the rows
 * whose target is not -1 (0 where there is none).  Without da: the loss alone.
 */
struct iz_classifier {
    struct iz_view a, w;   /* [M,C], [V,C] */
    struct iz_view b, db;  /* [1,V] or absent */
    const int32_t *target; /* [M], -1 = ignored */
    struct iz_view da, dw; /* of loss * loss_scale; da may be a */
    float loss_scale;
    float cap; /* a logit s is cap tanh(s / cap); 0: s */
    double *loss;
    /* Of samples with equally many rows.  each: the loss alone writes those of
     * each sample here.  scales: the gradient is that of the sum of each
     * sample's losses times its scale.  Either may be NULL, and so may `loss`
     * with them.  They are where units are computed. */
    struct iz_sample_loss *each;
    const float *scales;
    int samples;
    /* Of rows that are a part of a whole: the targets of the whole that are
     * not ignored; 0: these rows are all.  With `adds` loss, dw and db get
     * more, else they begin.  dw and db are of fp32, and dw has room for
     * iz_classifier_room elements behind it. */
    int64_t targets;
    bool adds;
};

/* Targets that are not ignored; iz_die where one is none of a vocabulary. */
int64_t iz_classifier_targets(const int32_t *target, int64_t n, int64_t vocab);
int64_t iz_classifier_room(const struct iz_exec *x, struct iz_view w);

void iz_classifier(struct iz_exec *x, const struct iz_classifier *c);

/* Preferences: samples 2i and 2i + 1 are a pair, a chosen text and a rejected
 * one.  With l(s) = log p(s) - log q(s), sums over the targets of a sample by
 * the policy p and the reference q, and d = l(chosen) - l(rejected), the loss
 * is the mean over the pairs of
 *     DPO (Rafailov et al., 2023, arXiv:2305.18290): -log sigmoid(beta d)
 *     IPO (Azar et al., 2023, arXiv:2310.12036): (d - 1 / (2 beta))^2, where d
 *         has l over the number of targets,
 * and sft times the mean of -log p over the targets of the chosen texts. */
enum iz_loss_type { IZ_LOSS_TARGETS, IZ_LOSS_DPO, IZ_LOSS_IPO };

struct iz_preference {
    enum iz_loss_type type;
    double beta, sft;
};

/* What iz_preference reads beside the policy's classifier: what c->a, w and b
 * are for the reference, and by what sft is multiplied: these samples' part of
 * all chosen targets, 1 where they are all. */
struct iz_pairs {
    const struct iz_preference *loss;
    struct iz_view a, w, b;
    double weight;
    struct iz_aux *aux; /* gets the figures of its pairs; NULL: nothing does
                         */
};

/* c: of the policy, with an even number of samples. */
void iz_preference(struct iz_exec *x, const struct iz_classifier *c,
                   const struct iz_pairs *p);
/* The part of it that has the losses of all samples, first by the policy, then
 * by the reference: writes the loss, the figures and by what each sample's sum
 * is scaled in the gradient. */
void iz_pair_loss(struct iz_exec *x, const struct iz_classifier *c,
                  const struct iz_pairs *p, const struct iz_sample_loss *each,
                  float *scales);

IZ_C_END
