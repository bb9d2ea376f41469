/* SPDX-License-Identifier: Apache-2.0 */
/* Calls for which CBLAS has no standard: OpenBLAS, BLIS and MKL each have their
 * own, so they are looked up in the library that is there; see blas.h. */
#define _GNU_SOURCE
#include "codelets/ops/blas.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "codelets/ops/gemm_rate.h"

#define VARIABLE "OPENBLAS_CORETYPE"
#define LEAST_GAIN 1.2 /* less than this is not worth other bits */

/* OpenBLAS's names of kernels by the instructions they use; the first of a
 * level serves every processor that has those. */
static const char *const names[][8] = {
    {NULL},
    {"Haswell", "Zen", "Excavator"},
    {"SkylakeX", "Cooperlake", "Sapphirerapids"},
};

enum { LEVELS = sizeof(names) / sizeof(names[0]) };

static char note[256];

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

static int level_of_core(const char *core)
{
    for (int l = LEVELS - 1; l > 0; l--)
        for (int i = 0; names[l][i]; i++)
            if (strcmp(names[l][i], core) == 0)
                return l;
    return 0;
}

static int level_of_processor(void)
{
#ifdef __x86_64__
    if (__builtin_cpu_supports("avx512f") &&
        __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl"))
        return 2;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return 1;
#endif
    return 0;
}

/* Takes the kernels of that name; returns the rate of a product. */
static double rate_with(const struct openblas *o, const char *core)
{
    setenv(VARIABLE, core, 1);
    o->quit();
    o->init();
    unsetenv(VARIABLE);
    return iz_blas_rate(192, 192, 192, 0.002);
}

static void choose_kernels(void)
{
    struct openblas o = openblas();
    const char *user = getenv(VARIABLE);
    int level = level_of_processor();
    if (!o.core || level <= level_of_core(o.core()))
        return;
    const char *better = names[level][0];
    char had[32];
    snprintf(had, sizeof(had), "%s", o.core());
    if (user)
        snprintf(note, sizeof(note),
                 VARIABLE "=%s is set: this processor has the instructions of "
                          "%s, whose kernels are faster",
                 user, better);
    else if (!o.quit || !o.init)
        snprintf(note, sizeof(note),
                 "OpenBLAS takes this processor for %s: set " VARIABLE
                 "=%s, whose instructions it has",
                 had, better);
    else if (rate_with(&o, better) < LEAST_GAIN * rate_with(&o, had))
        return;
    else if (rate_with(&o, better) > 0)
        snprintf(note, sizeof(note),
                 "OpenBLAS took this processor for %s; izar uses the kernels "
                 "of %s, whose instructions it has",
                 had, better);
}

void iz_blas_open(void)
{
    static const char *const calls[] = {"openblas_set_num_threads",
                                        "bli_thread_set_num_threads",
                                        "MKL_Set_Num_Threads"};
    for (int i = 0; i < 3; i++) {
        void (*set)(long) = NULL;
        *(void **)&set = symbol(calls[i]);
        if (set)
            set(1);
    }
    choose_kernels();
}

void iz_blas_name(char *out, size_t size)
{
    struct openblas o = openblas();
    out[0] = 0;
    if (!o.config || !o.core)
        return;
    char version[64];
    snprintf(version, sizeof(version), "%s", o.config());
    char *second = strchr(version, ' ');
    if (second && (second = strchr(second + 1, ' ')))
        *second = 0;
    snprintf(out, size, "%s %s", version, o.core());
}

void iz_blas_note(char *out, size_t size)
{
    snprintf(out, size, "%s", note);
}
