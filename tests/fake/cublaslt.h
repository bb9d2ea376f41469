/* SPDX-License-Identifier: Apache-2.0 */
/* A stand-in for cuBLASLt on the CPU, with the real header: it does the product
 * that the descriptors ask for, in double, when emu_enqueue runs it, and
 * refuses what the library would refuse.  This is what a test may set and see.
 */
#pragma once

#include <stdbool.h>

struct fake_cublaslt {
    bool no_bias;   /* no algorithm for a bias */
    bool fixed;     /* an algorithm is for one size alone */
    int fails;      /* status of every search, if not 0 */
    int bias_fails; /* the same of those with a bias */
    int searches;   /* calls of cublasLtMatmulAlgoGetHeuristic */
    int compute;    /* compute type of the last product */
};

extern struct fake_cublaslt fake_cublaslt;
