/* SPDX-License-Identifier: Apache-2.0 */
/* Makes files of records for models that read no tokens: invented ones that are
 * the same on every machine, and those of published sets. */
#include <arpa/inet.h>
#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "codelets/base/mix.h"
#include "codelets/base/take.h"
#include "runtime/base/durable.h"
#include "runtime/base/text.h"

enum {
    SIDE = 32,
    COLOURS = 3,
    SHAPES = 10,
    NOISE = 24,     /* of a pixel, up and down */
    DENSE = 13,     /* numbers of a click */
    CATEGORIES = 26 /* rows of tables that it names */
};

/* Tells why; always false. */
static bool records_fault(const char *path, const char *why)
{
    fprintf(stderr, "records: %s: %s\n", path, why);
    return false;
}

/* ---- the output ---- */

/* A file that has its name only once it is complete. */
struct output {
    char tmp[PATH_MAX + 4];
    const char *path;
    FILE *f;
    int64_t count;
};

static bool output_open(struct output *o, const char *path)
{
    *o = (struct output){.path = path};
    snprintf(o->tmp, sizeof(o->tmp), "%s.tmp", path);
    o->f = fopen(o->tmp, "wb");
    return o->f || records_fault(path, strerror(errno));
}

static void output_put(struct output *o, const void *record, size_t bytes)
{
    fwrite(record, 1, bytes, o->f); /* an error stays in the stream */
    o->count++;
}

/* Keeps a good file, once it is on the disk. */
static int output_close(struct output *o, bool good)
{
    if (good && (fflush(o->f) || ferror(o->f) || fsync(fileno(o->f))))
        good = records_fault(o->path, strerror(errno));
    fclose(o->f);
    if (!good || iz_durable_rename("records", o->tmp, o->path)) {
        remove(o->tmp);
        return 1;
    }
    printf("%s: %lld records\n", o->path, (long long)o->count);
    return 0;
}

/* ---- random numbers ---- */

/* Number i of a stream is a function of both alone. */
struct dice {
    uint64_t key, i;
};

static struct dice dice_of(uint64_t seed, uint64_t record)
{
    return (struct dice){.key = iz_mix(seed + iz_mix(record + 1))};
}

static double uniform(struct dice *d)
{
    return (double)(iz_mix(d->key + ++d->i * IZ_GOLDEN) >> 11) * 0x1p-53;
}

static int below(struct dice *d, int n)
{
    return (int)(uniform(d) * n);
}

/* Nearly normal: twelve uniform ones. */
static double normal(struct dice *d)
{
    double sum = -6;
    for (int i = 0; i < 12; i++)
        sum += uniform(d);
    return sum;
}

/* ---- shapes ---- */

/* Whether the point belongs to a shape of about the unit circle's size. */
static bool inside(int shape, double u, double v)
{
    double square = fmax(fabs(u), fabs(v)), round = u * u + v * v;
    double p = fabs(u + v) * M_SQRT1_2, q = fabs(u - v) * M_SQRT1_2;
    switch (shape) {
    case 0: /* disc */
        return round < 1;
    case 1: /* ring */
        return round < 1 && round > 0.36;
    case 2: /* square */
        return square < 0.85;
    case 3: /* frame */
        return square < 0.9 && square > 0.5;
    case 4: /* triangle */
        return fabs(v) < 0.9 && fabs(u) < (v + 0.9) / 1.8;
    case 5: /* upright cross */
        return square < 1 && fmin(fabs(u), fabs(v)) < 0.3;
    case 6: /* oblique cross */
        return fmax(p, q) < 1 && fmin(p, q) < 0.3;
    case 7: /* rows */
        return square < 0.9 && (int)((v + 1) * 3) % 2 == 0;
    case 8: /* columns */
        return square < 0.9 && (int)((u + 1) * 3) % 2 == 0;
    default: /* board */
        return square < 0.9 && ((int)((u + 1) * 2) + (int)((v + 1) * 2)) % 2;
    }
}

static unsigned char tinted(struct dice *d, int colour)
{
    int v = colour + below(d, 2 * NOISE + 1) - NOISE;
    return (unsigned char)(v < 0 ? 0 : v > 255 ? 255 : v);
}

/* A bright shape of random size and place before a dark ground; the label is
 * its number. */
static void draw(void *out, struct dice d)
{
    unsigned char *record = out;
    int shape = below(&d, SHAPES), colour[2][COLOURS];
    double size = 9 + 4 * uniform(&d);
    double cx = size + (SIDE - 2 * size) * uniform(&d);
    double cy = size + (SIDE - 2 * size) * uniform(&d);
    *record++ = (unsigned char)shape;
    for (int c = 0; c < COLOURS; c++) {
        colour[0][c] = below(&d, 110);
        colour[1][c] = 146 + below(&d, 110);
    }
    for (int i = 0; i < COLOURS * SIDE * SIDE; i++) {
        int x = i % SIDE, y = i / SIDE % SIDE, c = i / SIDE / SIDE;
        bool in = inside(shape, (x + 0.5 - cx) / size, (y + 0.5 - cy) / size);
        *record++ = tinted(&d, colour[in][c]);
    }
}

/* ---- clicks ---- */

/* What a category adds to the odds: a function of it alone, in [-1, 1). */
static double effect(int table, int row)
{
    struct dice d = dice_of(77 + (uint64_t)table, (uint64_t)row);
    return 2 * uniform(&d) - 1;
}

/* Small categories are frequent: the density of row r of n falls as r^(-2/3).
 * Tables have from 10 to 10^5 rows. */
static int category(struct dice *d, int table)
{
    double u = uniform(d), n = pow(10, 1 + 4. * table / (CATEGORIES - 1));
    return (int)(n * u * u * u);
}

/* Label, numbers, categories; the label depends on some of them, and on one
 * pair of categories together. */
static void click(void *out, struct dice d)
{
    int32_t *record = out;
    double logit = -1.2;
    for (int i = 1; i <= DENSE; i++)
        record[i] = (int32_t)exp(1 + 1.5 * normal(&d));
    for (int i = 0; i < CATEGORIES; i++)
        record[1 + DENSE + i] = category(&d, i);
    for (int i = 0; i < 10; i++)
        logit += effect(i, record[1 + DENSE + i]);
    logit += 3 * effect(20, record[1 + DENSE]) * effect(21, record[2 + DENSE]);
    logit += 0.4 * (log(1 + record[1]) - log(1 + record[2]));
    record[0] = uniform(&d) < 1 / (1 + exp(-logit));
}

/* ---- what is invented ---- */

static const struct kind {
    const char *name;
    size_t bytes;
    void (*make)(void *record, struct dice d);
} kinds[] = {{"shapes", 1 + COLOURS *SIDE *SIDE, draw},
             {"clicks", 4 * (1 + DENSE + CATEGORIES), click}};

static int invent(const struct kind *k, const char *path, int64_t count,
                  uint64_t seed)
{
    int32_t record[1 + COLOURS * SIDE * SIDE / 4];
    struct output o;
    if (!output_open(&o, path))
        return 1;
    for (int64_t i = 0; i < count && !ferror(o.f); i++) {
        k->make(record, dice_of(seed, (uint64_t)i));
        output_put(&o, record, k->bytes);
    }
    return output_close(&o, true);
}

/* ---- Criteo's text ---- */

/* An empty field is 0. */
static bool parse(char *at, int32_t *record)
{
    enum { LAST = DENSE + CATEGORIES };
    at[strcspn(at, "\r\n")] = 0;
    for (int i = 0; i <= LAST; i++) {
        bool number = i <= DENSE;
        size_t n =
            strspn(at, number ? "-0123456789" : "0123456789abcdefABCDEF");
        char *end = at;
        long long v = n ? strtoll(at, &end, number ? 10 : 16) : 0;
        if (end != at + n || *end != (i < LAST ? '\t' : 0) ||
            v < (number ? INT32_MIN : 0) ||
            v > (number ? INT32_MAX : UINT32_MAX) ||
            (i == 0 && (!n || v < 0 || v > 1)))
            return false;
        record[i] = (int32_t)v;
        at = end + 1;
    }
    return true;
}

static int criteo(const char *from, const char *path)
{
    int32_t record[1 + DENSE + CATEGORIES];
    FILE *in = fopen(from, "r");
    struct output o;
    char *line = NULL, why[128];
    size_t room = 0;
    bool good = in || records_fault(from, strerror(errno));
    if (!good || !output_open(&o, path))
        exit(1);
    for (ssize_t n;
         good && !ferror(o.f) && (n = getline(&line, &room, in)) > 0;) {
        good = strlen(line) == (size_t)n && parse(line, record);
        snprintf(why, sizeof(why),
                 "line %lld is not a label, 13 numbers and 26 categories",
                 (long long)o.count + 1);
        if (good)
            output_put(&o, record, sizeof(record));
        else
            records_fault(from, why);
    }
    if (good && ferror(in))
        good = records_fault(from, strerror(errno));
    else if (good && o.count == 0)
        good = records_fault(from, "no lines");
    free(line);
    fclose(in);
    return output_close(&o, good);
}

/* ---- IDX, the format of MNIST ---- */

/* Header: zero, zero, type (8: bytes), dimensions; then each, big-endian. */
static FILE *idx_open(const char *path, uint32_t *dim, size_t dims)
{
    uint32_t h[4];
    FILE *f = fopen(path, "rb");
    const char *why = NULL;
    if (!f)
        why = strerror(errno);
    else if (fread(h, 4, dims + 1, f) != dims + 1)
        why = "ends within its header";
    else if (ntohl(h[0]) != (8U << 8 | dims))
        why = "is no IDX file of bytes with these dimensions (a compressed one "
              "must be unpacked first)";
    if (why) {
        records_fault(path, why);
        exit(1);
    }
    for (size_t k = 0; k < dims; k++)
        dim[k] = ntohl(h[1 + k]);
    return f;
}

static int idx(const char *images, const char *labels, const char *path)
{
    uint32_t dim[3], count;
    FILE *image = idx_open(images, dim, 3),
         *label = idx_open(labels, &count, 1);
    size_t bytes = (size_t)dim[1] * dim[2];
    struct output o;
    bool good =
        dim[0] == count || records_fault(labels, "has another number of items");
    if (good && (bytes == 0 || bytes > 1 << 24))
        good = records_fault(images, "has impossible images");
    if (!good || !output_open(&o, path))
        exit(1);
    unsigned char *record = iz_take((int64_t)bytes + 1, 1, "an image");
    for (uint32_t n = 0; n < count && good && !ferror(o.f); n++)
        if (fread(record, 1, 1, label) != 1 ||
            fread(record + 1, 1, bytes, image) != bytes)
            good = records_fault(images, "or its labels end early");
        else
            output_put(&o, record, 1 + bytes);
    free(record);
    fclose(image);
    fclose(label);
    return output_close(&o, good);
}

/* ---- the command line ---- */

static int usage(void)
{
    fprintf(stderr,
            "usage: records shapes OUT COUNT [SEED]   invented images of 3 x "
            "32 x 32\n"
            "       records clicks OUT COUNT [SEED]   invented clicks\n"
            "       records idx IMAGES LABELS OUT     MNIST and its like\n"
            "       records criteo TEXT OUT           Criteo's click logs\n");
    return 2;
}

/* A number of the command line, at least `least`. */
static bool records_number(int64_t *out, const char *text, int64_t least)
{
    *out = iz_text_decimal(&text);
    return !*text && *out >= least;
}

int main(int argc, char **argv)
{
    int64_t count, seed = 1;
    if (argc == 5 && !strcmp(argv[1], "idx"))
        return idx(argv[2], argv[3], argv[4]);
    if (argc == 4 && !strcmp(argv[1], "criteo"))
        return criteo(argv[2], argv[3]);
    if (argc < 4 || argc > 5 || !records_number(&count, argv[3], 1) ||
        (argc == 5 && !records_number(&seed, argv[4], 0)))
        return usage();
    for (int i = 0; i < 2; i++)
        if (!strcmp(argv[1], kinds[i].name))
            return invent(&kinds[i], argv[2], count, (uint64_t)seed);
    return usage();
}
