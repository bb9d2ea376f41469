/* SPDX-License-Identifier: Apache-2.0 */
/* The CPU's BLAS library as it is installed: its threads, its kernels, its
 * name. */
#pragma once

#include <stddef.h>

/* Once per process, before any task runs: one BLAS thread per caller, and
 * kernels for this processor.  OpenBLAS knows processors by their numbers; for
 * one that is newer than it is it may take kernels of long ago.  Then those for
 * the instructions that the processor has are taken, if a product is faster
 * with them, unless the user set OPENBLAS_CORETYPE. */
void iz_blas_open(void);

/* "OpenBLAS 0.3.21 SkylakeX" or whatever name the library gives; "" if none. */
void iz_blas_name(char *out, size_t size);

/* Sentence about kernels that are not those which the library took by itself,
 * or are slow; or "". */
void iz_blas_note(char *out, size_t size);
