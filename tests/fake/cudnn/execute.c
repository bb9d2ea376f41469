/* SPDX-License-Identifier: Apache-2.0 */
/* Operations of a graph, one after the other, element by element in double;
 * results are rounded to the type of their tensor.  A tensor without memory is
 * an array here; sizes of 1, and fewer heads, are repeated. */
#include "tests/fake/cudnn/execute.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "codelets/flat/half.h"

enum { TENSORS = 40, OPERANDS = 4 };

/* One that an operation names; p: in its type, also where it is virtual. */
struct tensor {
    const struct thing *t;
    int64_t uid, size[4], stride[4];
    int type;
    bool passing;
    void *p;
};

struct run {
    struct tensor tensor[TENSORS];
    int n;
    const struct thing *pack;
    bool failed;
};

/* ---- tensors ------------------------------------------------------------ */

static void *memory_of(const struct thing *pack, int64_t uid)
{
    const struct fact *id =
        thing_fact(pack, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS);
    const struct fact *p =
        thing_fact(pack, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS);
    for (int i = 0; id && p && p->n == id->n && i < id->n; i++)
        if (((int64_t *)id->value)[i] == uid)
            return ((void **)p->value)[i];
    return NULL;
}

/* Elements from the first to the last one in memory. */
static int64_t extent(const struct tensor *x)
{
    int64_t n = 1;
    for (int i = 0; i < 4; i++)
        n += (x->size[i] - 1) * x->stride[i];
    return n;
}

static struct tensor *tensor_of(struct run *r, const struct thing *t)
{
    int64_t uid = thing_int(t, CUDNN_ATTR_TENSOR_UNIQUE_ID);
    struct tensor *x = r->tensor;
    for (; x < r->tensor + r->n; x++)
        if (x->uid == uid)
            return x;
    r->n++;
    *x = (struct tensor){.t = t, .uid = uid};
    memcpy(x->size, thing_fact(t, CUDNN_ATTR_TENSOR_DIMENSIONS)->value,
           sizeof(x->size));
    memcpy(x->stride, thing_fact(t, CUDNN_ATTR_TENSOR_STRIDES)->value,
           sizeof(x->stride));
    x->type = (int)thing_int(t, CUDNN_ATTR_TENSOR_DATA_TYPE);
    x->passing = thing_int(t, CUDNN_ATTR_TENSOR_IS_VIRTUAL);
    x->p = x->passing ? malloc((size_t)extent(x) * sizeof(float))
                      : memory_of(r->pack, uid);
    r->failed |= !x->p;
    return x;
}

static int64_t place(const struct tensor *x, const int64_t at[4],
                     const int64_t of[4])
{
    int64_t place = 0;
    for (int i = 0; i < 4; i++)
        place += at[i] / (of[i] / x->size[i]) * x->stride[i];
    return place;
}

/* Element `at` of what has the size `of`. */
static double get(const struct tensor *x, const int64_t at[4],
                  const int64_t of[4])
{
    int64_t i = place(x, at, of);
    const uint16_t *half = x->p;
    if (x->type == CUDNN_DATA_BFLOAT16)
        return (double)iz_bf16_load(half[i]);
    if (x->type == CUDNN_DATA_HALF)
        return (double)iz_f16_load(half[i]);
    return (double)((float *)x->p)[i];
}

static void put(const struct tensor *x, const int64_t at[4], double v)
{
    int64_t i = place(x, at, x->size);
    uint16_t *half = x->p;
    if (x->type == CUDNN_DATA_BFLOAT16)
        half[i] = iz_bf16_round((float)v);
    else if (x->type == CUDNN_DATA_HALF)
        half[i] = iz_f16_round((float)v);
    else
        ((float *)x->p)[i] = (float)v;
}

/* The next element; false after the last. */
static bool step(int64_t at[4], const int64_t size[4])
{
    for (int i = 3; i >= 0; i--) {
        if (++at[i] < size[i])
            return true;
        at[i] = 0;
    }
    return false;
}

/* ---- operations --------------------------------------------------------- */

enum kind { PRODUCT, REDUCTION, VIEW, OTHER };

static enum kind kind_of(const struct thing *op)
{
    switch (op->kind) {
    case CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR:
        return PRODUCT;
    case CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR:
        return REDUCTION;
    case CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR:
        return VIEW;
    default:
        return OTHER;
    }
}

/* What it names, as far as it has it: of a product A, B, of a reduction or a
 * view X, of others X, B, T; and last the result. */
static void operands(struct run *r, const struct thing *op,
                     struct tensor *v[OPERANDS])
{
    static const cudnnBackendAttributeName_t name[][OPERANDS] = {
        [PRODUCT] = {CUDNN_ATTR_OPERATION_MATMUL_ADESC,
                     CUDNN_ATTR_OPERATION_MATMUL_BDESC,
                     CUDNN_ATTR_OPERATION_MATMUL_BDESC,
                     CUDNN_ATTR_OPERATION_MATMUL_CDESC},
        [REDUCTION] = {CUDNN_ATTR_OPERATION_REDUCTION_XDESC,
                       CUDNN_ATTR_OPERATION_REDUCTION_XDESC,
                       CUDNN_ATTR_OPERATION_REDUCTION_XDESC,
                       CUDNN_ATTR_OPERATION_REDUCTION_YDESC},
        [VIEW] = {CUDNN_ATTR_OPERATION_RESHAPE_XDESC,
                  CUDNN_ATTR_OPERATION_RESHAPE_XDESC,
                  CUDNN_ATTR_OPERATION_RESHAPE_XDESC,
                  CUDNN_ATTR_OPERATION_RESHAPE_YDESC},
        [OTHER] = {CUDNN_ATTR_OPERATION_POINTWISE_XDESC,
                   CUDNN_ATTR_OPERATION_POINTWISE_BDESC,
                   CUDNN_ATTR_OPERATION_POINTWISE_TDESC,
                   CUDNN_ATTR_OPERATION_POINTWISE_YDESC}};
    for (int i = 0; i < OPERANDS; i++) {
        const struct thing *t = thing_at(op, name[kind_of(op)][i], 0);
        v[i] = t ? tensor_of(r, t) : NULL;
    }
}

static void multiply(struct tensor *const v[OPERANDS])
{
    const struct tensor *a = v[0], *b = v[1], *c = v[3];
    int64_t at[4] = {0}, n = a->size[3];
    do {
        double sum = 0;
        for (int64_t k = 0; k < n; k++) {
            int64_t of_a[4] = {c->size[0], c->size[1], c->size[2], n};
            int64_t of_b[4] = {c->size[0], c->size[1], n, c->size[3]};
            int64_t in_a[4] = {at[0], at[1], at[2], k};
            int64_t in_b[4] = {at[0], at[1], k, at[3]};
            sum += get(a, in_a, of_a) * get(b, in_b, of_b);
        }
        put(c, at, sum);
    } while (step(at, c->size));
}

/* What is together in x for each element of y: neighbours, all of a row or
 * some heads. */
static void reduce(struct tensor *const v[OPERANDS], int64_t how)
{
    const struct tensor *x = v[0], *y = v[3];
    int64_t at[4] = {0}, part[4];
    for (int i = 0; i < 4; i++)
        part[i] = x->size[i] / y->size[i];
    do {
        bool largest = how == CUDNN_REDUCE_TENSOR_MAX;
        double all = largest ? -INFINITY : 0;
        int64_t k[4] = {0}, in[4];
        do {
            for (int i = 0; i < 4; i++)
                in[i] = at[i] * part[i] + k[i];
            double e = get(x, in, x->size);
            if (!largest)
                all += e;
            else if (!(e <= all))
                all = e;
        } while (step(k, part));
        put(y, at, all);
    } while (step(at, y->size));
}

/* The elements stay where they are in memory, in an order of the result's. */
static void view(struct tensor *const v[OPERANDS])
{
    const struct tensor *y = v[3];
    struct tensor x = *v[0];
    int64_t at[4] = {0};
    memcpy(x.size, y->size, sizeof(x.size));
    memcpy(x.stride, y->stride, sizeof(x.stride));
    do {
        put(y, at, get(&x, at, y->size));
    } while (step(at, y->size));
}

static double apply(int64_t mode, const double o[3], int64_t index)
{
    switch (mode) {
    case CUDNN_POINTWISE_ADD:
        return o[0] + o[1];
    case CUDNN_POINTWISE_SUB:
        return o[0] - o[1];
    case CUDNN_POINTWISE_MUL:
        return o[0] * o[1];
    case CUDNN_POINTWISE_DIV:
        return o[0] / o[1];
    case CUDNN_POINTWISE_EXP:
        return exp(o[0]);
    case CUDNN_POINTWISE_LOG:
        return log(o[0]);
    case CUDNN_POINTWISE_GEN_INDEX:
        return (double)index;
    case CUDNN_POINTWISE_CMP_GE:
        return o[0] >= o[1];
    case CUDNN_POINTWISE_BINARY_SELECT:
        return o[2] != 0 ? o[0] : o[1];
    default:
        return NAN;
    }
}

static void for_each(struct tensor *const v[OPERANDS], const struct thing *how)
{
    int64_t mode = thing_int(how, CUDNN_ATTR_POINTWISE_MODE);
    int64_t axis = thing_int(how, CUDNN_ATTR_POINTWISE_AXIS);
    int64_t at[4] = {0};
    do {
        double o[3] = {0};
        for (int i = 0; mode != CUDNN_POINTWISE_GEN_INDEX && i < 3; i++)
            if (v[i])
                o[i] = get(v[i], at, v[3]->size);
        put(v[3], at, apply(mode, o, at[axis]));
    } while (step(at, v[3]->size));
}

/* ---- graphs ------------------------------------------------------------- */

static void execute(struct run *r, const struct thing *op)
{
    struct tensor *v[OPERANDS];
    operands(r, op, v);
    if (r->failed)
        return;
    if (kind_of(op) == PRODUCT)
        multiply(v);
    else if (kind_of(op) == VIEW)
        view(v);
    else if (kind_of(op) == REDUCTION)
        reduce(v,
               thing_int(thing_at(op, CUDNN_ATTR_OPERATION_REDUCTION_DESC, 0),
                         CUDNN_ATTR_REDUCTION_OPERATOR));
    else
        for_each(v,
                 thing_at(op, CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, 0));
}

bool execute_graph(const struct thing *graph, const struct thing *pack)
{
    const struct fact *ops = thing_fact(graph, CUDNN_ATTR_OPERATIONGRAPH_OPS);
    struct run r = {.pack = pack};
    for (int i = 0; i < ops->n; i++)
        execute(&r, thing_at(graph, CUDNN_ATTR_OPERATIONGRAPH_OPS, i));
    for (int i = 0; i < r.n; i++)
        if (r.tensor[i].passing)
            free(r.tensor[i].p);
    return !r.failed;
}
