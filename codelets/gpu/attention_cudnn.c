/* SPDX-License-Identifier: Apache-2.0 */
/* Attention through cuDNN's fused kernels.  The library is asked once per shape
 * and type which of its kernels does the whole graph (attention_graph.h), and
 * the answer is kept. */
#include "codelets/gpu/attention_cudnn.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "codelets/base/die.h"
#include "codelets/base/mix.h"
#include "codelets/base/take.h"
#include "codelets/gpu/attention_graph.h"
#include "codelets/kernels/cuda_lib.h"
#include "codelets/ops/gpu_ops.h"

enum { PLANS = 64, CONFIGS = 8, CHOICES = 16 };

#define ALIGN 256 /* of a workspace */

typedef cudnnBackendDescriptor_t descriptor;

struct plan {
    struct iz_attention_key key;
    bool taken, possible;
    struct iz_dnn_set set;
    descriptor plan;
    int64_t bytes;         /* of its workspace */
    uint64_t kernel;       /* and how it is set */
    struct iz_refusal why; /* it is not possible */
};

/* In the order in which they came; none is removed. */
struct iz_cudnn {
    cudnnHandle_t handle; /* NULL: of a described device */
    struct iz_dnn_set own;
    descriptor device;
    struct plan plan[PLANS];
};

void iz_cudnn_close(struct iz_cudnn **c)
{
    if (*c) {
        for (int i = 0; i < PLANS; i++)
            iz_dnn_clear(&(*c)->plan[i].set);
        iz_dnn_clear(&(*c)->own);
        if ((*c)->handle)
            iz_dnn.destroy((*c)->handle);
    }
    free(*c);
    *c = NULL;
}

int iz_cudnn_open(struct iz_cudnn **out, void *stream, const char *described,
                  struct iz_refusal *why)
{
    struct iz_cudnn *c = *out = iz_take(1, sizeof(*c), "cuDNN's plans");
    const char *none = iz_cudnn_missing();
    struct iz_dnn_fact device[2] = {{0}};
    if (none) {
        snprintf(why->why, sizeof(why->why), "%s", none);
        iz_cudnn_close(out);
        return -ENOTSUP;
    }
    device[0] = (struct iz_dnn_fact){CUDNN_ATTR_DEVICEPROP_HANDLE,
                                     CUDNN_TYPE_HANDLE, 1, &c->handle};
    if (described)
        device[0] = (struct iz_dnn_fact){
            CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, CUDNN_TYPE_CHAR,
            (int64_t)strlen(described), described};
    else if ((c->own.failed = iz_dnn.create(&c->handle)))
        c->handle = NULL;
    else
        c->own.failed = iz_dnn.set_stream(c->handle, stream);
    c->device =
        iz_dnn_add(&c->own, CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR, device);
    if (!c->own.failed)
        return 0;
    iz_cudnn_refuse(why, "the GPU", c->own.failed);
    iz_cudnn_close(out);
    return -EIO;
}

/* What the library thinks best first. */
static int64_t search(struct iz_dnn_set *g, const struct iz_attention_key *k,
                      descriptor device, descriptor *config)
{
    cudnnBackendHeurMode_t mode = CUDNN_HEUR_MODE_A;
    descriptor ops = iz_attention_graph(g, k);
    descriptor best = iz_dnn_add(
        g, CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR,
        (struct iz_dnn_fact[]){
            {CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, IZ_DNN_PART, 1, &ops},
            {CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, 1, &mode},
            {CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, IZ_DNN_PART, 1, &device},
            {0}});
    for (int i = 0; i < CONFIGS; i++)
        config[i] = iz_dnn_make(g, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
    return iz_dnn_get(g, best, CUDNN_ATTR_ENGINEHEUR_RESULTS, IZ_DNN_PART,
                      CONFIGS, config);
}

/* Whether the same inputs give the same bits, by the library's own word; false
 * with the reason. */
static bool repeats(struct iz_dnn_set *g, descriptor config,
                    struct iz_refusal *why)
{
    descriptor engine = iz_dnn_make(g, CUDNN_BACKEND_ENGINE_DESCRIPTOR);
    cudnnBackendNumericalNote_t note[CUDNN_NUMERICAL_NOTE_TYPE_COUNT];
    iz_dnn_get(g, config, CUDNN_ATTR_ENGINECFG_ENGINE, IZ_DNN_PART, 1, &engine);
    int64_t n = iz_dnn_get(g, engine, CUDNN_ATTR_ENGINE_NUMERICAL_NOTE,
                           CUDNN_TYPE_NUMERICAL_NOTE,
                           CUDNN_NUMERICAL_NOTE_TYPE_COUNT, note);
    if (g->failed)
        iz_cudnn_refuse(why, "its kernel's notes", g->failed);
    for (int64_t i = 0; i < n; i++)
        if (note[i] == CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC) {
            snprintf(why->why, sizeof(why->why),
                     "a second run of it may give other bits");
            return false;
        }
    return !g->failed;
}

/* What the plan of the run has for it, without what aligns it. */
static int64_t planned_bytes(const struct iz_attention_key *k)
{
    int64_t all = IZ_CUDNN_SCRATCH;
    if (k->back)
        all = iz_gpu_cudnn_bwd_bytes(k->samples, k->seq, k->heads, k->kv_heads,
                                     k->d);
    return all - ALIGN;
}

/* Compiles the kernel; false where it cannot be, with the reason. */
static bool build(struct plan *p, descriptor device, descriptor config)
{
    struct iz_dnn_set *g = &p->set;
    int64_t most = planned_bytes(&p->key);
    p->plan = iz_dnn_add(
        g, CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR,
        (struct iz_dnn_fact[]){
            {CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, IZ_DNN_PART, 1, &config},
            {CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP, IZ_DNN_PART, 1, &device},
            {0}});
    p->bytes = 0;
    iz_dnn_get(g, p->plan, CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, IZ_DNN_INT,
               1, &p->bytes);
    if (g->failed)
        iz_cudnn_refuse(&p->why, "its kernel", g->failed);
    else if (p->bytes > most)
        snprintf(p->why.why, sizeof(p->why.why),
                 "cuDNN wants %lld bytes beside the tensors, %lld are planned",
                 (long long)p->bytes, (long long)most);
    else
        return true;
    return false;
}

/* A number of the library's kernel and how it is set. */
static uint64_t kernel_of(struct iz_dnn_set *g, descriptor config)
{
    descriptor engine = iz_dnn_make(g, CUDNN_BACKEND_ENGINE_DESCRIPTOR);
    descriptor choice[CHOICES];
    int64_t number = 0;
    for (int i = 0; i < CHOICES; i++)
        choice[i] = iz_dnn_make(g, CUDNN_BACKEND_KNOB_CHOICE_DESCRIPTOR);
    iz_dnn_get(g, config, CUDNN_ATTR_ENGINECFG_ENGINE, IZ_DNN_PART, 1, &engine);
    iz_dnn_get(g, engine, CUDNN_ATTR_ENGINE_GLOBAL_INDEX, IZ_DNN_INT, 1,
               &number);
    uint64_t kernel = iz_mix((uint64_t)number);
    int64_t n = iz_dnn_get(g, config, CUDNN_ATTR_ENGINECFG_KNOB_CHOICES,
                           IZ_DNN_PART, CHOICES, choice);
    for (int64_t i = 0; i < n; i++) {
        cudnnBackendKnobType_t knob = CUDNN_KNOB_TYPE_COUNTS;
        iz_dnn_get(g, choice[i], CUDNN_ATTR_KNOB_CHOICE_KNOB_TYPE,
                   CUDNN_TYPE_KNOB_TYPE, 1, &knob);
        iz_dnn_get(g, choice[i], CUDNN_ATTR_KNOB_CHOICE_KNOB_VALUE, IZ_DNN_INT,
                   1, &number);
        kernel = iz_mix(kernel ^ (uint64_t)knob << 32 ^ (uint64_t)number);
    }
    return g->failed ? 0 : kernel;
}

static void attention_cudnn_choose(const struct iz_cudnn *c, struct plan *p)
{
    struct iz_dnn_set *g = &p->set;
    descriptor config[CONFIGS];
    int64_t n = search(g, &p->key, c->device, config);
    if (!n)
        iz_cudnn_refuse(&p->why, "its graph",
                        g->failed ? g->failed : CUDNN_STATUS_NOT_SUPPORTED);
    for (int64_t i = 0; i < n && !p->possible; i++) {
        p->possible =
            repeats(g, config[i], &p->why) && build(p, c->device, config[i]);
        if (p->possible)
            p->kernel = kernel_of(g, config[i]);
        g->failed = CUDNN_STATUS_SUCCESS; /* another one may do */
    }
}

static struct plan *plan_of(struct iz_cudnn *c, const struct iz_attention *a,
                            int64_t back)
{
    struct iz_attention_key k = iz_attention_key(a, back);
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
                   int64_t back, int64_t *bytes, struct iz_refusal *why)
{
    const struct plan *p = plan_of(c, a, back);
    const struct iz_attention_key *k = &p->key;
    *bytes = p->bytes;
    if (!p->possible)
        snprintf(why->why, sizeof(why->why),
                 "%s of %lld samples of %lld, %lld heads of %lld "
                 "columns, keys of %lld: %.300s",
                 back ? "backward of attention" : "attention",
                 (long long)k->samples, (long long)k->seq, (long long)k->heads,
                 (long long)k->d, (long long)k->kv_heads, p->why.why);
    return p->possible;
}

int64_t iz_cudnn_at_once(struct iz_cudnn *c, const struct iz_attention *a,
                         int64_t bytes)
{
    const struct plan *one = plan_of(c, a, 1);
    int64_t samples = a->o.rows / a->seq, n = samples;
    for (; n > 1; n--) {
        int64_t want = iz_gpu_cudnn_bwd_bytes(
            n, a->seq, a->heads, iz_attention_keys(a), a->o.cols / a->heads);
        if (samples % n || want > bytes)
            continue;
        const struct plan *p = plan_of(c, a, n);
        if (p->possible && p->kernel && p->kernel == one->kernel)
            break;
    }
    return n;
}

/* ---- the ops ------------------------------------------------------------ */

/* The handle is opened with the first plan, so that runs without cuDNN neither
 * load the library nor give it memory. */
bool iz_attention_ask_cudnn(struct iz_exec *x, const struct iz_attention *a,
                            bool back, int64_t scratch_bytes)
{
    int64_t bytes;
    if (!x->cuda->dnn && iz_cudnn_open(&x->cuda->dnn, x->stream, NULL, x->ask))
        return false;
    bool can = iz_cudnn_plan(x->cuda->dnn, a, back, &bytes, x->ask);
    if (can && back)
        iz_cudnn_at_once(x->cuda->dnn, a, scratch_bytes);
    return can;
}

/* Dies where the plan that was asked for before step 0 is not there. */
static void plans_at_hand(struct iz_exec *x, const struct iz_attention *a,
                          bool back)
{
    struct iz_refusal why;
    struct iz_exec asking = *x;
    asking.ask = &why;
    if (!iz_attention_ask_cudnn(&asking, a, back, 0))
        iz_die("%s", why.why);
}

/* Enqueues the plan on its handle's stream.  The library has no way to point a
 * finished pack elsewhere, so each call makes one: some hundred bytes. */
static void attention_cudnn_run(struct iz_exec *x, const struct plan *p,
                                const struct iz_attention_pack *t,
                                struct iz_view scratch)
{
    struct iz_refusal why;
    struct iz_dnn_set g = {.n = 0};
    uintptr_t space = ((uintptr_t)scratch.p + ALIGN - 1) / ALIGN * ALIGN;
    const struct iz_dnn_fact have[] = {
        {CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, IZ_DNN_INT, t->n, t->id},
        {CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, t->n,
         t->p},
        {CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, 1, &space},
        {0}};
    assert(iz_view_bytes(scratch) >= p->bytes + ALIGN);
    descriptor pack =
        iz_dnn_add(&g, CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR, have);
    if (!g.failed)
        g.failed = iz_dnn.execute(x->cuda->dnn->handle, p->plan, pack);
    if (g.failed) {
        iz_cudnn_refuse(&why, "attention", g.failed);
        iz_die("%s", why.why);
    }
    iz_dnn_clear(&g);
}

void iz_attention_fwd_cudnn(struct iz_exec *x, const struct iz_attention *a,
                            struct iz_view scratch)
{
    plans_at_hand(x, a, false);
    const struct plan *p = plan_of(x->cuda->dnn, a, 0);
    struct iz_attention_pack t;
    iz_attention_pack(&t, &p->key, a, 0, IZ_NONE, IZ_NONE, NULL);
    attention_cudnn_run(x, p, &t, scratch);
}

void iz_attention_bwd_cudnn(struct iz_exec *x, struct iz_view dqkv,
                            struct iz_view dy, const struct iz_attention *a,
                            struct iz_view delta, struct iz_view scratch)
{
    plans_at_hand(x, a, true);
    int64_t n = iz_cudnn_at_once(x->cuda->dnn, a, iz_view_bytes(scratch));
    const struct plan *p = plan_of(x->cuda->dnn, a, n);
    struct iz_attention_pack t;
    for (int64_t i = 0; i < a->o.rows / a->seq; i += n) {
        iz_attention_pack(&t, &p->key, a, i, dqkv, dy, delta.p);
        attention_cudnn_run(x, p, &t, scratch);
    }
}
