/* SPDX-License-Identifier: Apache-2.0 */
/* One matrix product of the GPU with all its tensors, and what must come out:
 * the real calls of cuBLASLt, answered by the stand-in. */
#ifndef IZ_TESTS_CODELETS_GPU_PRODUCT_H
#define IZ_TESTS_CODELETS_GPU_PRODUCT_H

#include "codelets/ops/gpu_ops.h"
#include "tests/codelets/ops/fixture.h"
#include "tests/codelets/ops/reference.h"

/* Those tensors that a case does not use stay unread. */
struct product {
    struct tensor y, r, a, w, b, dy, da, dw, db;
    struct iz_linear l;
    struct ref_matmul ref;
    double *want;
    bool tf32, fused_db;
};

/* The result is formed in double and rounded once to fp32, and once more to a
 * 16-bit type, which fixture_close allows for. */
#define PRODUCT_TOL 1e-7

extern struct iz_cuda product_cuda;

/* s: samples, in, out; dw: type of the weights' gradient. */
struct product product_new(enum iz_dtype t, enum iz_dtype dw,
                           const int64_t s[3], bool out_in);
void product_free(struct product *p);

/* Dry for the size of the scratch, which has no room to spare, then really. */
void product_run(void (*op)(struct iz_exec *x, struct product *p),
                 struct product *p);
void product_forward(struct iz_exec *x, struct product *p);
void product_backward_w(struct iz_exec *x, struct product *p);

void product_check_forward(struct product *p, bool with_r, bool with_b);
/* With r, b, both, neither, and scaled. */
void product_check_forwards(struct product *p);
void product_check_da(struct product *p);
void product_check_dw(struct product *p, bool add);

/* to [rows of w, cols of w] = a^T dy or dy^T a, plus `add`. */
void product_want_dw(const struct product *p, double *to, const double *add);
void product_want_db(const struct product *p, double *to);

/* Before a test: the library is new, and so is the stand-in. */
int product_renew(void **state);
/* main of a program of such tests; returns its exit status. */
#define product_main(tests)                                                    \
    product_end(cmocka_run_group_tests(tests, NULL, NULL))
int product_end(int failed);

#endif
