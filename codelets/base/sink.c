/* SPDX-License-Identifier: Apache-2.0 */
/* Text without malloc and stdio; see sink.h. */
#include "codelets/base/sink.h"

#include <errno.h>
#include <unistd.h>

void iz_sink_flush(struct iz_sink *s)
{
    for (int at = 0; s->fd >= 0 && at < s->n && !s->failed;) {
        ssize_t n = write(s->fd, s->buf + at, (size_t)(s->n - at));
        s->failed = n < 0 && errno != EINTR;
        at += n > 0 ? (int)n : 0;
    }
    s->n = 0;
}

static void put(struct iz_sink *s, char c)
{
    if (s->n == (int)sizeof(s->buf) && s->fd >= 0)
        iz_sink_flush(s);
    if (s->n < (int)sizeof(s->buf))
        s->buf[s->n++] = c;
}

void iz_sink_text(struct iz_sink *s, const char *text)
{
    while (*text)
        put(s, *text++);
}

void iz_sink_string(struct iz_sink *s, const char *text)
{
    put(s, '"');
    for (; *text; text++) {
        bool plain =
            (unsigned char)*text >= 0x20 && *text != '"' && *text != '\\';
        put(s, plain ? *text : '?');
    }
    put(s, '"');
}

/* At least `least` digits. */
static void digits(struct iz_sink *s, uint64_t v, unsigned base, int least)
{
    char text[24];
    int n = 0;
    for (; v || n < least; v /= base)
        text[n++] = "0123456789abcdef"[v % base];
    while (n > 0)
        put(s, text[--n]);
}

void iz_sink_number(struct iz_sink *s, int64_t v)
{
    if (v < 0)
        put(s, '-');
    digits(s, v < 0 ? -(uint64_t)v : (uint64_t)v, 10, 1);
}

void iz_sink_us(struct iz_sink *s, int64_t ns)
{
    uint64_t v = ns < 0 ? -(uint64_t)ns : (uint64_t)ns;
    if (ns < 0)
        put(s, '-');
    digits(s, v / 1000, 10, 1);
    put(s, '.');
    digits(s, v % 1000, 10, 3);
}

void iz_sink_hex(struct iz_sink *s, uint64_t v)
{
    digits(s, v, 16, 1);
}

void iz_sink_key(struct iz_sink *s, const char *key)
{
    char last = s->n ? s->buf[s->n - 1] : ',';
    if (last != '{' && last != '[')
        iz_sink_text(s, ", ");
    iz_sink_string(s, key);
    iz_sink_text(s, ": ");
}
