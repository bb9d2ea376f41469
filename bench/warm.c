/* SPDX-License-Identifier: Apache-2.0 */
/* usage: warm MIB COMMAND...
 * Runs a training command whose weights are MIB, in memory that was used just
 * before: holds as much until the command has mapped three times that
 * (gradients and states too), then lets go of it.  A virtual machine may give
 * free memory back to its host at any time, and gets it again far slower than a
 * processor can write it.  The exit status is the command's. */
#define _GNU_SOURCE /* madvise */

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static char *hold(size_t bytes)
{
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    if (p == MAP_FAILED) {
        perror("warm");
        exit(1);
    }
    madvise(p, bytes, MADV_HUGEPAGE);
    memset(p, 1, bytes);
    return p;
}

static bool has_mapped(pid_t pid, size_t bytes)
{
    char path[64];
    size_t pages = 0;
    FILE *f;

    snprintf(path, sizeof(path), "/proc/%d/statm", (int)pid);
    f = fopen(path, "r");
    if (!f)
        return false;
    if (fscanf(f, "%zu", &pages) != 1)
        pages = 0;
    fclose(f);
    return pages * (size_t)sysconf(_SC_PAGESIZE) >= bytes;
}

/* Lets go of p when the command has mapped thrice as much; the status with
 * which the command ends. */
static int let_go(pid_t pid, char *p, size_t bytes)
{
    const struct timespec nap = {.tv_nsec = 1000000};
    int status;

    while (!has_mapped(pid, 3 * bytes)) {
        if (waitpid(pid, &status, WNOHANG) == pid)
            return status;
        nanosleep(&nap, NULL);
    }
    munmap(p, bytes);
    return waitpid(pid, &status, 0) == pid ? status : -1;
}

int main(int argc, char **argv)
{
    size_t bytes = argc > 2 ? (size_t)atoll(argv[1]) << 20 : 0;
    char *p;
    pid_t pid;
    int status;

    if (!bytes) {
        fprintf(stderr, "usage: warm MIB COMMAND...\n");
        return 2;
    }
    p = hold(bytes);
    pid = fork();
    if (pid == 0) {
        execvp(argv[2], argv + 2);
        perror(argv[2]);
        _exit(127);
    }
    status = pid < 0 ? -1 : let_go(pid, p, bytes);
    return status >= 0 && WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}
