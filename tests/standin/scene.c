/* SPDX-License-Identifier: Apache-2.0 */
/* See scene.h. */
#include "tests/standin/scene.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

cudaStream_t stream;

static void *device_take(int64_t bytes)
{
    void *p = NULL;

    assert_int_equal(cudaMalloc(&p, (size_t)bytes), cudaSuccess);
    return p;
}

static void copy(void *dst, const void *src, int64_t bytes)
{
    assert_int_equal(cudaMemcpy(dst, src, (size_t)bytes, cudaMemcpyDefault),
                     cudaSuccess);
}

/* Nothing of an op stays in its scratch. */
static void check_scratch(const struct iz_arena *a)
{
    unsigned char first = 0xff;

    if (a->peak)
        copy(&first, a->base, 1);
    assert_int_equal(first, 0xff);
}

static void run_gpu(op_fn op, const struct scene *s)
{
    struct iz_exec x = iz_exec_dry(IZ_CUDA, IZ_F32);
    struct scene again = *s;

    x.capability = 90;
    op(&x, &again);
    x.dry = false;
    x.stream = stream;
    x.work = (struct iz_arena){.base = device_take(x.work.peak),
                               .size = x.work.peak};
    cudaMemset(x.work.base, 0, (size_t)x.work.size);
    op(&x, &again);
    memset(&again, 0xff, sizeof again);
    assert_int_equal(cudaStreamSynchronize(stream), cudaSuccess);
    check_scratch(&x.work);
    cudaFree(x.work.base);
}

static void run_cpu(op_fn op, const struct scene *s)
{
    struct iz_exec x = iz_exec_dry(IZ_CPU, IZ_F32);

    op(&x, s);
    x.dry = false;
    x.work = (struct iz_arena){.base = fixture_take(x.work.peak),
                               .size = x.work.peak};
    op(&x, s);
    free(x.work.base);
}

static void check_bits(const struct scene *cpu, const struct scene *gpu)
{
    for (int i = 0; i < VIEWS && cpu->v[i].rows; i++) {
        struct iz_view back = cpu->v[i];

        if (!back.p)
            continue;
        back.p = fixture_take(iz_view_bytes(back));
        copy(back.p, gpu->v[i].p, iz_view_bytes(back));
        fixture_same_bits("a tensor", back, cpu->v[i]);
        free(back.p);
        cudaFree(gpu->v[i].p);
        free(cpu->v[i].p);
    }
    assert_memory_equal(cpu->number, gpu->number, sizeof *cpu->number);
}

/* Random tensors, the same on both sides; flat buffers are positive, because
 * the square root of some is taken. */
static void make(struct scene *cpu, struct scene *gpu, const struct shape *s)
{
    for (int i = 0; i < VIEWS && s[i].rows; i++) {
        struct tensor t = tensor_new(s[i].type, s[i].rows, s[i].cols, 1);

        for (int64_t k = 0; s[i].cols == N && k < N; k++)
            t.d[k] = fabs(t.d[k]);
        tensor_store(&t);
        cpu->v[i] = gpu->v[i] = t.v;
        gpu->v[i].p = device_take(iz_view_bytes(t.v));
        copy(gpu->v[i].p, t.v.p, iz_view_bytes(t.v));
        free(t.d);
    }
}

static void *pinned_take(size_t bytes)
{
    void *p = NULL;

    assert_int_equal(cudaHostAlloc(&p, bytes, 0), cudaSuccess);
    memset(p, 0, bytes);
    return p;
}

void compare(op_fn op, const struct shape *shapes)
{
    struct scene cpu = {.number = pinned_take(sizeof(double))}, gpu;
    int32_t *token = pinned_take(M * sizeof *token);

    for (int i = 0; i < M; i++)
        token[i] = i == 2 ? 0 : fixture_below(VOCAB);
    cpu.token = token;
    gpu = cpu;
    gpu.number = pinned_take(sizeof(double));
    make(&cpu, &gpu, shapes);
    run_cpu(op, &cpu);
    run_gpu(op, &gpu);
    check_bits(&cpu, &gpu);
    cudaFreeHost(token);
    cudaFreeHost(cpu.number);
    cudaFreeHost(gpu.number);
}
