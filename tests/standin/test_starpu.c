/* SPDX-License-Identifier: Apache-2.0 */
/* StarPU's own CUDA driver on the stand-in, used as the runtime uses it: data
 * is registered in main memory with the addresses of device memory, and every
 * task names that node, so that StarPU orders tasks and copies nothing.  A
 * random graph of asynchronous tasks on a GPU worker and of tasks on a CPU
 * worker that use a stream of their own must give what its tasks give one after
 * the other. */
#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <cuda_runtime_api.h>
#include <starpu.h>

#include "tests/fake/standin/standin.h"

enum { BUFFERS = 6, LENGTH = 512, TASKS = 200, GRAPHS = 5, DATA = 3 };

/* What a task computes: data[0] changes, by data[1] and data[2]. */
struct work {
    uint64_t *data[DATA];
    uint64_t number;
};

struct argument {
    uint64_t number;
    uint64_t *device[DATA]; /* the addresses that a task must be given */
};

static uint64_t *device[BUFFERS];
static uint64_t expected[BUFFERS][LENGTH];
static starpu_data_handle_t handles[BUFFERS];
static cudaStream_t lane;
static uint64_t dice;

static uint64_t roll(uint64_t n)
{
    dice = dice * 6364136223846793005 + 1442695040888963407;
    return (dice >> 33) % n;
}

static void compute(const struct work *w)
{
    uint64_t *y = w->data[0];
    const uint64_t *a = w->data[1], *b = w->data[2];

    for (int i = 0; i < LENGTH; i++)
        y[i] = (y[i] * 3 + a[i]) ^ (b[i] + w->number);
}

/* In the thread of a stream. */
static void kernel(void *arg)
{
    struct work *w = arg;

    for (int i = 0; i < DATA; i++)
        w->data[i] = iz_standin_kernel(w->data[i], LENGTH * sizeof(uint64_t));
    compute(w);
    free(w);
}

static void launch(cudaStream_t s, void *buffers[], const struct argument *a)
{
    struct work *w = malloc(sizeof(*w));

    assert_non_null(w);
    w->number = a->number;
    for (int i = 0; i < DATA; i++) {
        w->data[i] = (uint64_t *)STARPU_VECTOR_GET_PTR(buffers[i]);
        assert_ptr_equal(w->data[i], a->device[i]);
    }
    assert_int_equal(cudaLaunchHostFunc(s, kernel, w), cudaSuccess);
}

/* Returns before the work is done. */
static void on_gpu(void *buffers[], void *arg)
{
    launch(starpu_cuda_get_local_stream(), buffers, arg);
}

static void on_cpu(void *buffers[], void *arg)
{
    launch(lane, buffers, arg);
    assert_int_equal(cudaStreamSynchronize(lane), cudaSuccess);
}

#define CODELET                                                                \
    .nbuffers = DATA, .modes = {STARPU_RW, STARPU_R, STARPU_R},                \
    .specific_nodes = 1,                                                       \
    .nodes = {STARPU_SPECIFIC_NODE_CPU, STARPU_SPECIFIC_NODE_CPU,              \
              STARPU_SPECIFIC_NODE_CPU}

static struct starpu_codelet codelets[] = {
    {.name = "gpu",
     .where = STARPU_CUDA,
     .cuda_funcs = {on_gpu},
     .cuda_flags = {STARPU_CUDA_ASYNC},
     CODELET},
    {.name = "cpu", .where = STARPU_CPU, .cpu_funcs = {on_cpu}, CODELET}};

/* Three different buffers. */
static void choose(int b[DATA])
{
    for (int i = 0; i < DATA; i++)
        do
            b[i] = (int)roll(BUFFERS);
        while ((i > 0 && b[i] == b[0]) || (i > 1 && b[i] == b[1]));
}

static void submit(uint64_t number)
{
    struct starpu_task *task = starpu_task_create();
    struct argument *a = malloc(sizeof(*a));
    struct work w = {.number = number};
    int b[DATA];

    choose(b);
    assert_non_null(a);
    a->number = number;
    for (int i = 0; i < DATA; i++) {
        a->device[i] = device[b[i]];
        w.data[i] = expected[b[i]];
        task->handles[i] = handles[b[i]];
    }
    task->cl = &codelets[roll(3) == 0];
    task->cl_arg = a;
    task->cl_arg_size = sizeof(*a);
    task->cl_arg_free = 1;
    assert_int_equal(starpu_task_submit(task), 0);
    compute(&w);
}

/* Not through starpu_vector_data_register, which reads the memory that it is
 * given and so crashes on device memory. */
static void register_device(starpu_data_handle_t *h, uint64_t *p)
{
    struct starpu_vector_interface v = {.id = STARPU_VECTOR_INTERFACE_ID,
                                        .ptr = (uintptr_t)p,
                                        .dev_handle = (uintptr_t)p,
                                        .nx = LENGTH,
                                        .elemsize = sizeof(*p),
                                        .allocsize = LENGTH * sizeof(*p)};

    starpu_data_register(h, STARPU_MAIN_RAM, &v, &starpu_interface_vector_ops);
}

static void data_open(void)
{
    for (int b = 0; b < BUFFERS; b++) {
        for (int i = 0; i < LENGTH; i++)
            expected[b][i] = roll(UINT32_MAX);
        assert_int_equal(cudaMalloc((void **)&device[b], sizeof(expected[b])),
                         cudaSuccess);
        cudaMemcpy(device[b], expected[b], sizeof(expected[b]),
                   cudaMemcpyHostToDevice);
        register_device(&handles[b], device[b]);
    }
}

static void data_close_and_check(void)
{
    uint64_t got[LENGTH];

    for (int b = 0; b < BUFFERS; b++) {
        starpu_data_unregister(handles[b]);
        cudaMemcpy(got, device[b], sizeof(got), cudaMemcpyDeviceToHost);
        assert_memory_equal(got, expected[b], sizeof(got));
        assert_int_equal(cudaFree(device[b]), cudaSuccess);
    }
}

static int64_t copies(void)
{
    int64_t n = 0;

    for (int w = 0; w < IZ_STANDIN_WAYS; w++)
        n += iz_standin_stats()->copies[w];
    return n;
}

/* Bytes that StarPU says it has moved. */
static int64_t bus_bytes(void)
{
    int64_t n = 0;

    for (int i = 0; i < starpu_bus_get_count(); i++) {
        struct starpu_profiling_bus_info info;

        starpu_bus_get_profiling_info(i, &info);
        n += (int64_t)info.transferred_bytes;
    }
    return n;
}

static void test_random_graphs(void **state)
{
    for (int g = 0; g < GRAPHS; g++) {
        int64_t before;

        data_open();
        before = copies();
        for (uint64_t t = 0; t < TASKS; t++)
            submit(t + 1);
        assert_int_equal(starpu_task_wait_for_all(), 0);
        assert_int_equal(copies(), before);
        assert_int_equal(bus_bytes(), 0);
        data_close_and_check();
    }
}

static void test_one_worker_of_each_kind(void **state)
{
    assert_int_equal(starpu_cuda_worker_get_count(), 1);
    assert_int_equal(starpu_cpu_worker_get_count(), 1);
}

static int group_setup(void **state)
{
    struct starpu_conf conf;
    const char *seed = getenv("IZ_STANDIN_SEED");

    dice = seed ? strtoull(seed, NULL, 10) : 1;
    printf("IZ_STANDIN_SEED=%" PRIu64 "\n", dice);
    starpu_conf_init(&conf);
    conf.ncpus = 1;
    conf.ncuda = 1;
    return starpu_init(&conf) || cudaStreamCreate(&lane);
}

static int group_teardown(void **state)
{
    cudaStreamDestroy(lane);
    starpu_shutdown();
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_one_worker_of_each_kind),
        cmocka_unit_test(test_random_graphs),
    };

    setenv("IZ_STANDIN_MEM_MB", "64", 0);
    setenv("IZ_STANDIN_JITTER_US", "200", 0);
    setenv("STARPU_SILENT", "1", 0);
    setenv("STARPU_WORKERS_NOBIND", "1", 0);
    return cmocka_run_group_tests_name("starpu", tests, group_setup,
                                       group_teardown);
}
