/* SPDX-License-Identifier: Apache-2.0 */
/* Whose kernels make the CPU's fp32 products: those that the BLAS library takes
 * by itself, others of OpenBLAS for the processor's instructions, or oneDNN's.
 * OpenBLAS knows processors by their numbers; for one that is newer than it is
 * it may take kernels of long ago. */
#pragma once

#include <stdbool.h>
#include <stddef.h>

/* Once per process, before any task runs: one BLAS thread per caller, with the
 * kernels that the library takes by itself. */
void iz_blas_open(void);

/* The kernels that may be taken, in the order of iz_blas_best.  [0] are the
 * library's own. */
enum { IZ_BLAS_KERNELS = 4 };

/* Name of kernels i: "oneDNN", one of OpenBLAS's names of processors like
 * "SkylakeX", or "BLAS" for the own ones of a library that gives no name.
 * NULL: not here.  If the user has set OPENBLAS_CORETYPE, no other of
 * OpenBLAS's are offered. */
const char *iz_blas_kernels(int i);

/* The user has set OPENBLAS_CORETYPE, and so chosen kernels. */
bool iz_blas_is_users(void);

/* Takes the kernels of that name; "BLAS": the library's own.  False: they are
 * not here.  Not while others multiply. */
bool iz_blas_take(const char *name);

/* Measures the kernels that are here, with the products of a layer as in
 * iz_rate_blas_layer, in some ten milliseconds each; flop/s of processor time.
 * 0: not here, or their products are wrong.  Any may be in use afterwards. */
void iz_blas_rates(double rate[IZ_BLAS_KERNELS], int rows, int in, int out);

/* The first one that has IZ_BLAS_NEAR of the best rate.  So near ones are not
 * told apart by chance, and the library's own are kept if they are as good. */
int iz_blas_best(const double rate[IZ_BLAS_KERNELS]);
#define IZ_BLAS_NEAR 0.95

/* Measures and takes the best for that layer; for programs of one process. */
void iz_blas_take_best(int rows, int in, int out);

/* "OpenBLAS 0.3.21 SkylakeX", "oneDNN 2.6.3" or whatever name the library
 * gives; "" if none. */
void iz_blas_name(char *out, size_t size);
