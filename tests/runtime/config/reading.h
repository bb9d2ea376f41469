/* SPDX-License-Identifier: Apache-2.0 */
/* What the config suites share: a model section as a model would have it, and
 * reading a config with what it says about it. */
#pragma once

#include "runtime/config/config.h"
#include "runtime/config/keys.h"
#include "tests/runtime/fixture.h"

struct toy {
    int layers, width;
    double dropout;
    bool bias;
    enum { TOY_GELU, TOY_RELU } act;
    char name[8];
    char blocks[8];
};

extern struct toy toy;
extern const struct iz_key toy_keys[];
extern const struct iz_section toy_section;

/* Of the last read; what was printed is in `said`. */
extern struct iz_config config;
extern char notes[4096]; /* what iz_config_read printed of a good file */

/* iz_config_read of a file, or of none when it is NULL. */
int read_file(const char *path, char *const *set, int n_set, int ranks);
/* key=value as an override, beside a batch size. */
int read_override(const char *key, const char *value);
