/* SPDX-License-Identifier: Apache-2.0 */
/* One message, then the end of the job, from whichever thread comes first. */
#include "codelets/base/die.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static char prefix[64];
static void (*end_job)(int status);
static atomic_flag dying = ATOMIC_FLAG_INIT;

void iz_die_set(const char *text, void (*end)(int status))
{
    snprintf(prefix, sizeof(prefix), "%s", text);
    end_job = end;
}

static const char *(*write_box)(const char *why);

void iz_die_set_box(const char *(*box)(const char *why))
{
    write_box = box;
}

static int clamp_len(int len, int room)
{
    return len < 0 ? 0 : len < room ? len : room - 1;
}

/* One write, so that lines of several ranks do not mix. */
static void die_print_line(bool stuck, const char *fmt, va_list ap)
{
    char line[1024];
    const int room = (int)sizeof(line) - 1; /* the newline */
    int begin =
        clamp_len(snprintf(line, (size_t)room, "izar: %s", prefix), room);
    int len = begin + clamp_len(vsnprintf(line + begin, (size_t)(room - begin),
                                          fmt, ap),
                                room - begin);
    const char *box = stuck && write_box ? write_box(line + begin) : NULL;
    if (box)
        len +=
            clamp_len(snprintf(line + len, (size_t)(room - len), " (%s)", box),
                      room - len);
    line[len++] = '\n';
    ssize_t done = write(STDERR_FILENO, line, (size_t)len);
    (void)done; /* nobody is left to tell */
}

static IZ_NORETURN void die(bool stuck, const char *fmt, va_list ap)
{
    /* The first message names the cause; later ones would only follow from it.
     */
    while (atomic_flag_test_and_set(&dying))
        pause();
    die_print_line(stuck, fmt, ap);
    if (end_job)
        end_job(EXIT_FAILURE);
    abort();
}

void iz_die(const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    die(false, fmt, ap);
}

void iz_die_stuck(const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    die(true, fmt, ap);
}
