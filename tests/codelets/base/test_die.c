/* SPDX-License-Identifier: Apache-2.0 */
/* iz_die in a child process: one whole line, then the ending that was set,
 * whatever other threads do; and the choice of a SIMD level, which may end so.
 */
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "codelets/base/die.h"
#include "codelets/flat/simd.h"

enum { THREADS = 8 };

/* What the child wrote on standard error, and how it ended. */
struct ending {
    char text[4096];
    int status;
};

static void run_child(struct ending *e, void (*body)(void))
{
    int fd[2];
    size_t len = 0;
    ssize_t n;
    pid_t pid;

    assert_int_equal(pipe(fd), 0);
    pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        dup2(fd[1], STDERR_FILENO);
        close(fd[0]);
        body();
        _exit(99);
    }
    close(fd[1]);
    while ((n = read(fd[0], e->text + len, sizeof(e->text) - 1 - len)) > 0)
        len += (size_t)n;
    e->text[len] = '\0';
    close(fd[0]);
    assert_int_equal(waitpid(pid, &e->status, 0), pid);
}

static void leave(int status)
{
    _exit(status + 2);
}

static void die_plainly(void)
{
    iz_die("no %s for %d", "room", 5);
}

static void die_with_ending(void)
{
    iz_die_set("rank 3: ", leave);
    iz_die("lost");
}

static void die_at_length(void)
{
    char text[3000];

    memset(text, 'x', sizeof(text));
    text[sizeof(text) - 1] = '\0';
    iz_die_set("", leave);
    iz_die("%s", text);
}

static pthread_barrier_t together;

static void *die_in_thread(void *arg)
{
    pthread_barrier_wait(&together);
    iz_die("thread %d", *(int *)arg);
    return NULL;
}

static void leave_late(int status)
{
    nanosleep(&(struct timespec){.tv_nsec = 20000000},
              NULL); /* others have time to print, if they would */
    _exit(status + 2);
}

static void die_in_threads(void)
{
    pthread_t t[THREADS];
    int id[THREADS];

    iz_die_set("rank 0: ", leave_late);
    pthread_barrier_init(&together, NULL, THREADS);
    for (int i = 0; i < THREADS; i++) {
        id[i] = i;
        pthread_create(&t[i], NULL, die_in_thread, &id[i]);
    }
    pthread_join(t[0], NULL);
}

static void without_an_ending_it_aborts(void **state)
{
    struct ending e;

    run_child(&e, die_plainly);
    assert_string_equal(e.text, "izar: no room for 5\n");
    assert_true(WIFSIGNALED(e.status) && WTERMSIG(e.status) == SIGABRT);
}

static void the_ending_gets_a_failure_status(void **state)
{
    struct ending e;

    run_child(&e, die_with_ending);
    assert_string_equal(e.text, "izar: rank 3: lost\n");
    assert_true(WIFEXITED(e.status) && WEXITSTATUS(e.status) == 3);
}

static void a_long_message_is_cut_to_one_line(void **state)
{
    struct ending e;

    run_child(&e, die_at_length);
    assert_true(strlen(e.text) > 1000 && strlen(e.text) <= 1024);
    assert_true(strchr(e.text, '\n') == e.text + strlen(e.text) - 1);
}

static void only_the_first_thread_speaks(void **state)
{
    struct ending e;

    run_child(&e, die_in_threads);
    assert_true(strncmp(e.text, "izar: rank 0: thread ", 21) == 0);
    assert_true(strchr(e.text, '\n') == e.text + strlen(e.text) - 1);
    assert_true(WIFEXITED(e.status) && WEXITSTATUS(e.status) == 3);
}

static void choose_an_unknown_level(void)
{
    setenv("IZ_SIMD", "mmx", 1);
    iz_simd();
}

static void choose_the_last_level(void)
{
    setenv("IZ_SIMD", "portable", 1);
    _exit(strcmp(iz_simd_name(), "portable") == 0 ? 7 : 8);
}

static void a_simd_level_is_obeyed_or_refused(void **state)
{
    struct ending e = {0};

    run_child(&e, choose_an_unknown_level);
    assert_string_equal(e.text, "izar: IZ_SIMD=mmx: no such SIMD level in this "
                                "build\n");
    run_child(&e, choose_the_last_level);
    assert_true(WIFEXITED(e.status) && WEXITSTATUS(e.status) == 7);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(without_an_ending_it_aborts),
        cmocka_unit_test(the_ending_gets_a_failure_status),
        cmocka_unit_test(a_long_message_is_cut_to_one_line),
        cmocka_unit_test(only_the_first_thread_speaks),
        cmocka_unit_test(a_simd_level_is_obeyed_or_refused),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
