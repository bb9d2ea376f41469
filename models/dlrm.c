/* SPDX-License-Identifier: Apache-2.0 */
/* Recommendation: embedding tables, which are nearly all of the model, and two
 * small MLPs.  n = samples, E = tables, D = dim.  All tables are one long one
 * of E * rows rows, cut into units of equal size whatever the sizes of tables;
 * each unit fills in the vectors that it has and hands on the others. */
#include "models/dlrm.h"

#include <math.h>

#include "models/keys.h"
#include "models/parts.h"

#define CONFIG struct iz_dlrm_config

/* Larger widths are typing errors. */
#define WIDEST (1 << 20)
#define ROWS_MOST (1 << 30)

static struct iz_dlrm_config config;

static const struct iz_key keys[] = {
    {KEY(dense, INT, 1, WIDEST, NULL), "13", "Numbers of a sample."},
    {KEY(tables, INT, 1, 1024, NULL), "26", "Categories of a sample."},
    {KEY(rows, INT, 1, ROWS_MOST, NULL), "1000000",
     "Rows of each table; a category is taken modulo this."},
    {KEY(dim, INT, 1, WIDEST, NULL), "64", "Numbers of a row."},
    {KEY(unit_rows, INT, 1, ROWS_MOST, NULL), "1000000",
     "Rows of all tables that are gathered and updated as one unit."},
    {KEY(bottom_layers, INT, 1, IZ_DLRM_LAYERS, NULL), "2",
     "Hidden layers of the MLP over the numbers."},
    {KEY(bottom_width, INT, 1, WIDEST, NULL), "512", "Of these layers."},
    {KEY(top_layers, INT, 1, IZ_DLRM_LAYERS, NULL), "3",
     "Hidden layers of the MLP over the products."},
    {KEY(top_width, INT, 1, WIDEST, NULL), "512", "Of these layers."},
    {0},
};

/* The first unit has nothing to hand on, the last may have fewer rows. */
enum kind { KIND_FIRST, KIND_MIDDLE, KIND_LAST, KIND_HEAD };

static int64_t all_rows(const struct iz_dlrm_config *c)
{
    return (int64_t)c->tables * c->rows;
}

static int64_t units(const struct iz_dlrm_config *c)
{
    return (all_rows(c) + c->unit_rows - 1) / c->unit_rows;
}

/* Columns that the top MLP reads: the bottom's vector, products of pairs. */
static int64_t pairs(const struct iz_dlrm_config *c)
{
    return c->dim + (int64_t)c->tables * (c->tables + 1) / 2;
}

/* ---- samples ---- */

/* The input of n samples: int32 [n E], rows of the long table; then fp32 [n,
 * dense]. */
static float *numbers(const void *input, const struct iz_dlrm_config *c,
                      int64_t samples)
{
    return input ? (float *)((int32_t *)(uintptr_t)input + samples * c->tables)
                 : NULL;
}

static int32_t word(const void *record, int64_t i)
{
    int32_t v;
    memcpy(&v, (const char *)record + 4 * i, sizeof(v));
    return v;
}

static const char *check_record(const void *self, const void *record)
{
    int32_t label = word(record, 0);
    return label == 0 || label == 1 ? NULL : "its label is neither 0 nor 1";
}

static void unpack(const void *self, const void *record, int64_t i, int64_t n,
                   void *input, void *target)
{
    const struct iz_dlrm_config *c = self;
    int32_t *row = (int32_t *)input + i * c->tables;
    float *x = numbers(input, c, n) + i * c->dense;
    ((int32_t *)target)[i] = word(record, 0);
    for (int k = 0; k < c->dense; k++) {
        int32_t v = word(record, 1 + k);
        x[k] = log1pf(v > 0 ? (float)v : 0);
    }
    for (int k = 0; k < c->tables; k++) {
        uint32_t v = (uint32_t)word(record, 1 + c->dense + k);
        row[k] = (int32_t)(k * (int64_t)c->rows + v % (uint32_t)c->rows);
    }
}

static int64_t list_rows(const void *self, int n, const void *input,
                         uint64_t *out)
{
    const struct iz_dlrm_config *c = self;
    const int32_t *row = input;
    int64_t reads = (int64_t)n * c->tables;
    for (int64_t i = 0; i < reads; i++)
        out[i] = (uint64_t)(row[i] / c->unit_rows) << 32 |
                 (uint32_t)(row[i] % c->unit_rows);
    return reads;
}

/* ---- tables ---- */

/* A boundary: the vectors [n E,D]. */
static struct iz_view vectors(struct iz_view v, const struct iz_layer *a)
{
    return tokens(v, ((const struct iz_dlrm_config *)a->self)->dim);
}

static struct iz_table table(const struct iz_layer *a)
{
    const struct iz_dlrm_config *c = a->self;
    struct iz_table t = {.w = a->w[0],
                         .row = a->input,
                         .first = (int64_t)a->unit * c->unit_rows};
    if (a->dw)
        t.dw = a->dw[0];
    return t;
}

static void table_forward(struct iz_exec *x, const struct iz_layer *a)
{
    struct iz_table t = table(a);
    iz_table_fwd(x, vectors(a->y, a), a->unit ? vectors(a->x, a) : IZ_NONE, &t);
}

/* What earlier units filled in has its gradient here too; what is from this
 * one they do not look at. */
static void table_backward(struct iz_exec *x, const struct iz_layer *a)
{
    struct iz_table t = table(a);
    iz_table_bwd(x, vectors(a->dy, a), &t);
    if (a->unit)
        iz_convert(x, a->dx, a->dy);
}

/* ---- the MLPs ---- */

/* u: before GELU, g: behind it; of each layer [n,width]. */
struct mlp {
    int first, layers; /* first parameter of the unit, hidden layers */
    struct iz_view in, u[IZ_DLRM_LAYERS], g[IZ_DLRM_LAYERS];
};

static struct iz_view mlp_input(const struct mlp *m, int layer)
{
    return layer ? m->g[layer - 1] : m->in;
}

/* The output of the last hidden layer. */
static struct iz_view mlp_forward(struct iz_exec *x, const struct iz_layer *a,
                                  struct mlp *m)
{
    for (int i = 0; i < m->layers; i++) {
        struct iz_linear l = affine(a, m->first + 2 * i);
        m->u[i] = iz_exec_work(x, x->act, m->in.rows, l.w.cols);
        m->g[i] = iz_exec_work(x, x->act, m->in.rows, l.w.cols);
        iz_matmul_fwd(x, m->u[i], IZ_NONE, mlp_input(m, i), &l);
        iz_activation_apply(x, IZ_NONE, m->g[i], IZ_NONE, m->u[i],
                            IZ_GELU_TANH);
    }
    return m->g[m->layers - 1];
}

/* From dy, the gradient of the output, which is lost; that of the input goes
 * into dx unless dx is absent. */
static void dlrm_mlp_backward(struct iz_exec *x, const struct iz_layer *a,
                              const struct mlp *m, struct iz_view dx,
                              struct iz_view dy)
{
    for (int i = m->layers - 1; i >= 0; i--) {
        struct iz_linear l = affine(a, m->first + 2 * i);
        struct iz_view to = dx;
        if (i)
            to = iz_exec_work(x, x->act, dy.rows, m->u[i - 1].cols);
        iz_activation_apply(x, dy, m->g[i], dy, m->u[i], IZ_GELU_TANH);
        iz_matmul_dw(x, dy, mlp_input(m, i), &l);
        if (to.rows)
            iz_matmul_da(x, to, dy, &l);
        dy = to;
    }
}

/* ---- the head ---- */

/* z is the bottom's vector [n,D], y the products; h is classified. */
struct head {
    struct mlp bottom, top;
    struct iz_view z, y, h;
    int last, matrix; /* parameters: of the bottom's last layer, the answers */
};

static struct head head_forward(struct iz_exec *x, const struct iz_layer *a)
{
    const struct iz_dlrm_config *c = a->self;
    struct head h = {.bottom = {.layers = c->bottom_layers},
                     .last = 2 * c->bottom_layers};
    h.top.first = h.last + 2;
    h.top.layers = c->top_layers;
    h.matrix = h.top.first + 2 * c->top_layers;
    struct iz_linear l = affine(a, h.last);
    h.bottom.in =
        numbers_of(x, numbers(a->input, c, a->samples), a->samples, c->dense);
    h.z = iz_exec_work(x, x->act, a->samples, c->dim);
    iz_matmul_fwd(x, h.z, IZ_NONE, mlp_forward(x, a, &h.bottom), &l);
    h.y = iz_exec_work(x, x->act, a->samples, pairs(c));
    iz_interact_fwd(x, h.y, h.z, vectors(a->x, a));
    h.top.in = h.y;
    h.h = mlp_forward(x, a, &h.top);
    return h;
}

static struct iz_classifier classifier(const struct iz_layer *a,
                                       const struct head *h)
{
    return (struct iz_classifier){
        .a = h->h, .w = a->w[h->matrix], .target = a->target, .loss = a->loss};
}

static void dlrm_head_backward(struct iz_exec *x, const struct iz_layer *a)
{
    int64_t mark = iz_exec_mark(x);
    struct head h = head_forward(x, a);
    struct iz_classifier k = classifier(a, &h);
    struct iz_linear l = affine(a, h.last);
    struct iz_view hidden = h.bottom.g[h.bottom.layers - 1];
    struct iz_view dh = iz_exec_work(x, x->act, h.h.rows, h.h.cols);
    struct iz_view dy = iz_exec_work(x, x->act, h.y.rows, h.y.cols);
    struct iz_view dz = iz_exec_work(x, x->act, h.z.rows, h.z.cols);
    struct iz_view dg = iz_exec_work(x, x->act, hidden.rows, hidden.cols);
    k.da = dh;
    k.dw = a->dw[h.matrix];
    k.loss_scale = a->loss_scale;
    iz_classifier(x, &k);
    dlrm_mlp_backward(x, a, &h.top, dy, dh);
    iz_interact_bwd(x, dz, vectors(a->dx, a), dy, h.z, vectors(a->x, a));
    iz_matmul_dw(x, dz, hidden, &l);
    iz_matmul_da(x, dg, dz, &l);
    dlrm_mlp_backward(x, a, &h.bottom, IZ_NONE, dg);
    iz_exec_release(x, mark);
}

static void dlrm_head_evaluate(struct iz_exec *x, const struct iz_layer *a)
{
    int64_t mark = iz_exec_mark(x);
    struct head h = head_forward(x, a);
    struct iz_classifier k = classifier(a, &h);
    iz_classifier(x, &k);
    iz_exec_release(x, mark);
}

/* ---- units ---- */

static void table_open(struct iz_unit *u, const struct iz_dlrm_config *c, int i)
{
    int64_t first = (int64_t)i * c->unit_rows, left = all_rows(c) - first;
    struct iz_param rows =
        weight("rows", left < c->unit_rows ? left : c->unit_rows, c->dim,
               1 / sqrtf((float)c->dim));
    char prefix[32];
    snprintf(u->name, sizeof(u->name), "tables.%d", i);
    snprintf(prefix, sizeof(prefix), "tables.%d.", i);
    u->kind = i == 0 ? KIND_FIRST : i + 1 < units(c) ? KIND_MIDDLE : KIND_LAST;
    u->out_elems = (int64_t)c->tables * c->dim;
    u->forward = table_forward;
    u->backward = table_backward;
    u->reads_input = true;
    /* A sample reads one row of each table that has rows in the unit. */
    u->table_reads = (first + rows.rows - 1) / c->rows - first / c->rows + 1;
    iz_unit_params(u, &rows, 1, prefix);
}

/* Appends a layer [in,out] with a bias and returns the next place. */
static int add_layer(struct iz_param *list, int n, const char *mlp, int layer,
                     int64_t in, int64_t out)
{
    char name[64];
    snprintf(name, sizeof(name), "%s.%d.weight", mlp, layer);
    list[n] = weight(name, in, out, sqrtf(2 / (float)(in + out)));
    snprintf(name, sizeof(name), "%s.%d.bias", mlp, layer);
    list[n + 1] = vector(name, out, IZ_INIT_ZERO);
    return n + 2;
}

static void head_open(struct iz_unit *u, const struct iz_dlrm_config *c)
{
    struct iz_param list[4 * IZ_DLRM_LAYERS + 3];
    int64_t in = c->dense;
    int n = 0;
    for (int i = 0; i < c->bottom_layers; i++, in = c->bottom_width)
        n = add_layer(list, n, "bottom", i, in, c->bottom_width);
    n = add_layer(list, n, "bottom", c->bottom_layers, in, c->dim);
    in = pairs(c);
    for (int i = 0; i < c->top_layers; i++, in = c->top_width)
        n = add_layer(list, n, "top", i, in, c->top_width);
    list[n++] = weight("answers.weight", 2, in, sqrtf(2 / (float)(in + 2)));
    snprintf(u->name, sizeof(u->name), "head");
    u->kind = KIND_HEAD;
    u->backward = dlrm_head_backward;
    u->evaluate = dlrm_head_evaluate;
    iz_unit_params(u, list, n, "");
}

static void dlrm_open_units(struct iz_model *m)
{
    const struct iz_dlrm_config *c = m->self;
    int n = (int)units(c);
    m->input_bytes = 4 * ((int64_t)c->tables + c->dense);
    m->target_bytes = 4;
    m->item = "sample";
    m->table_rows = all_rows(c);
    m->table_reads = c->tables;
    m->list_rows = list_rows;
    m->record = (struct iz_record){
        .bytes = 4 * (1 + (int64_t)c->dense + c->tables),
        .check = check_record,
        .unpack = unpack,
    };
    for (int i = 0; i < n; i++)
        table_open(&m->unit[i], c, i);
    head_open(&m->unit[n], c);
}

int iz_dlrm_open(struct iz_model **out, const void *target)
{
    const struct iz_dlrm_config *c = target;
    *out = NULL;
    if (check_keys("dlrm", keys, c))
        return -EINVAL;
    if (all_rows(c) > INT32_MAX) {
        fprintf(stderr, "dlrm: tables * rows = %lld: must be below 2^31\n",
                (long long)all_rows(c));
        return -EINVAL;
    }
    if (units(c) > WIDEST) {
        fprintf(stderr,
                "dlrm: unit_rows = %d cuts the tables into %lld units; "
                "%d are the most\n",
                c->unit_rows, (long long)units(c), WIDEST);
        return -EINVAL;
    }
    *out = iz_model_open("dlrm", (int)units(c) + 1, c, sizeof(*c));
    dlrm_open_units(*out);
    return 0;
}

/* ---- the program ---- */

static const struct iz_preset presets[] = {
    {"tiny",
     "{\"dense\": 3, \"tables\": 4, \"rows\": 50, \"dim\": 4, "
     "\"unit_rows\": 64, \"bottom_layers\": 1, \"bottom_width\": 8, "
     "\"top_layers\": 1, \"top_width\": 8}",
     "for tests"},
    {"criteo-1m", "{\"rows\": 1000000, \"dim\": 64, \"unit_rows\": 1000000}",
     "1.7B parameters over Criteo's fields"},
    {"criteo-40m", "{\"rows\": 40000000, \"dim\": 128, \"unit_rows\": 2000000}",
     "133B parameters over Criteo's fields"},
    {0},
};

const struct iz_program iz_program = {
    .name = "dlrm",
    .about = "trains recommendation models with large embedding tables",
    .section = {.keys = keys, .target = &config, .presets = presets},
    .open = iz_dlrm_open,
};
