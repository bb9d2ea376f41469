/* SPDX-License-Identifier: Apache-2.0 */
/* Loaded before a program: an OpenBLAS that is older than the processor, and
 * takes kernels of long ago by itself.  It does so on rank OLD_RANK, or on all
 * without that variable. */
#define _GNU_SOURCE /* RTLD_NEXT */
#include <dlfcn.h>
#include <stdlib.h>

#include "tests/fake/rank.h"

void openblas_set_num_threads(int n);

/* The first call of the program. */
void openblas_set_num_threads(int n)
{
    void (*set)(int), (*quit)(void), (*init)(void);
    *(void **)&set = dlsym(RTLD_NEXT, "openblas_set_num_threads");
    *(void **)&quit = dlsym(RTLD_NEXT, "gotoblas_dynamic_quit");
    *(void **)&init = dlsym(RTLD_NEXT, "gotoblas_dynamic_init");
    set(n);
    if (!quit || !init || (getenv("OLD_RANK") && !is_rank("OLD_RANK")))
        return;
    setenv("OPENBLAS_CORETYPE", "Prescott", 1);
    quit();
    init();
    unsetenv("OPENBLAS_CORETYPE");
}
