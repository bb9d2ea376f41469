/* SPDX-License-Identifier: Apache-2.0 */
/* Instantiates the table of a model for its units, and cuts ranges of flat
 * arrays into rectangles of tensors. */
#include "runtime/formats/map.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "codelets/base/take.h"
#include "runtime/base/key.h"
#include "runtime/base/text.h"

#define DIGITS "0123456789"
#define CUTS 16 /* tensors of one parameter at most */

/* ---- names ---- */

enum { HOLES = 2, NUMBER = 16 }; /* of a pattern; bytes of what fills one */

/* What stands in the holes {} of a pattern. */
struct numbers {
    char of[HOLES][NUMBER];
};

/* Whether `name` is the pattern with a number for each {}: those go to n; with
 * anything for a * at its end. */
static bool matches(const char *pattern, const char *name, struct numbers *n)
{
    int hole = 0;
    *n = (struct numbers){0};
    while (*pattern) {
        size_t digits = strspn(name, DIGITS);
        if (pattern[0] == '*')
            return true;
        if (pattern[0] != '{') {
            if (*pattern++ != *name++)
                return false;
            continue;
        }
        if (digits < 1 || digits > 9 || hole == HOLES)
            return false;
        memcpy(n->of[hole++], name, digits);
        name += digits;
        pattern += 2;
    }
    return !*name;
}

/* The pattern with the numbers in its holes, and `repeated` in [], if it has
 * one. */
static bool hf_map_fill(char out[IZ_HF_NAME], const char *pattern,
                        const struct numbers *n, int repeated)
{
    char *end = out + IZ_HF_NAME;
    int hole = 0;
    while (*pattern && out < end) {
        bool holed = *pattern == '{' || *pattern == '[';
        int room = (int)(end - out);
        if (*pattern == '{')
            out += snprintf(out, (size_t)room, "%s", n->of[hole++]);
        else if (*pattern == '[')
            out += snprintf(out, (size_t)room, "%d", repeated);
        else
            *out++ = *pattern;
        pattern += holed ? 2 : 1;
    }
    if (out >= end)
        return false;
    *out = '\0';
    return true;
}

/* Of a model that no type describes: the names of the first one. */
static const char *type_of(const struct iz_hf *hf, const struct iz_model *model)
{
    const char *type = hf->type ? hf->type(model->self) : NULL;
    return type ? type : hf->types->name;
}

/* The name as the model's type has it. */
static bool spell(char name[IZ_HF_NAME], const struct iz_hf *hf,
                  const struct iz_model *model)
{
    const struct iz_hf_word *w = hf->words;
    char was[IZ_HF_NAME];
    int n = 0;
    for (; w && w->types && n < IZ_HF_NAME; w++) {
        const char *at = strstr(name, w->is);
        if (!at || !iz_key_applies(type_of(hf, model), w->types))
            continue;
        memcpy(was, name, sizeof(was));
        n = snprintf(name, IZ_HF_NAME, "%.*s%s%s", (int)(at - name), was,
                     w->theirs, was + (at - name) + strlen(w->is));
    }
    return n < IZ_HF_NAME;
}

/* ---- tensors ---- */

static struct iz_hf_tensor *hf_map_add(struct iz_hf_map *m)
{
    m->tensor =
        iz_take_more(m->tensor, m->n, &m->room, sizeof(*m->tensor), "tensors");
    return &m->tensor[m->n++];
}

static int hf_map_refuse(const struct iz_param *p, const char *why)
{
    return iz_text_refuse(stderr, "parameter %s: %s", p->name, why);
}

/* What each of the tensors "a|b" has of `total` columns (rows), which are those
 * of one repetition.  Returns their number; 0: that is not all of them. */
static int cuts(int64_t out[CUTS], const struct iz_hf_name *row,
                const struct iz_model *model, int64_t total)
{
    char word[4 * IZ_HF_NAME];
    int64_t sum = 0;
    int n = 0;
    while (iz_text_word(word, sizeof(word), row->tensor, n))
        n++;
    for (int i = 0; i < n && n <= CUTS; i++) {
        out[i] = row->cut ? row->cut(model->self, i) : total / n;
        if (out[i] < 1)
            return 0;
        sum += out[i];
    }
    return sum == total ? n : 0;
}

/* Makes t the tensor of all experts of p; biases are a column. */
static void join_experts(struct iz_hf_tensor *t, const struct iz_param *p,
                         bool transposed)
{
    t->times = p->times;
    t->transposed = transposed;
    if (!t->vector)
        return;
    t->rows = t->cols;
    t->cols = t->width = 1;
}

/* The tensors of one parameter. */
static int add_tensors(struct iz_hf_map *m, const struct iz_model *model,
                       const struct iz_hf_name *row,
                       const struct iz_hf_tensor *like,
                       const struct numbers *number)
{
    const struct iz_param *p = &model->unit[like->unit].param[like->param];
    bool by_rows = row->layout == IZ_HF_ROWS;
    char word[4 * IZ_HF_NAME];
    bool all = row->layout >= IZ_HF_EXPERTS;
    int64_t cut[CUTS], at = 0, total = by_rows ? p->rows : p->cols;
    bool by_head = row->layout == IZ_HF_BY_HEAD;
    int64_t each = row->each && !by_head ? row->each(model->self) : total;
    int n = cuts(cut, row, model, each), first = atoi(number->of[1]);
    if (!n || total % each)
        return hf_map_refuse(p, "its tensors do not cover it");
    for (int k = 0; at < total; at += cut[k++ % n]) {
        struct iz_hf_tensor *t = hf_map_add(m);
        int i = k % n;
        *t = *like;
        iz_text_word(word, sizeof(word), row->tensor, i);
        if (!hf_map_fill(t->name, word, number, first + k / n) ||
            !spell(t->name, m->hf, model))
            return hf_map_refuse(p, "the name of its tensor is too long");
        t->row = by_rows ? at : 0;
        t->col = by_rows ? 0 : at;
        t->rows = by_rows ? cut[i] : p->rows;
        t->cols = by_rows ? p->cols : cut[i];
        t->vector = p->rows == 1 && !by_rows && row->layout != IZ_HF_FIRST_ROWS;
        t->transposed = row->layout == IZ_HF_TRANSPOSED && !t->vector;
        t->first = row->layout == IZ_HF_FIRST_ROWS;
        t->grows = row->grows;
        t->head = by_head ? row->each(model->self) : 0;
        if (all)
            join_experts(t, p, row->layout == IZ_HF_EXPERTS_TRANSPOSED);
    }
    return 0;
}

/* Only the rows with this value of `tied`; the number of rows that matched in
 * *found. */
static int add_param(struct iz_hf_map *m, const struct iz_model *model,
                     const struct iz_hf_tensor *like, int *found)
{
    const struct iz_param *p = &model->unit[like->unit].param[like->param];
    const struct iz_hf_name *row = m->hf->names;
    struct numbers number;
    char name[IZ_HF_NAME];
    int err = 0;
    *found = 0;
    for (; row->tensor && !err; row++) {
        if (!row->param || row->tied != like->tied ||
            !matches(row->param, p->name, &number) ||
            !iz_key_applies(type_of(m->hf, model), row->types))
            continue;
        ++*found;
        snprintf(name, sizeof(name), "%s", row->tensor);
        if (!like->tied ||
            (spell(name, m->hf, model) && !iz_hf_map_find(m, name)))
            err = add_tensors(m, model, row, like, &number);
    }
    return err;
}

static int add_params(struct iz_hf_map *m, const struct iz_model *model,
                      bool tied)
{
    int err = 0, found;
    for (int u = 0; u < model->n_units && !err; u++) {
        const struct iz_unit *unit = &model->unit[u];
        struct iz_hf_tensor like = {.unit = u, .tied = tied};
        int64_t at[IZ_PARTS] = {0};
        for (int i = 1; i < IZ_PARTS; i++)
            at[i] = at[i - 1] + iz_unit_elems(unit, (enum iz_unit_part)(i - 1));
        for (int p = 0; p < iz_unit_base(unit) && !err; p++) {
            like.param = p;
            like.width = unit->param[p].cols;
            int64_t *end = &at[iz_param_part(&unit->param[p])];
            like.offset = *end;
            err = add_param(m, model, &like, &found);
            if (!err && !tied && found != 1)
                err = hf_map_refuse(
                    &unit->param[p],
                    "its name in published checkpoints is not known");
            *end += unit->param[p].rows * unit->param[p].cols;
        }
    }
    return err;
}

static int by_bare(const void *a, const void *b)
{
    const struct iz_hf_named *x = a, *y = b;
    return strcmp(x->bare, y->bare);
}

void iz_hf_map_sort(struct iz_hf_map *m)
{
    m->by_name = iz_take(m->n, sizeof(*m->by_name), "names of tensors");
    for (int i = 0; i < m->n; i++)
        m->by_name[i] = (struct iz_hf_named){iz_hf_bare(m, m->tensor[i].name),
                                             &m->tensor[i]};
    qsort(m->by_name, (size_t)m->n, sizeof(*m->by_name), by_bare);
}

int iz_hf_map_open(struct iz_hf_map *m, const struct iz_hf *hf,
                   const struct iz_model *model)
{
    *m = (struct iz_hf_map){.hf = hf, .model = model};
    int err = add_params(m, model, false);
    if (!err)
        err = add_params(m, model, true);
    if (!err)
        iz_hf_map_sort(m);
    else
        iz_hf_map_close(m);
    return err;
}

void iz_hf_map_close(struct iz_hf_map *m)
{
    free(m->by_name);
    free(m->tensor);
    *m = (struct iz_hf_map){0};
}

const char *iz_hf_bare(const struct iz_hf_map *m, const char *name)
{
    static const char inner[] = "language_model.";
    const char *prefix = m->hf && m->hf->prefix ? m->hf->prefix : "";
    size_t n = strlen(prefix);
    bool begins = n && strncmp(name, prefix, n) == 0;
    if (strncmp(begins ? name + n : name, inner, strlen(inner)) == 0)
        return iz_hf_bare(m, name + (begins ? n : 0) + strlen(inner));
    return begins ? name + n : name;
}

const struct iz_hf_tensor *iz_hf_map_find(const struct iz_hf_map *m,
                                          const char *name)
{
    struct iz_hf_named key = {.bare = iz_hf_bare(m, name)}, *found;
    if (m->by_name) {
        found = bsearch(&key, m->by_name, (size_t)m->n, sizeof(key), by_bare);
        return found ? found->tensor : NULL;
    }
    for (int i = 0; i < m->n; i++)
        if (strcmp(iz_hf_bare(m, m->tensor[i].name), iz_hf_bare(m, name)) == 0)
            return &m->tensor[i];
    return NULL;
}

bool iz_hf_map_ignores(const struct iz_hf_map *m, const char *name)
{
    const struct iz_hf_name *row = m->hf->names;
    struct numbers number;
    for (; row->tensor; row++) {
        const char *pattern = iz_hf_bare(m, row->tensor);
        if (!row->param && matches(pattern, iz_hf_bare(m, name), &number) &&
            (!row->beyond ||
             (m->model &&
              iz_key_applies(type_of(m->hf, m->model), row->types) &&
              atoi(number.of[0]) >= row->beyond(m->model->self))))
            return true;
    }
    return false;
}

int iz_hf_shape(const struct iz_hf_tensor *t, int64_t shape[IZ_HF_DIMS])
{
    if (t->times) {
        shape[0] = t->times;
        shape[1] = t->transposed ? t->cols : t->rows / t->times;
        shape[2] = t->transposed ? t->rows / t->times : t->cols;
        return t->vector ? 2 : 3;
    }
    int64_t turns = t->experts ? t->experts : 1;
    shape[0] = t->transposed || t->vector ? t->cols : t->rows / turns;
    shape[1] = t->transposed ? t->rows : t->cols * turns;
    return t->vector ? 1 : 2;
}

/* ---- rectangles ---- */

/* The part of a rectangle of the parameter that is the tensor's, counted from
 * the tensor's own rows and columns; false: none. */
static bool inside(const struct iz_hf_tensor *t, int64_t row, int64_t rows,
                   int64_t col, int64_t cols, struct iz_hf_rect *out)
{
    int64_t r0 = row > t->row ? row : t->row;
    int64_t r1 = row + rows < t->row + t->rows ? row + rows : t->row + t->rows;
    int64_t c0 = col > t->col ? col : t->col;
    int64_t c1 = col + cols < t->col + t->cols ? col + cols : t->col + t->cols;
    *out = (struct iz_hf_rect){r0 - t->row, c0 - t->col, r1 - r0, c1 - c0};
    return r1 > r0 && c1 > c0;
}

/* A part of the first row, whole rows, a part of the last one. */
int iz_hf_rects(const struct iz_hf_tensor *t, int64_t from, int64_t to,
                struct iz_hf_rect out[3])
{
    int64_t w = t->width, end = (t->row + t->rows) * w;
    int n = 0;
    from = from > t->offset ? from - t->offset : 0;
    to = to - t->offset < end ? to - t->offset : end;
    if (from >= to)
        return 0;
    int64_t row = from / w;
    if (from % w) {
        int64_t stop = (row + 1) * w < to ? (row + 1) * w : to;
        n += inside(t, row, 1, from % w, stop - from, &out[n]);
        from = stop;
        row++;
    }
    int64_t whole = (to - from) / w;
    n += inside(t, row, whole, 0, w, &out[n]);
    from += whole * w;
    if (from < to)
        n += inside(t, row + whole, 1, 0, to - from, &out[n]);
    return n;
}

int64_t iz_hf_flat(const struct iz_hf_tensor *t, const struct iz_hf_rect *r)
{
    return t->offset + (t->row + r->row) * t->width + t->col + r->col;
}

/* Where output i of all queries, keys and values is, where heads have theirs
 * together. */
static int64_t place_by_head(const struct iz_hf_tensor *t, int64_t i)
{
    int64_t heads = (t->vector ? t->cols : t->rows) / (3 * t->head);
    int64_t part = i / (heads * t->head), head = i / t->head % heads;
    return (3 * head + part) * t->head + i % t->head;
}

bool iz_hf_next(const struct iz_hf_tensor *t, struct iz_hf_rect *r,
                struct iz_hf_rect *out)
{
    int64_t each = t->times ? t->rows / t->times : t->rows;
    int64_t left = each - r->row % each;
    *out = *r;
    out->rows = r->rows < left ? r->rows : left;
    r->row += out->rows;
    r->rows -= out->rows;
    return out->rows > 0;
}

int64_t iz_hf_place(const struct iz_hf_tensor *t, const struct iz_hf_rect *r)
{
    if (t->head)
        return t->vector ? place_by_head(t, r->col)
                         : place_by_head(t, r->row) * t->cols + r->col;
    if (t->times && t->transposed) {
        int64_t rows = t->rows / t->times;
        return (r->row / rows * t->cols + r->col) * rows + r->row % rows;
    }
    if (t->experts) {
        int64_t rows = t->rows / t->experts;
        return (r->row % rows * t->cols + r->col) * t->experts + r->row / rows;
    }
    return t->transposed ? r->col * t->rows + r->row
                         : r->row * t->cols + r->col;
}
