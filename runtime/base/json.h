/* SPDX-License-Identifier: Apache-2.0 */
/* Reading JSON: indexes and headers of weights, configs of others; writing a
 * string.  Nothing here fails on what it finds; a missing or foreign value
 * reads as NULL or -1. */
#pragma once

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

struct iz_json;

/* Any JSON value; members that occur twice are refused.  NULL: not JSON. */
struct iz_json *iz_json_open(const char *text, int64_t bytes);
/* The object that a whole file is.  NULL with the fault told on `err`, which
 * may be NULL. */
struct iz_json *iz_json_read(const char *path, FILE *err);
/* Accepts NULL. */
void iz_json_close(struct iz_json **v);

/* Values inside others live as long as the outermost one. */
const struct iz_json *iz_json_member(const struct iz_json *object,
                                     const char *key);
const struct iz_json *iz_json_item(const struct iz_json *array, int64_t i);
/* Members or items; 0 of anything else. */
int64_t iz_json_count(const struct iz_json *v);
/* The keys of an object in turn: the first after NULL, NULL after the last. */
const char *iz_json_key(const struct iz_json *object, const char *after);

/* NULL if it is not a string. */
const char *iz_json_text(const struct iz_json *v);
/* -1 if it is not an integer from 0 to max. */
int64_t iz_json_number(const struct iz_json *v, int64_t max);

/* A string with its quotes. */
void iz_json_print(FILE *out, const char *s);

bool iz_json_is_object(const struct iz_json *v);
bool iz_json_equal(const struct iz_json *a, const struct iz_json *b);
/* On one line; malloc'ed.  NULL: no memory. */
char *iz_json_dump(const struct iz_json *v);
