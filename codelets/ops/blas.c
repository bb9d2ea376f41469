/* SPDX-License-Identifier: Apache-2.0 */
/* The choice of kernels; see blas.h.  What CBLAS has no standard for, OpenBLAS,
 * BLIS and MKL each have their own calls for, which are looked up in the
 * library that is there. */
#define _GNU_SOURCE
#include "codelets/ops/blas.h"

#include <dlfcn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "codelets/base/die.h"
#include "codelets/flat/simd.h"
#include "codelets/ops/gemm.h"
#include "codelets/ops/gemm16.h"
#include "codelets/ops/gemm_rate.h"

#define VARIABLE "OPENBLAS_CORETYPE"

/* OpenBLAS's kernels for every processor that has the instructions of a SIMD
 * level.  Its others for the same level are these, or slower. */
static const struct {
    const char *level, *kernels;
} known[] = {{"avx512", "SkylakeX"}, {"avx2", "Haswell"}};

enum { OWN, ONEDNN, FIRST_KNOWN };

static char own[32]; /* what the library took by itself */

struct openblas {
    char *(*core)(void), *(*config)(void);
    void (*quit)(void), (*init)(void); /* takes the kernels of VARIABLE */
};

static void *symbol(const char *name)
{
    return dlsym(RTLD_DEFAULT, name);
}

static struct openblas openblas(void)
{
    struct openblas o;
    *(void **)&o.core = symbol("openblas_get_corename");
    *(void **)&o.config = symbol("openblas_get_config");
    *(void **)&o.quit = symbol("gotoblas_dynamic_quit");
    *(void **)&o.init = symbol("gotoblas_dynamic_init");
    return o;
}

bool iz_blas_is_users(void)
{
    return openblas().core && getenv(VARIABLE);
}

static bool processor_has(const char *level)
{
    for (const struct iz_simd_level *l = iz_simd_levels; l->name; l++)
        if (strcmp(l->name, level) == 0)
            return !l->runs || l->runs();
    return false;
}

void iz_blas_open(void)
{
    static const char *const calls[] = {"openblas_set_num_threads",
                                        "bli_thread_set_num_threads",
                                        "MKL_Set_Num_Threads"};
    struct openblas o = openblas();
    for (int i = 0; i < 3; i++) {
        void (*set)(long) = NULL;
        *(void **)&set = symbol(calls[i]);
        if (set)
            set(1);
    }
    iz_gemm_use_onednn(false);
    snprintf(own, sizeof(own), "%s", o.core ? o.core() : "BLAS");
    static const char *const wide[] = {"SkylakeX", "Cooperlake",
                                       "SapphireRapids"};
    for (int i = 0; i < 3 && iz_blas_is_users(); i++)
        if (strcmp(own, wide[i]) == 0 && !processor_has("avx512"))
            iz_die(VARIABLE "=%s: this processor lacks avx512; unset it", own);
}

const char *iz_blas_kernels(int i)
{
    struct openblas o = openblas();
    if (i == OWN)
        return own;
    if (i == ONEDNN)
        return iz_gemm16_onednn_missing() ? NULL : "oneDNN";
    const char *name = known[i - FIRST_KNOWN].kernels;
    bool other = o.core && o.quit && o.init && !iz_blas_is_users() &&
                 strcmp(name, own) != 0;
    return other && processor_has(known[i - FIRST_KNOWN].level) ? name : NULL;
}

/* Has OpenBLAS look for kernels again, for those of that name.  False: it has
 * none of that name. */
static bool take_openblas(const struct openblas *o, const char *name)
{
    if (strcmp(o->core(), name) == 0)
        return true;
    setenv(VARIABLE, name, 1);
    o->quit();
    o->init();
    unsetenv(VARIABLE);
    return strcmp(o->core(), name) == 0;
}

bool iz_blas_take(const char *name)
{
    struct openblas o = openblas();
    int i = 0;
    if (strcmp(name, "BLAS") == 0)
        name = own;
    for (; i < IZ_BLAS_KERNELS; i++)
        if (iz_blas_kernels(i) && strcmp(iz_blas_kernels(i), name) == 0)
            break;
    if (i == IZ_BLAS_KERNELS)
        return false;
    iz_gemm_use_onednn(i == ONEDNN);
    if (i == ONEDNN || !o.core || !o.quit || !o.init)
        return true;
    return take_openblas(&o, name) || i == OWN;
}

void iz_blas_rates(double rate[IZ_BLAS_KERNELS], int rows, int in, int out)
{
    enum { TURNS = 3 }; /* what disturbs one is likely to disturb the next */
    double best = 0;
    for (int k = 0; k < TURNS * IZ_BLAS_KERNELS; k++) {
        int i = k % IZ_BLAS_KERNELS;
        const char *name = iz_blas_kernels(i);
        if (k < IZ_BLAS_KERNELS)
            rate[i] = 0;
        else if (rate[i] < best / 2)
            continue; /* never the choice */
        if (name && iz_blas_take(name))
            rate[i] = fmax(rate[i], iz_rate_blas_layer(rows, in, out, 0.01));
        best = fmax(best, rate[i]);
    }
}

int iz_blas_best(const double rate[IZ_BLAS_KERNELS])
{
    double best = 0;
    int i = 0;
    for (int k = 0; k < IZ_BLAS_KERNELS; k++)
        best = fmax(best, rate[k]);
    while (rate[i] < IZ_BLAS_NEAR * best)
        i++;
    return i;
}

void iz_blas_take_best(int rows, int in, int out)
{
    double rate[IZ_BLAS_KERNELS];
    iz_blas_rates(rate, rows, in, out);
    iz_blas_take(iz_blas_kernels(iz_blas_best(rate)));
}

void iz_blas_name(char *out, size_t size)
{
    struct openblas o = openblas();
    out[0] = 0;
    if (iz_gemm_by_onednn()) {
        iz_gemm16_name(out, size);
        return;
    }
    if (!o.config || !o.core)
        return;
    char version[64];
    snprintf(version, sizeof(version), "%s", o.config());
    char *second = strchr(version, ' ');
    if (second && (second = strchr(second + 1, ' ')))
        *second = 0;
    snprintf(out, size, "%s %s", version, o.core());
}
