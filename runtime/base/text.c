/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/base/text.h"

#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "codelets/base/die.h"

bool iz_text_word(char *word, size_t size, const char *words, int i)
{
    for (; i > 0 && words; i--) {
        words = strchr(words, '|');
        words = words ? words + 1 : NULL;
    }
    if (!words)
        return false;
    snprintf(word, size, "%.*s", (int)strcspn(words, "|"), words);
    return true;
}

bool iz_text_among(const char *word, const char *words)
{
    size_t n = strlen(word);
    for (; words; words = strchr(words, '|')) {
        words += *words == '|';
        if (strcspn(words, "|") == n && !strncmp(words, word, n))
            return true;
    }
    return false;
}

bool iz_text_is_pointer(const void *begin, int64_t bytes)
{
    static const char line[] = "version https://git-lfs.github.com/spec/";
    int64_t n = sizeof(line) - 1;
    return bytes >= n && memcmp(begin, line, (size_t)n) == 0;
}

int64_t iz_text_decimal(const char **text)
{
    int64_t v = 0;
    const char *p = *text;
    while (*p >= '0' && *p <= '9') {
        if (v > (INT64_MAX - 9) / 10)
            return -1;
        v = 10 * v + (*p++ - '0');
    }
    if (p == *text)
        return -1;
    *text = p;
    return v;
}

FILE *iz_text_open(struct iz_text *t)
{
    *t = (struct iz_text){0};
    t->out = open_memstream(&t->text, &t->bytes);
    if (!t->out)
        iz_die("no memory for a text");
    return t->out;
}

char *iz_text_close(struct iz_text *t)
{
    if (!t->out)
        return NULL;
    if (ferror(t->out) | (fclose(t->out) != 0))
        iz_die("no memory for a text");
    return t->text;
}

int iz_text_refuse(FILE *err, const char *fmt, ...)
{
    struct iz_text t;
    va_list args;
    if (!err)
        return -EINVAL;
    va_start(args, fmt);
    vfprintf(iz_text_open(&t), fmt, args);
    va_end(args);
    char *text = iz_text_close(&t);
    iz_text_make_printable(text);
    fprintf(err, "izar: %s\n", text);
    free(text);
    return -EINVAL;
}

void iz_text_make_printable(char *s)
{
    for (; *s; s++)
        if ((unsigned char)*s < 0x20 || *s == 0x7f)
            *s = '?';
        else if (s[0] == '\xc2' && (s[1] & 0xe0) == 0x80) /* U+0080..U+009F */
            s[0] = s[1] = '?';
}
