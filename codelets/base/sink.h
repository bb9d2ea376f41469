/* SPDX-License-Identifier: Apache-2.0 */
/* Text for a file without malloc and stdio: what may be written in a signal's
 * handler. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

struct iz_sink {
    int fd, n; /* n: bytes in buf.  fd -1: no more than fits */
    bool failed;
    char buf[4096];
};

void iz_sink_text(struct iz_sink *s, const char *text);
/* `, "key": `, and without the comma at the begin of an object or list. */
void iz_sink_key(struct iz_sink *s, const char *key);
/* With a key if it is not NULL: text in quotes, in which ? stands for what
 * would need a backslash; a number; ns as us with three digits behind the
 * point. */
void iz_sink_string(struct iz_sink *s, const char *key, const char *text);
void iz_sink_number(struct iz_sink *s, const char *key, int64_t v);
void iz_sink_us(struct iz_sink *s, const char *key, int64_t ns);
void iz_sink_flush(struct iz_sink *s);
