/* SPDX-License-Identifier: Apache-2.0 */
/* Calls for which CBLAS has no standard: OpenBLAS, BLIS and MKL each have their
 * own, so they are looked up in the library that is there; see blas.h. */
#define _GNU_SOURCE
#include "codelets/ops/blas.h"

#include <dlfcn.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "codelets/flat/simd.h"
#include "codelets/ops/gemm_rate.h"

#define VARIABLE "OPENBLAS_CORETYPE"
#define LEAST_GAIN 1.2 /* less than this is not worth other bits */

/* OpenBLAS's names of kernels with the instructions of a SIMD level; the first
 * serves every processor that has them.  Best first. */
static const struct {
    const char *level, *kernels[3];
} known[] = {
    {"avx512", {"SkylakeX", "Cooperlake", "Sapphirerapids"}},
    {"avx2", {"Haswell", "Zen", "Excavator"}},
};

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

static bool processor_has(const char *level)
{
    for (const struct iz_simd_level *l = iz_simd_levels; l->name; l++)
        if (strcmp(l->name, level) == 0)
            return !l->runs || l->runs();
    return false;
}

/* Better ones for this processor than those, or NULL. */
static const char *better_kernels(const char *now)
{
    for (size_t l = 0; l < sizeof(known) / sizeof(known[0]); l++) {
        for (int i = 0; i < 3; i++)
            if (strcmp(known[l].kernels[i], now) == 0)
                return NULL;
        if (processor_has(known[l].level))
            return known[l].kernels[0];
    }
    return NULL;
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
    const char *better = o.core ? better_kernels(o.core()) : NULL;
    if (!better)
        return;
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
