/* SPDX-License-Identifier: Apache-2.0 */
/* The CUDA side of every op, as a table: the real kernels and libraries fill
 * it, a build without CUDA has none, and the tests have one that computes on
 * the CPU.  No type of CUDA appears here.
 *
 * Every function has the arguments of its namesake in ops.h or flat.h, only
 * enqueues on x->stream, and touches no memory but its arguments' and
 * `scratch`, which the op took from the work arena in the size that
 * iz_cuda_scratch_bytes in its .c file tells.  Device memory and pinned host
 * memory are both addressable by a kernel; the host may only read the latter.
 * Errors of CUDA and of its libraries end the job (iz_die). */
#ifndef IZ_CODELETS_OPS_GPU_OPS_H
#define IZ_CODELETS_OPS_GPU_OPS_H

#include "codelets/flat/update.h"
#include "codelets/ops/ops.h"

IZ_C_BEGIN

/* What cuDNN may have beside the tensors, with room to align.  The plans of all
 * shapes that were asked for take 256 bytes or none. */
#define IZ_CUDNN_SCRATCH (INT64_C(1) << 16)

/* Workspace of a product: 32 MiB, as NVIDIA recommends for compute capability
 * 9, and room to align. */
#define IZ_PRODUCT_SCRATCH ((int64_t)(32 << 20) + 256)

struct iz_cuda_ops {
    void (*matmul_fwd)(struct iz_exec *x, struct iz_view y, struct iz_view r,
                       struct iz_view a, const struct iz_linear *l,
                       struct iz_view scratch);
    void (*matmul_da)(struct iz_exec *x, struct iz_view da, struct iz_view dy,
                      const struct iz_linear *l, struct iz_view scratch);
    void (*matmul_dw)(struct iz_exec *x, struct iz_view dy, struct iz_view a,
                      const struct iz_linear *l, struct iz_view scratch);
    void (*layernorm_fwd)(struct iz_exec *x, struct iz_view y, struct iz_view a,
                          const struct iz_norm *n);
    void (*layernorm_again)(struct iz_exec *x, struct iz_view y,
                            struct iz_view a, const struct iz_norm *n);
    void (*layernorm_bwd)(struct iz_exec *x, struct iz_view dx,
                          struct iz_view r, struct iz_view dy, struct iz_view a,
                          const struct iz_norm *n, struct iz_view scratch);
    void (*gelu_fwd)(struct iz_exec *x, struct iz_view y, struct iz_view a);
    void (*gelu_bwd)(struct iz_exec *x, struct iz_view du, struct iz_view y,
                     struct iz_view dy, struct iz_view a);
    void (*rmsnorm_fwd)(struct iz_exec *x, struct iz_view y, struct iz_view a,
                        const struct iz_rmsnorm *n);
    void (*rmsnorm_again)(struct iz_exec *x, struct iz_view y, struct iz_view a,
                          const struct iz_rmsnorm *n);
    void (*rmsnorm_bwd)(struct iz_exec *x, struct iz_view dx, struct iz_view r,
                        struct iz_view dy, struct iz_view a,
                        const struct iz_rmsnorm *n, struct iz_view scratch);
    void (*headnorm_fwd)(struct iz_exec *x, struct iz_view a,
                         struct iz_view kept, const struct iz_rmsnorm *n,
                         int64_t first);
    void (*headnorm_bwd)(struct iz_exec *x, struct iz_view da,
                         struct iz_view kept, const struct iz_rmsnorm *n,
                         int64_t first, struct iz_view scratch);
    void (*rope)(struct iz_exec *x, struct iz_view a, const struct iz_rope *r,
                 bool back);
    void (*swiglu_fwd)(struct iz_exec *x, struct iz_view y, struct iz_view a);
    void (*swiglu_bwd)(struct iz_exec *x, struct iz_view da, struct iz_view y,
                       struct iz_view dy, struct iz_view a);
    void (*attention_fwd)(struct iz_exec *x, const struct iz_attention *a,
                          struct iz_view scratch);
    void (*attention_bwd)(struct iz_exec *x, struct iz_view dqkv,
                          struct iz_view dy, const struct iz_attention *a,
                          struct iz_view scratch);
    /* The forward through cuDNN; whether it can, else false with the reason in
     * x->ask; why cuDNN is not here, or NULL.  The first two make a plan where
     * there is none, which takes a second: steps begin with all of them. */
    void (*attention_cudnn)(struct iz_exec *x, const struct iz_attention *a,
                            struct iz_view scratch);
    bool (*attention_ask)(struct iz_exec *x, const struct iz_attention *a);
    const char *(*cudnn_missing)(void);
    /* Tokens, rows and targets lie in pinned host memory; the op has checked
     * those that it may. */
    void (*embedding_fwd)(struct iz_exec *x, struct iz_view y,
                          const int32_t *token, struct iz_view wte,
                          struct iz_view wpe);
    void (*embedding_bwd)(struct iz_exec *x, struct iz_view dwte,
                          struct iz_view dwpe, struct iz_view dy,
                          const int32_t *token, struct iz_view scratch);
    void (*table_fwd)(struct iz_exec *x, struct iz_view y, struct iz_view r,
                      const struct iz_table *t);
    void (*table_bwd)(struct iz_exec *x, struct iz_view dy,
                      const struct iz_table *t, struct iz_view scratch);
    void (*interact_fwd)(struct iz_exec *x, struct iz_view y, struct iz_view z,
                         struct iz_view e);
    void (*interact_bwd)(struct iz_exec *x, struct iz_view dz,
                         struct iz_view de, struct iz_view dy, struct iz_view z,
                         struct iz_view e);
    /* count: targets that are not ignored.  *c->loss is in pinned memory. */
    void (*classifier_fwd)(struct iz_exec *x, const struct iz_classifier *c,
                           int64_t count, struct iz_view scratch);
    void (*classifier_bwd)(struct iz_exec *x, const struct iz_classifier *c,
                           int64_t count, struct iz_view scratch);

    /* Flat buffers; *norm2 and the sums of squares are in pinned memory. */
    void (*sum)(struct iz_exec *x, void *out, enum iz_dtype out_type,
                bool accumulate, const void *const *in, int n_in,
                enum iz_dtype in_type, int64_t n);
    void (*squares)(struct iz_exec *x, double *sum, const void *p,
                    enum iz_dtype type, int64_t n);
    void (*norm2)(struct iz_exec *x, double *norm2, const void *p,
                  enum iz_dtype type, int64_t n, struct iz_view scratch);
    void (*update)(struct iz_exec *x, const struct iz_update *u);

    /* Best rate of y[m,n] = a[m,k] b[k,n] of type x->act within about
     * `seconds`, flop/s; waits.  Called outside of steps. */
    double (*gemm_rate)(struct iz_exec *x, int64_t m, int64_t n, int64_t k,
                        double seconds);

    /* Handles of the libraries for a compute worker; waits.  -errno with the
     * reason printed. */
    int (*open)(struct iz_cuda **out, void *stream);
    void (*close)(struct iz_cuda **c);

    /* The least compute capability that there are kernels for, 75 for 7.5. */
    int capability;

    /* Type of activations for parameters of type `param`. */
    enum iz_dtype (*act)(enum iz_dtype param);
};

/* NULL in a build without CUDA. */
extern const struct iz_cuda_ops *const iz_cuda_ops;

IZ_C_END

#endif
