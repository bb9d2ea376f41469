/* SPDX-License-Identifier: Apache-2.0 */
/* Whether the installed cuDNN has plans for the attention of our models, on
 * described devices: no GPU is needed.  Kernels are compiled and not run. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "codelets/base/int64.h"
#include "codelets/gpu/attention_cudnn.h"
#include "codelets/ops/gpu_ops.h"
#include "tests/codelets/base/dies.h"

/* The device as the library writes it down itself.  What differs between the
 * two comes from NVIDIA's data sheets; the order of the clocks is all that is
 * known of them. */
static const char description[] =
    "{\"cudaDeviceId\":0,\"deviceName\":\"%s\",\"deviceVer\":%d,"
    "\"driverVer\":13000,\"isTccDriver\":0,\"l2CacheSize\":%d,"
    "\"maxCtasPerSM\":32,\"maxRegistersPerSM\":65536,"
    "\"maxSharedMemoryPerBlock\":49152,"
    "\"maxSharedMemoryPerBlockOptin\":%d,\"maxThreadsPerBlock\":1024,"
    "\"maxThreadsPerSM\":2048,\"memClockRateKHz\":2000000,"
    "\"multiProcessorCount\":%d,\"pciDeviceId\":0,\"regsPerBlock\":65536,"
    "\"reservedSharedMemoryPerBlock\":1024,\"smClockRateKHz\":1500000,"
    "\"supportCoopLaunch\":1,\"totalGlobalMem\":%lld,\"warpSize\":32,"
    "\"maxBlockSize\":[1024,1024,64],"
    "\"maxGridSize\":[2147483647,65535,65535]}";

static const struct device {
    const char *name;
    int capability, l2, shared, sms;
    long long bytes;
} devices[] = {
    {"NVIDIA A100-SXM4-80GB", 800, 40 << 20, 166912, 108, 80LL << 30},
    {"NVIDIA H200", 900, 50 << 20, 232448, 132, 141LL << 30}};

struct shape {
    int64_t samples, seq, heads, d, kv_heads;
    bool full;
};

static struct iz_attention attention_of(const struct shape *s, enum iz_dtype t)
{
    int64_t m = s->samples * s->seq, c = s->heads * s->d;
    return (struct iz_attention){
        .qkv = {.dtype = t, .rows = m, .cols = c + 2 * s->kv_heads * s->d},
        .o = {.dtype = t, .rows = m, .cols = c},
        .lse = {.dtype = IZ_F32, .rows = s->samples * s->heads, .cols = s->seq},
        .seq = s->seq,
        .heads = (int)s->heads,
        .kv_heads = (int)s->kv_heads,
        .full = s->full};
}

static struct iz_cudnn *open_on(const struct device *d)
{
    struct iz_refusal why = {""};
    struct iz_cudnn *c = NULL;
    char text[1024];
    snprintf(text, sizeof(text), description, d->name, d->capability, d->l2,
             d->shared, d->sms, d->bytes);
    if (iz_cudnn_open(&c, NULL, text, &why))
        fail_msg("%s: %s", d->name, why.why);
    return c;
}

/* Bytes of the plan's scratch. */
static int64_t planned(struct iz_cudnn *c, const struct shape *s,
                       enum iz_dtype t, bool back)
{
    struct iz_attention a = attention_of(s, t);
    struct iz_refusal why = {""};
    int64_t bytes;
    if (!iz_cudnn_plan(c, &a, back, &bytes, &why))
        fail_msg("%s: %s", iz_dtype_name(t), why.why);
    if (back && s->seq <= 1024) /* by the same kernel */
        assert_int_equal(iz_cudnn_at_once(c, &a, INT64_MAX), s->samples);
    return bytes;
}

/* Its scratch is what the plan of a run counts, but for the rest that aligns
 * it: that with a fixed order, a matrix of 16 bits of the scores of each head.
 */
static void backward_planned(struct iz_cudnn *c, const struct shape *s,
                             enum iz_dtype t)
{
    int64_t tile = 2 * s->heads * round_up(s->seq, 64) * round_up(s->seq, 64);
    int64_t most =
        iz_gpu_cudnn_bwd_bytes(1, s->seq, s->heads, s->kv_heads, s->d);
    int64_t bytes = planned(c, s, t, true);
    if (s->heads != s->kv_heads)
        tile += 4 * s->heads * s->seq * s->d;
    if (bytes < tile || bytes > most - 256)
        fail_msg("%lld bytes, not %lld to %lld", (long long)bytes,
                 (long long)tile, (long long)most - 256);
    if (s->seq % 128 == 0 && bytes > tile + 256)
        fail_msg("%lld bytes more than scores", (long long)(bytes - tile));
}

/* GPT-2 small and the 1.5B, 7B and 14B of configs/; Llama 3.2 1B and 3 8B, Qwen
 * 2.5 0.5B, Mistral 7B; ViT's of 224 x 224; and odd ones. */
static const struct shape shape[] = {
    {4, 1024, 12, 64, 12, false},   {16, 1024, 25, 64, 25, false},
    {16, 1024, 32, 128, 32, false}, {16, 1024, 40, 128, 40, false},
    {2, 8192, 32, 64, 8, false},    {1, 8192, 32, 128, 8, false},
    {2, 4096, 14, 64, 2, false},    {8, 197, 12, 64, 12, true},
    {1, 1024, 12, 64, 12, false},   {3, 65, 2, 8, 1, false},
    {1, 33, 2, 80, 2, true},        {1, 1, 1, 8, 1, false},
    {1, 129, 4, 64, 2, false},      {1, 70, 2, 256, 2, false}};
enum { SHAPES = sizeof(shape) / sizeof(shape[0]), WIDE = SHAPES - 1 };

/* Each shape on one device; with IZ_TEST_FULL on all.  At 8.0 the library has
 * no backward for heads of 256 columns.  Of long samples a matrix of scores
 * would be a thousand times what is planned, and more. */
static void shapes_of_the_models_have_plans(void **state)
{
    const size_t n = sizeof(devices) / sizeof(devices[0]);
    const size_t step = getenv("IZ_TEST_FULL") ? 1 : n;
    for (size_t d = 0; d < n; d++) {
        struct iz_cudnn *c = open_on(&devices[d]);
        for (size_t i = d % step; i < SHAPES; i += step) {
            enum iz_dtype t = i % 3 == 1 ? IZ_F16 : IZ_BF16;
            planned(c, &shape[i], t, false);
            if (i != WIDE)
                backward_planned(c, &shape[i], t);
        }
        struct iz_attention a = attention_of(&shape[WIDE], IZ_BF16);
        struct iz_refusal why = {""};
        int64_t bytes;
        assert_int_equal(iz_cudnn_plan(c, &a, true, &bytes, &why),
                         devices[d].capability >= 900);
        for (int64_t seq = 4096; seq <= 131072; seq *= 32)
            planned(c, &(struct shape){4, seq, 32, 128, 32, false}, IZ_BF16,
                    false);
        iz_cudnn_close(&c);
    }
}

static void what_the_library_refuses_is_refused(void **state)
{
    struct iz_cudnn *c = open_on(&devices[0]);
    struct iz_attention a =
        attention_of(&(struct shape){1, 64, 1, 12, 1, false}, IZ_BF16);
    struct iz_refusal why = {""};
    int64_t bytes;
    assert_false(iz_cudnn_plan(c, &a, false, &bytes, &why));
    if (!strstr(why.why, "1 heads of 12 columns, keys of 1: its graph: cuDNN"))
        fail_msg("it said: %s", why.why);
    iz_cudnn_close(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(shapes_of_the_models_have_plans),
        cmocka_unit_test(what_the_library_refuses_is_refused),
    };
    if (iz_cudnn_missing()) {
        printf("no cuDNN: %s\n", iz_cudnn_missing());
        return 77;
    }
    return cmocka_run_group_tests_name("cudnn_plans", tests, NULL, NULL);
}
