/* SPDX-License-Identifier: Apache-2.0 */
/* What jansson does not have; see json.h. */
#include "runtime/base/json.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/durable.h"
#include "runtime/base/text.h"

enum { HOW = JSON_REJECT_DUPLICATES | JSON_DECODE_ANY };

json_t *iz_json_open(const char *text, int64_t bytes)
{
    return json_loadb(text, (size_t)bytes, HOW, NULL);
}

void iz_json_lines(const char *path, const char *name,
                   void (*take)(void *arg, json_t *line), void *arg)
{
    FILE *f = fopen(path, "r");
    char *text = NULL, begin[64];
    size_t room = 0;
    int length = snprintf(begin, sizeof(begin), "{\"%s\"", name);
    for (ssize_t n; f && (n = getline(&text, &room, f)) > 0;) {
        json_t *line = strncmp(text, begin, (size_t)length) == 0
                           ? iz_json_open(text, n)
                           : NULL;
        if (line)
            take(arg, line);
        json_decref(line);
    }
    free(text);
    if (f)
        fclose(f);
}

/* Behind what Python writes and jansson does not take, in the string that
 * stands for it: -Infinity, Infinity, NaN, integers of more than 18 digits. */
#define TAIL ", no JSON\""
enum { TAKEN_DIGITS = 18 };

/* The length of a string, a word, a number, or of any other byte. */
static size_t piece(const char *p)
{
    static const char *const words[] = {"-Infinity", "Infinity", "NaN"};
    size_t n = strspn(p, "+-.0123456789eE");
    for (int i = 0; i < 3; i++)
        if (strncmp(p, words[i], strlen(words[i])) == 0)
            return strlen(words[i]);
    if (*p != '"')
        return n ? n : 1;
    for (n = 1; p[n] && p[n] != '"'; n++)
        n += p[n] == '\\' && p[n + 1];
    return n + (p[n] == '"');
}

static bool is_odd(const char *p, size_t n)
{
    size_t sign = *p == '-', digits = strspn(p + sign, "0123456789");
    bool word = (p[sign] == 'I' || p[sign] == 'N') && n > 1 && piece(p) == n;
    return word || (n - sign > TAKEN_DIGITS && digits == n - sign);
}

void iz_json_put(FILE *out, const char *text)
{
    size_t tail = strlen(TAIL), n;
    for (const char *p = text; *p; p += n) {
        n = piece(p);
        bool odd = *p == '"' && n > tail + 1 &&
                   strncmp(p + n - tail, TAIL, tail) == 0 &&
                   is_odd(p + 1, n - tail - 1);
        fwrite(p + odd, 1, odd ? n - tail - 1 : n, out);
    }
}

/* A whole file's, once more. */
static json_t *load_odd(const char *text, json_error_t *e)
{
    struct iz_text t;
    FILE *out = iz_text_open(&t);
    size_t n;
    for (const char *p = text; *p; p += n) {
        n = piece(p);
        fprintf(out, is_odd(p, n) ? "\"%.*s" TAIL : "%.*s", (int)n, p);
    }
    char *plain = iz_text_close(&t);
    json_t *v = json_loads(plain, HOW, e);
    free(plain);
    return v;
}

json_t *iz_json_read(const char *path, FILE *err)
{
    json_error_t e = {.text = ""};
    int64_t bytes = 0;
    char *text = iz_durable_read(path, &bytes);
    const char *fault = text ? "not a JSON object" : strerror(errno);
    bool pointer = text && iz_text_is_pointer(text, bytes);
    json_t *v = text ? json_loadb(text, (size_t)bytes, HOW, &e) : NULL;
    if (text && !v)
        v = load_odd(text, &e);
    free(text);
    if (json_is_object(v))
        return v;
    iz_text_make_printable(e.text);
    if (pointer)
        iz_text_refuse(err, "%s: " IZ_TEXT_POINTER, path);
    else if (e.text[0])
        iz_text_refuse(err, "%s: %s: line %d, %s", path, fault, e.line, e.text);
    else
        iz_text_refuse(err, "%s: %s", path, fault);
    json_decref(v);
    return NULL;
}

int64_t iz_json_count(const json_t *v)
{
    return (int64_t)(json_array_size(v) + json_object_size(v));
}

/* jansson takes an object that it does not change as not const. */
const char *iz_json_key(const json_t *object, const char *after)
{
    json_t *o = (json_t *)(uintptr_t)object;
    void *at = after ? json_object_iter_next(o, json_object_iter_at(o, after))
                     : json_object_iter(o);
    return at ? json_object_iter_key(at) : NULL;
}

const json_t *iz_json_at(const json_t *v, const char *name)
{
    char key[64];
    while (v && *name) {
        size_t n = strcspn(name, ".");
        snprintf(key, sizeof(key), "%.*s", (int)n, name);
        v = json_object_get(v, key);
        name += n + (name[n] == '.');
    }
    return v;
}

int64_t iz_json_number(const json_t *v, int64_t max)
{
    int64_t n = json_is_integer(v) ? json_integer_value(v) : -1;
    return n >= 0 && n <= max ? n : -1;
}

int64_t iz_json_count_of(const json_t *object, const char *key)
{
    return iz_json_number(json_object_get(object, key), INT64_MAX);
}

const char *iz_json_text_of(const json_t *object, const char *key)
{
    const char *s = json_string_value(json_object_get(object, key));
    return s ? s : "";
}

bool iz_json_same(const json_t *a, const json_t *b)
{
    if (json_is_number(a) && json_is_number(b))
        return json_number_value(a) == json_number_value(b);
    return json_equal(a, b);
}

char *iz_json_dump(const json_t *v)
{
    return json_dumps(v, JSON_ENCODE_ANY | JSON_COMPACT);
}

void iz_json_print(FILE *out, const char *s)
{
    fputc('"', out);
    for (; *s != '\0'; s++) {
        unsigned char c = (unsigned char)*s;
        if (c == '"' || c == '\\')
            fprintf(out, "\\%c", c);
        else if (c < 0x20)
            fprintf(out, "\\u%04x", c);
        else
            fputc(c, out);
    }
    fputc('"', out);
}

static void new_line(struct iz_nest *n)
{
    fprintf(n->out, "%s\n%*s", n->first ? "" : ",", n->indent * (n->depth + 1),
            "");
    n->first = false;
}

void iz_nest_end(struct iz_nest *n)
{
    char *dot = strrchr(n->open, '.');
    *(dot ? dot : n->open) = '\0';
    n->depth--;
    fprintf(n->out, "\n%*s}", n->indent * (n->depth + 1), "");
    n->first = false;
}

static bool is_inside(const char *section, const char *name)
{
    size_t n = strlen(section);
    return n == 0 || (strncmp(section, name, n) == 0 && name[n] == '.');
}

void iz_nest_name(struct iz_nest *n, const char *name)
{
    while (!is_inside(n->open, name))
        iz_nest_end(n);
    size_t at = n->open[0] != '\0' ? strlen(n->open) + 1 : 0;
    for (const char *dot; (dot = strchr(name + at, '.')) != NULL;) {
        size_t end = (size_t)(dot - name);
        new_line(n);
        fprintf(n->out, "\"%.*s\": {", (int)(end - at), name + at);
        snprintf(n->open, sizeof(n->open), "%.*s", (int)end, name);
        n->depth++;
        n->first = true;
        at = end + 1;
    }
    new_line(n);
    iz_json_print(n->out, name + at);
    fputs(": ", n->out);
}
