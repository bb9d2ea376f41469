/* SPDX-License-Identifier: Apache-2.0 */
/* Reading JSON with jansson: indexes and headers of weights, configs of others;
 * writing a string.  A missing or foreign value reads as NULL or -1. */
#pragma once

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "runtime/base/key.h"

/* Any JSON value; members that occur twice are refused.  NULL: not JSON. */
json_t *iz_json_open(const char *text, int64_t bytes);
/* The object that a whole file is.  In one that jansson does not take,
 * Infinity, NaN and integers of more than 18 digits become strings, which
 * iz_json_put prints as they were.  NULL with the fault printed on `err`, which
 * may be NULL.
 */
json_t *iz_json_read(const char *path, FILE *err);

/* Calls `take` with each object of a file that has one on each line, if `name`
 * is its first member; a file that cannot be opened has none.  The object is
 * borrowed. */
void iz_json_lines(const char *path, const char *name,
                   void (*take)(void *arg, json_t *line), void *arg);

/* Members or items; 0 of anything else. */
int64_t iz_json_count(const json_t *v);
/* The keys of an object in turn: the first after NULL, NULL after the last. */
const char *iz_json_key(const json_t *object, const char *after);
/* -1 if it is not an integer from 0 to max. */
int64_t iz_json_number(const json_t *v, int64_t max);
/* The member "a.b" of nested objects; NULL: there is none. */
const json_t *iz_json_at(const json_t *v, const char *name);
/* Members of an object: a number, -1 where there is none; text, "" likewise. */
int64_t iz_json_count_of(const json_t *object, const char *key);
const char *iz_json_text_of(const json_t *object, const char *key);
/* Whether two values are equal; numbers are by what they are, 1 and 1.0 too. */
bool iz_json_same(const json_t *a, const json_t *b);
/* On one line; malloc'ed.  NULL: no memory. */
char *iz_json_dump(const json_t *v);
/* Prints what that made of a part of a file. */
void iz_json_put(FILE *out, const char *text);

/* A string with its quotes. */
void iz_json_print(FILE *out, const char *s);

/* Members of JSON objects that are written by their dotted names: the sections
 * that are open. */
struct iz_nest {
    FILE *out;
    char open[IZ_KEY_NAME_MAX]; /* dotted, "" at the top level */
    int indent, depth;
    bool first; /* nothing in the innermost section yet */
};

/* Ends and begins sections until the key can follow, and writes its name. */
void iz_nest_name(struct iz_nest *n, const char *name);
/* Ends the innermost section. */
void iz_nest_end(struct iz_nest *n);
