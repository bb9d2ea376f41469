/* SPDX-License-Identifier: Apache-2.0 */
/* Child processes of tests; see child.h. */
#define _GNU_SOURCE
#include "tests/standin/child.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

/* Reads to the end; what does not fit is dropped. */
static void read_all(int fd, char *text, size_t size)
{
    char rest[1024];
    size_t len = 0;
    ssize_t n;
    while ((n = read(fd, rest, sizeof(rest))) > 0) {
        size_t fits = size - 1 - len < (size_t)n ? size - 1 - len : (size_t)n;
        memcpy(text + len, rest, fits);
        len += fits;
    }
    text[len] = '\0';
}

void child_run(struct child *c, const char *name)
{
    int fd[2];
    c->status = -1;
    c->text[0] = '\0';
    if (pipe2(fd, O_CLOEXEC))
        return;
    pid_t pid = fork();
    if (pid == 0) {
        dup2(fd[1], STDERR_FILENO);
        execl("/proc/self/exe", "child", name, (char *)NULL);
        _exit(127);
    }
    close(fd[1]);
    read_all(fd[0], c->text, sizeof(c->text));
    close(fd[0]);
    if (pid > 0)
        waitpid(pid, &c->status, 0);
}

int child_main(const struct child_body *bodies, const char *name)
{
    for (; bodies->name; bodies++)
        if (strcmp(bodies->name, name) == 0) {
            bodies->run();
            return 0;
        }
    fprintf(stderr, "no child %s\n", name);
    return 2;
}
