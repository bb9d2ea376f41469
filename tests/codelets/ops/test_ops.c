/* SPDX-License-Identifier: Apache-2.0 */
/* The ops on the CPU against double precision.
 *
 * usage: test_ops [GROUP ...] */
#include "tests/codelets/ops/scene.h"

#include <stdint.h>

#include "codelets/ops/blas.h"

static enum iz_dtype act_of(enum iz_dtype param)
{
    return IZ_F32;
}

struct backend backend = {.x = {.backend = IZ_CPU},
                          .act = act_of,
                          .refuses = true,
                          .piece = INT64_MAX};

int main(int argc, char **argv)
{
    iz_blas_open();
    return (argc == 1 ? ops_cpu() : 0) + ops_groups(argc, argv);
}
