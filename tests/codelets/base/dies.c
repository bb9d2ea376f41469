/* SPDX-License-Identifier: Apache-2.0 */
/* Child processes, whose end is seen; see dies.h. */
#include "tests/codelets/base/dies.h"

#include <signal.h>
#include <string.h>
#include <unistd.h>

#include "codelets/base/die.h"

enum { RETURNED = 99, DIED = 43 };

struct ending ending_of(void (*f)(const void *arg), const void *arg)
{
    struct ending e = {.text = ""};
    size_t len = 0;
    int fd[2];
    ssize_t n;
    assert_int_equal(pipe(fd), 0);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        signal(SIGSEGV, SIG_DFL); /* not the test's */
        signal(SIGABRT, SIG_DFL);
        dup2(fd[1], STDERR_FILENO);
        close(fd[0]);
        f(arg);
        _exit(RETURNED);
    }
    close(fd[1]);
    while ((n = read(fd[0], e.text + len, sizeof(e.text) - 1 - len)) > 0)
        len += (size_t)n;
    close(fd[0]);
    assert_int_equal(waitpid(pid, &e.status, 0), pid);
    return e;
}

static void leave(int status)
{
    _exit(DIED);
}

void dies(void (*f)(const void *arg), const void *arg, const char *message)
{
    iz_die_set("", leave);
    struct ending e = ending_of(f, arg);
    iz_die_set("", NULL);
    assert_true(WIFEXITED(e.status) && WEXITSTATUS(e.status) == DIED);
    if (!strstr(e.text, message))
        fail_msg("it said: %s", e.text);
}
