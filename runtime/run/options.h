/* SPDX-License-Identifier: Apache-2.0 */
/* The command line of a model's program. */
#pragma once

#include "runtime/run/run.h"

struct iz_options {
    const char *path; /* config.json */
    char **set;       /* key=value, borrowed from argv; array owned */
    int n_set;
    bool resume, plan, parameters, help, help_markdown, version;
    bool replay; /* steps from..to of the run with output `path` */
    int64_t from, to;
    int ranks;           /* --plan for this many; 0: those of the run */
    const char *machine; /* --plan for this one, or NULL; borrowed */
    char steps[64];      /* "run.steps=N" or "" */
    char *own[2];        /* of a replay: path and run.output; NULL: none */
};

/* Returns 0, or -EINVAL with the reason printed. */
int iz_options_read(struct iz_options *o, int argc, char **argv);
void iz_options_clear(struct iz_options *o);
/* Prints a text that they ask for in place of a run; false: they ask for none.
 */
bool iz_options_told(const struct iz_options *o, const struct iz_program *p,
                     const char *argv0);
