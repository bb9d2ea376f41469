/* SPDX-License-Identifier: Apache-2.0 */
/* Lists of words, numbers, text that is printed into memory, and refusals. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "codelets/base/build.h"

/* Copies word i of "a|b|c" to `word` (`size` bytes); false after the last. */
bool iz_text_word(char *word, size_t size, const char *words, int i);
/* Whether `word` is one of "a|b|c". */
bool iz_text_among(const char *word, const char *words);

/* The digits at *text, which moves behind them.  -1, and *text stays, if there
 * are none or the number does not fit. */
int64_t iz_text_decimal(const char **text);

struct iz_text {
    FILE *out; /* to print to */
    char *text;
    size_t bytes;
};

/* Returns t->out.  Without memory the job ends, here and below. */
FILE *iz_text_open(struct iz_text *t);
/* The text, malloc'ed; NULL: it was not opened. */
char *iz_text_close(struct iz_text *t);

/* Puts ? for control characters: names in a message come from files, and must
 * not break its line or reach a terminal as commands. */
void iz_text_make_printable(char *s);
/* What a checkout without Git LFS has in place of a large file. */
#define IZ_TEXT_POINTER "is a Git LFS pointer and not the file: git lfs pull"
bool iz_text_is_pointer(const void *begin, int64_t bytes);

/* Prints "izar: TEXT" as a line on `err`, unless that is NULL.  Returns
 * -EINVAL.
 */
int iz_text_refuse(FILE *err, const char *fmt, ...) IZ_PRINTF(2, 3);
