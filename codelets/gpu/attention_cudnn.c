/* SPDX-License-Identifier: Apache-2.0 */
/* Attention's forward through cuDNN's fused kernels.  Its backend interface
 * takes a graph of small operations, and finds a kernel that does them all at
 * once without ever writing the scores. That is asked once per shape and type,
 * and kept.
 *
 * Only the forward: a backward whose memory grows with the length alone adds
 * to the gradient of the queries with atomics, in no fixed order, and one
 * without them writes a matrix of scores.  Our own backward takes the logarithm
 * of the sum of exponentials that this forward leaves. */
#include "codelets/gpu/attention_cudnn.h"

#include <assert.h>
#include <errno.h>
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "codelets/base/die.h"
#include "codelets/base/units.h"
#include "codelets/gpu/cudnn.h"
#include "codelets/kernels/cuda_lib.h"
#include "codelets/ops/gpu_ops.h"

#define WORKSPACE_ALIGN 256
#define WORKSPACE_BYTES (IZ_CUDNN_SCRATCH - WORKSPACE_ALIGN)

enum { PLANS = 32, CONFIGS = 8 };

typedef iz_dnn_descriptor descriptor;

/* Tensors with memory, by their number; others count on. */
enum { Q = 1, K, V, O, LSE, SCALE, LOWEST, FIRST_VIRTUAL };

/* ---- attention ---------------------------------------------------------- */

/* All that a plan depends on; no padding. */
struct key {
    int64_t samples, seq, heads, kv_heads, d, type, full;
};

static struct key key_of(const struct iz_attention *a)
{
    return (struct key){.samples = a->o.rows / a->seq,
                        .seq = a->seq,
                        .heads = a->heads,
                        .kv_heads = iz_attention_keys(a),
                        .d = a->o.cols / a->heads,
                        .type = a->o.dtype,
                        .full = a->full};
}

static cudnnDataType_t type_of(const struct key *k)
{
    return k->type == IZ_BF16 ? CUDNN_DATA_BFLOAT16 : CUDNN_DATA_HALF;
}

/* Scores of keys after the query become the lowest number. */
static descriptor hide(struct iz_dnn_graph *g, descriptor s,
                       const int64_t size[4])
{
    struct iz_dnn_pointwise row = {CUDNN_POINTWISE_GEN_INDEX, CUDNN_DATA_INT32,
                                   .x = s, .axis = 2};
    struct iz_dnn_pointwise col = row;
    struct iz_dnn_pointwise sees = {.mode = CUDNN_POINTWISE_CMP_GE,
                                    .type = CUDNN_DATA_BOOLEAN};
    struct iz_dnn_pointwise pick = {CUDNN_POINTWISE_BINARY_SELECT,
                                    CUDNN_DATA_FLOAT, .x = s};

    col.axis = 3;
    sees.x =
        iz_dnn_pointwise(g, &row, iz_dnn_passing(g, size, CUDNN_DATA_INT32));
    sees.b =
        iz_dnn_pointwise(g, &col, iz_dnn_passing(g, size, CUDNN_DATA_INT32));
    pick.b = iz_dnn_number(g, LOWEST);
    pick.t =
        iz_dnn_pointwise(g, &sees, iz_dnn_passing(g, size, CUDNN_DATA_BOOLEAN));
    return iz_dnn_pointwise(g, &pick,
                            iz_dnn_passing(g, size, CUDNN_DATA_FLOAT));
}

/* p = softmax(s), of the type of the values; writes lse. */
static descriptor softmax(struct iz_dnn_graph *g, descriptor s,
                          const struct key *k, const int64_t size[4])
{
    int64_t rows[4] = {k->samples, k->heads, k->seq, 1};
    int64_t stride[4] = {k->heads * k->seq, k->seq, 1, 1};
    cudnnDataType_t f = CUDNN_DATA_FLOAT;
    descriptor lse = iz_dnn_tensor(g, LSE, IZ_DNN_MEMORY, f, rows, stride);
    descriptor most = iz_dnn_reduce(g, CUDNN_REDUCE_TENSOR_MAX, s,
                                    iz_dnn_passing(g, rows, f));
    descriptor less = iz_dnn_of_two(g, CUDNN_POINTWISE_SUB, s, most,
                                    iz_dnn_passing(g, size, f));
    descriptor e =
        iz_dnn_of_one(g, CUDNN_POINTWISE_EXP, less, iz_dnn_passing(g, size, f));
    descriptor sum = iz_dnn_reduce(g, CUDNN_REDUCE_TENSOR_ADD, e,
                                   iz_dnn_passing(g, rows, f));
    descriptor l =
        iz_dnn_of_one(g, CUDNN_POINTWISE_LOG, sum, iz_dnn_passing(g, rows, f));

    iz_dnn_of_two(g, CUDNN_POINTWISE_ADD, most, l, lse);
    return iz_dnn_of_two(g, CUDNN_POINTWISE_DIV, e, sum,
                         iz_dnn_passing(g, size, type_of(k)));
}

/* The library multiplies [samples, heads, rows, cols] and takes a heads' keys
 * transposed: the strides say where a row of qkv has them. */
static void attention_cudnn_describe(struct iz_dnn_graph *g,
                                     const struct key *k)
{
    int64_t b = k->samples, t = k->seq, h = k->heads, n = k->kv_heads;
    int64_t d = k->d, c = h * d, ld = c + 2 * n * d;
    int64_t size[4] = {b, h, t, t};
    cudnnDataType_t type = type_of(k);
    descriptor q =
        iz_dnn_tensor(g, Q, IZ_DNN_MEMORY, type, (int64_t[]){b, h, t, d},
                      (int64_t[]){t * ld, d, ld, 1});
    descriptor keys =
        iz_dnn_tensor(g, K, IZ_DNN_MEMORY, type, (int64_t[]){b, n, d, t},
                      (int64_t[]){t * ld, d, 1, ld});
    descriptor v =
        iz_dnn_tensor(g, V, IZ_DNN_MEMORY, type, (int64_t[]){b, n, t, d},
                      (int64_t[]){t * ld, d, ld, 1});
    descriptor o =
        iz_dnn_tensor(g, O, IZ_DNN_MEMORY, type, (int64_t[]){b, h, t, d},
                      (int64_t[]){t * c, d, c, 1});
    descriptor s = iz_dnn_passing(g, size, CUDNN_DATA_FLOAT);

    iz_dnn_product(g, q, keys, s);
    s = iz_dnn_of_two(g, CUDNN_POINTWISE_MUL, s, iz_dnn_number(g, SCALE),
                      iz_dnn_passing(g, size, CUDNN_DATA_FLOAT));
    if (!k->full)
        s = hide(g, s, size);
    iz_dnn_product(g, softmax(g, s, k, size), v, o);
}

const char *iz_cudnn_missing(void)
{
    return iz_dnn_missing();
}

/* ---- plans -------------------------------------------------------------- */

struct plan {
    struct key key;
    bool taken, possible;
    struct iz_dnn_graph graph;
    descriptor plan;
    struct iz_refusal why; /* it is not possible */
};

/* In the order in which they came; none is removed. */
struct iz_cudnn {
    cudnnHandle_t handle; /* NULL: of a described device */
    struct iz_dnn_graph own;
    descriptor device;
    struct plan plan[PLANS];
};

void iz_cudnn_close(struct iz_cudnn **c)
{
    if (*c) {
        for (int i = 0; i < PLANS; i++)
            iz_dnn_clear(&(*c)->plan[i].graph);
        iz_dnn_clear(&(*c)->own);
        if ((*c)->handle)
            iz_dnn.destroy((*c)->handle);
    }
    free(*c);
    *c = NULL;
}

static cudnnStatus_t open_handle(struct iz_cudnn *c, void *stream)
{
    cudnnStatus_t s = iz_dnn.create(&c->handle);

    if (s != CUDNN_STATUS_SUCCESS)
        c->handle = NULL;
    return s != CUDNN_STATUS_SUCCESS ? s : iz_dnn.set_stream(c->handle, stream);
}

static cudnnStatus_t open_device(struct iz_cudnn *c, const char *described)
{
    struct iz_dnn_graph *g = &c->own;

    c->device = iz_dnn_make(g, CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR);
    if (described)
        iz_dnn_set(g, c->device, CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION,
                   CUDNN_TYPE_CHAR, (int64_t)strlen(described), described);
    else
        iz_dnn_set(g, c->device, CUDNN_ATTR_DEVICEPROP_HANDLE,
                   CUDNN_TYPE_HANDLE, 1, &c->handle);
    iz_dnn_finish(g, c->device);
    return g->failed;
}

int iz_cudnn_open(struct iz_cudnn **out, void *stream, const char *described,
                  struct iz_refusal *why)
{
    struct iz_cudnn *c = NULL;
    const char *none = iz_cudnn_missing();
    cudnnStatus_t s = CUDNN_STATUS_SUCCESS;

    *out = NULL;
    if (!none && !(c = calloc(1, sizeof(*c))))
        none = "no memory for the table of plans";
    if (none) {
        snprintf(why->why, sizeof(why->why), "%s", none);
        return -ENOTSUP;
    }
    *out = c;
    if (!described)
        s = open_handle(c, stream);
    if (s == CUDNN_STATUS_SUCCESS)
        s = open_device(c, described);
    if (s == CUDNN_STATUS_SUCCESS)
        return 0;
    iz_dnn_refuse(why, "the GPU", s);
    iz_cudnn_close(out);
    return -EIO;
}

/* What the library thinks best first. */
static int search(struct iz_dnn_graph *g, descriptor device, descriptor *config)
{
    descriptor ops = iz_dnn_make(g, CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
    descriptor h = iz_dnn_make(g, CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
    cudnnBackendHeurMode_t mode = CUDNN_HEUR_MODE_A;
    int64_t n = 0;

    iz_dnn_set(g, ops, CUDNN_ATTR_OPERATIONGRAPH_OPS,
               CUDNN_TYPE_BACKEND_DESCRIPTOR, g->ops, g->op);
    iz_dnn_finish(g, ops);
    iz_dnn_set_descriptor(g, h, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, ops);
    iz_dnn_set(g, h, CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, 1,
               &mode);
    iz_dnn_set_descriptor(g, h, CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, device);
    iz_dnn_finish(g, h);
    for (int i = 0; i < CONFIGS; i++)
        config[i] = iz_dnn_make(g, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
    if (g->failed == CUDNN_STATUS_SUCCESS)
        g->failed =
            iz_dnn.get(h, CUDNN_ATTR_ENGINEHEUR_RESULTS,
                       CUDNN_TYPE_BACKEND_DESCRIPTOR, CONFIGS, &n, config);
    return g->failed == CUDNN_STATUS_SUCCESS ? (int)n : 0;
}

/* Whether the same inputs give the same bits, by the library's own word; false
 * with the reason. */
static bool repeats(struct iz_dnn_graph *g, descriptor config,
                    struct iz_refusal *why)
{
    descriptor engine = iz_dnn_make(g, CUDNN_BACKEND_ENGINE_DESCRIPTOR);
    cudnnBackendNumericalNote_t note[CUDNN_NUMERICAL_NOTE_TYPE_COUNT];
    int64_t n = 0;

    if (g->failed == CUDNN_STATUS_SUCCESS)
        g->failed = iz_dnn.get(config, CUDNN_ATTR_ENGINECFG_ENGINE,
                               CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &n, &engine);
    if (g->failed == CUDNN_STATUS_SUCCESS)
        g->failed = iz_dnn.get(engine, CUDNN_ATTR_ENGINE_NUMERICAL_NOTE,
                               CUDNN_TYPE_NUMERICAL_NOTE,
                               CUDNN_NUMERICAL_NOTE_TYPE_COUNT, &n, note);
    if (g->failed != CUDNN_STATUS_SUCCESS)
        iz_dnn_refuse(why, "its kernel's notes", g->failed);
    for (int i = 0; g->failed == CUDNN_STATUS_SUCCESS && i < n; i++)
        if (note[i] == CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC) {
            snprintf(why->why, sizeof(why->why),
                     "a second run of it may give other bits");
            return false;
        }
    n = g->failed;
    g->failed = CUDNN_STATUS_SUCCESS; /* another one may do */
    return n == CUDNN_STATUS_SUCCESS;
}

/* Compiles the kernel; false where it cannot be, with the reason. */
static bool build(struct plan *p, descriptor device, descriptor config)
{
    struct iz_dnn_graph *g = &p->graph;
    int64_t bytes = 0, n = 0;

    p->plan = iz_dnn_make(g, CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
    iz_dnn_set_descriptor(g, p->plan, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG,
                          config);
    iz_dnn_set_descriptor(g, p->plan, CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP,
                          device);
    iz_dnn_finish(g, p->plan);
    if (g->failed == CUDNN_STATUS_SUCCESS)
        g->failed =
            iz_dnn.get(p->plan, CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE,
                       CUDNN_TYPE_INT64, 1, &n, &bytes);
    if (g->failed != CUDNN_STATUS_SUCCESS)
        iz_dnn_refuse(&p->why, "its kernel", g->failed);
    else if (bytes > WORKSPACE_BYTES)
        snprintf(p->why.why, sizeof(p->why.why),
                 "cuDNN wants %.1f MiB beside the tensors, %d KiB are planned",
                 iz_mib(bytes), (int)(WORKSPACE_BYTES >> 10));
    else
        return true;
    g->failed = CUDNN_STATUS_SUCCESS; /* another one may do */
    return false;
}

static void attention_cudnn_choose(const struct iz_cudnn *c, struct plan *p)
{
    struct iz_dnn_graph *g = &p->graph;
    descriptor config[CONFIGS];
    int n = search(g, c->device, config);

    if (g->failed != CUDNN_STATUS_SUCCESS || !n)
        iz_dnn_refuse(&p->why, "its graph",
                      g->failed ? g->failed : CUDNN_STATUS_NOT_SUPPORTED);
    for (int i = 0; i < n && !p->possible; i++)
        if (repeats(g, config[i], &p->why))
            p->possible = build(p, c->device, config[i]);
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
        p->graph.uid = FIRST_VIRTUAL;
        if (k.type == IZ_F32) {
            snprintf(p->why.why, sizeof(p->why.why),
                     "cuDNN's attention is of bf16 and fp16");
            return p;
        }
        attention_cudnn_describe(&p->graph, &k);
        attention_cudnn_choose(c, p);
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

static void attention_cudnn_check(cudnnStatus_t s)
{
    struct iz_refusal r;

    if (s == CUDNN_STATUS_SUCCESS)
        return;
    iz_dnn_refuse(&r, "attention", s);
    iz_die("%s", r.why);
}

/* Enqueues the plan on its handle's stream.  The library has no way to point a
 * finished pack elsewhere, so each call makes one: some hundred bytes. */
static void execute(const struct iz_cudnn *c, const struct plan *p,
                    void *const pointer[FIRST_VIRTUAL], void *space)
{
    static const int64_t uid[] = {Q, K, V, O, LSE, SCALE, LOWEST};
    int64_t n = LOWEST - Q + !p->key.full;
    struct iz_dnn_graph g = {.n = 0};
    descriptor pack = iz_dnn_make(&g, CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);

    iz_dnn_set(&g, pack, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64,
               n, uid);
    iz_dnn_set(&g, pack, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS,
               CUDNN_TYPE_VOID_PTR, n, pointer + Q);
    iz_dnn_set(&g, pack, CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR,
               1, &space);
    iz_dnn_finish(&g, pack);
    if (g.failed == CUDNN_STATUS_SUCCESS)
        g.failed = iz_dnn.execute(c->handle, p->plan, pack);
    attention_cudnn_check(g.failed);
    iz_dnn_clear(&g);
}

void iz_attention_fwd_cudnn(struct iz_exec *x, const struct iz_attention *a,
                            struct iz_view scratch)
{
    struct iz_refusal why;
    struct iz_exec asking = *x;
    float lowest = -FLT_MAX, scale;
    uintptr_t space = ((uintptr_t)scratch.p + WORKSPACE_ALIGN - 1) /
                      WORKSPACE_ALIGN * WORKSPACE_ALIGN;
    char *q = a->qkv.p, *k = q + a->o.cols * iz_dtype_bytes(a->o.dtype);
    const struct plan *p;

    assert(iz_view_bytes(scratch) >= IZ_CUDNN_SCRATCH);
    asking.ask = &why;
    if (!iz_attention_ask_cudnn(&asking, a))
        iz_die("%s", why.why);
    p = plan_of(x->cuda->dnn, a);
    scale = 1 / sqrtf((float)p->key.d);
    execute(
        x->cuda->dnn, p,
        (void *[FIRST_VIRTUAL]){
            [Q] = q,
            [K] = k,
            [V] = k + p->key.kv_heads * p->key.d * iz_dtype_bytes(a->o.dtype),
            [O] = a->o.p,
            [LSE] = a->lse.p,
            [SCALE] = &scale,
            [LOWEST] = &lowest,
        },
        (void *)space);
}
