/* SPDX-License-Identifier: Apache-2.0 */
/* The loss of a folder in the layout of Hugging Face: the program that reads it
 * makes a run of no steps here, whose validation it is. */
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/base/durable.h"
#include "runtime/base/json.h"
#include "runtime/run/run.h"
#include "tools/ckpt.h"

struct validation {
    int64_t step;
    double loss;
};

/* A loss that is not finite is written as a word. */
static void take_line(void *arg, json_t *line)
{
    struct validation *a = arg;
    const json_t *v = json_object_get(line, "validation_loss");
    if (v && iz_json_count_of(line, "step") == a->step)
        a->loss = json_is_number(v) ? json_number_value(v) : NAN;
}

double ckpt_validation(const char *output, int64_t step)
{
    char path[IZ_PATH_MAX + 32];
    struct validation a = {step, NAN};
    snprintf(path, sizeof(path), "%s/metrics.jsonl", output);
    iz_json_lines(path, "step", take_line, &a);
    return a.loss;
}

void ckpt_freeze(char *out, size_t size, const struct iz_model *m)
{
    int u = m->n_units - 1;
    while (u > 0 && !m->unit[u].n_params) /* a head may have none of its own */
        u--;
    snprintf(out, size,
             "parameters=[{\"match\": \"*\", \"frozen\": true}, "
             "{\"match\": \"%s\", \"frozen\": false}]",
             m->unit[u].param[0].name);
}

/* What a run prints is not what the tool prints. */
static int run_silently(struct iz_coll *coll, const struct iz_program *p,
                        const char *config, char **set, int n)
{
    fflush(stdout);
    int kept = dup(STDOUT_FILENO), none = open("/dev/null", O_WRONLY);
    if (kept >= 0 && none >= 0)
        dup2(none, STDOUT_FILENO);
    int err = iz_run_on(coll, p, config, set, n);
    fflush(stdout);
    if (kept >= 0)
        dup2(kept, STDOUT_FILENO);
    close(kept);
    close(none);
    return err;
}

double ckpt_loss(struct iz_coll *coll, const struct iz_program *p,
                 const char *config, const char *const *more)
{
    static const char *const all[] = {"*", NULL};
    char output[] = "/tmp/izar-loss-XXXXXX", imported[64], to[64];
    char *set[CKPT_SETTINGS + 4] = {"run.steps=0", "run.save=false",
                                    "run.export=", to};
    int n = 4;
    if (coll->rank == 0 && !mkdtemp(output)) {
        iz_durable_refuse("ckpt", output, "cannot create", errno);
        *output = '\0';
    }
    iz_coll_broadcast(coll, output, sizeof(output), 0, "a folder");
    if (!*output)
        return NAN;
    snprintf(to, sizeof(to), "run.output=%s", output);
    snprintf(imported, sizeof(imported), "%s/imported", output);
    while (n < CKPT_SETTINGS + 4 && *more)
        set[n++] = (char *)(uintptr_t)*more++;
    int err = run_silently(coll, p, config, set, n);
    double loss = err ? NAN : ckpt_validation(output, 0);
    if (!err && isnan(loss) && coll->rank == 0)
        fprintf(stderr, "ckpt: the loss is not finite\n");
    if (coll->rank == 0 && access(imported, F_OK) == 0)
        iz_durable_remove_directory("ckpt", imported, all);
    if (coll->rank == 0)
        iz_durable_remove_directory("ckpt", output, all);
    return loss;
}
