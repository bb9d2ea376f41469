/* SPDX-License-Identifier: Apache-2.0 */
/* usage: overhead TASKS [ROUNDS | izar | StarPU]
 * What a task costs: tasks that do nothing, through our submission door and
 * through StarPU's own, alternating.  Prints a JSON object per round and door:
 * us per task to submit, and until all have run.  With the name of a door: KiB
 * per task that waits; in a process of its own, because what is freed is not
 * given back to the system. */
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "codelets/task/task.h"

#define HANDLES 8

static sem_t gate;

static void nothing(struct iz_exec *x, void **buf, const void *arg)
{
}

static void hold(struct iz_exec *x, void **buf, const void *arg)
{
    nothing(x, buf, arg);
    sem_wait(&gate);
}

static void nothing_cpu(void *buffers[], void *arg)
{
}

static struct starpu_codelet bare = {.cpu_funcs = {nothing_cpu},
                                     .nbuffers = 2,
                                     .modes = {STARPU_R, STARPU_RW},
                                     .name = "bare"};

struct setup {
    struct iz_graph *g;
    starpu_data_handle_t h[HANDLES];
};

static void ours(struct setup *s, int i)
{
    iz_task_submit(s->g, &(struct iz_task){
                             .kind = IZ_NORM,
                             .run = nothing,
                             .data = {{s->h[i % HANDLES], STARPU_R},
                                      {s->h[(i + 1) % HANDLES], STARPU_RW}}});
}

static void starpus(struct setup *s, int i)
{
    struct starpu_task *t = starpu_task_create();
    t->cl = &bare;
    t->handles[0] = s->h[i % HANDLES];
    t->handles[1] = s->h[(i + 1) % HANDLES];
    if (starpu_task_submit(t))
        abort();
}

static const struct door {
    const char *name;
    void (*submit)(struct setup *s, int i);
} doors[] = {{"izar", ours}, {"StarPU", starpus}};

static double since_us(int64_t begin)
{
    return (double)(iz_clock_ns() - begin) * 1e-3;
}

static double resident_kib(void)
{
    long pages = 0, all;
    FILE *f = fopen("/proc/self/statm", "r");
    if (!f || fscanf(f, "%ld %ld", &all, &pages) != 2)
        abort();
    fclose(f);
    return (double)pages * (double)sysconf(_SC_PAGESIZE) / 1024;
}

static void time_door(struct setup *s, const struct door *d, int n)
{
    int64_t begin = iz_clock_ns();
    double submit;
    for (int i = 0; i < n; i++)
        d->submit(s, i);
    submit = since_us(begin) / n;
    starpu_task_wait_for_all();
    printf("{\"door\": \"%s\", \"submit_us\": %.3f, \"total_us\": %.3f}\n",
           d->name, submit, since_us(begin) / n);
}

/* All tasks wait for one that holds the data of all. */
static void weigh_door(struct setup *s, const struct door *d, int n)
{
    double before = resident_kib(), after;
    struct iz_task t = {.kind = IZ_NORM, .run = hold};
    for (int i = 0; i < HANDLES; i++)
        t.data[i] = (struct iz_access){s->h[i], STARPU_RW};
    iz_task_submit(s->g, &t);
    for (int i = 0; i < n; i++)
        d->submit(s, i);
    after = resident_kib();
    sem_post(&gate);
    starpu_task_wait_for_all();
    printf("{\"door\": \"%s\", \"waiting\": %d, \"kib_per_task\": %.3f}\n",
           d->name, n, (after - before) / n);
}

static void time_doors(struct setup *s, int n, int rounds)
{
    for (int r = 0; r < rounds; r++)
        for (int d = 0; d < 2; d++)
            time_door(s, &doors[(r + d) % 2], n);
}

int main(int argc, char **argv)
{
    int n = argc > 1 ? atoi(argv[1]) : 20000;
    int rounds = argc > 2 ? atoi(argv[2]) : 3;
    struct iz_graph_config c = {
        .workers = 2, .device = -1, .scheduler = "prio"};
    static double value[HANDLES];
    struct setup s = {0};
    const struct door *weighed = NULL;
    for (int d = 0; d < 2 && argc > 2; d++)
        if (strcmp(argv[2], doors[d].name) == 0)
            weighed = &doors[d];
    if (n < 1 || (rounds < 1 && !weighed)) {
        fprintf(stderr, "usage: overhead TASKS [ROUNDS | izar | StarPU]\n");
        return 2;
    }
    if (iz_graph_open(&s.g, &c))
        return 1;
    sem_init(&gate, 0, 0);
    for (int i = 0; i < HANDLES; i++)
        starpu_variable_data_register(&s.h[i], STARPU_MAIN_RAM,
                                      (uintptr_t)&value[i], sizeof(value[i]));
    if (weighed)
        weigh_door(&s, weighed, n);
    else
        time_doors(&s, n, rounds);
    for (int i = 0; i < HANDLES; i++)
        starpu_data_unregister(s.h[i]);
    sem_destroy(&gate);
    iz_graph_close(&s.g);
    return 0;
}
