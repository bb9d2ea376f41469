/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/gpu/cudnn_lib.h"

#include <assert.h>
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "codelets/ops/gpu_ops.h"

#define LIBRARY "libcudnn.so.9"
#define VERSION_LEAST 90800 /* descriptions of devices */

/* Loaded by the first call of iz_cudnn_missing, which comes before there are
 * workers, and never unloaded. */
struct iz_dnn iz_dnn;

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
_Static_assert(sizeof(iz_dnn) == sizeof(symbols), "a name for each function");

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
        memcpy((char *)&iz_dnn + i * sizeof(f), &f, sizeof(f));
    }
    if (!missing[0] && iz_dnn.version() < VERSION_LEAST)
        snprintf(missing, sizeof(missing), "%s is of version %d, 9.8 is needed",
                 LIBRARY, (int)iz_dnn.version());
}

const char *iz_cudnn_missing(void)
{
    if (!iz_dnn.version && !missing[0])
        cudnn_load();
    return missing[0] ? missing : NULL;
}

void iz_cudnn_refuse(struct iz_refusal *r, const char *what, cudnnStatus_t s)
{
    char text[1024] = "";
    int v = (int)iz_dnn.version();
    iz_dnn.last_error(text, sizeof(text));
    text[strcspn(text, "\n")] = 0;
    snprintf(r->why, sizeof(r->why), "%s: cuDNN %d.%d.%d: %s%s%.120s", what,
             v / 10000, v / 100 % 100, v % 100, iz_dnn.status(s),
             text[0] ? ": " : "", text);
}

void iz_dnn_clear(struct iz_dnn_set *g)
{
    while (g->n > 0)
        iz_dnn.unmake(g->made[--g->n]);
}

cudnnBackendDescriptor_t iz_dnn_make(struct iz_dnn_set *g,
                                     cudnnBackendDescriptorType_t t)
{
    cudnnBackendDescriptor_t d = NULL;
    assert(g->n < IZ_DNN_MADE);
    if (!g->failed)
        g->failed = iz_dnn.make(t, &d);
    if (!g->failed)
        g->made[g->n++] = d;
    return d;
}

cudnnBackendDescriptor_t iz_dnn_add(struct iz_dnn_set *g,
                                    cudnnBackendDescriptorType_t t,
                                    const struct iz_dnn_fact *a)
{
    cudnnBackendDescriptor_t d = iz_dnn_make(g, t);
    for (; a->n && !g->failed; a++)
        g->failed = iz_dnn.set(d, a->name, a->type, a->n, a->value);
    if (!g->failed)
        g->failed = iz_dnn.finish(d);
    return d;
}

int64_t iz_dnn_get(struct iz_dnn_set *g, cudnnBackendDescriptor_t d,
                   cudnnBackendAttributeName_t name,
                   cudnnBackendAttributeType_t t, int64_t most, void *value)
{
    int64_t n = 0;
    if (!g->failed)
        g->failed = iz_dnn.get(d, name, t, most, &n, value);
    return g->failed ? 0 : n < most ? n : most; /* it counts all that it has */
}
