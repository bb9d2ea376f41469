/* SPDX-License-Identifier: Apache-2.0 */
/* Valid UTF-8, and normalisation form C through utf8proc. */
#include "runtime/tokenizer_parts.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

int iz_text_add(struct iz_text *t, const char *p, int64_t n)
{
    int64_t room = t->room ? t->room : 256;
    char *grown;

    while (room - t->bytes < n)
        room *= 2;
    if (room > t->room) {
        grown = realloc(t->p, (size_t)room);
        if (!grown)
            return -ENOMEM;
        t->p = grown;
        t->room = room;
    }
    if (n > 0)
        memcpy(t->p + t->bytes, p, (size_t)n);
    t->bytes += n;
    return 0;
}

/* Bytes of the character at p (not ASCII); 0: not valid.  Table 3-7 of the
 * Unicode standard: no surrogates, nothing overlong, at most U+10FFFF. */
static int character(const unsigned char *p, int64_t n)
{
    int bytes = p[0] < 0xc2   ? 0
                : p[0] < 0xe0 ? 2
                : p[0] < 0xf0 ? 3
                : p[0] < 0xf5 ? 4
                              : 0;
    unsigned char low = p[0] == 0xe0 ? 0xa0 : p[0] == 0xf0 ? 0x90 : 0x80;
    unsigned char high = p[0] == 0xed ? 0x9f : p[0] == 0xf4 ? 0x8f : 0xbf;

    if (bytes == 0 || bytes > n || p[1] < low || p[1] > high)
        return 0;
    for (int i = 2; i < bytes; i++)
        if ((p[i] & 0xc0) != 0x80)
            return 0;
    return bytes;
}

int64_t iz_utf8_valid(const char *text, int64_t n)
{
    const unsigned char *p = (const unsigned char *)text;
    int64_t i = 0;
    uint64_t eight;

    while (i < n) {
        int bytes = p[i] < 0x80 ? 1 : character(p + i, n - i);

        if (bytes == 0)
            break;
        i += bytes;
        for (; n - i >= 8; i += 8) {
            memcpy(&eight, p + i, 8);
            if (eight & 0x8080808080808080u)
                break;
        }
    }
    return i;
}

int64_t iz_utf8_invalid(const char *text, int64_t n)
{
    const unsigned char *p = (const unsigned char *)text;
    int64_t i = 0;

    while (i < n && p[i] >= 0x80 && character(p + i, n - i) == 0)
        i++;
    return i;
}

/* Below U+0300, whose UTF-8 begins with 0xcc, every text is in form C. */
bool iz_nfc_may_change(const char *p, int64_t n)
{
    unsigned char most = 0;

    for (int64_t i = 0; i < n; i++)
        most = (unsigned char)p[i] > most ? (unsigned char)p[i] : most;
    return most >= 0xcc;
}

static int compose(struct iz_text *t, const char *p, int64_t n)
{
    utf8proc_uint8_t *out = NULL;
    utf8proc_ssize_t bytes = utf8proc_map((const utf8proc_uint8_t *)p, n, &out,
                                          UTF8PROC_STABLE | UTF8PROC_COMPOSE);
    int err;

    if (bytes < 0)
        return bytes == UTF8PROC_ERROR_NOMEM ? -ENOMEM : -EINVAL;
    err = iz_text_add(t, (char *)out, bytes);
    free(out);
    return err;
}

/* Nothing composes with an ASCII character behind it: a stretch from one up to
 * the next can be composed alone. */
int iz_nfc_add(struct iz_text *t, const char *p, int64_t n)
{
    for (int64_t at = 0, end; at < n; at = end) {
        int err;

        for (end = at + 1; end < n && (p[end] & 0x80) == 0;)
            end++; /* characters that only the last of may change */
        for (; end < n && (p[end] & 0x80) != 0;)
            end++;
        err = iz_nfc_may_change(p + at, end - at)
                  ? compose(t, p + at, end - at)
                  : iz_text_add(t, p + at, end - at);
        if (err)
            return err;
    }
    return 0;
}
