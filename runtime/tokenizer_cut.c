/* SPDX-License-Identifier: Apache-2.0 */
/* Cuts text into pieces with the patterns of a tokenizer.json, through PCRE2.
 * The patterns are written for Oniguruma: what the two read differently is
 * rewritten or refused, so that no piece differs in silence. */
#define PCRE2_CODE_UNIT_WIDTH 8

#include "runtime/tokenizer_parts.h"

#include <assert.h>
#include <ctype.h>
#include <errno.h>
#include <pcre2.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define JIT_STACK_MAX (64 << 20)
#define STEPS_MAX                                                              \
    1000000000 /* of one match; a long run of blanks needs many                \
                */

/* ---- the pattern ---- */

struct pattern {
    const char *at;
    bool in_class;
    struct iz_text out;
    char *why;
};

static int refuse(struct pattern *p, const char *what, int length)
{
    snprintf(p->why, IZ_WHY, "%.*s in a pattern is not supported",
             length < 40 ? length : 40, what);
    return -ENOTSUP;
}

static int copy(struct pattern *p, int n)
{
    int err = iz_text_add(&p->out, p->at, n);

    p->at += n;
    return err;
}

/* PCRE2's \s has U+180E, which is no white space since Unicode 6.3. */
static int take_space(struct pattern *p)
{
    const char *name =
        p->at[1] == 's' ? "\\p{White_Space}" : "\\P{White_Space}";

    p->at += 2;
    return iz_text_add(&p->out, name, (int64_t)strlen(name));
}

static int take_escape(struct pattern *p)
{
    char c = p->at[1];

    if (c == 's' || c == 'S')
        return take_space(p);
    if (strchr("pP", c) && c && p->at[2] == '{')
        return copy(p, 2);
    if (c && (strchr("rntfdD", c) || ispunct((unsigned char)c)))
        return copy(p, 2);
    return refuse(p, p->at, c ? 2 : 1);
}

/* Groups without names, captures or settings but (?i. */
static int take_group(struct pattern *p)
{
    static const char *const known[] = {
        "(?:", "(?i:", "(?!", "(?=", "(?<!", "(?<=", "(?>"};

    if (p->at[1] != '?')
        return p->at[1] == '*' ? refuse(p, p->at, 2) : copy(p, 1);
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (strncmp(p->at, known[i], strlen(known[i])) == 0)
            return copy(p, (int)strlen(known[i]));
    return refuse(p, p->at, 4);
}

/* {n,m} without a sign behind it: {n}+ is possessive in one of the two only,
 * and so is {,m} a number of times. */
static int take_count(struct pattern *p)
{
    int n = 1;

    while (isdigit((unsigned char)p->at[n]) || (n > 1 && p->at[n] == ','))
        n++;
    if (n == 1 || p->at[n] != '}')
        return refuse(p, p->at, n + 1);
    if (p->at[n + 1] == '+' || p->at[n + 1] == '?')
        return refuse(p, p->at, n + 2);
    return copy(p, n + 1);
}

/* A set; sets within sets and intersections mean nothing to PCRE2. */
static int take_in_class(struct pattern *p)
{
    if (*p->at == '[')
        return refuse(p, p->at, 2);
    if (*p->at == '&' && p->at[1] == '&')
        return refuse(p, p->at, 2);
    if (*p->at == ']')
        p->in_class = false;
    return copy(p, 1);
}

static int take(struct pattern *p)
{
    if (*p->at == '\\')
        return take_escape(p);
    if (p->in_class)
        return take_in_class(p);
    if (*p->at == '(')
        return take_group(p);
    if (*p->at == '{')
        return take_count(p);
    if (*p->at == '^' || *p->at == '$')
        return refuse(p, p->at, 1);
    if (*p->at != '[')
        return copy(p, 1);
    p->in_class = true;
    if (p->at[1] == ']' || (p->at[1] == '^' && p->at[2] == ']'))
        return refuse(p, p->at, 3);
    return copy(p, p->at[1] == '^' ? 2 : 1);
}

/* The braces of \p{...} are not a count. */
static int take_property(struct pattern *p)
{
    const char *end = strchr(p->at, '}');

    return end ? copy(p, (int)(end - p->at) + 1) : refuse(p, p->at, 3);
}

static int rewrite(struct pattern *p)
{
    int err = 0;

    while (!err && *p->at) {
        bool property =
            (p->at[0] == '\\') && (p->at[1] == 'p' || p->at[1] == 'P');

        err = take(p);
        if (!err && property)
            err = take_property(p);
    }
    return err;
}

static int compile(struct iz_cut *cut, const struct iz_text *pattern, char *why)
{
    pcre2_compile_context *c = pcre2_compile_context_create(NULL);
    int code = 0;
    size_t at = 0;

    if (!c)
        return -ENOMEM;
    pcre2_set_newline(c, PCRE2_NEWLINE_LF);
    cut->code = pcre2_compile((PCRE2_SPTR)pattern->p, (size_t)pattern->bytes,
                              PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C,
                              &code, &at, c);
    pcre2_compile_context_free(c);
    if (cut->code)
        return 0;
    pcre2_get_error_message(code, (PCRE2_UCHAR *)why, IZ_WHY);
    return -EINVAL;
}

static int check(const struct iz_cut *cut, char *why)
{
    uint32_t empty = 0;

    pcre2_pattern_info(cut->code, PCRE2_INFO_MATCHEMPTY, &empty);
    if (empty) {
        snprintf(why, IZ_WHY,
                 "a pattern that can match nothing is not "
                 "supported");
        return -ENOTSUP;
    }
    /* Where there is no compiler for this machine, it is interpreted. */
    pcre2_jit_compile(cut->code, PCRE2_JIT_COMPLETE);
    return 0;
}

int iz_cuts_add(struct iz_cuts *c, const char *pattern, bool drop_gaps,
                char *why)
{
    struct pattern p = {.at = pattern, .why = why};
    struct iz_cut *cut = &c->cut[c->count];
    int err;

    snprintf(why, IZ_WHY, "no memory");
    if (c->count == IZ_CUTS_MAX) {
        snprintf(why, IZ_WHY, "more than %d patterns", IZ_CUTS_MAX);
        return -ENOTSUP;
    }
    err = rewrite(&p);
    if (!err)
        err = compile(cut, &p.out, why);
    free(p.out.p);
    if (err)
        return err;
    cut->drop_gaps = drop_gaps;
    c->count++;
    return check(cut, why);
}

void iz_cuts_close(struct iz_cuts *c)
{
    for (int i = 0; i < c->count; i++)
        pcre2_code_free(c->cut[i].code);
    *c = (struct iz_cuts){0};
}

/* ---- matching ---- */

struct iz_cut_work {
    pcre2_match_data *match;
    pcre2_match_context *context;
    pcre2_jit_stack *stack;
};

int iz_cut_work_open(struct iz_cut_work **out)
{
    struct iz_cut_work *w = calloc(1, sizeof *w);

    *out = w;
    if (!w)
        return -ENOMEM;
    w->match = pcre2_match_data_create(1, NULL);
    w->context = pcre2_match_context_create(NULL);
    w->stack = pcre2_jit_stack_create(1 << 15, JIT_STACK_MAX, NULL);
    if (!w->match || !w->context || !w->stack)
        return -ENOMEM;
    pcre2_jit_stack_assign(w->context, NULL, w->stack);
    pcre2_set_match_limit(w->context, STEPS_MAX);
    return 0;
}

void iz_cut_work_close(struct iz_cut_work **w)
{
    if (!*w)
        return;
    pcre2_match_data_free((*w)->match);
    pcre2_match_context_free((*w)->context);
    pcre2_jit_stack_free((*w)->stack);
    free(*w);
    *w = NULL;
}

/* What iz_cut goes down the stages with. */
struct cutting {
    const struct iz_cuts *cuts;
    struct iz_cut_work *w;
    iz_piece_fn *f;
    void *arg;
};

static int cut_from(const struct cutting *c, int stage, const char *text,
                    int64_t n);

/* The next match at or after `at`; both ends are n where there is none. */
static int next_match(const struct cutting *c, int stage, const char *text,
                      int64_t n, int64_t at, int64_t match[2])
{
    const size_t *ends = pcre2_get_ovector_pointer(c->w->match);
    int rc =
        pcre2_match(c->cuts->cut[stage].code, (PCRE2_SPTR)text, (size_t)n,
                    (size_t)at, PCRE2_NO_UTF_CHECK, c->w->match, c->w->context);
    char why[IZ_WHY];

    match[0] = match[1] = n;
    if (rc == PCRE2_ERROR_NOMATCH)
        return 0;
    if (rc < 0) {
        pcre2_get_error_message(rc, (PCRE2_UCHAR *)why, sizeof why);
        fprintf(stderr, "izar: tokenizer: a pattern failed: %s\n", why);
        return -EIO;
    }
    match[0] = (int64_t)ends[0];
    match[1] = (int64_t)ends[1];
    assert(match[0] >= at && match[1] > match[0]);
    return 0;
}

static int cut_stage(const struct cutting *c, int stage, const char *text,
                     int64_t n)
{
    bool keep = !c->cuts->cut[stage].drop_gaps;

    for (int64_t at = 0, match[2]; at < n; at = match[1]) {
        int err = next_match(c, stage, text, n, at, match);

        if (!err && keep && match[0] > at)
            err = cut_from(c, stage + 1, text + at, match[0] - at);
        if (!err && match[1] > match[0])
            err = cut_from(c, stage + 1, text + match[0], match[1] - match[0]);
        if (err)
            return err;
    }
    return 0;
}

static int cut_from(const struct cutting *c, int stage, const char *text,
                    int64_t n)
{
    if (stage == c->cuts->count)
        return c->f(c->arg, text, n);
    return cut_stage(c, stage, text, n);
}

int iz_cut(const struct iz_cuts *cuts, struct iz_cut_work *w, const char *text,
           int64_t bytes, iz_piece_fn *f, void *arg)
{
    return cut_from(&(struct cutting){cuts, w, f, arg}, 0, text, bytes);
}
