/* SPDX-License-Identifier: Apache-2.0 */
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

static void quote(struct iz_sink *s, const char *text)
{
    put(s, '"');
    for (; *text; text++) {
        bool plain =
            (unsigned char)*text >= 0x20 && *text != '"' && *text != '\\';
        put(s, plain ? *text : '?');
    }
    put(s, '"');
}

void iz_sink_key(struct iz_sink *s, const char *key)
{
    char last = s->n ? s->buf[s->n - 1] : ',';
    if (!key)
        return;
    if (last != '{' && last != '[')
        iz_sink_text(s, ", ");
    quote(s, key);
    iz_sink_text(s, ": ");
}

void iz_sink_string(struct iz_sink *s, const char *key, const char *text)
{
    iz_sink_key(s, key);
    quote(s, text);
}

/* At least `least` digits of v >= 0. */
static void digits(struct iz_sink *s, int64_t v, int least)
{
    char text[24];
    int n = 0;
    for (; v || n < least; v /= 10)
        text[n++] = (char)('0' + v % 10);
    while (n > 0)
        put(s, text[--n]);
}

void iz_sink_number(struct iz_sink *s, const char *key, int64_t v)
{
    iz_sink_key(s, key);
    if (v < 0)
        put(s, '-');
    digits(s, v < 0 ? -v : v, 1);
}

void iz_sink_us(struct iz_sink *s, const char *key, int64_t ns)
{
    iz_sink_number(s, key, ns / 1000);
    put(s, '.');
    digits(s, (ns < 0 ? -ns : ns) % 1000, 3);
}
