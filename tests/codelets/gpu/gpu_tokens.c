/* SPDX-License-Identifier: Apache-2.0 */
/* The kernels of the embedding: bit by bit, with the sums written out in the
 * order that embedding.cu promises. */
#include "tests/codelets/gpu/emulated.h"

#include <stdlib.h>
#include <string.h>

#include "tests/codelets/gpu/dies.h"

enum { PIECE = 128 };

struct embedding {
    struct tensor y, wte, wpe, dy, dwte, dwpe;
    int32_t *token;
    bool positions;
};

static void embed_forward(struct iz_exec *x, void *arg)
{
    struct embedding *e = arg;

    iz_embedding_fwd(x, e->y.v, e->token, e->wte.v,
                     e->positions ? e->wpe.v : IZ_NONE);
}

static void embed_backward(struct iz_exec *x, void *arg)
{
    struct embedding *e = arg;

    iz_embedding_bwd(x, e->dwte.v, e->positions ? e->dwpe.v : IZ_NONE, e->dy.v,
                     e->token);
}

static struct embedding embedding_new(enum iz_dtype t, int64_t m, int64_t seq,
                                      int64_t c, int64_t v)
{
    return (struct embedding){.y = tensor_new(t, m, c, 1),
                              .wte = tensor_new(t, v, c, 1),
                              .wpe = tensor_new(t, seq, c, 1),
                              .dy = tensor_new(t, m, c, 1),
                              .dwte = tensor_new(t, v, c, 1),
                              .dwpe = tensor_new(t, seq, c, 1),
                              .token = calloc((size_t)m, sizeof(int32_t)),
                              .positions = true};
}

static void embedding_free(struct embedding *e)
{
    struct tensor *all[] = {&e->y,  &e->wte,  &e->wpe,
                            &e->dy, &e->dwte, &e->dwpe};

    for (int i = 0; i < 6; i++)
        tensor_free(all[i]);
    free(e->token);
}

/* Rounds to the type of v and compares the bits of one element. */
static void same_element(const char *what, struct iz_view v, int64_t at,
                         float want)
{
    char bits[4];
    int64_t bytes = iz_dtype_bytes(v.dtype);

    iz_cast(bits, v.dtype, &want, IZ_F32, 1);
    if (memcmp(bits, (char *)v.p + at * bytes, (size_t)bytes))
        fail_msg("%s [%lld,%lld] %s: element %lld is not %.9g", what,
                 (long long)v.rows, (long long)v.cols, iz_dtype_name(v.dtype),
                 (long long)at, (double)want);
}

static void check_forward(struct embedding *e)
{
    int64_t c = e->y.v.cols, seq = e->wpe.v.rows;

    emulated_run(embed_forward, e, e->y.v.dtype);
    for (int64_t i = 0; i < iz_view_len(e->y.v); i++) {
        int64_t t = i / c, j = i % c;
        float v = (float)e->wte.d[e->token[t] * c + j];

        if (e->positions)
            v += (float)e->wpe.d[t % seq * c + j];
        same_element("embedding", e->y.v, i, v);
    }
}

/* The positions of a token, in order. */
static int64_t list_positions(int64_t *list, const struct embedding *e,
                              int32_t token)
{
    int64_t n = 0;

    for (int64_t t = 0; t < e->y.v.rows; t++)
        if (e->token[t] == token)
            list[n++] = t;
    return n;
}

static float sum_rows(const struct embedding *e, const int64_t *list, int64_t n,
                      int64_t j)
{
    float sum = 0;

    for (int64_t i = 0; i < n; i++)
        sum += (float)e->dy.d[list[i] * e->dy.v.cols + j];
    return sum;
}

static float sum_pieces(const struct embedding *e, const int64_t *list,
                        int64_t n, int64_t j)
{
    float sum = 0;

    if (n <= PIECE)
        return sum_rows(e, list, n, j);
    for (int64_t i = 0; i < n; i += PIECE)
        sum += sum_rows(e, list + i, n - i < PIECE ? n - i : PIECE, j);
    return sum;
}

static void check_tokens(struct embedding *e)
{
    int64_t c = e->dy.v.cols;
    int64_t *list = calloc((size_t)e->y.v.rows, sizeof *list);

    for (int64_t v = 0; v < e->dwte.v.rows; v++) {
        int64_t n = list_positions(list, e, (int32_t)v);

        for (int64_t j = 0; j < c; j++)
            same_element("dwte", e->dwte.v, v * c + j,
                         sum_pieces(e, list, n, j));
    }
    free(list);
}

static void check_positions(struct embedding *e)
{
    int64_t c = e->dy.v.cols, seq = e->dwpe.v.rows;

    for (int64_t p = 0; p < seq; p++)
        for (int64_t j = 0; j < c; j++) {
            float sum = 0;

            for (int64_t t = p; t < e->dy.v.rows; t += seq)
                sum += (float)e->dy.d[t * c + j];
            same_element("dwpe", e->dwpe.v, p * c + j, sum);
        }
}

static void check_embedding(struct embedding *e)
{
    for (int positions = 0; positions < 2; positions++) {
        e->positions = positions;
        check_forward(e);
        emulated_run(embed_backward, e, e->y.v.dtype);
        check_tokens(e);
        if (positions)
            check_positions(e);
    }
}

/* How tokens are distributed over the positions. */
static int32_t all_equal(int64_t t, int64_t vocab)
{
    (void)t;
    return (int32_t)(vocab / 2);
}

static int32_t all_different(int64_t t, int64_t vocab)
{
    return (int32_t)((vocab - t * 7 % vocab) % vocab);
}

static int32_t any(int64_t t, int64_t vocab)
{
    (void)t;
    return fixture_below(vocab);
}

/* Counts around the size of a piece: 127, 128, 129, 255, 256, 257, ... */
static int32_t near_pieces(int64_t t, int64_t vocab)
{
    static const int count[] = {127, 1, 128, 129, 130, 256, 257, 255, 3, 400};
    int64_t end = 0;

    for (int v = 0; v < 10; v++)
        if (t * 13 % 1693 < (end += count[v]))
            return (int32_t)(v % vocab);
    return (int32_t)(vocab - 1);
}

static void embedding_has_the_bits_of_its_order(void **state)
{
    static int32_t (*const kind[])(int64_t, int64_t) = {
        all_equal, all_different, any, near_pieces};
    /* positions, seq, width, vocab */
    static const int64_t size[][4] = {{1, 1, 1, 1},      {6, 3, 8, 11},
                                      {300, 100, 3, 57}, {1693, 1693, 16, 12},
                                      {1024, 8, 1, 5},   {2500, 100, 8, 2503},
                                      {40, 20, 264, 9},  {5000, 1000, 2, 40}};

    (void)state;
    fixture_seed();
    for (int k = 0; k < 3 * 4 * 8; k++) {
        const int64_t *s = size[k / 12];
        struct embedding e =
            embedding_new(fixture_types[k % 3], s[0], s[1], s[2], s[3]);

        for (int64_t t = 0; t < s[0]; t++)
            e.token[t] = kind[k / 3 % 4](t, s[3]);
        check_embedding(&e);
        embedding_free(&e);
    }
}

static void embedding_leaves_out_unwanted_gradients(void **state)
{
    struct embedding e;

    (void)state;
    fixture_seed();
    e = embedding_new(IZ_F32, 20, 10, 8, 5);
    e.dwte.v.p = NULL;
    emulated_run(embed_backward, &e, IZ_F32);
    check_positions(&e);
    embedding_free(&e);
}

static void embed_number(int32_t token, void (*op)(struct iz_exec *, void *))
{
    struct embedding e = embedding_new(IZ_F32, 4, 2, 8, 5);

    e.token[3] = token;
    emulated_run(op, &e, IZ_F32);
}

static void embed_too_large(void)
{
    embed_number(5, embed_forward);
}

static void embed_negative_backward(void)
{
    embed_number(-1, embed_backward);
}

static void embedding_refuses_tokens_outside_of_the_vocabulary(void **state)
{
    (void)state;
    dies(embed_too_large, "token 5 at position 3 is outside");
    dies(embed_negative_backward, "token -1 at position 3 is outside");
}

int gpu_tokens(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(embedding_has_the_bits_of_its_order),
        cmocka_unit_test(embedding_leaves_out_unwanted_gradients),
        cmocka_unit_test(embedding_refuses_tokens_outside_of_the_vocabulary),
    };

    return cmocka_run_group_tests_name("tokens", tests, NULL, NULL);
}
