/* SPDX-License-Identifier: Apache-2.0 */
/* Embedding and tables of rows: bit by bit, sums in the order that is promised.
 */
#include "tests/codelets/ops/timed.h"

#include <stdlib.h>
#include <string.h>

#include "codelets/base/mix.h"

enum { Y, R, WTE, WPE, DY, DWTE, DWPE, TOKEN, BEGINS, EMBED_TENSORS };

struct embedding {
    struct scene s;
    int32_t *token, *begins;
    int64_t first; /* of the rows that are here, where others are elsewhere */
    bool elsewhere, with_r, positions, apart;
};

static struct iz_table table_of(const struct iz_view *v,
                                const struct embedding *e)
{
    return (struct iz_table){.w = v[WTE],
                             .dw = v[DWTE],
                             .row = v[TOKEN].p,
                             .first = e->first,
                             .vocabulary = !e->elsewhere,
                             .wpe = e->positions ? v[WPE] : IZ_NONE,
                             .dwpe = e->positions ? v[DWPE] : IZ_NONE,
                             .begins = {.p = e->apart ? v[BEGINS].p : NULL,
                                        .dtype = IZ_I32,
                                        .rows = e->apart,
                                        .cols = v[Y].rows}};
}

static void embed_forward(struct iz_exec *x, const struct iz_view *v,
                          const void *arg)
{
    const struct embedding *e = arg;
    struct iz_table t = table_of(v, e);
    iz_table_fwd(x, v[Y], e->with_r ? v[R] : IZ_NONE, &t);
}

static void embed_backward(struct iz_exec *x, const struct iz_view *v,
                           const void *arg)
{
    struct iz_table t = table_of(v, arg);
    iz_table_bwd(x, v[DY], &t);
}

static const struct pass embed[2] = {
    {embed_forward, BIT(R) | BIT(WTE) | BIT(TOKEN) | BIT(WPE) | BIT(BEGINS),
     BIT(Y)},
    {embed_backward, BIT(DY) | BIT(TOKEN) | BIT(BEGINS),
     BIT(DWTE) | BIT(DWPE)}};

/* s: positions, seq, width, rows of the table, and rows that are elsewhere,
 * half of them before. */
static struct embedding embedding_new(enum iz_dtype param, const int64_t *s)
{
    enum iz_dtype act = backend.act(param);
    struct embedding e = {.s = {.n = EMBED_TENSORS,
                                .pinned = BIT(TOKEN) | BIT(BEGINS),
                                .t = {[Y] = tensor_new(act, s[0], s[2], 1),
                                      [R] = tensor_new(act, s[0], s[2], 1),
                                      [WTE] = tensor_new(param, s[3], s[2], 1),
                                      [WPE] = tensor_new(param, s[1], s[2], 1),
                                      [DY] = tensor_new(act, s[0], s[2], 1),
                                      [DWTE] = tensor_new(param, s[3], s[2], 1),
                                      [DWPE] = tensor_new(param, s[1], s[2], 1),
                                      [TOKEN] = bytes_new(s[0] * 4),
                                      [BEGINS] = bytes_new(s[0] * 4)}},
                          .first = s[4] / 2,
                          .elsewhere = s[4] > 0,
                          .positions = true};
    e.begins = memset(e.s.t[BEGINS].v.p, 0, (size_t)s[0] * 4);
    e.token = memset(e.s.t[TOKEN].v.p, 0, (size_t)s[0] * 4);
    return e;
}

void timed_tokens(const struct timed_shape *s, int32_t *token)
{
    for (int64_t i = 0; i < s->tokens; i++)
        token[i] = (int32_t)(iz_mix((uint64_t)i) % (uint64_t)s->vocab);
}

void embedding_timed(const struct timed_shape *s, timed_fn *f, void *to)
{
    const int64_t size[] = {s->tokens, s->seq, s->width, s->vocab, 0};
    struct embedding e = embedding_new(backend.x.act, size);
    timed_tokens(s, e.token);
    f(to, &e.s,
      (const struct timed[]){{"embedding", embed_forward, .arg = &e},
                             {"embedding backward", embed_backward, .arg = &e}},
      2);
    scene_free(&e.s);
}

/* What is expected, rounded to the type of t, has its bits. */
static void check_rounded(const char *what, const struct tensor *t)
{
    struct tensor want = tensor_copy(t);
    memcpy(want.d, t->want, (size_t)iz_view_len(t->v) * 8);
    tensor_store(&want);
    fixture_same_bits(what, t->v, want.v);
    tensor_free(&want);
}

/* The row of a table, or of its gradient, that belongs to row i. */
static int64_t row_of(const struct embedding *e, int table, int64_t i)
{
    return table == WTE || table == DWTE
               ? e->token[i] - e->first
               : i % e->s.t[WPE].v.rows - e->begins[i];
}

static void check_embedded(struct embedding *e)
{
    struct tensor *t = e->s.t;
    int64_t c = t[Y].v.cols;
    double *want = tensor_want(&t[Y]);
    for (int64_t i = 0; i < iz_view_len(t[Y].v); i++) {
        int64_t row = row_of(e, WTE, i / c);
        float sum = e->with_r ? (float)t[R].d[i] : 0;
        if (row >= 0 && row < t[WTE].v.rows)
            sum = (float)t[WTE].d[row * c + i % c];
        if (e->positions)
            sum += (float)t[WPE].d[row_of(e, WPE, i / c) * c + i % c];
        want[i] = (double)sum;
    }
    scene_run(&e->s, &embed[0], e);
    check_rounded("embedding", &t[Y]);
}

/* Column j of n rows of dy, in their order; pieces are added alone. */
static float sum_rows(const struct tensor *dy, const int64_t *list, int64_t n,
                      int64_t j)
{
    float sum = 0, part = 0;
    for (int64_t i = 0; i < n; i++) {
        if (i % backend.piece == 0) {
            sum += part;
            part = 0;
        }
        part += (float)dy->d[list[i] * dy->v.cols + j];
    }
    return sum + part;
}

static void check_gradient(const char *what, struct embedding *e, int table)
{
    struct tensor *t = e->s.t;
    int64_t c = t[DY].v.cols, m = t[DY].v.rows;
    int64_t *list = calloc((size_t)m, sizeof(*list));
    double *want = tensor_want(&t[table]);
    for (int64_t v = 0; v < t[table].v.rows; v++) {
        int64_t n = 0;
        for (int64_t i = 0; i < m; i++)
            if (row_of(e, table, i) == v)
                list[n++] = i;
        for (int64_t j = 0; j < c; j++)
            want[v * c + j] = (double)sum_rows(&t[DY], list, n, j);
    }
    check_rounded(what, &t[table]);
    free(list);
}

/* How tokens are distributed over the positions: the last by counts around the
 * size of a piece. */
enum { EQUAL, DIFFERENT, ANY, NEAR_PIECES, DISTRIBUTIONS };

static int32_t token_at(int64_t t, int64_t vocab, int kind)
{
    static const int count[] = {127, 1, 128, 129, 130, 256, 257, 255, 3, 400};
    int64_t end = 0;
    if (kind == EQUAL)
        return (int32_t)(vocab / 2);
    if (kind == DIFFERENT)
        return (int32_t)((vocab - t * 7 % vocab) % vocab);
    if (kind == ANY)
        return fixture_below(vocab);
    for (int v = 0; v < 10; v++)
        if (t * 13 % 1693 < (end += count[v]))
            return (int32_t)(v % vocab);
    return (int32_t)(vocab - 1);
}

/* Without positions, with them, and where they begin again with a document. */
static void check_distributed(enum iz_dtype param, const int64_t *s, int kind)
{
    struct embedding e = embedding_new(param, s);
    for (int64_t t = 0; t < s[0]; t++)
        e.token[t] = token_at(t, s[3] + s[4], kind);
    for (int with = 0; with < 3; with++) {
        e.positions = with > 0;
        e.apart = with > 1;
        for (int64_t i = 0; e.apart && i < s[0]; i++)
            e.begins[i] = i % s[1] && fixture_below(7) ? e.begins[i - 1]
                                                       : (int32_t)(i % s[1]);
        e.with_r = e.elsewhere && (with + kind) % 2;
        check_embedded(&e);
        if (e.with_r)
            scene_in_place(&e.s, &embed[0], &e, 1, (const int[][2]){{Y, R}});
        scene_run(&e.s, &embed[1], &e);
        check_gradient("dwte", &e, DWTE);
        if (e.positions)
            check_gradient("dwpe", &e, DWPE);
    }
    if (kind == EQUAL) {
        e.s.unwanted = BIT(DWTE);
        scene_run(&e.s, &embed[1], &e);
        check_gradient("dwpe", &e, DWPE);
    }
    scene_free(&e.s);
}

/* Also without the gradient of tokens.  Rows repeat, never occur, or are
 * elsewhere, where there is more than one part of a table.  The last is the
 * embedding of a 1.5B model. */
static void embedding_has_the_bits_of_its_order(void **state)
{
    static const int64_t size[][5] = {
        {1, 1, 1, 1},         {6, 3, 8, 11},         {6, 3, 7, 3},
        {21, 7, 17, 5},       {17, 17, 3, 33},       {300, 100, 3, 57},
        {1693, 1693, 16, 12}, {1024, 8, 1, 5},       {2500, 100, 8, 2503},
        {40, 20, 264, 9},     {5000, 1000, 2, 40},   {1, 1, 1, 1, 9},
        {60, 20, 3, 4, 9},    {7, 7, 16, 1, 9},      {700, 100, 8, 2, 40},
        {1500, 500, 1, 3, 5}, {33, 33, 264, 40, 20}, {600, 300, 768, 555}};
    static const int64_t large[5] = {2048, 1024, 1600, 50257};
    int n = COUNT(size) - (backend.large ? 0 : 1);
    for (int k = 0; k < n * DISTRIBUTIONS; k += scene_step())
        check_distributed(fixture_types[(k + k / DISTRIBUTIONS) % 3],
                          size[k / DISTRIBUTIONS], k % DISTRIBUTIONS);
    if (backend.large)
        check_distributed(IZ_BF16, large, ANY);
}

/* arg: a token, and whether it is met in the backward. */
static void embed_token(const void *arg)
{
    static const int64_t size[5] = {4, 2, 8, 5};
    struct embedding e = embedding_new(IZ_F32, size);
    const int *of = arg;
    e.token[3] = of[0];
    scene_run(&e.s, &embed[of[1]], &e);
}

static void embedding_refuses_tokens_outside_of_the_vocabulary(void **state)
{
    scene_dies(embed_token, (const int[]){5, 0},
               "token 5 at position 3 is outside");
    scene_dies(embed_token, (const int[]){-1, 1},
               "token -1 at position 3 is outside");
}

int ops_embedding(void)
{
    const struct CMUnitTest tests[] = {
        SEEDED(embedding_has_the_bits_of_its_order),
        SEEDED(embedding_refuses_tokens_outside_of_the_vocabulary),
    };
    return cmocka_run_group_tests_name("embedding", tests, NULL, NULL);
}
