/* SPDX-License-Identifier: Apache-2.0 */
/* The program around a model: arguments, config, plan, training, summary. Every
 * model's main is one call of iz_run. */
#pragma once

#include "codelets/unit/layer.h"
#include "runtime/config/config.h"

struct iz_coll;

/* What a model's program needs to know of its model. */
struct iz_program {
    const char *name;          /* "gpt2" */
    const char *about;         /* one line for --help */
    struct iz_section section; /* keys of "model"; target is filled */
    /* Creates the model from section.target.  Negative errno, reason printed.
     */
    int (*open)(struct iz_model **out, const void *target);
};

/* Returns the exit status. */
int iz_run(int argc, char **argv, const struct iz_program *p);
/* The same on ranks that are there, of a config with `n` overrides, for a
 * caller whose signals are its own: SIGINT and its like end the process.  0, or
 * a negative errno with the reason printed. */
int iz_run_on(struct iz_coll *coll, const struct iz_program *p,
              const char *config, char **set, int n);
