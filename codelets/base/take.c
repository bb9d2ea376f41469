/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/base/take.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "codelets/base/die.h"

void *iz_take(int64_t n, int64_t size, const char *what, ...)
{
    void *p = calloc(n > 0 ? (size_t)n : 1, (size_t)size);
    char text[256];
    va_list ap;
    if (p)
        return p;
    va_start(ap, what);
    vsnprintf(text, sizeof(text), what, ap);
    va_end(ap);
    iz_die("no memory for %s", text);
}

void *iz_take_more(void *p, int64_t n, int *room, int64_t size,
                   const char *what)
{
    if (n < *room)
        return p;
    *room = *room ? 2 * *room : 256;
    return iz_take_longer(p, *room, size, what);
}

void *iz_take_longer(void *p, int64_t n, int64_t size, const char *what)
{
    p = realloc(p, (size_t)n * (size_t)size);
    if (!p)
        iz_die("no memory for %lld %s", (long long)n, what);
    return p;
}

char *iz_take_text(const char *text, int64_t n)
{
    char *p = iz_take(n + 1, 1, "a text");
    memcpy(p, text, (size_t)n);
    return p;
}
