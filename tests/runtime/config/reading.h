/* SPDX-License-Identifier: Apache-2.0 */
/* What the config suites share: a model section as a model would have it, and
 * reading a config from text with what it says about it. */
#pragma once

#include "runtime/config/config.h"
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
extern const struct iz_section toy_section;

/* As DeepSpeed's own pages show files, with every kind of key; for 3 ranks. */
#define USERS_FILE "tests/runtime/config/users.json"

/* Of the last read; what was printed is in `said`. */
extern struct iz_config config;
extern char notes[4096]; /* what iz_config_read printed of a good file */

/* Around a suite. */
int remove_configs(void **state); /* fails when a temporary file was left */

/* iz_config_read of a file, or of none when it is NULL. */
int read_file(const char *path, char *const *set, int n_set, int ranks);
/* Of a text, in which ' stands for ". */
int read_text(const char *text);
/* key=value as an override, beside a batch size. */
int read_override(const char *key, const char *value);
/* The config has these values of keys: "key value;key value", in which ' stands
 * for ". */
void assert_settings(const char *gives);
/* What was just read, written and read again, is the same, byte for byte. */
void assert_round_trip(int ranks);
/* The config as iz_config_write writes it; valid until the next call. */
const char *effective(void);

/* One fault, with `words` in it.  read_refused: of a whole text, or of none,
 * and an override or none. */
void read_refused(const char *text, const char *set, int ranks,
                  const char *words);
/* Of what stands beside a batch size. */
void assert_refused(const char *body, const char *words);
void assert_accepted(const char *body);
int lines_of(const char *s);
/* Calls check for each case of a file: a line, with each of the indented ones
 * behind it, in which $ stands for the end of a line.  # begins a comment. */
void each_case(const char *path,
               void (*check)(const char *body, const char *words));
