/* SPDX-License-Identifier: Apache-2.0 */
/* usage: overhead [TASKS]
 * What a task costs: tasks that do nothing, through our submission door,
 * against StarPU's own.  Prints us per task, submission and execution together.
 */
#include <stdio.h>
#include <stdlib.h>

#include "codelets/task.h"

#define HANDLES 8

static void nothing(struct iz_exec *x, void **buf, const void *arg)
{
    (void)x;
    (void)buf;
    (void)arg;
}

static void nothing_cpu(void *buffers[], void *arg)
{
    (void)buffers;
    (void)arg;
}

static struct starpu_codelet bare = {.cpu_funcs = {nothing_cpu},
                                     .nbuffers = 2,
                                     .modes = {STARPU_R, STARPU_RW},
                                     .name = "bare"};

static double ours(struct iz_graph *g, starpu_data_handle_t *h, int n,
                   double *submit_us)
{
    int64_t begin = iz_now_ns();
    for (int i = 0; i < n; i++)
        iz_submit(
            g, &(struct iz_task){.kind = IZ_NORM,
                                 .run = nothing,
                                 .data = {{h[i % HANDLES], STARPU_R},
                                          {h[(i + 1) % HANDLES], STARPU_RW}}});
    *submit_us = (double)(iz_now_ns() - begin) * 1e-3 / n;
    iz_graph_wait(g);
    return (double)(iz_now_ns() - begin) * 1e-3 / n;
}

static double starpus(starpu_data_handle_t *h, int n, double *submit_us)
{
    int64_t begin = iz_now_ns();
    for (int i = 0; i < n; i++) {
        struct starpu_task *t = starpu_task_create();
        t->cl = &bare;
        t->handles[0] = h[i % HANDLES];
        t->handles[1] = h[(i + 1) % HANDLES];
        if (starpu_task_submit(t))
            return 0;
    }
    *submit_us = (double)(iz_now_ns() - begin) * 1e-3 / n;
    starpu_task_wait_for_all();
    return (double)(iz_now_ns() - begin) * 1e-3 / n;
}

int main(int argc, char **argv)
{
    int n = argc > 1 ? atoi(argv[1]) : 20000;
    struct iz_graph_config c = {
        .workers = 2, .device = -1, .scheduler = "prio"};
    struct iz_graph *g = NULL;
    starpu_data_handle_t h[HANDLES];
    static double value[HANDLES];
    if (iz_graph_open(&g, &c, NULL))
        return 1;
    for (int i = 0; i < HANDLES; i++)
        starpu_variable_data_register(&h[i], STARPU_MAIN_RAM,
                                      (uintptr_t)&value[i], sizeof(value[i]));
    printf("%-10s %12s %18s\n", "door", "submit us", "submit and run us");
    for (int round = 0; round < 3; round++) {
        double a_submit = 0, b_submit = 0;
        double a = ours(g, h, n, &a_submit), b = starpus(h, n, &b_submit);
        printf("%-10s %12.2f %18.2f\n", "izar", a_submit, a);
        printf("%-10s %12.2f %18.2f\n", "StarPU", b_submit, b);
    }
    for (int i = 0; i < HANDLES; i++)
        starpu_data_unregister(h[i]);
    iz_graph_close(&g);
    return 0;
}
