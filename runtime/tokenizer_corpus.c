/* SPDX-License-Identifier: Apache-2.0 */
/* Walks over mapped files; see tokenizer_corpus.h. */
#include "runtime/tokenizer_corpus.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "codelets/base/mix.h"
#include "runtime/data/shard.h"

struct file {
    const char *path;
    struct iz_mapping map;
    bool json;
    int64_t cut; /* of one document: where validation begins; 0: nowhere */
};

struct iz_corpus {
    struct file *file;
    int files, at_file;
    int64_t at, line; /* in that file */
    int64_t bytes, done, documents;
    const char *split_on;
    double val_fraction;
};

/* ---- opening ---- */

static bool is_jsonl(const char *path)
{
    size_t n = strlen(path);

    return n >= 6 && strcmp(path + n - 6, ".jsonl") == 0;
}

/* Behind the last end of a line before the last part of the file. */
static int64_t find_cut(const struct iz_mapping *m, double fraction)
{
    int64_t at = m->bytes - (int64_t)(fraction * (double)m->bytes);

    while (at > 0 && m->at[at - 1] != '\n')
        at--;
    return at;
}

static int open_all(struct iz_corpus *c, const char *const *path, int paths)
{
    c->file = calloc((size_t)paths, sizeof *c->file);
    if (!c->file)
        return -ENOMEM;
    for (int i = 0; i < paths; i++) {
        struct file *f = &c->file[i];
        int err = iz_mapping_open(&f->map, path[i]);

        if (err)
            return err;
        c->files = i + 1;
        f->path = path[i];
        f->json = is_jsonl(path[i]);
        if (!f->json && !c->split_on && c->val_fraction > 0)
            f->cut = find_cut(&f->map, c->val_fraction);
        posix_madvise(f->map.at, (size_t)f->map.bytes, POSIX_MADV_SEQUENTIAL);
        c->bytes += f->map.bytes;
    }
    return 0;
}

int iz_corpus_open(struct iz_corpus **out, const char *const *path, int paths,
                   const char *split_on, double val_fraction)
{
    struct iz_corpus *c = calloc(1, sizeof *c);
    int err;

    *out = c;
    if (!c)
        return -ENOMEM;
    c->split_on = split_on;
    c->val_fraction = val_fraction;
    err = open_all(c, path, paths);
    if (err)
        iz_corpus_close(out);
    return err;
}

void iz_corpus_close(struct iz_corpus **c)
{
    if (!*c)
        return;
    for (int i = 0; i < (*c)->files; i++)
        iz_mapping_close(&(*c)->file[i].map);
    free((*c)->file);
    free(*c);
    *c = NULL;
}

void iz_corpus_rewind(struct iz_corpus *c)
{
    c->at_file = 0;
    c->at = c->line = c->done = c->documents = 0;
}

int64_t iz_corpus_bytes(const struct iz_corpus *c)
{
    return c->bytes;
}

int64_t iz_corpus_done(const struct iz_corpus *c)
{
    return c->done;
}

/* ---- documents ---- */

/* Whether document i is for validation: each stretch of 1/fraction documents
 * has one, at a random place of it, so that no period of the input is met. */
static bool is_chosen(int64_t i, double fraction)
{
    double j = floor((double)i * fraction);
    double first = ceil(j / fraction), behind = ceil((j + 1) / fraction);
    uint64_t random = iz_mix((uint64_t)j + IZ_GOLDEN) >> 11;

    return first + floor((behind - first) * (double)random * 0x1p-53) ==
           (double)i;
}

/* Where the first occurrence of a text begins, or n. */
static int64_t find(const char *p, int64_t n, const char *what, int64_t length)
{
    for (int64_t at = 0; n - at >= length; at++) {
        const char *hit = memchr(p + at, *what, (size_t)(n - at - length + 1));

        if (!hit)
            break;
        at = hit - p;
        if (memcmp(hit, what, (size_t)length) == 0)
            return at;
    }
    return n;
}

/* The extent of the document at c->at and of what separates it from the next.
 */
static void extent(struct iz_corpus *c, const struct file *f,
                   struct iz_document *d, int64_t *behind)
{
    int64_t left = f->map.bytes - c->at, length;
    const char *separator = f->json ? "\n" : c->split_on;

    *d = (struct iz_document){.text = (const char *)f->map.at + c->at,
                              .path = f->path,
                              .json = f->json};
    if (!separator) {
        d->val = f->cut > 0 && c->at >= f->cut;
        d->bytes = c->at < f->cut ? f->cut - c->at : left;
        *behind = d->bytes;
        return;
    }
    length = (int64_t)strlen(separator);
    d->bytes = find(d->text, left, separator, length);
    *behind = d->bytes + length < left ? d->bytes + length : left;
    d->line = ++c->line;
}

static bool is_blank(const struct iz_document *d)
{
    for (int64_t i = 0; i < d->bytes; i++)
        if (!strchr(" \t\r\n", d->text[i]) || !d->text[i])
            return false;
    return true;
}

bool iz_corpus_next(struct iz_corpus *c, struct iz_document *d)
{
    while (c->at_file < c->files) {
        const struct file *f = &c->file[c->at_file];
        int64_t behind;

        if (c->at == f->map.bytes) {
            c->at_file++;
            c->at = c->line = 0;
            continue;
        }
        extent(c, f, d, &behind);
        c->at += behind;
        c->done += behind;
        if (is_blank(d))
            continue;
        if (d->json || c->split_on)
            d->val =
                c->val_fraction > 0 && is_chosen(c->documents, c->val_fraction);
        c->documents++;
        return true;
    }
    return false;
}
