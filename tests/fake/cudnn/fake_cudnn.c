/* SPDX-License-Identifier: Apache-2.0 */
/* The library's functions: descriptors and what can be asked of them; see
 * fake_cudnn.h. */
#include "tests/fake/cudnn/fake_cudnn.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/fake/cudnn/execute.h"

struct fake_cudnn fake_cudnn = {
    .configs = 1, .config = {{.workspace = 256}}, .version = 91900};

static char last_error[256];

static cudnnStatus_t fail(const char *why)
{
    snprintf(last_error, sizeof(last_error), "%s\nand where that was", why);
    return CUDNN_STATUS_BAD_PARAM;
}

size_t cudnnGetVersion(void)
{
    return (size_t)fake_cudnn.version;
}

const char *cudnnGetErrorString(cudnnStatus_t s)
{
    return s == CUDNN_STATUS_NOT_SUPPORTED ? "CUDNN_STATUS_NOT_SUPPORTED"
                                           : "CUDNN_STATUS_BAD_PARAM";
}

void cudnnGetLastErrorString(char *text, size_t size)
{
    snprintf(text, size, "%s", last_error);
}

/* Of a handle, or of a descriptor. */
static void *take(size_t bytes)
{
    fake_cudnn.alive++;
    return calloc(1, bytes);
}

cudnnStatus_t cudnnCreate(cudnnHandle_t *out)
{
    *out = take(1);
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnDestroy(cudnnHandle_t h)
{
    free(h);
    fake_cudnn.alive--;
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnSetStream(cudnnHandle_t h, cudaStream_t s)
{
    fake_cudnn.stream = s;
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t kind,
                                           cudnnBackendDescriptor_t *out)
{
    struct thing *t = *out = take(sizeof(*t));
    t->kind = kind;
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t d)
{
    free(d);
    fake_cudnn.alive--;
    return CUDNN_STATUS_SUCCESS;
}

static size_t size_of(cudnnBackendAttributeType_t t)
{
    switch (t) {
    case CUDNN_TYPE_INT64:
    case CUDNN_TYPE_VOID_PTR:
    case CUDNN_TYPE_HANDLE:
    case CUDNN_TYPE_BACKEND_DESCRIPTOR:
        return 8;
    case CUDNN_TYPE_CHAR:
    case CUDNN_TYPE_BOOLEAN:
        return 1;
    default:
        return 4; /* enums */
    }
}

const struct fact *thing_fact(const struct thing *t,
                              cudnnBackendAttributeName_t name)
{
    for (int i = 0; i < t->n; i++)
        if (t->fact[i].name == name)
            return &t->fact[i];
    return NULL;
}

const struct thing *thing_at(const struct thing *t,
                             cudnnBackendAttributeName_t name, int i)
{
    const struct fact *f = thing_fact(t, name);
    return f && i < f->n ? (const struct thing *)(uintptr_t)f->value[i] : NULL;
}

int64_t thing_int(const struct thing *t, cudnnBackendAttributeName_t name)
{
    const struct fact *f = thing_fact(t, name);
    return f ? f->value[0] : 0;
}

/* What may be told of what, and when, the library itself says in
 * tests/codelets/gpu/test_cudnn_plans.c. */
cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t d,
                                       cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type,
                                       int64_t n, const void *value)
{
    struct thing *t = d;
    size_t bytes = (size_t)n * size_of(type);
    struct fact *f = &t->fact[t->n++];
    assert(t->n <= FACTS && bytes <= sizeof(f->value));
    f->name = name;
    f->n = n;
    memcpy(f->value, value, bytes);
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendFinalize(cudnnBackendDescriptor_t d)
{
    struct thing *t = d;
    if (t->kind == CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR) {
        const struct thing *c =
            thing_at(t, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, 0);
        if (fake_cudnn.config[c->config].broken)
            return fail("it does not compile");
        t->config = c->config;
        t->graph = c->graph;
        fake_cudnn.plans++;
    }
    return CUDNN_STATUS_SUCCESS;
}

/* The search fills descriptors that the caller has made, and says how many
 * there are in all. */
static int64_t results(const struct thing *search, int64_t most,
                       struct thing **out)
{
    int64_t n = fake_cudnn.configs < most ? fake_cudnn.configs : most;
    for (int i = 0; i < n; i++) {
        out[i]->graph =
            thing_at(search, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, 0);
        out[i]->config = i;
    }
    if (!n)
        snprintf(last_error, sizeof(last_error), "no engine does this");
    return fake_cudnn.configs;
}

cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t const d,
                                       cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type,
                                       int64_t most, int64_t *n, void *out)
{
    const struct thing *t = d;
    if (name == CUDNN_ATTR_ENGINEHEUR_RESULTS) {
        *n = results(t, most, out);
    } else if (name == CUDNN_ATTR_ENGINECFG_ENGINE) {
        (*(struct thing **)out)->config = t->config;
    } else if (name == CUDNN_ATTR_ENGINE_NUMERICAL_NOTE) {
        *n = 1;
        *(int *)out = fake_cudnn.config[t->config].varies
                          ? CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC
                          : CUDNN_NUMERICAL_NOTE_TENSOR_CORE;
    } else if (name == CUDNN_ATTR_ENGINE_GLOBAL_INDEX) {
        *(int64_t *)out = t->config;
    } else if (name == CUDNN_ATTR_ENGINECFG_KNOB_CHOICES) {
        *n = 1;
    } else if (name == CUDNN_ATTR_KNOB_CHOICE_KNOB_TYPE) {
        *(int *)out = CUDNN_KNOB_TYPE_TILE_CGA;
    } else if (name == CUDNN_ATTR_KNOB_CHOICE_KNOB_VALUE) {
        *(int64_t *)out = fake_cudnn.moody ? fake_cudnn.plans : 0;
    } else if (name == CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE) {
        *(int64_t *)out = fake_cudnn.config[t->config].workspace;
    } else {
        return fail("unknown");
    }
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendExecute(cudnnHandle_t h,
                                  cudnnBackendDescriptor_t plan,
                                  cudnnBackendDescriptor_t pack)
{
    const struct thing *p = plan;
    void *w =
        (void *)(uintptr_t)thing_int(pack, CUDNN_ATTR_VARIANT_PACK_WORKSPACE);
    if (!h || !w || (uintptr_t)w % 256)
        return fail("a plan without a handle, or without its memory");
    memset(w, 0x55, (size_t)fake_cudnn.config[p->config].workspace);
    fake_cudnn.runs++;
    fake_cudnn.chosen = p->config;
    execute_graph(p->graph, pack);
    return CUDNN_STATUS_SUCCESS;
}
