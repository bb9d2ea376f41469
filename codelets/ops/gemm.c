/* SPDX-License-Identifier: Apache-2.0 */
/* The matrix product through CBLAS. */
#define _GNU_SOURCE
#include "codelets/ops/gemm.h"

#include <assert.h>
#include <cblas.h>
#include <dlfcn.h>
#include <limits.h>

/* The standard has no call for it: OpenBLAS, BLIS and MKL each have their own,
 * so it is looked up in the library that is there. */
void iz_gemm_open(void)
{
    static const char *const names[] = {"openblas_set_num_threads",
                                        "bli_thread_set_num_threads",
                                        "MKL_Set_Num_Threads"};
    for (int i = 0; i < 3; i++) {
        void (*set)(long) = NULL;
        *(void **)&set = dlsym(RTLD_DEFAULT, names[i]);
        if (set)
            set(1);
    }
}

void iz_gemm_cpu(const struct iz_gemm *g)
{
    assert(g->m <= INT_MAX && g->n <= INT_MAX && g->k <= INT_MAX);
    assert(g->lda <= INT_MAX && g->ldb <= INT_MAX && g->ldc <= INT_MAX);
    cblas_sgemm(CblasRowMajor, g->ta ? CblasTrans : CblasNoTrans,
                g->tb ? CblasTrans : CblasNoTrans, (int)g->m, (int)g->n,
                (int)g->k, g->alpha, g->a, (int)g->lda, g->b, (int)g->ldb,
                g->beta, g->c, (int)g->ldc);
}
