/* SPDX-License-Identifier: Apache-2.0 */
/* Loaded before a program: takes SIGHUP before main, as UCX does. */
#include <signal.h>

static void nothing(int number)
{
}

static void __attribute__((constructor)) take(void)
{
    signal(SIGHUP, nothing);
}
