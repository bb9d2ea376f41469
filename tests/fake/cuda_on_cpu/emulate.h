/* SPDX-License-Identifier: Apache-2.0 */
/* Runs a grid of CUDA threads on one CPU thread: blocks one after another in a
 * shuffled order, the threads of a block as fibers in a shuffled order.  It
 * finds wrong indices, missing or divergent barriers, use of shared memory that
 * nobody wrote, and results that depend on the order of threads.  It does not
 * find races inside a warp that hardware hides, nor anything about speed. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <tuple>
#include <type_traits>

#include "tests/fake/cuda_on_cpu/launch.h"

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z)
    {
    }
};
struct uint3 {
    unsigned x, y, z;
};

extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

/* The dynamic shared memory of the block that runs. */
extern void *emu_shared;

/* Calls kernel(arg) once per thread; what names the kernel in messages.  One
 * grid at a time, whatever thread of the host asks. */
void emu_grid(const char *what, dim3 grid, dim3 block, size_t shared_bytes,
              void (*kernel)(void *arg), void *arg);

/* A barrier of the block; file and line tell divergent ones apart. */
void emu_block_barrier(const char *file, int line);

/* All lanes of the warp give a value of at most 48 bytes and get a table of all
 * 32, valid until the lane's next call; NaN where there is no lane.
 * `what` must be the same for all. */
typedef struct {
    alignas(16) unsigned char byte[48];
} emu_value;
const emu_value *emu_warp_exchange(const char *what, unsigned mask,
                                   const void *value, size_t bytes);
/* Fails unless the GPU has at least this compute capability, which `what`
 * needs. */
void emu_needs(int capability, const char *what);

/* Prints the message with kernel, block and thread, and aborts. */
void emu_fail(const char *fmt, ...) __attribute__((format(printf, 1, 2)))
__attribute__((noreturn));

/* The type itself, not to be deduced from an argument. */
template <class T> struct emu_same {
    typedef T type;
};

template <class T> constexpr size_t emu_bytes = sizeof(T);
template <> inline constexpr size_t emu_bytes<void> = 1;

/* What lies between members may look like the address of a device. */
template <class T> static void emu_clear_padding(T &a)
{
#if __has_builtin(__builtin_clear_padding)
    __builtin_clear_padding(&a);
#endif
}

/* A pointer, or the pointers in a struct, as the kernel can use them. */
template <class T> static void emu_reach_argument(T &a)
{
    if constexpr (std::is_pointer_v<T>)
        a = (T)emu_reach((const void *)a,
                         emu_bytes<std::remove_cv_t<std::remove_pointer_t<T>>>);
    else if constexpr (std::is_class_v<T> && alignof(T) == alignof(void *)) {
        emu_clear_padding(a);
        emu_reach_words(&a, sizeof(a));
    }
}

/* A launch that waits, with the arguments of its kernel. */
template <class... P> struct emu_job {
    const char *what;
    dim3 grid, block;
    size_t shared_bytes;
    void (*kernel)(P...);
    std::tuple<P...> args;
};

template <class... P> static void emu_thread(void *arg)
{
    emu_job<P...> *j = (emu_job<P...> *)arg;
    std::apply(j->kernel, j->args);
}

template <class... P> static void emu_run(void *arg)
{
    emu_job<P...> *j = (emu_job<P...> *)arg;
    std::apply([](auto &...a) { (emu_reach_argument(a), ...); }, j->args);
    emu_grid(j->what, j->grid, j->block, j->shared_bytes, emu_thread<P...>, j);
    delete j;
}

/* Arguments are converted to the kernel's parameters once, as at a launch. */
template <class... P>
static void emu_launch(const char *what, dim3 grid, dim3 block,
                       size_t shared_bytes, void *stream, void (*kernel)(P...),
                       typename emu_same<P>::type... args)
{
    emu_enqueue(stream, emu_run<P...>,
                new emu_job<P...>{what, grid, block, shared_bytes, kernel,
                                  std::tuple<P...>(args...)});
}
