/* SPDX-License-Identifier: Apache-2.0 */
/* Attention's forward through cuDNN's fused kernels.  Its backend interface
 * takes a graph of small operations, and finds a kernel that does them all at
 * once without ever writing the scores. That is asked once per shape and type,
 * and kept.  Only this file includes cuDNN's header.
 *
 * Only the forward: a backward whose memory grows with the length alone adds
 * to the gradient of the queries with atomics, in no fixed order, and one
 * without them writes a matrix of scores.  Our own backward takes the logarithm
 * of the sum of exponentials that this forward leaves. */
#include "codelets/gpu/attention_cudnn.h"

#include <assert.h>
#include <cudnn_graph.h>
#include <dlfcn.h>
#include <errno.h>
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "codelets/base/die.h"
#include "codelets/base/units.h"
#include "codelets/kernels/cuda_lib.h"
#include "codelets/ops/gpu_ops.h"

#define LIBRARY "libcudnn.so.9"
#define VERSION_LEAST 90800 /* descriptions of devices */

#define WORKSPACE_ALIGN 256
#define WORKSPACE_BYTES (IZ_CUDNN_SCRATCH - WORKSPACE_ALIGN)

enum { PLANS = 32, CONFIGS = 8, MADE = 128, STEPS = 14 };

/* Types of attributes. */
#define PART CUDNN_TYPE_BACKEND_DESCRIPTOR
#define INT64 CUDNN_TYPE_INT64
#define TYPE CUDNN_TYPE_DATA_TYPE

typedef cudnnBackendDescriptor_t descriptor;

/* ---- the library -------------------------------------------------------- */

/* Its functions, loaded by the first call of iz_cudnn_missing, which comes
 * before there are workers, and never unloaded. */
static struct {
    size_t (*version)(void);
    const char *(*status)(cudnnStatus_t s);
    void (*last_error)(char *text, size_t size);
    cudnnStatus_t (*create)(cudnnHandle_t *h);
    cudnnStatus_t (*destroy)(cudnnHandle_t h);
    cudnnStatus_t (*set_stream)(cudnnHandle_t h, cudaStream_t s);
    cudnnStatus_t (*make)(cudnnBackendDescriptorType_t t, descriptor *d);
    cudnnStatus_t (*unmake)(descriptor d);
    cudnnStatus_t (*finish)(descriptor d);
    cudnnStatus_t (*set)(descriptor d, cudnnBackendAttributeName_t name,
                         cudnnBackendAttributeType_t t, int64_t n,
                         const void *value);
    cudnnStatus_t (*get)(descriptor d, cudnnBackendAttributeName_t name,
                         cudnnBackendAttributeType_t t, int64_t most,
                         int64_t *n, void *value);
    cudnnStatus_t (*execute)(cudnnHandle_t h, descriptor plan, descriptor pack);
} dnn;

/* In that order. */
static const char *const symbols[] = {"cudnnGetVersion",
                                      "cudnnGetErrorString",
                                      "cudnnGetLastErrorString",
                                      "cudnnCreate",
                                      "cudnnDestroy",
                                      "cudnnSetStream",
                                      "cudnnBackendCreateDescriptor",
                                      "cudnnBackendDestroyDescriptor",
                                      "cudnnBackendFinalize",
                                      "cudnnBackendSetAttribute",
                                      "cudnnBackendGetAttribute",
                                      "cudnnBackendExecute"};
_Static_assert(sizeof(dnn) == sizeof(symbols), "a name for each function");

static char missing[160];

static void cudnn_load(void)
{
    void *l = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL);
    if (!l)
        snprintf(missing, sizeof(missing), "%s", dlerror());
    for (size_t i = 0; l && i < sizeof(symbols) / sizeof(symbols[0]); i++) {
        void *f = dlsym(l, symbols[i]);
        if (!f)
            snprintf(missing, sizeof(missing), "%s has no %s", LIBRARY,
                     symbols[i]);
        memcpy((char *)&dnn + i * sizeof(f), &f, sizeof(f));
    }
    if (!missing[0] && dnn.version() < VERSION_LEAST)
        snprintf(missing, sizeof(missing), "%s is of version %d, 9.8 is needed",
                 LIBRARY, (int)dnn.version());
}

const char *iz_cudnn_missing(void)
{
    if (!dnn.version && !missing[0])
        cudnn_load();
    return missing[0] ? missing : NULL;
}

/* Writes the library's message about s to r, after `what`. */
static void cudnn_refuse(struct iz_refusal *r, const char *what,
                         cudnnStatus_t s)
{
    char text[1024] = "";
    int v = (int)dnn.version();
    dnn.last_error(text, sizeof(text));
    text[strcspn(text, "\n")] = 0;
    snprintf(r->why, sizeof(r->why), "%s: cuDNN %d.%d.%d: %s%s%.120s", what,
             v / 10000, v / 100 % 100, v % 100, dnn.status(s),
             text[0] ? ": " : "", text);
}

/* ---- descriptors -------------------------------------------------------- */

/* The tensors by their numbers.  Those from S on exist in the kernel alone. */
enum { Q = 1, K, V, O, LSE, SCALE, LOWEST, S, SCALED, ROW, COL, SEES, SEEN };
enum { MOST = SEEN + 1, LESS, POWER, SUM, LOG, P, TENSORS };

/* Those that live and end together.  After the first call that fails the others
 * do nothing. */
struct graph {
    descriptor made[MADE], tensor[TENSORS];
    int n;
    cudnnStatus_t failed;
};

static void graph_clear(struct graph *g)
{
    while (g->n > 0)
        dnn.unmake(g->made[--g->n]);
}

/* One to be filled by the library. */
static descriptor graph_make(struct graph *g, cudnnBackendDescriptorType_t t)
{
    descriptor d = NULL;
    assert(g->n < MADE);
    if (!g->failed)
        g->failed = dnn.make(t, &d);
    if (!g->failed)
        g->made[g->n++] = d;
    return d;
}

/* What a descriptor is given: n values, 0 at the end of a list. */
struct attribute {
    cudnnBackendAttributeName_t name;
    cudnnBackendAttributeType_t type;
    int64_t n;
    const void *value;
};

static descriptor graph_add(struct graph *g, cudnnBackendDescriptorType_t t,
                            const struct attribute *a)
{
    descriptor d = graph_make(g, t);
    for (; a->n && !g->failed; a++)
        g->failed = dnn.set(d, a->name, a->type, a->n, a->value);
    if (!g->failed)
        g->failed = dnn.finish(d);
    return d;
}

/* Returns how many values there are, 0 after a failure. */
static int64_t graph_get(struct graph *g, descriptor d,
                         cudnnBackendAttributeName_t name,
                         cudnnBackendAttributeType_t t, int64_t most,
                         void *value)
{
    int64_t n = 0;
    if (!g->failed)
        g->failed = dnn.get(d, name, t, most, &n, value);
    return g->failed ? 0 : n;
}

/* ---- attention ---------------------------------------------------------- */

/* All that a plan depends on; no padding. */
struct key {
    int64_t samples, seq, heads, kv_heads, d, type, full;
};

static struct key key_of(const struct iz_attention *a)
{
    return (struct key){
        a->o.rows / a->seq,   a->seq,     a->heads, iz_attention_keys(a),
        a->o.cols / a->heads, a->o.dtype, a->full};
}

/* [samples, heads, rows, cols] */
struct shape {
    cudnnDataType_t type;
    int64_t size[4], stride[4];
};

/* The library takes a heads' keys transposed: the strides say where a row of
 * qkv has them. */
static struct shape shape_of(const struct key *k, int tensor)
{
    int64_t b = k->samples, t = k->seq, h = k->heads, n = k->kv_heads;
    int64_t d = k->d, c = h * d, ld = c + 2 * n * d;
    cudnnDataType_t f = CUDNN_DATA_FLOAT;
    cudnnDataType_t half =
        k->type == IZ_BF16 ? CUDNN_DATA_BFLOAT16 : CUDNN_DATA_HALF;
    struct shape scores = {f, {b, h, t, t}, {h * t * t, t * t, t, 1}};
    switch (tensor) {
    case Q:
        return (struct shape){half, {b, h, t, d}, {t * ld, d, ld, 1}};
    case K:
        return (struct shape){half, {b, n, d, t}, {t * ld, d, 1, ld}};
    case V:
        return (struct shape){half, {b, n, t, d}, {t * ld, d, ld, 1}};
    case O:
        return (struct shape){half, {b, h, t, d}, {t * c, d, c, 1}};
    case SCALE:
    case LOWEST:
        return (struct shape){f, {1, 1, 1, 1}, {1, 1, 1, 1}};
    case LSE:
    case MOST:
    case SUM:
    case LOG:
        return (struct shape){f, {b, h, t, 1}, {h * t, t, 1, 1}};
    }
    scores.type = tensor == P                      ? half
                  : tensor == SEES                 ? CUDNN_DATA_BOOLEAN
                  : tensor == ROW || tensor == COL ? CUDNN_DATA_INT32
                                                   : f;
    return scores;
}

/* The operations in turn: the tensor y comes of x and, where there are more
 * operands, of b and t.  Together o = softmax(scale q k, without the keys after
 * the query) v. */
enum kind { MATMUL, REDUCE, EACH };
static const struct step {
    enum kind kind;
    int how; /* what reduction, or what is done to each element */
    int y, x, b, t;
    int64_t axis; /* of an index */
} steps[STEPS] = {
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
};

/* What the library calls a kind of operation and its attributes. */
static const struct names {
    cudnnBackendDescriptorType_t how, op;
    cudnnBackendAttributeName_t by, type, x, y, b, t, kind;
    cudnnBackendAttributeType_t kind_type;
} names_of[] = {
    [MATMUL] = {CUDNN_BACKEND_MATMUL_DESCRIPTOR,
                CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR,
                CUDNN_ATTR_OPERATION_MATMUL_DESC, CUDNN_ATTR_MATMUL_COMP_TYPE,
                .x = CUDNN_ATTR_OPERATION_MATMUL_ADESC,
                .b = CUDNN_ATTR_OPERATION_MATMUL_BDESC,
                .y = CUDNN_ATTR_OPERATION_MATMUL_CDESC},
    [REDUCE] = {CUDNN_BACKEND_REDUCTION_DESCRIPTOR,
                CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR,
                CUDNN_ATTR_OPERATION_REDUCTION_DESC,
                CUDNN_ATTR_REDUCTION_COMP_TYPE,
                .x = CUDNN_ATTR_OPERATION_REDUCTION_XDESC,
                .y = CUDNN_ATTR_OPERATION_REDUCTION_YDESC,
                .kind = CUDNN_ATTR_REDUCTION_OPERATOR,
                .kind_type = CUDNN_TYPE_REDUCTION_OPERATOR_TYPE},
    [EACH] = {CUDNN_BACKEND_POINTWISE_DESCRIPTOR,
              CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR,
              CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR,
              CUDNN_ATTR_POINTWISE_MATH_PREC,
              CUDNN_ATTR_OPERATION_POINTWISE_XDESC,
              CUDNN_ATTR_OPERATION_POINTWISE_YDESC,
              CUDNN_ATTR_OPERATION_POINTWISE_BDESC,
              CUDNN_ATTR_OPERATION_POINTWISE_TDESC, CUDNN_ATTR_POINTWISE_MODE,
              CUDNN_TYPE_POINTWISE_MODE},
};

/* NULL: no such operand. */
static descriptor graph_tensor(struct graph *g, const struct key *k,
                               int64_t number)
{
    struct shape s = shape_of(k, (int)number);
    bool is = true, value = number == SCALE || number == LOWEST;
    int64_t align = 16;
    const struct attribute a[] = {
        {CUDNN_ATTR_TENSOR_UNIQUE_ID, INT64, 1, &number},
        {CUDNN_ATTR_TENSOR_DATA_TYPE, TYPE, 1, &s.type},
        {CUDNN_ATTR_TENSOR_DIMENSIONS, INT64, 4, s.size},
        {CUDNN_ATTR_TENSOR_STRIDES, INT64, 4, s.stride},
        {CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, INT64, 1, &align},
        {value ? CUDNN_ATTR_TENSOR_IS_BY_VALUE : CUDNN_ATTR_TENSOR_IS_VIRTUAL,
         CUDNN_TYPE_BOOLEAN, value || number >= S, &is},
        {0}};
    if (number && !g->tensor[number])
        g->tensor[number] = graph_add(g, CUDNN_BACKEND_TENSOR_DESCRIPTOR, a);
    return g->tensor[number];
}

static descriptor graph_step(struct graph *g, const struct key *k,
                             const struct step *s)
{
    const struct names *n = &names_of[s->kind];
    descriptor x = graph_tensor(g, k, s->x);
    descriptor b = graph_tensor(g, k, s->b);
    descriptor t = graph_tensor(g, k, s->t);
    descriptor y = graph_tensor(g, k, s->y), by;
    cudnnDataType_t type = shape_of(k, s->y).type;
    if (type != CUDNN_DATA_INT32 && type != CUDNN_DATA_BOOLEAN)
        type = CUDNN_DATA_FLOAT; /* also where 16 bits are multiplied */

    const struct attribute how[] = {
        {n->type, TYPE, 1, &type},
        {n->kind, n->kind_type, s->kind != MATMUL, &s->how},
        {CUDNN_ATTR_POINTWISE_AXIS, INT64, s->axis != 0, &s->axis},
        {0}};
    const struct attribute op[] = {
        {n->by, PART, 1, &by},       {n->x, PART, 1, &x},
        {n->y, PART, 1, &y},         {n->b, PART, b != NULL, &b},
        {n->t, PART, t != NULL, &t}, {0}};
    by = graph_add(g, n->how, how);
    return graph_add(g, n->op, op);
}

/* ---- plans -------------------------------------------------------------- */

struct plan {
    struct key key;
    bool taken, possible;
    struct graph graph;
    descriptor plan;
    struct iz_refusal why; /* it is not possible */
};

/* In the order in which they came; none is removed. */
struct iz_cudnn {
    cudnnHandle_t handle; /* NULL: of a described device */
    struct graph own;
    descriptor device;
    struct plan plan[PLANS];
};

void iz_cudnn_close(struct iz_cudnn **c)
{
    if (*c) {
        for (int i = 0; i < PLANS; i++)
            graph_clear(&(*c)->plan[i].graph);
        graph_clear(&(*c)->own);
        if ((*c)->handle)
            dnn.destroy((*c)->handle);
    }
    free(*c);
    *c = NULL;
}

int iz_cudnn_open(struct iz_cudnn **out, void *stream, const char *described,
                  struct iz_refusal *why)
{
    struct iz_cudnn *c = calloc(1, sizeof(*c));
    const char *none =
        c ? iz_cudnn_missing() : "no memory for the table of plans";
    struct attribute device[2] = {{0}};
    *out = c;
    if (none) {
        snprintf(why->why, sizeof(why->why), "%s", none);
        iz_cudnn_close(out);
        return -ENOTSUP;
    }
    device[0] = (struct attribute){CUDNN_ATTR_DEVICEPROP_HANDLE,
                                   CUDNN_TYPE_HANDLE, 1, &c->handle};
    if (described)
        device[0] = (struct attribute){
            CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, CUDNN_TYPE_CHAR,
            (int64_t)strlen(described), described};
    else if ((c->own.failed = dnn.create(&c->handle)))
        c->handle = NULL;
    else
        c->own.failed = dnn.set_stream(c->handle, stream);
    c->device = graph_add(&c->own, CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR, device);
    if (!c->own.failed)
        return 0;
    cudnn_refuse(why, "the GPU", c->own.failed);
    iz_cudnn_close(out);
    return -EIO;
}

/* What the library thinks best first. */
static int64_t search(struct graph *g, const struct key *k, descriptor device,
                      descriptor *config)
{
    descriptor op[STEPS];
    int n = 0;
    cudnnBackendHeurMode_t mode = CUDNN_HEUR_MODE_A;
    for (int i = 0; i < STEPS; i++)
        if (k->full && steps[i].y >= ROW && steps[i].y <= SEEN)
            g->tensor[SEEN] = g->tensor[SCALED];
        else
            op[n++] = graph_step(g, k, &steps[i]);
    descriptor ops =
        graph_add(g, CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR,
                  (struct attribute[]){
                      {CUDNN_ATTR_OPERATIONGRAPH_OPS, PART, n, op}, {0}});
    descriptor best = graph_add(
        g, CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR,
        (struct attribute[]){
            {CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, PART, 1, &ops},
            {CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, 1, &mode},
            {CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, PART, 1, &device},
            {0}});
    for (int i = 0; i < CONFIGS; i++)
        config[i] = graph_make(g, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
    return graph_get(g, best, CUDNN_ATTR_ENGINEHEUR_RESULTS, PART, CONFIGS,
                     config);
}

/* Whether the same inputs give the same bits, by the library's own word; false
 * with the reason. */
static bool repeats(struct graph *g, descriptor config, struct iz_refusal *why)
{
    descriptor engine = graph_make(g, CUDNN_BACKEND_ENGINE_DESCRIPTOR);
    cudnnBackendNumericalNote_t note[CUDNN_NUMERICAL_NOTE_TYPE_COUNT];
    graph_get(g, config, CUDNN_ATTR_ENGINECFG_ENGINE, PART, 1, &engine);
    int64_t n = graph_get(g, engine, CUDNN_ATTR_ENGINE_NUMERICAL_NOTE,
                          CUDNN_TYPE_NUMERICAL_NOTE,
                          CUDNN_NUMERICAL_NOTE_TYPE_COUNT, note);
    if (g->failed)
        cudnn_refuse(why, "its kernel's notes", g->failed);
    for (int64_t i = 0; i < n; i++)
        if (note[i] == CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC) {
            snprintf(why->why, sizeof(why->why),
                     "a second run of it may give other bits");
            return false;
        }
    return !g->failed;
}

/* Compiles the kernel; false where it cannot be, with the reason. */
static bool build(struct plan *p, descriptor device, descriptor config)
{
    struct graph *g = &p->graph;
    int64_t bytes = 0;
    p->plan = graph_add(
        g, CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR,
        (struct attribute[]){
            {CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, PART, 1, &config},
            {CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP, PART, 1, &device},
            {0}});
    graph_get(g, p->plan, CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, INT64, 1,
              &bytes);
    if (g->failed)
        cudnn_refuse(&p->why, "its kernel", g->failed);
    else if (bytes > WORKSPACE_BYTES)
        snprintf(p->why.why, sizeof(p->why.why),
                 "cuDNN wants %.1f MiB beside the tensors, %d KiB are planned",
                 iz_mib(bytes), (int)(WORKSPACE_BYTES >> 10));
    else
        return true;
    return false;
}

static void attention_cudnn_choose(const struct iz_cudnn *c, struct plan *p)
{
    struct graph *g = &p->graph;
    descriptor config[CONFIGS];
    int64_t n = search(g, &p->key, c->device, config);
    if (!n)
        cudnn_refuse(&p->why, "its graph",
                     g->failed ? g->failed : CUDNN_STATUS_NOT_SUPPORTED);
    for (int64_t i = 0; i < n && !p->possible; i++) {
        p->possible =
            repeats(g, config[i], &p->why) && build(p, c->device, config[i]);
        g->failed = CUDNN_STATUS_SUCCESS; /* another one may do */
    }
}

static struct plan *plan_of(struct iz_cudnn *c, const struct iz_attention *a)
{
    struct key k = key_of(a);
    for (int i = 0; i < PLANS; i++) {
        struct plan *p = &c->plan[i];
        if (p->taken && memcmp(&p->key, &k, sizeof(k)) == 0)
            return p;
        if (p->taken)
            continue;
        *p = (struct plan){.key = k, .taken = true};
        if (k.type == IZ_F32) {
            snprintf(p->why.why, sizeof(p->why.why),
                     "cuDNN's attention is of bf16 and fp16");
        } else {
            attention_cudnn_choose(c, p);
        }
        return p;
    }
    iz_die("more than %d shapes of attention", PLANS);
}

bool iz_cudnn_plan(struct iz_cudnn *c, const struct iz_attention *a,
                   struct iz_refusal *why)
{
    const struct plan *p = plan_of(c, a);
    const struct key *k = &p->key;
    if (!p->possible)
        snprintf(why->why, sizeof(why->why),
                 "attention of %lld samples of %lld, %lld heads of %lld "
                 "columns, keys of %lld: %.300s",
                 (long long)k->samples, (long long)k->seq, (long long)k->heads,
                 (long long)k->d, (long long)k->kv_heads, p->why.why);
    return p->possible;
}

/* ---- the op ------------------------------------------------------------- */

/* The handle is opened with the first plan, so that runs without cuDNN neither
 * load the library nor give it memory. */
bool iz_attention_ask_cudnn(struct iz_exec *x, const struct iz_attention *a)
{
    if (!x->cuda->dnn && iz_cudnn_open(&x->cuda->dnn, x->stream, NULL, x->ask))
        return false;
    return iz_cudnn_plan(x->cuda->dnn, a, x->ask);
}

/* Enqueues the plan on its handle's stream.  The library has no way to point a
 * finished pack elsewhere, so each call makes one: some hundred bytes. */
void iz_attention_fwd_cudnn(struct iz_exec *x, const struct iz_attention *a,
                            struct iz_view scratch)
{
    static const int64_t uid[] = {Q, K, V, O, LSE, SCALE, LOWEST};
    struct iz_refusal why;
    struct iz_exec asking = *x;
    float lowest = -FLT_MAX, scale;
    uintptr_t space = ((uintptr_t)scratch.p + WORKSPACE_ALIGN - 1) /
                      WORKSPACE_ALIGN * WORKSPACE_ALIGN;
    int64_t bytes = iz_dtype_bytes(a->o.dtype), n = LOWEST - Q + !a->full;
    char *q = a->qkv.p, *k = q + a->o.cols * bytes;
    struct graph g = {.n = 0};
    assert(iz_view_bytes(scratch) >= IZ_CUDNN_SCRATCH);
    asking.ask = &why;
    if (!iz_attention_ask_cudnn(&asking, a))
        iz_die("%s", why.why);
    const struct plan *p = plan_of(x->cuda->dnn, a);
    scale = 1 / sqrtf((float)p->key.d);
    void *pointer[] = {q,      k,        k + p->key.kv_heads * p->key.d * bytes,
                       a->o.p, a->lse.p, &scale,
                       &lowest};
    const struct attribute have[] = {
        {CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, INT64, n, uid},
        {CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, n,
         pointer},
        {CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, 1, &space},
        {0}};
    descriptor pack =
        graph_add(&g, CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR, have);
    if (!g.failed)
        g.failed = dnn.execute(x->cuda->dnn->handle, p->plan, pack);
    if (g.failed) {
        cudnn_refuse(&why, "attention", g.failed);
        iz_die("%s", why.why);
    }
    graph_clear(&g);
}
