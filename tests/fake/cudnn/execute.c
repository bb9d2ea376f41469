/* SPDX-License-Identifier: Apache-2.0 */
/* Operations of a graph, one after the other, element by element in double;
 * results are rounded to the type of their tensor.  A tensor without memory is
 * an array here; sizes of 1, and fewer heads, are repeated. */
#include "tests/fake/cudnn/execute.h"

#include <assert.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "codelets/flat/dtype.h"

enum { TENSORS = 40 };

/* One that an operation names. */
struct tensor {
    int64_t uid, size[4], stride[4];
    enum iz_dtype type;
    bool passing;
    void *p;
};

struct run {
    struct tensor tensor[TENSORS];
    int n;
    const struct thing *pack;
};

/* ---- tensors ------------------------------------------------------------ */

static void *memory_of(const struct thing *pack, int64_t uid)
{
    const struct fact *id =
        thing_fact(pack, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS);
    const struct fact *p =
        thing_fact(pack, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS);
    for (int i = 0; i < id->n; i++)
        if (id->value[i] == uid)
            return (void *)(uintptr_t)p->value[i];
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

/* NULL where the operation has none by this name. */
static struct tensor *tensor_of(struct run *r, const struct thing *op,
                                cudnnBackendAttributeName_t name)
{
    const struct thing *t = thing_at(op, name, 0);
    struct tensor *x = r->tensor;
    if (!t)
        return NULL;
    int64_t uid = thing_int(t, CUDNN_ATTR_TENSOR_UNIQUE_ID);
    int64_t type = thing_int(t, CUDNN_ATTR_TENSOR_DATA_TYPE);
    for (; x < r->tensor + r->n; x++)
        if (x->uid == uid)
            return x;
    r->n++;
    x->uid = uid;
    memcpy(x->size, thing_fact(t, CUDNN_ATTR_TENSOR_DIMENSIONS)->value,
           sizeof(x->size));
    memcpy(x->stride, thing_fact(t, CUDNN_ATTR_TENSOR_STRIDES)->value,
           sizeof(x->stride));
    x->type = type == CUDNN_DATA_BFLOAT16 ? IZ_BF16
              : type == CUDNN_DATA_HALF   ? IZ_F16
                                          : IZ_F32;
    x->passing = thing_int(t, CUDNN_ATTR_TENSOR_IS_VIRTUAL);
    x->p = x->passing ? malloc((size_t)extent(x) * sizeof(float))
                      : memory_of(r->pack, uid);
    assert(x->p);
    return x;
}

/* Element `at` of what has the size `of`. */
static char *place(const struct tensor *x, const int64_t at[4],
                   const int64_t of[4])
{
    int64_t place = 0;
    for (int i = 0; i < 4; i++)
        place += at[i] / (of[i] / x->size[i]) * x->stride[i];
    return (char *)x->p + place * iz_dtype_bytes(x->type);
}

static double get(const struct tensor *x, const int64_t at[4],
                  const int64_t of[4])
{
    float f;
    iz_cast(&f, IZ_F32, place(x, at, of), x->type, 1);
    return (double)f;
}

static void put(const struct tensor *x, const int64_t at[4], double v)
{
    float f = (float)v;
    iz_cast(place(x, at, x->size), x->type, &f, IZ_F32, 1);
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

static void multiply(const struct tensor *a, const struct tensor *b,
                     const struct tensor *c)
{
    int64_t at[4] = {0}, n = a->size[3];
    const int64_t of_a[4] = {c->size[0], c->size[1], c->size[2], n};
    const int64_t of_b[4] = {c->size[0], c->size[1], n, c->size[3]};
    do {
        double sum = 0;
        for (int64_t k = 0; k < n; k++)
            sum += get(a, (int64_t[]){at[0], at[1], at[2], k}, of_a) *
                   get(b, (int64_t[]){at[0], at[1], k, at[3]}, of_b);
        put(c, at, sum);
    } while (step(at, c->size));
}

/* What is together in x for each element of y: neighbours, all of a row or
 * some heads. */
static void reduce(const struct tensor *x, const struct tensor *y, int64_t how)
{
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
static void view(struct tensor x, const struct tensor *y)
{
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

/* v: up to three operands. */
static void for_each(const struct tensor *const v[3], const struct tensor *y,
                     const struct thing *how)
{
    int64_t mode = thing_int(how, CUDNN_ATTR_POINTWISE_MODE);
    int64_t axis = thing_int(how, CUDNN_ATTR_POINTWISE_AXIS);
    int64_t at[4] = {0};
    do {
        double o[3] = {0};
        for (int i = 0; mode != CUDNN_POINTWISE_GEN_INDEX && i < 3; i++)
            if (v[i])
                o[i] = get(v[i], at, y->size);
        put(y, at, apply(mode, o, at[axis]));
    } while (step(at, y->size));
}

/* ---- graphs ------------------------------------------------------------- */

static void execute(struct run *r, const struct thing *op)
{
    switch (op->kind) {
    case CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR:
        multiply(tensor_of(r, op, CUDNN_ATTR_OPERATION_MATMUL_ADESC),
                 tensor_of(r, op, CUDNN_ATTR_OPERATION_MATMUL_BDESC),
                 tensor_of(r, op, CUDNN_ATTR_OPERATION_MATMUL_CDESC));
        break;
    case CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR:
        reduce(tensor_of(r, op, CUDNN_ATTR_OPERATION_REDUCTION_XDESC),
               tensor_of(r, op, CUDNN_ATTR_OPERATION_REDUCTION_YDESC),
               thing_int(thing_at(op, CUDNN_ATTR_OPERATION_REDUCTION_DESC, 0),
                         CUDNN_ATTR_REDUCTION_OPERATOR));
        break;
    case CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR:
        view(*tensor_of(r, op, CUDNN_ATTR_OPERATION_RESHAPE_XDESC),
             tensor_of(r, op, CUDNN_ATTR_OPERATION_RESHAPE_YDESC));
        break;
    default:
        for_each(
            (const struct tensor *[]){
                tensor_of(r, op, CUDNN_ATTR_OPERATION_POINTWISE_XDESC),
                tensor_of(r, op, CUDNN_ATTR_OPERATION_POINTWISE_BDESC),
                tensor_of(r, op, CUDNN_ATTR_OPERATION_POINTWISE_TDESC)},
            tensor_of(r, op, CUDNN_ATTR_OPERATION_POINTWISE_YDESC),
            thing_at(op, CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, 0));
    }
}

void execute_graph(const struct thing *graph, const struct thing *pack)
{
    const struct thing *op;
    struct run r = {.pack = pack};
    for (int i = 0;
         (op = thing_at(graph, CUDNN_ATTR_OPERATIONGRAPH_OPS, i)) != NULL; i++)
        execute(&r, op);
    for (int i = 0; i < r.n; i++)
        if (r.tensor[i].passing)
            free(r.tensor[i].p);
}
