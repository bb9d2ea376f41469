/* SPDX-License-Identifier: Apache-2.0 */
/* Over jansson, whose values these are; see json.h. */
#include "runtime/base/json.h"

#include <errno.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/durable.h"
#include "runtime/base/text.h"

/* jansson takes pointers to values that it does not change as not const. */
static json_t *value(const struct iz_json *v)
{
    return (json_t *)(uintptr_t)v;
}

struct iz_json *iz_json_open(const char *text, int64_t bytes)
{
    return (struct iz_json *)json_loadb(
        text, (size_t)bytes, JSON_REJECT_DUPLICATES | JSON_DECODE_ANY, NULL);
}

struct iz_json *iz_json_read(const char *path, FILE *err)
{
    int64_t bytes;
    char *text = iz_durable_read(path, &bytes);
    const char *fault = text ? "not a JSON object" : strerror(errno);
    struct iz_json *v = text ? iz_json_open(text, bytes) : NULL;

    free(text);
    if (iz_json_is_object(v))
        return v;
    iz_refuse(err, "%s: %s", path, fault);
    if (v)
        iz_json_close(&v);
    return NULL;
}

void iz_json_close(struct iz_json **v)
{
    json_decref(value(*v));
    *v = NULL;
}

const struct iz_json *iz_json_member(const struct iz_json *object,
                                     const char *key)
{
    return (struct iz_json *)json_object_get(value(object), key);
}

const struct iz_json *iz_json_item(const struct iz_json *array, int64_t i)
{
    return (struct iz_json *)json_array_get(value(array), (size_t)i);
}

int64_t iz_json_count(const struct iz_json *v)
{
    return (int64_t)(json_array_size(value(v)) + json_object_size(value(v)));
}

const char *iz_json_key(const struct iz_json *object, const char *after)
{
    json_t *o = value(object);
    void *at = after ? json_object_iter_next(o, json_object_iter_at(o, after))
                     : json_object_iter(o);
    return at ? json_object_iter_key(at) : NULL;
}

const char *iz_json_text(const struct iz_json *v)
{
    return json_string_value(value(v));
}

int64_t iz_json_number(const struct iz_json *v, int64_t max)
{
    int64_t n = json_is_integer(value(v)) ? json_integer_value(value(v)) : -1;
    return n >= 0 && n <= max ? n : -1;
}

bool iz_json_is_object(const struct iz_json *v)
{
    return json_is_object(value(v));
}

bool iz_json_equal(const struct iz_json *a, const struct iz_json *b)
{
    return json_equal(value(a), value(b)) != 0;
}

char *iz_json_dump(const struct iz_json *v)
{
    return json_dumps(value(v), JSON_ENCODE_ANY | JSON_COMPACT);
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
