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
/* In quotes, as JSON; what would need a backslash becomes ?. */
void iz_sink_string(struct iz_sink *s, const char *text);
void iz_sink_number(struct iz_sink *s, int64_t v);
/* ns as us with three digits behind the point. */
void iz_sink_us(struct iz_sink *s, int64_t ns);
void iz_sink_hex(struct iz_sink *s, uint64_t v);
/* `, "key": `, and without the comma at the begin of an object or list. */
void iz_sink_key(struct iz_sink *s, const char *key);
void iz_sink_flush(struct iz_sink *s);
