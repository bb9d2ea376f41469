/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE /* syscall */
#include "codelets/base/futex.h"

#include <limits.h>
#include <linux/futex.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

void iz_futex_sleep(struct iz_futex *f, uint32_t seen, long ns)
{
    struct timespec t = {.tv_nsec = ns};
    atomic_fetch_add(&f->sleepers, 1);
    syscall(SYS_futex, &f->changes, FUTEX_WAIT, seen, &t, NULL, 0);
    atomic_fetch_sub(&f->sleepers, 1);
}

void iz_futex_wake(struct iz_futex *f)
{
    atomic_fetch_add(&f->changes, 1);
    if (atomic_load(&f->sleepers) > 0)
        syscall(SYS_futex, &f->changes, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}
