/* SPDX-License-Identifier: Apache-2.0 */
/* Puts one JSON value into the field that a key of a table names, or says why
 * it does not fit; and prints it. */
#include "runtime/base/key.h"

#include <assert.h>
#include <float.h>
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "runtime/base/json.h"
#include "runtime/base/nearest.h"
#include "runtime/base/text.h"

const struct iz_key *iz_key_find(const struct iz_key *table, const char *name)
{
    while (table->name && strcmp(table->name, name) != 0)
        table++;
    return table->name ? table : NULL;
}

void iz_key_describe(char *out, size_t size, const json_t *v)
{
    static const char *const kinds[] = {
        [JSON_OBJECT] = "an object", [JSON_ARRAY] = "an array",
        [JSON_STRING] = "a string",  [JSON_INTEGER] = "an integer",
        [JSON_REAL] = "a number",    [JSON_TRUE] = "a boolean",
        [JSON_FALSE] = "a boolean",  [JSON_NULL] = NULL,
    };
    const char *kind = kinds[json_typeof(v)];
    char *text =
        json_dumps(v, JSON_ENCODE_ANY | JSON_COMPACT | JSON_REAL_PRECISION(15));
    if (json_is_object(v) || !text)
        snprintf(out, size, "%s", kind ? kind : "null");
    else if (!kind)
        snprintf(out, size, "%s", text);
    else
        snprintf(out, size, "%.60s%s (%s)", text,
                 strlen(text) > 60 ? "..." : "", kind);
    free(text);
}

bool iz_key_among(const json_t *v, const char *values)
{
    char word[IZ_KEY_NAME_MAX];
    bool same = false;
    for (int i = 0; !same && iz_text_word(word, sizeof(word), values, i); i++) {
        json_t *w = json_loads(word, JSON_DECODE_ANY, NULL);
        same = iz_json_same(w, v);
        json_decref(w);
    }
    return same;
}

static bool mismatch(char *why, const char *expected, const json_t *v)
{
    char found[IZ_WHY_MAX / 2];
    iz_key_describe(found, sizeof(found), v);
    snprintf(why, IZ_WHY_MAX, "expected %s, found %s", expected, found);
    return false;
}

/* Beside the range: numbers meet others in fp32, where such a one is 0. */
static bool in_range(char *why, const struct iz_key *k, double x)
{
    if (x != 0 && fabs(x) < FLT_MIN) {
        snprintf(why, IZ_WHY_MAX, "%.3g is nearer to 0 than any number in fp32",
                 x);
        return false;
    }
    if (!iz_key_ranged(k) || (x >= k->min && x <= k->max))
        return true;
    /* an integer may miss by one */
    int digits = x == floor(x) && fabs(x) < 0x1p53 ? 17 : 15;
    if (x < k->min && k->max > 1e5)
        snprintf(why, IZ_WHY_MAX, "%.*g is less than %.15g", digits, x, k->min);
    else
        snprintf(why, IZ_WHY_MAX, "%.*g is not in %.15g..%.15g", digits, x,
                 k->min, k->max);
    return false;
}

/* DeepSpeed's files write 5e8 where an integer is meant. */
static bool whole_number(int64_t *n, const json_t *v)
{
    if (json_is_integer(v)) {
        *n = json_integer_value(v);
        return true;
    }
    if (!json_is_real(v))
        return false;
    double x = json_real_value(v); /* beyond, it is another number's double */
    if (!(fabs(x) <= 0x1p53) || x != floor(x))
        return false;
    *n = (int64_t)x;
    return true;
}

static bool store_integer(char *why, void *at, const struct iz_key *k,
                          const json_t *v)
{
    int64_t n;
    if (!whole_number(&n, v))
        return mismatch(why, "an integer", v);
    if (!in_range(why, k, (double)n))
        return false;
    if (k->type == IZ_KEY_INT && (n < INT_MIN || n > INT_MAX))
        return mismatch(why, "an integer of 32 bits", v);
    if (k->type == IZ_KEY_UINT64 && n < 0)
        return mismatch(why, "an integer >= 0", v);
    if (k->type == IZ_KEY_INT)
        *(int *)at = (int)n;
    else if (k->type == IZ_KEY_UINT64)
        *(uint64_t *)at = (uint64_t)n;
    else
        *(int64_t *)at = n;
    return true;
}

/* An integer that a double has not is none. */
static bool is_double(const json_t *v)
{
    int64_t n = json_integer_value(v);
    return json_is_real(v) ||
           (json_is_integer(v) && n <= 1LL << 53 && n >= -(1LL << 53));
}

static bool store_pair(char *why, double *at, const struct iz_key *k,
                       const json_t *v)
{
    double x[2];
    if (json_array_size(v) != 2)
        return mismatch(why, "an array of two numbers", v);
    for (size_t i = 0; i < 2; i++) {
        const json_t *e = json_array_get(v, i);
        if (!is_double(e))
            return mismatch(why, "an array of two numbers", v);
        x[i] = json_number_value(e);
        if (!in_range(why, k, x[i]))
            return false;
    }
    memcpy(at, x, sizeof(x));
    return true;
}

static bool too_long(char *why, const struct iz_key *k, size_t n)
{
    snprintf(why, IZ_WHY_MAX, "%zu bytes, at most %zu fit", n, k->size - 1);
    return false;
}

/* An array of strings, or of integers, is a list with commas. */
static bool store_list(char *why, char *at, const struct iz_key *k,
                       const json_t *v)
{
    const json_t *e;
    size_t i, used = 0;
    memset(at, 0, k->size);
    json_array_foreach(v, i, e)
    {
        char number[24];
        const char *s = json_string_value(e);
        if (k->type == IZ_KEY_INTS) {
            snprintf(number, sizeof(number), "%" JSON_INTEGER_FORMAT,
                     json_integer_value(e));
            s = json_is_integer(e) ? number : NULL;
        }
        if (!s)
            return mismatch(why,
                            k->type == IZ_KEY_INTS ? "integers" : "strings", e);
        size_t n = strlen(s);
        if (!n || strchr(s, ',')) {
            snprintf(why, IZ_WHY_MAX, "\"%.60s\" %s", s,
                     n ? "has a comma" : "is no member of a list");
            return false;
        }
        if (used + n + 1 >= k->size)
            return too_long(why, k, used + n + 1);
        if (i > 0)
            at[used++] = ',';
        memcpy(at + used, s, n);
        used += n;
    }
    return true;
}

/* One integer, or what would be an array in brackets. */
static bool store_integers(char *why, char *at, const struct iz_key *k,
                           const json_t *v)
{
    struct iz_text text;
    fputc('[', iz_text_open(&text));
    if (json_is_string(v))
        fputs(json_string_value(v), text.out);
    else
        json_dumpf(v, text.out, JSON_ENCODE_ANY);
    fputc(']', text.out);
    char *array = iz_text_close(&text);
    json_t *list = json_loads(array, 0, NULL);
    bool stored =
        list ? store_list(why, at, k, list) : mismatch(why, "integers", v);
    json_decref(list);
    free(array);
    return stored;
}

/* Of numbers that are in range. */
static bool store_map(char *why, char *at, const struct iz_key *k,
                      const json_t *v)
{
    const char *name;
    json_t *e;
    json_object_foreach((json_t *)(uintptr_t)v, name, e)
    {
        if (!json_is_number(e))
            return mismatch(why, "numbers", e);
        if (!in_range(why, k, json_number_value(e)))
            return false;
    }
    size_t n =
        json_dumpb(v, at, k->size - 1, JSON_COMPACT | JSON_REAL_PRECISION(15));
    if (n >= k->size)
        return too_long(why, k, n);
    at[n] = '\0';
    return true;
}

/* Only shells know what ~ stands for. */
static bool has_bad_path(char *why, const struct iz_key *k, const char *text)
{
    for (const char *path = text; *text && path; path = strchr(path, ',')) {
        path += path != text;
        if (k->type == IZ_KEY_LIST && (!*path || *path == ',')) {
            snprintf(why, IZ_WHY_MAX, "\"%.60s\" has an empty member", text);
            return true;
        }
        if (path[0] != '~' || (path[1] && path[1] != '/'))
            continue;
        snprintf(why, IZ_WHY_MAX,
                 "\"%.60s\" begins with ~, which only a shell "
                 "expands: write the path out",
                 path);
        return true;
    }
    return false;
}

static bool store_string(char *why, char *at, const struct iz_key *k,
                         const json_t *v)
{
    size_t n = json_string_length(v);
    if (k->type == IZ_KEY_MAP)
        return json_is_object(v) ? store_map(why, at, k, v)
                                 : mismatch(why, "an object of numbers", v);
    if ((k->type == IZ_KEY_LIST || k->type == IZ_KEY_INTS) && json_is_array(v))
        return store_list(why, at, k, v) && !has_bad_path(why, k, at);
    if (k->type == IZ_KEY_INTS)
        return store_integers(why, at, k, v);
    if (!json_is_string(v))
        return mismatch(
            why, k->type == IZ_KEY_LIST ? "a string or strings" : "a string",
            v);
    if (n >= k->size)
        return too_long(why, k, n);
    memset(at, 0, k->size);
    memcpy(at, json_string_value(v), n);
    return k->type == IZ_KEY_STRING || !has_bad_path(why, k, at);
}

static bool store_word(char *why, int *at, const struct iz_key *k,
                       const json_t *v)
{
    const char *s = json_string_value(v);
    if (!s)
        return mismatch(why, k->words, v);
    struct iz_nearest near = iz_nearest_start(s, false);
    char word[IZ_KEY_NAME_MAX];
    for (int i = 0; iz_text_word(word, sizeof(word), k->words, i); i++) {
        if (strcasecmp(word, s) == 0 && strcmp(word, "null") != 0) {
            *at = i;
            return true;
        }
        iz_nearest_try(&near, word);
    }
    snprintf(why, IZ_WHY_MAX, "\"%.60s\" is not one of %s%s", s, k->words,
             near.hint);
    return false;
}

static bool nullable(const struct iz_key *k)
{
    return (k->fallback && strcmp(k->fallback, "null") == 0) ||
           (k->type == IZ_KEY_ENUM && strncmp(k->words, "null", 4) == 0);
}

static void store_null(void *at, const struct iz_key *k)
{
    static const size_t bytes[] = {
        [IZ_KEY_BOOL] = sizeof(bool),     [IZ_KEY_INT] = sizeof(int),
        [IZ_KEY_INT64] = sizeof(int64_t), [IZ_KEY_UINT64] = sizeof(uint64_t),
        [IZ_KEY_DOUBLE] = sizeof(double), [IZ_KEY_PAIR] = 2 * sizeof(double),
        [IZ_KEY_ENUM] = sizeof(int),      [IZ_KEY_COUNT] = sizeof(int64_t),
    };
    memset(at, 0, iz_key_is_text(k) ? k->size : bytes[k->type]);
}

static bool store_count_word(char *why, char *at, const struct iz_key *k,
                             const json_t *v)
{
    int word;
    if (!store_word(why, &word, k, v))
        return false;
    *(int64_t *)at = -word;
    return true;
}

bool iz_key_applies(const char *word, const char *words)
{
    if (!words)
        return true;
    return *words == '!' ? !iz_text_among(word, words + 1)
                         : iz_text_among(word, words);
}

bool iz_key_store(char *why, void *base, const struct iz_key *k,
                  const json_t *v)
{
    void *at = (char *)base + k->offset;
    if (json_is_null(v) && nullable(k)) {
        store_null(at, k);
        return true;
    }
    switch (k->type) {
    case IZ_KEY_BOOL:
        if (!json_is_boolean(v))
            return mismatch(why, "true or false", v);
        *(bool *)at = json_is_true(v);
        return true;
    case IZ_KEY_INT:
    case IZ_KEY_INT64:
    case IZ_KEY_UINT64:
        return store_integer(why, at, k, v);
    case IZ_KEY_DOUBLE:
        if (!is_double(v))
            return mismatch(why, "a number", v);
        if (!in_range(why, k, json_number_value(v)))
            return false;
        *(double *)at = json_number_value(v);
        return true;
    case IZ_KEY_PAIR:
        return store_pair(why, at, k, v);
    case IZ_KEY_STRING:
    case IZ_KEY_PATH:
    case IZ_KEY_LIST:
    case IZ_KEY_INTS:
    case IZ_KEY_MAP:
        return store_string(why, at, k, v);
    case IZ_KEY_ENUM:
        return store_word(why, at, k, v);
    case IZ_KEY_COUNT:
        return json_is_string(v) ? store_count_word(why, at, k, v)
                                 : store_integer(why, at, k, v);
    }
    return false;
}

/* A fallback in a table that does not parse is our mistake. */
void iz_key_store_default(void *base, const struct iz_key *k)
{
    char why[IZ_WHY_MAX];
    json_t *v =
        json_loads(k->fallback ? k->fallback : "null", JSON_DECODE_ANY, NULL);
    bool stored = v != NULL && iz_key_store(why, base, k, v);
    assert(stored);
    json_decref(v);
}

void iz_key_store_defaults(void *base, const struct iz_key *k)
{
    for (; k->name; k++)
        iz_key_store_default(base, k);
}

/* The fewest digits that read back as x. */
static void print_double(FILE *out, double x)
{
    char text[32];
    for (int digits = 15; digits <= 17; digits++) {
        snprintf(text, sizeof(text), "%.*g", digits, x);
        if (strtod(text, NULL) == x)
            break;
    }
    fprintf(out, "%s%s", text, strpbrk(text, ".e") != NULL ? "" : ".0");
}

static void print_word(FILE *out, const char *words, int i)
{
    char word[IZ_KEY_NAME_MAX];
    if (!iz_text_word(word, sizeof(word), words, i) ||
        strcmp(word, "null") == 0)
        fputs("null", out);
    else
        iz_json_print(out, word);
}

void iz_key_print(FILE *out, const struct iz_key *k, const void *base)
{
    const void *at = (const char *)base + k->offset;
    switch (k->type) {
    case IZ_KEY_BOOL:
        fputs(*(const bool *)at ? "true" : "false", out);
        break;
    case IZ_KEY_INT:
        fprintf(out, "%d", *(const int *)at);
        break;
    case IZ_KEY_INT64:
        fprintf(out, "%lld", (long long)*(const int64_t *)at);
        break;
    case IZ_KEY_UINT64:
        fprintf(out, "%llu", (unsigned long long)*(const uint64_t *)at);
        break;
    case IZ_KEY_DOUBLE:
        print_double(out, *(const double *)at);
        break;
    case IZ_KEY_PAIR:
        fputc('[', out);
        print_double(out, ((const double *)at)[0]);
        fputs(", ", out);
        print_double(out, ((const double *)at)[1]);
        fputc(']', out);
        break;
    case IZ_KEY_STRING:
    case IZ_KEY_PATH:
    case IZ_KEY_LIST:
        iz_json_print(out, at);
        break;
    case IZ_KEY_INTS:
        fprintf(out, "[%s]", (const char *)at);
        break;
    case IZ_KEY_MAP:
        fputs(at, out);
        break;
    case IZ_KEY_ENUM:
        print_word(out, k->words, *(const int *)at);
        break;
    case IZ_KEY_COUNT:
        if (*(const int64_t *)at > 0)
            fprintf(out, "%lld", (long long)*(const int64_t *)at);
        else
            print_word(out, k->words, (int)-*(const int64_t *)at);
        break;
    }
}
