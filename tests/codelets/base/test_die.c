/* SPDX-License-Identifier: Apache-2.0 */
/* iz_die in a child process: one whole line, then the ending that was set,
 * whatever other threads do; and the choice of a SIMD level, which may end so.
 */
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "codelets/base/die.h"
#include "codelets/flat/simd.h"
#include "tests/codelets/base/dies.h"

enum { THREADS = 8 };

static void leave(int status)
{
    _exit(status + 2);
}

/* How a child has ended: by exit with this status. */
static bool exited(const struct ending *e, int status)
{
    return WIFEXITED(e->status) && WEXITSTATUS(e->status) == status;
}

static void die_plainly(const void *arg)
{
    iz_die("no %s for %d", "room", 5);
}

static void without_an_ending_it_aborts(void **state)
{
    struct ending e = ending_of(die_plainly, NULL);
    assert_string_equal(e.text, "izar: no room for 5\n");
    assert_true(WIFSIGNALED(e.status) && WTERMSIG(e.status) == SIGABRT);
}

static void die_with(const void *text)
{
    iz_die_set("rank 3: ", leave);
    iz_die("%s", (const char *)text);
}

/* A long message is cut to one line. */
static void the_ending_gets_a_failure_status(void **state)
{
    char text[3000] = "";
    struct ending e = ending_of(die_with, "lost");
    assert_string_equal(e.text, "izar: rank 3: lost\n");
    assert_true(exited(&e, 3));
    memset(text, 'x', sizeof(text) - 1);
    e = ending_of(die_with, text);
    assert_true(strlen(e.text) > 1000 && strlen(e.text) <= 1024);
    assert_true(strchr(e.text, '\n') == e.text + strlen(e.text) - 1);
}

static pthread_barrier_t together;

static void *die_in_thread(void *arg)
{
    pthread_barrier_wait(&together);
    iz_die("thread %d", *(int *)arg);
    return NULL;
}

/* Others have time to print, if they would. */
static void leave_late(int status)
{
    nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL);
    leave(status);
}

static void die_in_threads(const void *arg)
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

static void only_the_first_thread_speaks(void **state)
{
    struct ending e = ending_of(die_in_threads, NULL);
    assert_true(strncmp(e.text, "izar: rank 0: thread ", 21) == 0);
    assert_true(strchr(e.text, '\n') == e.text + strlen(e.text) - 1);
    assert_true(exited(&e, 3));
}

static void choose_level(const void *name)
{
    setenv("IZ_SIMD", name, 1);
    _exit(strcmp(iz_simd_name(), name) == 0 ? 7 : 8);
}

static void a_simd_level_is_obeyed_or_refused(void **state)
{
    struct ending e = ending_of(choose_level, "mmx");
    assert_string_equal(e.text, "izar: IZ_SIMD=mmx: no such SIMD level in this "
                                "build\n");
    e = ending_of(choose_level, "portable");
    assert_true(exited(&e, 7));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(without_an_ending_it_aborts),
        cmocka_unit_test(the_ending_gets_a_failure_status),
        cmocka_unit_test(only_the_first_thread_speaks),
        cmocka_unit_test(a_simd_level_is_obeyed_or_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
