/* SPDX-License-Identifier: Apache-2.0 */
/* Tensors of more than 2^32 elements.  Their memory is mapped and taken where
 * it is touched alone: an op has the last rows of many, or some columns of very
 * long ones, and must give the bits that it gives of these alone.  Kernels are
 * emulated in the first and the last blocks of a grid.  What visits all rows on
 * the CPU is left out there. */
#include "tests/codelets/ops/scene.h"

#include <string.h>

#include "codelets/buffer/flat_buffer.h"
#include "codelets/flat/nf4.h"

enum { PARTS = 8, ROWS = 4, COLS = 1024, ENDS = 8, CHUNK = 128 };
#define ABOVE (INT64_C(1) << 22) /* rows of COLS */
#define WIDE (INT64_C(1) << 30)  /* columns; the fifth row begins at 2^32 */

/* A tensor near, and so many rows above it and columns beside it far. */
struct part {
    int64_t rows, cols, above, left, right;
    enum { ACT, SUM, NUMBER, BYTE } kind;
};

struct far {
    const char *name;
    void (*op)(struct iz_exec *x, const struct iz_view *v, const struct far *f,
               bool far);
    struct part part[PARTS];
    bool all; /* the op visits all rows */
    /* Of what are numbers; above: rows of the tensors that they count. */
    void (*set)(const struct iz_view *v, int64_t above);
};

static int64_t above_of(const struct far *f, bool far)
{
    return far ? f->part[0].above : 0;
}

static int64_t left_of(const struct far *f, bool far)
{
    return far ? f->part[0].left : 0;
}

/* ---- ops ---- */

#define OP(name)                                                               \
    static void name(struct iz_exec *x, const struct iz_view *v,               \
                     const struct far *f, bool far)

OP(columns)
{
    int64_t left = left_of(f, far);
    iz_op_columns(x, v[0], left, v[1], left, v[2].cols);
}

static struct iz_norm_layer norm_of(const struct iz_view *v)
{
    return (struct iz_norm_layer){
        .w = v[2], .rstd = v[3], .dw = v[4], .eps = 1e-5f};
}

OP(heads)
{
    struct iz_norm_layer n = norm_of(v);
    iz_norm_head(x, v[0], v[1], &n, left_of(f, far), false);
    iz_norm_head(x, v[0], v[1], &n, left_of(f, far), true);
}

/* Without a gradient of the weight. */
OP(all_heads)
{
    struct iz_norm_layer n = norm_of(v);
    n.dw = IZ_NONE;
    iz_norm_head(x, v[0], v[1], &n, 0, false);
    iz_norm_head(x, v[0], v[1], &n, 0, true);
}

OP(rope)
{
    struct iz_rope r = {
        .seq = 100, .heads = 2, .d = 8, .theta = 1e4, .factor = 1};
    iz_rope(x, v[0], IZ_NONE, &r, false);
}

/* y = a w^T, a = y w, dw = y^T a. */
OP(products)
{
    struct iz_linear l = {.w = v[2], .dw = v[3], .out_in = true};
    if (!backend_multiplies())
        return;
    iz_matmul_fwd(x, v[0], IZ_NONE, v[1], &l);
    iz_matmul_da(x, v[1], v[0], &l);
    iz_matmul_dw(x, v[0], v[1], &l);
}

/* The last rows of a sample, in few blocks.  The CPU's backward alone visits no
 * others. */
OP(attention)
{
    struct iz_attention a = {.kv = v[0],
                             .dkv = v[1],
                             .qkv = v[2],
                             .o = v[3],
                             .lse = v[4],
                             .first = above_of(f, far) + CHUNK,
                             .seq = above_of(f, far) + 2 * CHUNK,
                             .heads = 16,
                             .window = 100};
    if (backend.ends)
        backend.ends(0);
    iz_attention_fwd(x, &a);
    if (x->backend == IZ_CPU)
        iz_attention_bwd(x, v[5], v[6], &a);
}

OP(magnitudes)
{
    struct iz_magnitude g = {.w = v[0],
                             .a = v[1],
                             .b = v[2],
                             .m = v[3],
                             .scale = 2,
                             .first = above_of(f, far),
                             .out_in = true};
    iz_magnitude_gain(x, v[4], v[5], &g);
}

OP(magnitudes_dm)
{
    iz_magnitude_dm(x, v[2], v[0], v[1], v[3], left_of(f, far));
}

OP(table)
{
    struct iz_table t = {.w = v[0], .row = v[1].p, .vocabulary = true};
    iz_table_fwd(x, v[2], IZ_NONE, &t);
}

/* The last tokens are 2 and 3.  All others are 0, which is not in the table:
 * the CPU would add all its rows.  A sort of which a part is done cannot have
 * it behind the others. */
OP(table_gradient)
{
    struct iz_table t = {
        .dw = v[1], .row = v[2].p, .first = backend.x.backend == IZ_CPU};
    iz_table_bwd(x, v[0], &t);
}

static struct iz_routes routes_of(const struct iz_view *v)
{
    return (struct iz_routes){.place = v[2],
                              .chosen = v[3],
                              .weight = v[4],
                              .end = v[5],
                              .first = 1,
                              .here = 1};
}

OP(experts)
{
    struct iz_routes r = routes_of(v);
    struct iz_linear l = {.w = v[6], .out_in = true};
    iz_experts_dispatch(x, v[1], v[0], &r);
    if (backend_multiplies())
        iz_experts_fwd(x, v[7], v[1], &l, &r);
    iz_experts_combine(x, v[0], v[0], v[1], &r, false);
    iz_experts_combine(x, v[0], v[0], v[1], &r, true);
}

OP(experts_weights)
{
    struct iz_routes r = routes_of(v);
    iz_experts_weigh_bwd(x, v[6], v[0], v[1], v[7], &r);
}

OP(experts_biases)
{
    struct iz_routes r = routes_of(v);
    iz_experts_bias_bwd(x, v[1], v[0], v[6], &r);
}

OP(norms)
{
    struct iz_norm_layer n = norm_of(v);
    iz_norm_layer_fwd(x, v[1], v[0], &n, false);
    n.dw = IZ_NONE;
    iz_norm_layer_bwd(x, v[1], v[0], v[1], v[0], &n);
    n = norm_of(v);
    n.mean = v[5];
    iz_norm_layer_fwd(x, v[6], v[0], &n, false);
    n.dw = IZ_NONE;
    iz_norm_layer_bwd(x, v[6], v[0], v[6], v[0], &n);
}

/* Gated and not. */
OP(activations)
{
    iz_activation_apply(x, IZ_NONE, v[0], IZ_NONE, v[1], IZ_SILU);
    iz_activation_apply(x, v[2], v[0], v[0], v[1], IZ_SILU);
    iz_activation_apply(x, IZ_NONE, v[0], IZ_NONE, v[0], IZ_GELU_TANH);
    iz_activation_apply(x, v[3], v[0], v[3], v[0], IZ_GELU_TANH);
}

OP(elements)
{
    struct iz_drop d = {.p = 0.5, .key = 7, .samples = 1};
    d.sample = far ? 0 : f->part[0].above / ROWS;
    iz_dropout(x, v[1], v[0], v[0], &d);
    iz_op_scale(x, v[0], v[1], 3, 2);
    iz_convert(x, v[2], v[0]);
    iz_op_add(x, v[2], v[1]);
    iz_magnitude_apply(x, v[0], v[1], v[0], v[3], IZ_NONE);
}

OP(router)
{
    struct iz_routes r = {
        .p = v[0],
        .lse = v[1],
        .weight = v[2],
        .chosen = v[3],
        .normalise = true,
        .place = {.dtype = IZ_I32, .rows = v[0].rows, .cols = v[2].cols},
        .end = {.dtype = IZ_I32, .rows = 1, .cols = v[0].cols}};
    r.place.p = iz_exec_work(x, IZ_I32, r.place.rows, r.place.cols).p;
    r.end.p = iz_exec_work(x, IZ_I32, 1, r.end.cols).p;
    iz_route_fwd(x, &r);
    iz_route_bwd(x, v[4], v[2], &r, 0, 0);
    iz_exec_release(x, 0);
}

OP(column_sums)
{
    struct iz_linear l = {.w = v[1], .db = v[2]};
    if (!backend_multiplies())
        return;
    l.dw = v[1];
    l.dw.p = NULL;
    if (!x->dry)
        iz_matmul_dw(x, v[0], v[0], &l);
    else
        iz_exec_work(x, IZ_U8, 1, 64 << 20);
    iz_exec_release(x, 0);
}

OP(quantised)
{
    if (x->dry)
        return;
    iz_buffer_quant(x, IZ_QUANT_NF4, v[0].p, v[0].dtype, v[1].p,
                    iz_view_len(v[0]));
    iz_buffer_quant(x, IZ_QUANT_INT8, v[2].p, v[2].dtype, v[3].p,
                    iz_view_len(v[2]));
}

/* ---- numbers ---- */

static void set_tokens(const struct iz_view *v, int64_t above)
{
    int32_t *token = v[1].p;
    token[0] = (int32_t)above + 1;
    token[1] = (int32_t)above;
}

static void set_rows(const struct iz_view *v, int64_t above)
{
    int32_t *token = (int32_t *)v[2].p + above;
    for (int32_t i = 0; i < ROWS; i++)
        token[i] = 2 + i % 2;
}

/* The last rows have expert 1, in another order. */
static void set_routes(const struct iz_view *v, int64_t above)
{
    int32_t *place = (int32_t *)v[2].p + above, *end = v[5].p;
    int32_t *chosen = (int32_t *)v[3].p + above;
    for (int32_t i = 0; i < ROWS; i++) {
        place[i] = (int32_t)above + (i ^ 1);
        chosen[i] = 1;
    }
    end[0] = (int32_t)above;
    end[1] = (int32_t)above + ROWS;
}

/* clang-format off */
#define AS(r, c, k, ...) {.rows = (r), .cols = (c), .kind = (k), __VA_ARGS__}
#define NEAR(r, c, k) AS(r, c, k, .above = 0)
#define TALL(r, c, k) AS(r, c, k, .above = ABOVE)
#define LEFT(r, c) AS(r, c, ACT, .left = WIDE)
#define RIGHT(r, c) AS(r, c, ACT, .right = WIDE)
#define HEADS 128 /* of 2^24 rows */
#define OF_HEADS(c, k) AS(1, c, k, .above = (1 << 24) - 1)
#define GROUPS(c, k) AS(2, c, k, .above = ABOVE / 16)
#define KEYS(k) AS(2 * CHUNK, 2 * COLS, k, .above = 1 << 20)
#define ROUTED                                                                 \
    TALL(ROWS, 1, NUMBER), TALL(ROWS, 1, NUMBER), TALL(ROWS, 1, SUM),          \
        NEAR(1, 2, NUMBER)
#define CASE(f, ...) {.name = #f, .op = f, .part = {__VA_ARGS__}}
#define SET(f, how, ...) {.name = #f, .op = f, .set = how, .part = {__VA_ARGS__}}
#define ALL(f, ...) {.name = #f, .op = f, .all = true, .part = {__VA_ARGS__}}

static const struct far cases[] = {
    CASE(columns, LEFT(5, 16), LEFT(5, 16), NEAR(1, 16, ACT)),
    CASE(heads, LEFT(5, 16), NEAR(5, 16, ACT), NEAR(1, 8, ACT),
         NEAR(5, 2, SUM), NEAR(1, 8, ACT)),
    CASE(rope, RIGHT(5, 16)),
    CASE(products, RIGHT(5, 16), NEAR(5, 8, ACT), NEAR(16, 8, ACT),
         NEAR(16, 8, ACT)),
    CASE(attention, KEYS(ACT), KEYS(SUM), NEAR(CHUNK, 3 * COLS, ACT),
         NEAR(CHUNK, COLS, ACT), NEAR(16, CHUNK, SUM),
         NEAR(CHUNK, 3 * COLS, ACT), NEAR(CHUNK, COLS, ACT)),
    CASE(magnitudes, TALL(2, COLS, ACT), NEAR(2, COLS, ACT), NEAR(2, 2, ACT),
         NEAR(1, 2, ACT), AS(1, 2, SUM, .left = ABOVE), NEAR(1, 2, SUM)),
    CASE(magnitudes_dm, LEFT(5, 8), LEFT(5, 8), NEAR(1, 8, ACT),
         NEAR(1, 8, SUM)),
    SET(table, set_tokens, TALL(2, COLS, ACT), NEAR(1, 2, NUMBER),
        NEAR(2, COLS, ACT)),
    SET(table_gradient, set_rows, TALL(ROWS, COLS, ACT), NEAR(4, COLS, ACT),
        TALL(ROWS, 1, NUMBER)),
    SET(experts, set_routes, TALL(ROWS, COLS, ACT), TALL(ROWS, COLS, ACT),
        ROUTED, NEAR(16, COLS, ACT), TALL(ROWS, 16, ACT)),
    SET(experts_weights, set_routes, TALL(ROWS, COLS, ACT),
        TALL(ROWS, 2 * COLS, ACT), ROUTED, TALL(ROWS, 1, SUM),
        TALL(ROWS, COLS, ACT)),
    SET(experts_biases, set_routes, TALL(ROWS, COLS, ACT), TALL(ROWS, 1, SUM),
        ROUTED, NEAR(1, COLS, ACT)),
    ALL(norms, TALL(ROWS, COLS, ACT), TALL(ROWS, COLS, ACT),
        NEAR(1, COLS, ACT), TALL(ROWS, 1, SUM), NEAR(1, COLS, ACT),
        TALL(ROWS, 1, SUM), TALL(ROWS, COLS, ACT)),
    ALL(all_heads, OF_HEADS(2 * HEADS, ACT), OF_HEADS(2 * HEADS, ACT),
        NEAR(1, 2, ACT), OF_HEADS(HEADS, SUM)),
    ALL(activations, TALL(ROWS, COLS, ACT), TALL(ROWS, 2 * COLS, ACT),
        TALL(ROWS, 2 * COLS, ACT), TALL(ROWS, COLS, ACT)),
    ALL(elements, TALL(ROWS, COLS, ACT), TALL(ROWS, COLS, ACT),
        TALL(ROWS, COLS, ACT), NEAR(1, COLS, SUM)),
    ALL(router, TALL(ROWS, COLS, SUM), TALL(ROWS, 1, SUM), TALL(ROWS, 2, SUM),
        TALL(ROWS, 2, NUMBER), TALL(ROWS, COLS, ACT)),
    /* in the first of 264 shares, which take 8 rows in turns */
    ALL(column_sums, AS(8, COLS, ACT, .above = 264 * 8 * 2000),
        NEAR(COLS, COLS, ACT), NEAR(1, COLS, ACT)),
    ALL(quantised, GROUPS(IZ_QUANT_GROUP, ACT),
        GROUPS(sizeof(struct iz_nf4_group), BYTE), GROUPS(IZ_QUANT_GROUP, ACT),
        GROUPS(sizeof(struct iz_int8_group), BYTE)),
};
/* clang-format on */

/* ---- runs ---- */

/* Row i of the part in its tensor. */
static void *row_of(struct iz_view v, const struct part *p, int64_t i)
{
    int64_t left = v.cols > p->cols ? p->left : 0;
    return fixture_at(v.p, v.dtype, (v.rows - p->rows + i) * v.cols + left);
}

static void run(const struct far *f, enum iz_dtype act,
                const struct tensor *value, bool far, struct iz_view *v)
{
    static const enum iz_dtype type[] = {
        [SUM] = IZ_F32, [NUMBER] = IZ_I32, [BYTE] = IZ_U8};
    struct iz_view none[PARTS] = {{0}};
    struct iz_exec x = backend.x, dry;
    static uint64_t task;
    for (int i = 0; i < PARTS && f->part[i].rows; i++) {
        const struct part *p = &f->part[i];
        none[i] = v[i] = fixture_map(p->kind == ACT ? act : type[p->kind],
                                     p->rows + far * p->above,
                                     p->cols + far * (p->left + p->right));
        for (int64_t r = 0; r < p->rows && value[i].v.p; r++)
            memcpy(row_of(v[i], p, r), iz_view_rows(value[i].v, r, 1).p,
                   (size_t)(p->cols * iz_dtype_bytes(v[i].dtype)));
        none[i].p = NULL;
    }
    if (f->set)
        f->set(v, above_of(f, far));
    x.act = act;
    x.task = ++task;
    dry = iz_exec_dry(x.backend, act);
    dry.numerics = x.numerics;
    f->op(&dry, none, f, far);
    struct iz_view work = fixture_map(IZ_U8, 1, dry.work.peak + 1);
    x.work = (struct iz_arena){.base = work.p, .size = dry.work.peak};
    if (far && backend.ends)
        backend.ends(ENDS);
    f->op(&x, v, f, far);
    if (backend.ends)
        backend.ends(0);
    fixture_unmap(work);
}

static void check_case(const struct far *f, enum iz_dtype act)
{
    struct tensor value[PARTS];
    struct iz_view near[PARTS], far[PARTS];
    int n = 0;
    memset(value, 0, sizeof(value));
    for (; n < PARTS && f->part[n].rows; n++) {
        const struct part *p = &f->part[n];
        if (p->kind <= SUM)
            value[n] = tensor_new(p->kind ? IZ_F32 : act, p->rows, p->cols, 1);
    }
    run(f, act, value, false, near);
    run(f, act, value, true, far);
    for (int i = 0; i < n; i++) {
        const struct part *p = &f->part[i];
        size_t bytes = (size_t)(p->cols * iz_dtype_bytes(near[i].dtype));
        for (int64_t r = 0; r < p->rows && p->kind != NUMBER; r++)
            if (memcmp(row_of(near[i], p, r), row_of(far[i], p, r), bytes))
                fail_msg("%s in %s: tensor %d differs far away in row %lld",
                         f->name, iz_dtype_name(act), i, (long long)r);
        fixture_unmap(near[i]);
        fixture_unmap(far[i]);
        tensor_free(&value[i]);
    }
}

static void what_is_far_is_as_what_is_near(void **state)
{
    if (backend.device || (backend.x.backend == IZ_CUDA && !backend.ends))
        skip();
    for (int k = 0; k < 2 * COUNT(cases); k++) {
        const struct far *f = &cases[k / 2];
        enum iz_dtype act = k % 2 ? IZ_BF16 : IZ_F32;
        if (backend_acts(act) && !(f->all && backend.x.backend == IZ_CPU))
            check_case(f, act);
    }
}

int ops_far(void)
{
    const struct CMUnitTest tests[] = {
        SEEDED(what_is_far_is_as_what_is_near),
    };
    return cmocka_run_group_tests_name("far", tests, NULL, NULL);
}
