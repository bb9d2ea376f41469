/* SPDX-License-Identifier: Apache-2.0 */
/* What the tests of ops and models share: random tensors that exist both in the
 * type under test and in double, and comparisons. */
#pragma once

#include "codelets/ops/ops.h"
#include "tests/codelets/base/dies.h"

/* Memory for tensors and arenas, filled with NaN, to be freed by the caller;
 * large pieces lie on huge pages, as the program's do. */
void *fixture_take(int64_t bytes);

/* Zeros that take no memory before they are touched. */
struct iz_view fixture_map(enum iz_dtype t, int64_t rows, int64_t cols);
void fixture_unmap(struct iz_view v);

/* Calls work for parts of [0, n) on all processors at once; it may not fail. */
void fixture_share(int64_t n,
                   void (*work)(void *arg, int64_t begin, int64_t end),
                   void *arg);

/* d holds the same values as v, exactly; want, once asked for, what is expected
 * of v. */
struct tensor {
    struct iz_view v;
    double *d, *want;
};

/* Restarts the random numbers from the seed, which is printed: the environment
 * variable IZ_SEED or 1.  SEEDED: a test that begins so. */
int fixture_seed(void **test);
#define SEEDED(f) cmocka_unit_test_setup(f, fixture_seed)
double fixture_uniform(void); /* [-1, 1) */
int32_t fixture_below(int64_t n);

/* Uniform in [-scale, scale), rounded to the type; without any memory, where
 * only shapes are wanted. */
extern bool fixture_bare;
struct tensor tensor_new(enum iz_dtype t, int64_t rows, int64_t cols,
                         double scale);
struct tensor tensor_copy(const struct tensor *from);
/* Rounds d into v and back again: after a change of d. */
void tensor_store(struct tensor *t);
/* Reads v into d: after an op has written v. */
void tensor_load(struct tensor *t);
/* Zeros, for the numbers that are expected; t's own. */
double *tensor_want(struct tensor *t);
void tensor_free(struct tensor *t);

/* The sum of n products. */
double fixture_dot(const double *a, const double *b, int64_t n);

/* The largest error of rounding x to the type. */
double fixture_rounding(enum iz_dtype t, double x);

/* A number that is expected, and a bound on the error. */
struct near {
    double is, within;
};

/* Fails unless element i of v is near that; what names the tensor.  Returns the
 * error as a part of the bound. */
double fixture_element(const char *what, struct iz_view v, int64_t i,
                       struct near want);
/* |got - got->want| <= tol max|want| + (rounding error of got's type) |want|.
 */
void fixture_close(const char *what, struct tensor *got, double tol);
/* Fails where an element of `got` is out of its bound.  IZ_SHOW: prints the
 * largest error, as a part of the bound. */
void fixture_near(const char *what, struct tensor *got,
                  const struct near *want);
void fixture_same_bits(const char *what, struct iz_view a, struct iz_view b);

extern const enum iz_dtype fixture_types[3];

/* Element i of numbers of a type, and what it is. */
void *fixture_at(const void *x, enum iz_dtype t, int64_t i);
double fixture_get(const void *x, enum iz_dtype t, int64_t i);
