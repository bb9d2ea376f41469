/* SPDX-License-Identifier: Apache-2.0 */
/* Fibers, barriers and warps of the emulation.  A fiber starts on a stack of
 * its own through ucontext, once; after that the compiler's own setjmp and
 * longjmp switch, which are a few instructions.
 */
#include "tests/fake/cuda_on_cpu/emulate.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <numeric>

enum {
    THREADS = 1024,
    LANES = 32,
    STACK_BYTES = 64 << 10,
    STACK_SHIFT = 5 * 64, /* or all stacks would share a few lines of cache */
    SHARED_BYTES = 227 << 10, /* of a block, on any GPU */
    PAGE = 4096
};

#define STACK_GUARD UINT64_C(0x9e3779b97f4a7c15)

enum state { READY, AT_BARRIER, AT_EXCHANGE, DONE };

typedef void *place[5]; /* as the compiler wants it */

struct fiber {
    place at;
    bool started;
    enum state state;
    uint3 index;
};

/* Values of an exchange stay until the one after the next, because a lane may
 * arrive at the next before another has read. */
struct warp {
    emu_value value[2][LANES];
    const char *what;
    int arrived, alive, turn;
};

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;
void *emu_shared;

extern char __start_emu_fixed[], __stop_emu_fixed[]; /* of fixed.ld */

static struct {
    struct fiber fiber[THREADS];
    struct warp warp[THREADS / LANES];
    int order[THREADS], piece; /* who runs when; threads that take turns */
    char *stacks, *shared_end;
    const char *what, *file; /* kernel; where threads wait */
    int line, threads, alive, at_barrier, now;
    void (*kernel)(void *arg);
    void *arg;
    place scheduler;
    ucontext_t back;
    uint64_t random;
} emu;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int device = 90;
static unsigned ends;

void emu_device(int capability)
{
    device = capability;
}

void emu_ends(unsigned blocks)
{
    ends = blocks;
}

void emu_needs(int capability, const char *what)
{
    if (device < capability)
        emu_fail("%s needs compute capability %d.%d, this is %d.%d", what,
                 capability / 10, capability % 10, device / 10, device % 10);
}

/* CUDA C++ Programming Guide, "Technical Specifications per Compute
 * Capability": maximum amount of shared memory per thread block. */
static size_t shared_most(void)
{
    static const struct {
        int capability;
        size_t kib;
    } most[] = {{70, 96}, {75, 64},  {80, 163}, {86, 99},
                {89, 99}, {90, 227}, {120, 99}};
    for (auto m : most)
        if (m.capability == device)
            return m.kib << 10;
    emu_fail("no figures for compute capability %d.%d", device / 10,
             device % 10);
}

void emu_fail(const char *fmt, ...)
{
    char text[512];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof(text), fmt, ap);
    va_end(ap);
    dprintf(STDERR_FILENO, "%s, block %u,%u,%u thread %u,%u,%u: %s\n", emu.what,
            blockIdx.x, blockIdx.y, blockIdx.z, threadIdx.x, threadIdx.y,
            threadIdx.z, text);
    abort();
}

static uint64_t random_below(uint64_t n)
{
    emu.random = emu.random * 6364136223846793005u + 1442695040888963407u;
    return (emu.random >> 33) % n;
}

static struct warp *warp_of(int thread)
{
    return &emu.warp[thread / LANES];
}

/* Not in the function that has set its own place: GCC would lose that. */
__attribute__((noinline, noreturn)) static void jump(place to)
{
    __builtin_longjmp(to, 1);
}

/* Lets the other threads run until this one is ready again. */
static void suspend(enum state why)
{
    struct fiber *f = &emu.fiber[emu.now];
    f->state = why;
    if (__builtin_setjmp(f->at) == 0)
        jump(emu.scheduler);
}

static void wake(int from, int n, enum state waiting)
{
    for (int i = from; i < from + n && i < emu.threads; i++)
        if (emu.fiber[i].state == waiting)
            emu.fiber[i].state = READY;
}

static void open_barrier(void)
{
    emu.at_barrier = 0;
    emu.file = NULL;
    wake(0, emu.threads, AT_BARRIER);
}

static void end_exchange(int thread)
{
    struct warp *w = warp_of(thread);
    w->arrived = 0;
    w->turn ^= 1;
    wake(thread / LANES * LANES, LANES, AT_EXCHANGE);
}

/* Waiting threads do not wait for one that has returned. */
static void leave(int thread)
{
    struct warp *w = warp_of(thread);
    emu.fiber[thread].state = DONE;
    emu.alive--;
    w->alive--;
    memset(&w->value[w->turn][thread % LANES], 0xff, sizeof(emu_value));
    if (emu.at_barrier && emu.at_barrier == emu.alive)
        open_barrier();
    if (w->arrived && w->arrived == w->alive)
        end_exchange(thread);
}

/* A fiber outlives its thread and runs that of the next block. */
static void live(void)
{
    for (;;) {
        emu.kernel(emu.arg);
        leave(emu.now);
        suspend(DONE);
    }
}

void emu_block_barrier(const char *file, int line)
{
    if (emu.at_barrier &&
        (emu.line != line || (emu.file != file && strcmp(emu.file, file))))
        emu_fail("divergent __syncthreads: %s:%d and %s:%d", emu.file, emu.line,
                 file, line);
    emu.file = file;
    emu.line = line;
    if (++emu.at_barrier == emu.alive)
        open_barrier();
    else
        suspend(AT_BARRIER);
}

const emu_value *emu_warp_exchange(const char *what, unsigned mask,
                                   const void *value, size_t bytes)
{
    struct warp *w = warp_of(emu.now);
    int turn = w->turn;
    if (mask != 0xffffffffu || bytes > sizeof(emu_value))
        emu_fail("%s with mask %x and %zu bytes", what, mask, bytes);
    if (w->arrived == 0 && w->alive < LANES)
        memset(w->value[turn], 0xff, sizeof(w->value[turn]));
    if (w->arrived && w->what != what && strcmp(w->what, what))
        emu_fail("divergent warp: %s and %s", w->what, what);
    w->what = what;
    memcpy(w->value[turn][emu.now % LANES].byte, value, bytes);
    if (++w->arrived == w->alive)
        end_exchange(emu.now);
    else
        suspend(AT_EXCHANGE);
    return w->value[turn];
}

/* A word at the end of its stack, where no other thread's has the same place in
 * the cache. */
static uint64_t *guard(int thread)
{
    return (uint64_t *)(emu.stacks + (size_t)thread * STACK_BYTES +
                        (size_t)thread % 64 * 64);
}

/* Runs one thread until it waits or returns. */
static void resume(int thread)
{
    struct fiber *f = &emu.fiber[thread];
    emu.now = thread;
    threadIdx = f->index;
    if (__builtin_setjmp(emu.scheduler) != 0) {
        if (*guard(emu.now) != STACK_GUARD)
            emu_fail("a thread's stack of %d bytes is too short", STACK_BYTES);
        return;
    }
    if (f->started)
        jump(f->at);
    f->started = true;
    *guard(thread) = STACK_GUARD;
    ucontext_t c;
    getcontext(&c);
    c.uc_stack.ss_sp = emu.stacks + (size_t)thread * STACK_BYTES;
    c.uc_stack.ss_size = STACK_BYTES - (size_t)thread % 64 * STACK_SHIFT;
    c.uc_link = NULL;
    makecontext(&c, live, 0);
    swapcontext(&emu.back, &c);
}

static void fail_stuck(void)
{
    int exchange = 0;
    for (int i = 0; i < emu.threads; i++)
        exchange += emu.fiber[i].state == AT_EXCHANGE;
    emu_fail("deadlock: %d threads at __syncthreads (%s:%d), %d at a warp "
             "operation, %d returned",
             emu.at_barrier, emu.file ? emu.file : "", emu.line, exchange,
             emu.threads - emu.alive);
}

static int piece_end(int from)
{
    return std::min(from + emu.piece, emu.threads);
}

/* Shuffles n entries of the order, in pieces of `piece` entries. */
static void shuffle(int from, int n, int piece)
{
    for (int i = n / piece - 1; i > 0; i--) {
        int *a = emu.order + from + i * piece;
        int *b = emu.order + from + (int)random_below((uint64_t)i + 1) * piece;
        if (a != b)
            std::swap_ranges(a, a + piece, b);
    }
}

/* Either all threads take turns, or a warp runs as far as it can before the
 * next one: faults that one of them hides show in the other. */
static void choose_order(void)
{
    emu.piece = random_below(2) ? LANES : emu.threads;
    for (int i = 0; i < emu.threads; i++)
        emu.order[i] = i;
    for (int i = 0; i < emu.threads; i += emu.piece)
        shuffle(i, piece_end(i) - i, 1);
    shuffle(0, emu.threads, emu.piece);
}

static void start_threads(void)
{
    for (struct warp &w : emu.warp)
        w.arrived = w.alive = w.turn = 0;
    for (int i = 0; i < emu.threads; i++) {
        unsigned u = (unsigned)i;
        emu.fiber[i].state = READY;
        emu.fiber[i].index = {u % blockDim.x, u / blockDim.x % blockDim.y,
                              u / blockDim.x / blockDim.y};
        warp_of(i)->alive++;
    }
    emu.alive = emu.threads;
    emu.at_barrier = 0;
    emu.file = NULL;
    choose_order();
}

/* Whether any thread of the piece that begins there was ready. */
static bool run_turn(int from)
{
    bool ran = false;
    for (int i = from; i < piece_end(from); i++)
        if (emu.fiber[emu.order[i]].state == READY) {
            resume(emu.order[i]);
            ran = true;
        }
    return ran;
}

static void run_block(void)
{
    start_threads();
    while (emu.alive) {
        bool ran = false;
        for (int i = 0; i < emu.threads; i += emu.piece)
            while (run_turn(i))
                ran = true;
        if (!ran)
            fail_stuck();
    }
}

static void *map(size_t bytes)
{
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED)
        emu_fail("no memory for the emulation");
    return p;
}

/* The page after shared memory cannot be touched. */
static void open_once(void)
{
    size_t shared = (SHARED_BYTES + PAGE - 1) / PAGE * PAGE;
    const char *seed = getenv("IZ_SEED");
    if (emu.stacks)
        return;
    emu.stacks = (char *)map((size_t)THREADS * STACK_BYTES);
    madvise(emu.stacks, (size_t)THREADS * STACK_BYTES, MADV_HUGEPAGE);
    emu.shared_end = (char *)map(shared + PAGE) + shared;
    mprotect(emu.shared_end, PAGE, PROT_NONE);
    emu.random = seed ? strtoull(seed, NULL, 10) : 1;
}

static void poison(size_t shared_bytes)
{
    memset(emu_shared, 0xff, shared_bytes);
    memset(__start_emu_fixed, 0xff,
           (size_t)(__stop_emu_fixed - __start_emu_fixed));
}

static void check_limits(size_t shared_bytes)
{
    uint64_t threads = (uint64_t)blockDim.x * blockDim.y * blockDim.z;
    if (threads < 1 || threads > THREADS || blockDim.z > 64)
        emu_fail("block of %u x %u x %u threads", blockDim.x, blockDim.y,
                 blockDim.z);
    if (!gridDim.x || !gridDim.y || !gridDim.z || gridDim.x > 0x7fffffffu ||
        gridDim.y > 65535 || gridDim.z > 65535)
        emu_fail("grid of %u x %u x %u blocks", gridDim.x, gridDim.y,
                 gridDim.z);
    if (shared_bytes > shared_most())
        emu_fail("%zu bytes of shared memory", shared_bytes);
}

/* Blocks along an axis of n that run, and the place of the i-th of them. */
static uint64_t run_along(unsigned n)
{
    return ends && n / 2 >= ends ? 2 * ends : n;
}

static unsigned place_along(uint64_t i, unsigned n)
{
    return (unsigned)(i < run_along(n) / 2 ? i : n - run_along(n) + i);
}

/* Visits all blocks with a stride that is coprime to their number. */
static void run_blocks(size_t shared_bytes)
{
    uint64_t x = run_along(gridDim.x), y = run_along(gridDim.y);
    uint64_t n = x * y * gridDim.z;
    uint64_t at = random_below(n), step = 1 + random_below(n);
    while (std::gcd(n, step) != 1)
        step++;
    for (uint64_t i = 0; i < n; i++, at = (at + step) % n) {
        blockIdx = {place_along(at % x, gridDim.x),
                    place_along(at / x % y, gridDim.y), (unsigned)(at / x / y)};
        poison(shared_bytes);
        run_block();
    }
}

void emu_grid(const char *what, dim3 grid, dim3 block, size_t shared_bytes,
              void (*kernel)(void *arg), void *arg)
{
    pthread_mutex_lock(&lock);
    emu.what = what;
    emu.kernel = kernel;
    emu.arg = arg;
    gridDim = grid;
    blockDim = block;
    open_once();
    check_limits(shared_bytes);
    emu.threads = (int)(block.x * block.y * block.z);
    emu_shared = emu.shared_end - (shared_bytes + 127) / 128 * 128;
    run_blocks(shared_bytes);
    pthread_mutex_unlock(&lock);
}
