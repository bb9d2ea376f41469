/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/gpu/attention_graph.h"

#include <assert.h>
#include <float.h>

/* The tensors by their numbers.  Those from S on exist in the kernels alone:
 * _T is transposed, and *_ALL has a part for each head of queries. */
enum { Q = 1, K, V, O, LSE, SCALE, LOWEST, ONE, DY, DELTA, DQ, DK, DV };
enum { S = DV + 1, SCALED, ROW, COL, SEES, SEEN };
enum { MOST = SEEN + 1, LESS, POWER, SUM, LOG, P };
enum {
    DY_O = P + 1,
    DY_O_SUM,
    P_T,
    DV_ALL,
    DP,
    DP_LESS,
    DP_P,
    DS,
    DS_T,
    DK_ALL,
    K_T
};
enum { TENSORS = K_T + 1, STEPS_MOST = 32 };

struct iz_attention_key iz_attention_key(const struct iz_attention *a,
                                         int64_t back)
{
    return (struct iz_attention_key){back ? back : a->o.rows / a->seq,
                                     a->seq,
                                     a->heads,
                                     iz_attention_keys(a),
                                     a->o.cols / a->heads,
                                     a->o.dtype,
                                     a->full,
                                     back > 0};
}

/* [samples, heads, rows, cols] */
struct shape {
    cudnnDataType_t type;
    int64_t size[4], stride[4];
};

static struct shape turned(struct shape s)
{
    int64_t size = s.size[2], stride = s.stride[2];
    s.size[2] = s.size[3];
    s.stride[2] = s.stride[3];
    s.size[3] = size;
    s.stride[3] = stride;
    return s;
}

/* The strides say where a row of qkv, or of its gradient, has the heads of
 * queries, keys and values. */
static struct shape shape_of(const struct iz_attention_key *k, int tensor)
{
    int64_t b = k->samples, t = k->seq, h = k->heads, n = k->kv_heads;
    int64_t d = k->d, c = h * d, ld = c + 2 * n * d;
    cudnnDataType_t f = CUDNN_DATA_FLOAT;
    cudnnDataType_t half =
        k->type == IZ_BF16 ? CUDNN_DATA_BFLOAT16 : CUDNN_DATA_HALF;
    struct shape keys = {half, {b, n, t, d}, {t * ld, d, ld, 1}};
    struct shape scores = {f, {b, h, t, t}, {h * t * t, t * t, t, 1}};
    struct shape whole = {half, {b, h, t, d}, {h * t * d, t * d, d, 1}};
    switch (tensor) {
    case Q:
    case DQ:
        return (struct shape){half, {b, h, t, d}, {t * ld, d, ld, 1}};
    case DK:
    case DV:
    case K_T:
        return keys;
    case V:
        return k->back ? turned(keys) : keys;
    case K: /* the library takes a head's keys transposed */
        return turned(keys);
    case O:
    case DY:
        return (struct shape){half, {b, h, t, d}, {t * c, d, c, 1}};
    case DY_O:
        whole.type = f;
        return whole;
    case DK_ALL:
    case DV_ALL:
        return whole;
    case SCALE:
    case LOWEST:
    case ONE:
        return (struct shape){f, {1, 1, 1, 1}, {1, 1, 1, 1}};
    case LSE:
    case MOST:
    case SUM:
    case LOG:
    case DELTA:
    case DY_O_SUM:
        return (struct shape){f, {b, h, t, 1}, {h * t, t, 1, 1}};
    case P_T:
    case DS_T:
        scores.type = half;
        return turned(scores);
    }
    scores.type = tensor == P                      ? half
                  : tensor == SEES                 ? CUDNN_DATA_BOOLEAN
                  : tensor == ROW || tensor == COL ? CUDNN_DATA_INT32
                                                   : f;
    return scores;
}

/* The operations in turn: the tensor y comes of x and, where there are more
 * operands, of b and t. */
enum kind { MATMUL, REDUCE, EACH, RESHAPE };
struct step {
    enum kind kind;
    int how; /* what reduction, or what is done to each element */
    int y, x, b, t;
    int64_t axis; /* of an index */
};

/* o = softmax(scale q k, without the keys after the query) v. */
static const struct step forward[] = {
    {MATMUL, 0, .y = S, .x = Q, .b = K},
    {EACH, CUDNN_POINTWISE_MUL, .y = SCALED, .x = S, .b = SCALE},
    {EACH, CUDNN_POINTWISE_GEN_INDEX, .y = ROW, .x = SCALED, .axis = 2},
    {EACH, CUDNN_POINTWISE_GEN_INDEX, .y = COL, .x = SCALED, .axis = 3},
    {EACH, CUDNN_POINTWISE_CMP_GE, .y = SEES, .x = ROW, .b = COL},
    {EACH, CUDNN_POINTWISE_BINARY_SELECT, .y = SEEN, .x = SCALED, .b = LOWEST,
     .t = SEES},
    {REDUCE, CUDNN_REDUCE_TENSOR_MAX, .y = MOST, .x = SEEN},
    {EACH, CUDNN_POINTWISE_SUB, .y = LESS, .x = SEEN, .b = MOST},
    {EACH, CUDNN_POINTWISE_EXP, .y = POWER, .x = LESS},
    {REDUCE, CUDNN_REDUCE_TENSOR_ADD, .y = SUM, .x = POWER},
    {EACH, CUDNN_POINTWISE_LOG, .y = LOG, .x = SUM},
    {EACH, CUDNN_POINTWISE_ADD, .y = LSE, .x = MOST, .b = LOG},
    {EACH, CUDNN_POINTWISE_DIV, .y = P, .x = POWER, .b = SUM},
    {MATMUL, 0, .y = O, .x = P, .b = V},
    {0}};

/* With the probabilities p of above, dv = p' dy, and with ds = scale p (dy v' -
 * dy . o) dk = ds' q and dq = ds k.  Without the product with 1 the library
 * finds the same kernels but wants three times the memory.  It also takes a
 * tensor of fp32 in which to sum dq; such a kernel adds in no fixed order. */
static const struct step backward[] = {
    {EACH, CUDNN_POINTWISE_MUL, .y = DY_O, .x = DY, .b = O},
    {REDUCE, CUDNN_REDUCE_TENSOR_ADD, .y = DY_O_SUM, .x = DY_O},
    {EACH, CUDNN_POINTWISE_MUL, .y = DELTA, .x = DY_O_SUM, .b = ONE},
    {MATMUL, 0, .y = S, .x = Q, .b = K},
    {EACH, CUDNN_POINTWISE_MUL, .y = SCALED, .x = S, .b = SCALE},
    {EACH, CUDNN_POINTWISE_SUB, .y = LESS, .x = SCALED, .b = LSE},
    {EACH, CUDNN_POINTWISE_GEN_INDEX, .y = ROW, .x = LESS, .axis = 2},
    {EACH, CUDNN_POINTWISE_GEN_INDEX, .y = COL, .x = LESS, .axis = 3},
    {EACH, CUDNN_POINTWISE_CMP_GE, .y = SEES, .x = ROW, .b = COL},
    {EACH, CUDNN_POINTWISE_BINARY_SELECT, .y = SEEN, .x = LESS, .b = LOWEST,
     .t = SEES},
    {EACH, CUDNN_POINTWISE_EXP, .y = POWER, .x = SEEN},
    {RESHAPE, 0, .y = P_T, .x = POWER},
    {MATMUL, 0, .y = DV_ALL, .x = P_T, .b = DY},
    {REDUCE, CUDNN_REDUCE_TENSOR_ADD, .y = DV, .x = DV_ALL},
    {MATMUL, 0, .y = DP, .x = DY, .b = V},
    {EACH, CUDNN_POINTWISE_SUB, .y = DP_LESS, .x = DP, .b = DELTA},
    {EACH, CUDNN_POINTWISE_MUL, .y = DP_P, .x = DP_LESS, .b = POWER},
    {EACH, CUDNN_POINTWISE_MUL, .y = DS, .x = DP_P, .b = SCALE},
    {RESHAPE, 0, .y = DS_T, .x = DS},
    {MATMUL, 0, .y = DK_ALL, .x = DS_T, .b = Q},
    {REDUCE, CUDNN_REDUCE_TENSOR_ADD, .y = DK, .x = DK_ALL},
    {RESHAPE, 0, .y = K_T, .x = K},
    {MATMUL, 0, .y = DQ, .x = DS, .b = K_T},
    {0}};

/* Without a mask, or with keys of its own for each head, some operations are
 * none: what they would have read stands for their result. */
static int64_t stands_for(const struct iz_attention_key *k, int tensor)
{
    bool own = k->heads == k->kv_heads;
    if (k->full && tensor == SEEN)
        return k->back ? LESS : SCALED;
    return own && tensor == DK_ALL ? DK : own && tensor == DV_ALL ? DV : tensor;
}

static bool is_needed(const struct iz_attention_key *k, const struct step *s)
{
    bool own = k->heads == k->kv_heads;
    if (k->full && s->y >= ROW && s->y <= SEEN)
        return false;
    return !(own && s->kind == REDUCE && (s->y == DK || s->y == DV));
}

/* What the library calls a kind of operation and its attributes. */
static const struct names {
    cudnnBackendDescriptorType_t op, how;
    cudnnBackendAttributeName_t by, type, x, y, b, t, kind;
    cudnnBackendAttributeType_t kind_type;
} names_of[] = {
    [MATMUL] = {CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR,
                CUDNN_BACKEND_MATMUL_DESCRIPTOR,
                CUDNN_ATTR_OPERATION_MATMUL_DESC, CUDNN_ATTR_MATMUL_COMP_TYPE,
                .x = CUDNN_ATTR_OPERATION_MATMUL_ADESC,
                .b = CUDNN_ATTR_OPERATION_MATMUL_BDESC,
                .y = CUDNN_ATTR_OPERATION_MATMUL_CDESC},
    [REDUCE] = {CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR,
                CUDNN_BACKEND_REDUCTION_DESCRIPTOR,
                CUDNN_ATTR_OPERATION_REDUCTION_DESC,
                CUDNN_ATTR_REDUCTION_COMP_TYPE,
                .x = CUDNN_ATTR_OPERATION_REDUCTION_XDESC,
                .y = CUDNN_ATTR_OPERATION_REDUCTION_YDESC,
                .kind = CUDNN_ATTR_REDUCTION_OPERATOR,
                .kind_type = CUDNN_TYPE_REDUCTION_OPERATOR_TYPE},
    [EACH] = {CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR,
              CUDNN_BACKEND_POINTWISE_DESCRIPTOR,
              CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR,
              CUDNN_ATTR_POINTWISE_MATH_PREC,
              CUDNN_ATTR_OPERATION_POINTWISE_XDESC,
              CUDNN_ATTR_OPERATION_POINTWISE_YDESC,
              CUDNN_ATTR_OPERATION_POINTWISE_BDESC,
              CUDNN_ATTR_OPERATION_POINTWISE_TDESC, CUDNN_ATTR_POINTWISE_MODE,
              CUDNN_TYPE_POINTWISE_MODE},
    [RESHAPE] = {CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR,
                 .x = CUDNN_ATTR_OPERATION_RESHAPE_XDESC,
                 .y = CUDNN_ATTR_OPERATION_RESHAPE_YDESC},
};

/* A graph that is being made. */
struct making {
    struct iz_dnn_set *g;
    const struct iz_attention_key *k;
    cudnnBackendDescriptor_t tensor[TENSORS];
};

/* NULL: no such operand. */
static cudnnBackendDescriptor_t graph_tensor(struct making *m, int operand)
{
    int64_t number = stands_for(m->k, operand);
    struct shape s = shape_of(m->k, (int)number);
    bool is = true, value = number >= SCALE && number <= ONE;
    int64_t align = 16;
    const struct iz_dnn_fact a[] = {
        {CUDNN_ATTR_TENSOR_UNIQUE_ID, IZ_DNN_INT, 1, &number},
        {CUDNN_ATTR_TENSOR_DATA_TYPE, IZ_DNN_TYPE, 1, &s.type},
        {CUDNN_ATTR_TENSOR_DIMENSIONS, IZ_DNN_INT, 4, s.size},
        {CUDNN_ATTR_TENSOR_STRIDES, IZ_DNN_INT, 4, s.stride},
        {CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, IZ_DNN_INT, 1, &align},
        {value ? CUDNN_ATTR_TENSOR_IS_BY_VALUE : CUDNN_ATTR_TENSOR_IS_VIRTUAL,
         CUDNN_TYPE_BOOLEAN, value || number >= S, &is},
        {0}};
    if (number && !m->tensor[number])
        m->tensor[number] =
            iz_dnn_add(m->g, CUDNN_BACKEND_TENSOR_DESCRIPTOR, a);
    return m->tensor[number];
}

static cudnnBackendDescriptor_t graph_step(struct making *m,
                                           const struct step *s)
{
    const struct names *n = &names_of[s->kind];
    cudnnBackendDescriptor_t x = graph_tensor(m, s->x);
    cudnnBackendDescriptor_t b = graph_tensor(m, s->b);
    cudnnBackendDescriptor_t t = graph_tensor(m, s->t);
    cudnnBackendDescriptor_t y = graph_tensor(m, s->y), by = NULL;
    cudnnDataType_t type = shape_of(m->k, s->y).type;
    if (type != CUDNN_DATA_INT32 && type != CUDNN_DATA_BOOLEAN)
        type = CUDNN_DATA_FLOAT; /* also where 16 bits are multiplied */

    const struct iz_dnn_fact how[] = {
        {n->type, IZ_DNN_TYPE, 1, &type},
        {n->kind, n->kind_type, s->kind != MATMUL, &s->how},
        {CUDNN_ATTR_POINTWISE_AXIS, IZ_DNN_INT, s->axis != 0, &s->axis},
        {0}};
    if (s->kind != RESHAPE)
        by = iz_dnn_add(m->g, n->how, how);
    const struct iz_dnn_fact op[] = {{n->x, IZ_DNN_PART, 1, &x},
                                     {n->y, IZ_DNN_PART, 1, &y},
                                     {n->by, IZ_DNN_PART, by != NULL, &by},
                                     {n->b, IZ_DNN_PART, b != NULL, &b},
                                     {n->t, IZ_DNN_PART, t != NULL, &t},
                                     {0}};
    return iz_dnn_add(m->g, n->op, op);
}

cudnnBackendDescriptor_t iz_attention_graph(struct iz_dnn_set *g,
                                            const struct iz_attention_key *k)
{
    struct making m = {.g = g, .k = k};
    cudnnBackendDescriptor_t op[STEPS_MOST];
    int n = 0;
    for (const struct step *s = k->back ? backward : forward; s->y; s++)
        if (is_needed(k, s))
            op[n++] = graph_step(&m, s);
    assert(n <= STEPS_MOST);
    return iz_dnn_add(
        g, CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR,
        (struct iz_dnn_fact[]){
            {CUDNN_ATTR_OPERATIONGRAPH_OPS, IZ_DNN_PART, n, op}, {0}});
}

static void pack_tensor(struct iz_attention_pack *to, int tensor, void *p)
{
    assert(to->n < IZ_ATTENTION_GIVEN);
    to->id[to->n] = tensor;
    to->p[to->n++] = p;
}

/* q, k and v of a sample in a matrix like qkv. */
static void pack_heads(struct iz_attention_pack *to,
                       const struct iz_attention_key *k, struct iz_view qkv,
                       int64_t row, const int tensor[3])
{
    int64_t bytes = iz_dtype_bytes(qkv.dtype), width = k->d * bytes;
    char *q = (char *)qkv.p + row * qkv.cols * bytes;
    pack_tensor(to, tensor[0], q);
    pack_tensor(to, tensor[1], q + k->heads * width);
    pack_tensor(to, tensor[2], q + (k->heads + k->kv_heads) * width);
}

void iz_attention_pack(struct iz_attention_pack *to,
                       const struct iz_attention_key *k,
                       const struct iz_attention *a, int64_t sample,
                       struct iz_view dqkv, struct iz_view dy, void *delta)
{
    int64_t row = sample * k->seq, n = k->heads * k->seq;
    int64_t at = row * a->o.cols * iz_dtype_bytes(a->o.dtype);
    to->n = 0;
    to->scale = iz_attention_scale(a);
    to->lowest = -FLT_MAX;
    to->one = 1;
    pack_heads(to, k, a->qkv, row, (int[]){Q, K, V});
    pack_tensor(to, O, (char *)a->o.p + at);
    pack_tensor(to, LSE, (float *)a->lse.p + sample * n);
    pack_tensor(to, SCALE, &to->scale);
    if (!k->full)
        pack_tensor(to, LOWEST, &to->lowest);
    if (!k->back)
        return;
    pack_tensor(to, ONE, &to->one);
    pack_tensor(to, DY, (char *)dy.p + at);
    pack_tensor(to, DELTA, delta);
    pack_heads(to, k, dqkv, row, (int[]){DQ, DK, DV});
}
