/* SPDX-License-Identifier: Apache-2.0 */
/* The functions that fill the table of cuda.h, which has their descriptions:
 * they launch kernels or call the libraries. */
#ifndef IZ_CODELETS_KERNELS_LAUNCH_H
#define IZ_CODELETS_KERNELS_LAUNCH_H

#include "codelets/ops/gpu_ops.h"

IZ_C_BEGIN

/* matmul_cuda.c */
void iz_matmul_fwd_cuda(struct iz_exec *x, struct iz_view y, struct iz_view r,
                        struct iz_view a, const struct iz_linear *l,
                        struct iz_view scratch);
void iz_matmul_da_cuda(struct iz_exec *x, struct iz_view da, struct iz_view dy,
                       const struct iz_linear *l, struct iz_view scratch);
void iz_matmul_dw_cuda(struct iz_exec *x, struct iz_view dy, struct iz_view a,
                       const struct iz_linear *l, struct iz_view scratch);

/* classifier.cu */
void iz_classifier_fwd_cuda(struct iz_exec *x, const struct iz_classifier *c,
                            int64_t count, struct iz_view scratch);
void iz_classifier_bwd_cuda(struct iz_exec *x, const struct iz_classifier *c,
                            int64_t count, struct iz_view scratch);

/* codelets/gpu/gemm_rate_cuda.c */
double iz_gemm_rate_cuda(struct iz_exec *x, int64_t m, int64_t n, int64_t k,
                         double seconds);

/* layernorm.cu */
void iz_layernorm_fwd_cuda(struct iz_exec *x, struct iz_view y,
                           struct iz_view a, const struct iz_norm *n);
void iz_layernorm_again_cuda(struct iz_exec *x, struct iz_view y,
                             struct iz_view a, const struct iz_norm *n);
void iz_layernorm_bwd_cuda(struct iz_exec *x, struct iz_view dx,
                           struct iz_view r, struct iz_view dy,
                           struct iz_view a, const struct iz_norm *n,
                           struct iz_view scratch);

/* gelu.cu */
void iz_gelu_fwd_cuda(struct iz_exec *x, struct iz_view y, struct iz_view a);
void iz_gelu_bwd_cuda(struct iz_exec *x, struct iz_view du, struct iz_view y,
                      struct iz_view dy, struct iz_view a);

/* rmsnorm.cu */
void iz_rmsnorm_fwd_cuda(struct iz_exec *x, struct iz_view y, struct iz_view a,
                         const struct iz_rmsnorm *n);
void iz_rmsnorm_again_cuda(struct iz_exec *x, struct iz_view y,
                           struct iz_view a, const struct iz_rmsnorm *n);
void iz_rmsnorm_bwd_cuda(struct iz_exec *x, struct iz_view dx, struct iz_view r,
                         struct iz_view dy, struct iz_view a,
                         const struct iz_rmsnorm *n, struct iz_view scratch);
void iz_headnorm_fwd_cuda(struct iz_exec *x, struct iz_view a,
                          struct iz_view kept, const struct iz_rmsnorm *n,
                          int64_t first);
void iz_headnorm_bwd_cuda(struct iz_exec *x, struct iz_view da,
                          struct iz_view kept, const struct iz_rmsnorm *n,
                          int64_t first, struct iz_view scratch);

/* rope.cu */
void iz_rope_cuda(struct iz_exec *x, struct iz_view a, const struct iz_rope *r,
                  bool back);

/* swiglu.cu */
void iz_swiglu_fwd_cuda(struct iz_exec *x, struct iz_view y, struct iz_view a);
void iz_swiglu_bwd_cuda(struct iz_exec *x, struct iz_view da, struct iz_view y,
                        struct iz_view dy, struct iz_view a);

/* embedding.cu */
void iz_embedding_fwd_cuda(struct iz_exec *x, struct iz_view y,
                           const int32_t *token, struct iz_view wte,
                           struct iz_view wpe);
void iz_embedding_bwd_cuda(struct iz_exec *x, struct iz_view dwte,
                           struct iz_view dwpe, struct iz_view dy,
                           const int32_t *token, struct iz_view scratch);

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

/* flat.cu */
void iz_flat_sum_cuda(struct iz_exec *x, void *out, enum iz_dtype out_type,
                      bool accumulate, const void *const *in, int n_in,
                      enum iz_dtype in_type, int64_t n);
void iz_flat_squares_cuda(struct iz_exec *x, double *sum, const void *p,
                          enum iz_dtype type, int64_t n);
void iz_flat_norm2_cuda(struct iz_exec *x, double *norm2, const void *p,
                        enum iz_dtype type, int64_t n, struct iz_view scratch);

/* update.cu */
void iz_update_cuda(struct iz_exec *x, const struct iz_update *u);

/* attention.cu */
void iz_attention_fwd_cuda(struct iz_exec *x, const struct iz_attention *a,
                           struct iz_view scratch);
void iz_attention_bwd_cuda(struct iz_exec *x, struct iz_view dqkv,
                           struct iz_view dy, const struct iz_attention *a,
                           struct iz_view scratch);

/* attention_cudnn.c */
void iz_attention_fwd_cudnn(struct iz_exec *x, const struct iz_attention *a,
                            struct iz_view scratch);
bool iz_attention_ask_cudnn(struct iz_exec *x, const struct iz_attention *a);

IZ_C_END

#endif
