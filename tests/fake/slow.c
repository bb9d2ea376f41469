/* SPDX-License-Identifier: Apache-2.0 */
/* Loaded before a program: on rank SLOW_RANK the first fsync of a file with
 * SLOW_NAME in its path takes SLOW_S seconds, or sends the process the signal
 * SLOW_SIGNAL, or finds that the file's last byte has become SLOW_BYTE. */
#define _GNU_SOURCE /* syscall */
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "tests/fake/rank.h"

static int number(const char *variable)
{
    const char *s = getenv(variable);
    return s ? atoi(s) : 0;
}

static int is_slow(int fd)
{
    const char *name = getenv("SLOW_NAME");
    char link[64], path[4096] = "";
    snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
    return is_rank("SLOW_RANK") && name &&
           readlink(link, path, sizeof(path) - 1) > 0 && strstr(path, name);
}

static void put_last_byte(int fd, char byte)
{
    int err = pwrite(fd, &byte, 1, lseek(fd, 0, SEEK_END) - 1) != 1;
    if (err)
        perror("SLOW_BYTE");
}

int fsync(int fd)
{
    static atomic_int seen;
    if (is_slow(fd) && !atomic_fetch_add(&seen, 1)) {
        if (number("SLOW_SIGNAL"))
            raise(number("SLOW_SIGNAL"));
        if (getenv("SLOW_BYTE"))
            put_last_byte(fd, (char)number("SLOW_BYTE"));
        nanosleep(&(struct timespec){.tv_sec = number("SLOW_S")}, NULL);
    }
    return (int)syscall(SYS_fsync, fd);
}
