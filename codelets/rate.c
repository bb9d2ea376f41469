/* SPDX-License-Identifier: Apache-2.0 */
/* Rate and identity of the BLAS library; see rate.h. */
#define _GNU_SOURCE
#include "codelets/rate.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "codelets/gemm.h"
#include "codelets/task.h"

/* Extensions of OpenBLAS and BLIS; absent in other libraries, so looked up. */
static void *symbol(const char *name)
{
    return dlsym(RTLD_DEFAULT, name);
}

double iz_blas_rate(int m, int n, int k, double seconds)
{
    size_t na = (size_t)m * (size_t)k, nb = (size_t)k * (size_t)n;
    float *a = calloc(na + nb + (size_t)m * (size_t)n, sizeof(*a));
    double best = 0;
    if (!a)
        return 0;
    int64_t end = iz_now_ns() + (int64_t)(seconds * 1e9);
    do {
        int64_t begin = iz_now_ns();
        iz_gemm_cpu(&(struct iz_gemm){.m = m,
                                      .n = n,
                                      .k = k,
                                      .a = a,
                                      .lda = k,
                                      .b = a + na,
                                      .ldb = n,
                                      .c = a + na + nb,
                                      .ldc = n,
                                      .alpha = 1});
        double rate = 2.0 * m * n * k * 1e9 / (double)(iz_now_ns() - begin + 1);
        if (rate > best)
            best = rate;
    } while (iz_now_ns() < end);
    free(a);
    return best;
}

void iz_blas_name(char *out, size_t size)
{
    char *(*config)(void) = NULL, *(*core)(void) = NULL;
    *(void **)&config = symbol("openblas_get_config");
    *(void **)&core = symbol("openblas_get_corename");
    out[0] = 0;
    if (!config || !core)
        return;
    char version[64];
    snprintf(version, sizeof(version), "%s", config());
    char *second = strchr(version, ' ');
    if (second && (second = strchr(second + 1, ' ')))
        *second = 0;
    snprintf(out, size, "%s %s", version, core());
}

void iz_blas_warning(char *out, size_t size)
{
    const char *core = getenv("OPENBLAS_CORETYPE");
    out[0] = 0;
    if (core && symbol("openblas_get_corename"))
        snprintf(out, size,
                 "OPENBLAS_CORETYPE=%s is set: it fixes OpenBLAS's kernels and "
                 "may halve their speed; unset it to let the library choose",
                 core);
}
