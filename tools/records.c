/* SPDX-License-Identifier: Apache-2.0 */
/* Makes files of records for models that read no tokens: invented ones that are
 * the same on every machine, and those of published sets. */
#include <arpa/inet.h>
#include <errno.h>
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

/* ---- the output ---- */

/* A file that has its name only once it is complete. */
struct output {
    char tmp[4096];
    const char *path;
    FILE *f;
    int64_t count;
};

static bool output_open(struct output *o, const char *path)
{
    *o = (struct output){.path = path};
    if (snprintf(o->tmp, sizeof(o->tmp), "%s.tmp", path) >= (int)sizeof(o->tmp))
        errno = ENAMETOOLONG;
    else
        o->f = fopen(o->tmp, "wb");
    if (!o->f)
        fprintf(stderr, "records: %s: %s\n", path, strerror(errno));
    return o->f != NULL;
}

static void output_put(struct output *o, const void *record, size_t bytes)
{
    fwrite(record, 1, bytes, o->f); /* an error stays in the stream */
    o->count++;
}

/* Keeps a good file, once it is on the disk. */
static int output_close(struct output *o, bool good)
{
    int err = fflush(o->f) || ferror(o->f) ? EIO : 0;
    int fd = dup(fileno(o->f));
    if (good && err)
        iz_durable_refuse("records", o->path, "write", err);
    fclose(o->f);
    err = iz_durable_close("records", o->tmp, fd, good ? -err : -ECANCELED);
    if (!err)
        err = iz_durable_rename("records", o->tmp, o->path);
    if (err) {
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
    for (int64_t i = 0; i < count; i++) {
        k->make(record, dice_of(seed, (uint64_t)i));
        output_put(&o, record, k->bytes);
    }
    return output_close(&o, true);
}

/* ---- Criteo's text ---- */

/* The next field of a line, which strtok would skip if it is empty. */
static char *field(char **rest)
{
    char *begin = *rest, *end;
    if (!begin)
        return NULL;
    end = strchr(begin, '\t');
    *rest = end ? end + 1 : NULL;
    if (end)
        *end = 0;
    return begin;
}

/* An empty field is 0. */
static bool parse(char *line, int32_t *record)
{
    char *rest = line;
    line[strcspn(line, "\r\n")] = 0;
    for (int i = 0; i < 1 + DENSE + CATEGORIES; i++) {
        char *text = field(&rest), *end = text;
        if (!text)
            return false;
        record[i] = i <= DENSE ? (int32_t)strtol(text, &end, 10)
                               : (int32_t)(uint32_t)strtoul(text, &end, 16);
        if (*end || (i == 0 && end == text))
            return false;
    }
    return !rest && (record[0] == 0 || record[0] == 1);
}

static int criteo(const char *from, const char *path)
{
    int32_t record[1 + DENSE + CATEGORIES];
    FILE *in = fopen(from, "r");
    struct output o;
    char *line = NULL;
    size_t room = 0;
    bool good = true;
    if (!in) {
        fprintf(stderr, "records: %s: %s\n", from, strerror(errno));
        return 1;
    }
    if (!output_open(&o, path)) {
        fclose(in);
        return 1;
    }
    while (good && getline(&line, &room, in) > 0) {
        good = parse(line, record);
        if (good)
            output_put(&o, record, sizeof(record));
        else
            fprintf(stderr,
                    "records: %s: line %lld is not a label, 13 numbers and 26 "
                    "categories\n",
                    from, (long long)o.count + 1);
    }
    if (good && ferror(in)) {
        fprintf(stderr, "records: %s: %s\n", from, strerror(errno));
        good = false;
    } else if (good && o.count == 0) {
        fprintf(stderr, "records: %s: no lines\n", from);
        good = false;
    }
    free(line);
    fclose(in);
    return output_close(&o, good);
}

/* ---- IDX, the format of MNIST ---- */

struct idx {
    const char *path;
    FILE *f;
    uint32_t dim[3];
};

static bool idx_fault(const struct idx *i, const char *why)
{
    fprintf(stderr, "records: %s: %s\n", i->path, why);
    return false;
}

/* Header: zero, zero, type (8: bytes), dimensions; then each, big-endian. */
static bool idx_open(struct idx *i, const char *path, int dims)
{
    uint32_t h[4];
    i->path = path;
    i->f = fopen(path, "rb");
    if (!i->f)
        return idx_fault(i, strerror(errno));
    if (fread(h, 4, (size_t)dims + 1, i->f) != (size_t)dims + 1)
        return idx_fault(i, "ends within its header");
    if (ntohl(h[0]) != (8U << 8 | (uint32_t)dims))
        return idx_fault(i, "is no IDX file of bytes with these dimensions (a "
                            "compressed one must be unpacked first)");
    for (int k = 0; k < dims; k++)
        i->dim[k] = ntohl(h[1 + k]);
    return true;
}

static bool idx_copy(struct output *o, struct idx *images, struct idx *labels)
{
    size_t bytes = (size_t)images->dim[1] * images->dim[2];
    if (images->dim[0] != labels->dim[0])
        return idx_fault(labels, "has another number of items");
    if (bytes == 0 || bytes > 1 << 24)
        return idx_fault(images, "has impossible images");
    unsigned char *record = iz_take((int64_t)bytes + 1, 1, "an image");
    for (uint32_t n = 0; n < images->dim[0]; n++) {
        if (fread(record, 1, 1, labels->f) != 1 ||
            fread(record + 1, 1, bytes, images->f) != bytes) {
            free(record);
            return idx_fault(images, "or its labels end early");
        }
        output_put(o, record, 1 + bytes);
    }
    free(record);
    return true;
}

static int idx(const char *images, const char *labels, const char *path)
{
    struct idx a = {0}, b = {0};
    struct output o;
    int status = 1;
    if (idx_open(&a, images, 3) && idx_open(&b, labels, 1) &&
        output_open(&o, path))
        status = output_close(&o, idx_copy(&o, &a, &b));
    if (a.f)
        fclose(a.f);
    if (b.f)
        fclose(b.f);
    return status;
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
