/* SPDX-License-Identifier: Apache-2.0 */
/* Loaded before a program: on rank SCARCE_RANK the malloc or calloc of exactly
 * SCARCE_BYTES fails, once. */
#include <errno.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>

#include "tests/fake/rank.h"

/* glibc's own, which need no dlsym that would call calloc again. */
extern void *__libc_malloc(size_t size);
extern void *__libc_calloc(size_t n, size_t size);

/* Of this rank; 0: none. */
static size_t scarce(void)
{
    const char *bytes = getenv("SCARCE_BYTES");
    return is_rank("SCARCE_RANK") && bytes ? (size_t)strtoull(bytes, NULL, 10)
                                           : 0;
}

static int fails(size_t size)
{
    static _Atomic size_t bytes = (size_t)-1, seen;

    if (bytes == (size_t)-1)
        bytes = scarce();
    if (size != bytes || !size || seen++)
        return 0;
    errno = ENOMEM;
    return 1;
}

void *malloc(size_t size)
{
    return fails(size) ? NULL : __libc_malloc(size);
}

void *calloc(size_t n, size_t size)
{
    return fails(n * size) ? NULL : __libc_calloc(n, size);
}
