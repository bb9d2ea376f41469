/* SPDX-License-Identifier: Apache-2.0 */
/* The ops on a GPU.  The kernels and libraries define them; in a build for the
 * tests' stand-in for a GPU, code that computes on the CPU does; in a build
 * without CUDA nobody calls them (cuda_none.c).  No type of CUDA appears here.
 *
 * Every function has the arguments of its namesake in ops.h or flat.h, only
 * enqueues on x->stream, and touches no memory but its arguments' and
 * `scratch`, which the op takes from the work arena; its .c file has the size.
 *  Device memory and pinned host memory are both addressable by a
 * kernel; the host may only read the latter.  Errors of CUDA and of its
 * libraries end the job (iz_die). */
#pragma once

#include "codelets/flat/nf4.h"
#include "codelets/flat/update.h"
#include "codelets/ops/ops.h"
#include "codelets/ops/orthogonal.h"

IZ_C_BEGIN

/* Scratch of cuDNN, with room to align.  All plans that it was asked for so far
 * need at most 256 bytes. */
#define IZ_CUDNN_SCRATCH (INT64_C(1) << 16)

/* Of a backward of several samples at most: kernels may count in 32 bits. */
#define IZ_CUDNN_SCORES (INT64_C(1) << 30)

/* The same of a backward of so many samples, whose kernels keep the gradient of
 * each head's scores in tiles of 64 x 128, and with shared keys those of each
 * head's keys and values. */
static inline int64_t iz_gpu_cudnn_bwd_bytes(int64_t samples, int64_t seq,
                                             int64_t heads, int64_t kv_heads,
                                             int64_t d)
{
    int64_t rows = (seq + 63) / 64 * 64, cols = (seq + 127) / 128 * 128;
    int64_t parts = heads == kv_heads ? 0 : 4 * heads * seq * d;
    return samples * (2 * heads * rows * cols + parts) + IZ_CUDNN_SCRATCH;
}

/* Workspace of a product: 32 MiB, as NVIDIA recommends for compute capability
 * 9, and room to align. */
#define IZ_PRODUCT_SCRATCH ((int64_t)(32 << 20) + 256)

/* matmul_cuda.c */
void iz_matmul_fwd_cuda(struct iz_exec *x, struct iz_view y, struct iz_view r,
                        struct iz_view a, const struct iz_linear *l,
                        struct iz_view scratch);
void iz_matmul_dw_cuda(struct iz_exec *x, struct iz_view dy, struct iz_view a,
                       const struct iz_linear *l, struct iz_view scratch);

/* norm_layers.cu */
void iz_norm_layer_fwd_cuda(struct iz_exec *x, struct iz_view y,
                            struct iz_view a, const struct iz_norm_layer *n,
                            bool again);
void iz_norm_layer_bwd_cuda(struct iz_exec *x, struct iz_view dx,
                            struct iz_view r, struct iz_view dy,
                            struct iz_view a, const struct iz_norm_layer *n,
                            struct iz_view scratch);
void iz_norm_head_cuda(struct iz_exec *x, struct iz_view a, struct iz_view kept,
                       const struct iz_norm_layer *n, int64_t first, bool back,
                       struct iz_view scratch);

/* activation.cu, rope.cu */
void iz_op_scale_cuda(struct iz_exec *x, struct iz_view y, struct iz_view a,
                      float scale, float cap);
void iz_op_columns_cuda(struct iz_exec *x, struct iz_view y, int64_t to,
                        struct iz_view a, int64_t from, int64_t cols);
void iz_activation_apply_cuda(struct iz_exec *x, struct iz_view da,
                              struct iz_view y, struct iz_view dy,
                              struct iz_view a, enum iz_activation act);
void iz_rope_cuda(struct iz_exec *x, struct iz_view a, struct iz_view begins,
                  const struct iz_rope *r, bool back);

/* attention.cu */
void iz_attention_fwd_cuda(struct iz_exec *x, const struct iz_attention *a,
                           struct iz_view scratch);
void iz_attention_bwd_cuda(struct iz_exec *x, struct iz_view dqkv,
                           struct iz_view dy, const struct iz_attention *a,
                           struct iz_view scratch);

/* attention_cudnn.c.  fwd, bwd: through cuDNN; bwd does as many samples at once
 * as scratch has room for.  ask: whether cuDNN can do the forward, or the
 * backward with so much scratch; false with the reason in x->ask.  missing: why
 * cuDNN cannot be used at all, or NULL.  The first call of any loads the
 * library.  The first three make a plan if there is none, which takes a second,
 * so plans are made before the first step. */
void iz_attention_fwd_cudnn(struct iz_exec *x, const struct iz_attention *a,
                            struct iz_view scratch);
void iz_attention_bwd_cudnn(struct iz_exec *x, struct iz_view dqkv,
                            struct iz_view dy, const struct iz_attention *a,
                            struct iz_view delta, struct iz_view scratch);
bool iz_attention_ask_cudnn(struct iz_exec *x, const struct iz_attention *a,
                            bool back, int64_t scratch_bytes);
const char *iz_cudnn_missing(void);

/* embedding.cu.  Tokens, rows and targets, here and below, lie in pinned host
 * memory; the op has checked those that it may. */
void iz_table_fwd_cuda(struct iz_exec *x, struct iz_view y, struct iz_view r,
                       const struct iz_table *t);
void iz_table_bwd_cuda(struct iz_exec *x, struct iz_view dy,
                       const struct iz_table *t, struct iz_view scratch);

/* interact.cu */
void iz_interact_fwd_cuda(struct iz_exec *x, struct iz_view y, struct iz_view z,
                          struct iz_view e);
void iz_interact_bwd_cuda(struct iz_exec *x, struct iz_view dz,
                          struct iz_view de, struct iz_view dy,
                          struct iz_view z, struct iz_view e);

/* dropout.cu */
void iz_dropout_cuda(struct iz_exec *x, struct iz_view y, struct iz_view c,
                     struct iz_view a, const struct iz_drop *d);

/* magnitude.cu */
void iz_magnitude_gain_cuda(struct iz_exec *x, struct iz_view gain,
                            struct iz_view inverse,
                            const struct iz_magnitude *g);
void iz_magnitude_apply_cuda(struct iz_exec *x, struct iz_view y,
                             struct iz_view r, struct iz_view u,
                             struct iz_view gain, struct iz_view b);
void iz_magnitude_dm_cuda(struct iz_exec *x, struct iz_view dm,
                          struct iz_view dy, struct iz_view u,
                          struct iz_view inverse, int64_t first);

/* preference.cu.  The loss and the metrics are in pinned memory. */
void iz_pair_loss_cuda(struct iz_exec *x, const struct iz_classifier *c,
                       const struct iz_pairs *p,
                       const struct iz_sample_loss *each, float *scales);

/* experts_cuda.c */
void iz_op_copy_cuda(struct iz_exec *x, struct iz_view y, struct iz_view a);
void iz_op_clear_cuda(struct iz_exec *x, struct iz_view v);
/* `end` of struct iz_routes on the host, valid in this task.  The first call of
 * a task waits for the stream. */
const int32_t *iz_experts_routes_end_cuda(struct iz_exec *x,
                                          struct iz_view end);

/* experts.cu; routers' metrics are in pinned memory. */
void iz_route_fwd_cuda(struct iz_exec *x, const struct iz_routes *r,
                       struct iz_view scratch);
void iz_route_aux_cuda(struct iz_exec *x, struct iz_aux *aux,
                       const struct iz_routes *r, double balance, double z,
                       struct iz_view scratch);
void iz_route_bwd_cuda(struct iz_exec *x, struct iz_view dlogits,
                       struct iz_view dweight, const struct iz_routes *r,
                       float balance, float z);
void iz_experts_dispatch_cuda(struct iz_exec *x, struct iz_view y,
                              struct iz_view a, const struct iz_routes *r);
void iz_experts_combine_cuda(struct iz_exec *x, struct iz_view y,
                             struct iz_view c, struct iz_view a,
                             const struct iz_routes *r, bool back);
void iz_experts_weigh_bwd_cuda(struct iz_exec *x, struct iz_view dweight,
                               struct iz_view g, struct iz_view du,
                               struct iz_view dg, const struct iz_routes *r);
void iz_experts_bias_bwd_cuda(struct iz_exec *x, struct iz_view dweight,
                              struct iz_view dy, struct iz_view b,
                              const struct iz_routes *r);

/* classifier.cu.  count: targets that are not ignored.  *c->loss is in pinned
 * memory. */
void iz_classifier_cuda(struct iz_exec *x, const struct iz_classifier *c,
                        int64_t count, struct iz_view scratch);

/* flat.cu, update.cu.  *norm2 and the sums of squares are in pinned memory. */
void iz_flat_sum_cuda(struct iz_exec *x, void *out, enum iz_dtype out_type,
                      bool accumulate, const void *const *in, int n_in,
                      enum iz_dtype in_type, int64_t n);
void iz_flat_squares_cuda(struct iz_exec *x, double *sum, const void *p,
                          enum iz_dtype type, int64_t n);
void iz_flat_norm2_cuda(struct iz_exec *x, double *norm2, const void *p,
                        enum iz_dtype type, int64_t n, struct iz_view scratch);
void iz_update_cuda(struct iz_exec *x, const struct iz_update *u);

/* quant.cu: the n weights of a matrix, whose groups follow one another. */
void iz_quant_load_cuda(struct iz_exec *x, enum iz_quant q, void *out,
                        enum iz_dtype type, const void *groups, int64_t n);

/* orthogonal_cuda.c */
void iz_orthogonal_cuda(struct iz_exec *x, const struct iz_orthogonal *m,
                        struct iz_view scratch);

/* gemm_rate_cuda.c: rate of y[m,n] = a[m,k] b[k,n] of type x->act in the last
 * third of about `seconds`, flop/s; waits.  A GPU that was idle is cool for
 * half a second, and faster than in a step.  Called outside of steps. */
double iz_gemm_rate_cuda(struct iz_exec *x, int64_t m, int64_t n, int64_t k,
                         double seconds);

/* cuda_lib.c: handles of the libraries for a compute worker; waits.  -errno
 * with the reason printed; close accepts NULL. */
int iz_cuda_open(struct iz_cuda **out);
void iz_cuda_close(struct iz_cuda **c);

/* The least compute capability that there are kernels for, 75 for 7.5. */
int iz_cuda_capability(void);

/* Type of activations for parameters of type `param`. */
enum iz_dtype iz_cuda_act(enum iz_dtype param);

IZ_C_END
