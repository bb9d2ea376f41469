/* SPDX-License-Identifier: Apache-2.0 */
/* A child process that ends through iz_die. */
#include "tests/codelets/gpu/dies.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "codelets/base/die.h"

enum { DIED = 43 };

static void leave(int status)
{
    _exit(DIED);
}

void dies(void (*f)(void), const char *message)
{
    char text[1024] = "";
    int fd[2], status;
    ssize_t n;
    pid_t pid;

    assert_int_equal(pipe(fd), 0);
    pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        dup2(fd[1], STDERR_FILENO);
        iz_die_set("", leave);
        f();
        _exit(0);
    }
    close(fd[1]);
    n = read(fd[0], text, sizeof(text) - 1); /* iz_die writes once */
    close(fd[0]);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == DIED);
    assert_true(n > 0);
    if (!strstr(text, message))
        fail_msg("it said: %s", text);
}
