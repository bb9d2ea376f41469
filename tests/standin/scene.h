/* SPDX-License-Identifier: Apache-2.0 */
/* One op on a GPU of the stand-in and on the CPU, with the same arguments. */
#ifndef IZ_TESTS_STANDIN_SCENE_H
#define IZ_TESTS_STANDIN_SCENE_H

#include <cuda_runtime_api.h>

#include "tests/codelets/ops/fixture.h"

enum { M = 6, C = 8, OUT = 12, VOCAB = 20, SEQ = 3, HEADS = 2, N = 1003 };
enum { VIEWS = 10 };

/* Arguments of one op. */
struct scene {
    struct iz_view v[VIEWS];
    const int32_t *token; /* pinned [M] */
    double *number;       /* pinned */
};

typedef void (*op_fn)(struct iz_exec *x, const struct scene *s);

struct shape {
    enum iz_dtype type;
    int64_t rows, cols;
};

/* Of the GPU's calls; the test creates it. */
extern cudaStream_t stream;

/* Calls op on both sides with random tensors of these shapes, up to one without
 * rows: the same bits in all of them and in *number. */
void compare(op_fn op, const struct shape *shapes);

#endif
