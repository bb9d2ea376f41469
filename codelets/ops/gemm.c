/* SPDX-License-Identifier: Apache-2.0 */
/* The matrix product through CBLAS or oneDNN. */
#include "codelets/ops/gemm.h"

#include <assert.h>
#include <cblas.h>
#include <limits.h>

#include "codelets/ops/gemm16.h"

static bool by_onednn;

void iz_gemm_use_onednn(bool use)
{
    by_onednn = use;
}

bool iz_gemm_by_onednn(void)
{
    return by_onednn;
}

void iz_gemm_cpu(const struct iz_gemm *g)
{
    assert(g->m <= INT_MAX && g->n <= INT_MAX && g->k <= INT_MAX);
    assert(g->lda <= INT_MAX && g->ldb <= INT_MAX && g->ldc <= INT_MAX);
    if (by_onednn && g->m && g->n && g->k) {
        iz_gemm_onednn(g);
        return;
    }
    cblas_sgemm(CblasRowMajor, g->ta ? CblasTrans : CblasNoTrans,
                g->tb ? CblasTrans : CblasNoTrans, (int)g->m, (int)g->n,
                (int)g->k, g->alpha, g->a, (int)g->lda, g->b, (int)g->ldb,
                g->beta, g->c, (int)g->ldc);
}
