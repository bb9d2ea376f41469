/* SPDX-License-Identifier: Apache-2.0 */
/* What the config suites share: a model section as a model would have it, and
 * reading a config from text with what it says about it. */
#pragma once

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "runtime/config/config.h"

#define N_OF(a) ((int)(sizeof(a) / sizeof(a)[0]))

struct toy {
    int layers, width;
    double dropout;
    bool bias;
    enum { TOY_GELU, TOY_RELU } act;
    char name[8];
};

extern struct toy toy;
extern const struct iz_section toy_section;

/* As DeepSpeed's own pages show files, with every kind of key; for 3 ranks. */
extern const char users_file[];

/* Of the last read: the config, and what was printed. */
extern struct iz_config config;
extern char said[65536];

/* Paths in the folder of make_folder. */
extern char config_json[64], effective_json[64];

int make_folder(void **state);
int remove_folder(void **state); /* fails when a temporary file was left */

void write_file(const char *path, const char *text);
void read_whole(const char *path, char *text, size_t size);

/* iz_config_read of this text, or of no file when it is NULL. */
int read_set(const char *json, char *const *set, int n_set, int ranks);
int read_text(const char *json);
/* key=value as an override, beside a batch size. */
int read_override(const char *key, const char *value);

int lines_of(const char *s);
void assert_said(const char *text);
/* Reads `body` beside a batch size: exactly one fault, with `text` in it. */
void assert_refused(const char *body, const char *text);
void assert_accepted(const char *body);
