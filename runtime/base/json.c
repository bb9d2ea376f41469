/* SPDX-License-Identifier: Apache-2.0 */
/* Over jansson, whose values these are; see json.h. */
#include "runtime/base/json.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define FILE_MAX ((int64_t)256 << 20) /* bytes */

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

struct iz_json *iz_json_read(const char *path)
{
    return (struct iz_json *)json_load_file(
        path, JSON_DECODE_ANY | JSON_REJECT_DUPLICATES, NULL);
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

static char *text_read(const char *path, int64_t *bytes, int *why)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    struct stat st = {0};
    char *text = NULL;
    ssize_t n = 0;

    *bytes = 0;
    *why = fd < 0 || fstat(fd, &st) != 0 ? errno : 0;
    if (!*why && (!S_ISREG(st.st_mode) || st.st_size > FILE_MAX))
        *why = EINVAL;
    if (!*why && !(text = malloc((size_t)st.st_size + 1)))
        *why = ENOMEM;
    while (!*why && *bytes < st.st_size) {
        n = pread(fd, text + *bytes, (size_t)(st.st_size - *bytes), *bytes);
        if (n < 0 && errno != EINTR)
            *why = errno;
        if (n == 0)
            break;
        *bytes += n > 0 ? n : 0;
    }
    if (fd >= 0)
        close(fd);
    return text;
}

struct iz_json *iz_json_read_object(const char *path, FILE *err)
{
    int64_t bytes;
    int why;
    char *text = text_read(path, &bytes, &why);
    struct iz_json *root = why ? NULL : iz_json_open(text, bytes);

    free(text);
    if (!why && iz_json_is_object(root))
        return root;
    if (err)
        fprintf(err, "izar: %s: %s\n", path,
                why ? strerror(why) : "not a JSON object");
    iz_json_close(&root);
    return NULL;
}
