/* SPDX-License-Identifier: Apache-2.0 */
/* cmocka, and child processes for what ends the job. */
#pragma once

/* cmocka.h needs these four. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <sys/wait.h>

/* What a child process wrote on standard error, and its status of waitpid. */
struct ending {
    char text[8192];
    int status;
};

/* Calls f(arg) in a child process; it exits with 99 where f returns. */
struct ending ending_of(void (*f)(const void *arg), const void *arg);

/* f(arg) must end through iz_die with a text that contains `message`. */
void dies(void (*f)(const void *arg), const void *arg, const char *message);
