/* SPDX-License-Identifier: Apache-2.0 */
/* The files that a list such as data.path names. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

struct iz_paths {
    char **path;
    int count, room;
    FILE *err; /* where faults are told, or NULL */
};

/* The files that a list with commas names: each entry a file or, where no file
 * has that name, a pattern of glob(7), whose files come in the order of their
 * names.  A name that is no pattern is kept even if no file has it.  A pattern
 * without a file and a file named twice are refused, both told on `err`. */
int iz_paths_open(struct iz_paths *p, const char *list, FILE *err);
void iz_paths_close(struct iz_paths *p);
/* The first file of a list; false: it is not there. */
bool iz_paths_first(char *out, size_t size, const char *list);
