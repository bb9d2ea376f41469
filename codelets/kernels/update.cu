/* SPDX-License-Identifier: Apache-2.0 */
/* Updates on a GPU, with the bits of update.c: the formulas are the functions
 * of the CPU's loops (adam.h, lion.h, muon.h), compiled without contraction
 * here too, and so are those of states in fewer bytes (moment_code.h).  Only a
 * NaN may have other bits than there: a GPU knows one. */
#include "codelets/kernels/launch.cuh"

#include "codelets/flat/moment_code.h"
#include "codelets/ops/gpu_ops.h"

/* Elements of a thread: 16 bytes of fp32, so that a warp's accesses have no
 * gaps. */
enum { THREADS = 256, PER_THREAD = 4 };

/* ---- formulas: an element with gradient g; s: its states, and behind them the
 * direction that is all that comes of it where MOVES is 0 ---- */

struct adam {
    enum { STATES = 2, MOVES = 1 };
    static __device__ void update(const union iz_consts &k, float &p, float *s,
                                  float g)
    {
        g = iz_adam_gradient(&k.adam, k.adam.l2 != 0, g, p);
        s[0] = iz_adam_m(&k.adam, s[0], g);
        s[1] = iz_adam_v(&k.adam, s[1], g);
        p = iz_adam_p(&k.adam, p, s[0], s[1]);
    }
};

struct lion {
    enum { STATES = 1, MOVES = 1 };
    static __device__ void update(const union iz_consts &k, float &p, float *s,
                                  float g)
    {
        g = g * k.lion.scale;
        p = iz_lion_p(&k.lion, p, s[0], g);
        s[0] = iz_lion_m(&k.lion, s[0], g);
    }
};

/* Of Muon's matrices. */
struct direction {
    enum { STATES = 1, MOVES = 0 };
    static __device__ void update(const union iz_consts &k, float &, float *s,
                                  float g)
    {
        g = g * k.muon.adam.scale;
        s[0] = iz_muon_m(&k.muon, s[0], g);
        s[1] = iz_muon_d(&k.muon, s[0], g);
    }
};

struct along {
    enum { STATES = 0, MOVES = 1 };
    static __device__ void update(const union iz_consts &k, float &p, float *,
                                  float g)
    {
        p = iz_along_p(&k.along, p, g);
    }
};

/* Elements of both kinds. */
struct muon {
    enum { STATES = 2, MOVES = 1 };
    static __device__ void update(const union iz_consts &k, float &p, float *s,
                                  float g)
    {
        if (k.muon.matrix) {
            float one[2] = {s[0], 0};
            direction::update(k, p, one, g);
            s[0] = one[0];
            s[2] = one[1];
        } else {
            union iz_consts own;
            own.adam = k.muon.adam;
            adam::update(own, p, s, g);
        }
    }
};

/* Element j of rows of states. */
template <class F, int N>
static __device__ void update_elem(const union iz_consts &k, float &p,
                                   float (&state)[F::STATES + 1][N], int j,
                                   float g)
{
    float s[F::STATES + 1];
    for (int i = 0; i < F::STATES; i++)
        s[i] = state[i][j];
    s[F::STATES] = 0;
    F::update(k, p, s, g);
    for (int i = 0; i <= F::STATES; i++)
        state[i][j] = s[i];
}

/* ---- master and parameters ---- */

/* N numbers of 16 bits, at once where they are 8 bytes. */
template <int N>
static __device__ void load_halves(uint32_t (&to)[N], const uint16_t *p)
{
    if constexpr (N == 4) {
        uint2 two = *(const uint2 *)p;
        to[0] = two.x & 0xffffu;
        to[1] = two.x >> 16;
        to[2] = two.y & 0xffffu;
        to[3] = two.y >> 16;
    } else {
        for (int j = 0; j < N; j++)
            to[j] = p[j];
    }
}

template <int N>
static __device__ void store_halves(uint16_t *p, const uint32_t (&h)[N])
{
    if constexpr (N == 4) {
        uint2 two;
        two.x = h[0] | h[1] << 16;
        two.y = h[2] | h[3] << 16;
        *(uint2 *)p = two;
    } else {
        for (int j = 0; j < N; j++)
            p[j] = (uint16_t)h[j];
    }
}

/* The masters of N elements: where `lower` is, in two halves. */
template <int N, class O>
static __device__ void load_master(float (&p)[N], const float *master,
                                   const uint16_t *lower, const O *out)
{
    uint32_t low[N], high[N];
    if (!lower) {
        iz_load_row(p, master);
        return;
    }
    load_halves(low, lower);
    load_halves(high, (const uint16_t *)out);
    for (int j = 0; j < N; j++)
        p[j] = iz_half_join((uint16_t)high[j], (uint16_t)low[j]);
}

/* And their parameters, unless out is NULL. */
template <int N, class O>
static __device__ void store_master(float *master, uint16_t *lower, O *out,
                                    const float (&p)[N])
{
    uint32_t half[N];
    if (lower) {
        for (int j = 0; j < N; j++)
            half[j] = iz_half_lower(p[j]);
        store_halves(lower, half);
    } else {
        iz_store_row(master, p);
    }
    if (!out)
        return;
    if constexpr (std::is_same<O, iz_bf16>::value) {
        for (int j = 0; j < N; j++)
            half[j] = iz_half_upper(p[j]);
        store_halves((uint16_t *)out, half);
    } else {
        iz_store_row(out, p);
    }
}

/* Element i of an array that may be none. */
template <class T> IZ_EITHER T *elem_of(T *p, int64_t i)
{
    return p ? p + i : p;
}

/* ---- states in fp32 ---- */

/* n elements that are updated alike; no two buffers overlap. */
struct wide {
    union iz_consts consts;
    int64_t n;
    float *p, *d, *state[IZ_STATES_MAX];
    uint16_t *lower;
    bool aligned; /* all buffers, to 16 bytes */
};

/* Moves per element 8 bytes of p, 8 of each state, the gradient and the copy:
 * with Adam and both of these in 16 bits 28, and 26 with p in two halves. */
template <class F, class G, class O>
static __global__ void __launch_bounds__(THREADS)
    update_wide(struct wide w, const G *g, O *out)
{
    iz_each<THREADS, PER_THREAD>(w.n, w.aligned, [&](int64_t i, auto count) {
        constexpr int N = decltype(count)::value;
        float p[N], grad[N], state[F::STATES + 1][N];
        iz_load_row(grad, g + i);
        if constexpr (F::MOVES)
            load_master(p, w.p + i, elem_of(w.lower, i), out + i);
        for (int s = 0; s < F::STATES; s++)
            iz_load_row(state[s], w.state[s] + i);
        for (int j = 0; j < N; j++)
            update_elem<F, N>(w.consts, p[j], state, j, grad[j]);
        if constexpr (F::MOVES)
            store_master(w.p + i, elem_of(w.lower, i), elem_of(out, i), p);
        else
            iz_store_row(w.d + i, state[F::STATES]);
        for (int s = 0; s < F::STATES; s++)
            iz_store_row(w.state[s] + i, state[s]);
    });
}

/* The elements [i, end) of one range. */
template <class F, class G, class O>
static void launch_span(struct iz_exec *x, const struct iz_update *u, int64_t i,
                        int64_t end, const union iz_consts *k)
{
    const G *g = (const G *)u->g + i;
    O *out = elem_of((O *)u->out, i);
    float *p = elem_of(u->p, i), *d = elem_of(u->d, i);
    uint16_t *lower = elem_of(u->lower, i);
    struct wide w = {
        *k, end - i, p, d, {}, lower, iz_aligned(p, d, lower, g, out)};
    for (int j = 0; j < F::STATES; j++) {
        w.state[j] = (float *)u->state[j] + iz_update_at(u, j) + i;
        w.aligned = w.aligned && iz_aligned(w.state[j]);
    }
    IZ_LAUNCH((update_wide<F, G, O>), iz_blocks(w.n, THREADS * PER_THREAD),
              THREADS, 0, x->stream, w, g, out);
}

/* Every range by a launch of its own. */
template <class F, class G, class O>
static void launch_wide(struct iz_exec *x, const struct iz_update *u)
{
    for (int64_t i = 0, s = 0; i < u->n; i = u->range[s++].end) {
        int64_t end = u->range[s].end < u->n ? u->range[s].end : u->n;
        union iz_consts k = u->range[s].consts;
        if (end <= i)
            iz_die("update: range %d of %d is empty", (int)s, u->ranges);
        if constexpr (std::is_same<F, muon>::value) {
            if (k.muon.matrix) {
                launch_span<direction, G, O>(x, u, i, end, &k);
                continue;
            }
            struct iz_adam_consts own = k.muon.adam;
            k.adam = own;
            launch_span<adam, G, O>(x, u, i, end, &k);
        } else {
            launch_span<F, G, O>(x, u, i, end, &k);
        }
    }
}

/* ---- states in fewer bytes ---- */

/* Goes to the kernel by value: 4.1 KiB with Muon's constants, and CUDA takes
 * more than 4 KiB from 12.1 on only. */
struct coded {
    int64_t n, first;
    uint64_t key;
    float *p, *d;
    uint16_t *lower;
    struct {
        unsigned char *codes; /* of the array's first element */
        unsigned char *power; /* fp8: of its first block */
        int64_t at;           /* the first element in the array */
        bool positive;        /* never negative */
    } state[IZ_STATES_MAX];
    struct iz_update_range range[IZ_UPDATE_RANGES_MAX];
};

/* Threads of a block of 64, and where this one's elements begin in it. */
enum { LANES = IZ_MOMENT_BLOCK / PER_THREAD };

static __device__ uint32_t place_in_block()
{
    return threadIdx.x % LANES * PER_THREAD;
}

/* Elements of state s as fp32, from i on; h: the random bits of their block. */
struct bf16 {
    static __device__ void load(float (&to)[PER_THREAD], const struct coded &k,
                                int s, int64_t i)
    {
        iz_load_row(to, (const iz_bf16 *)k.state[s].codes + k.state[s].at + i);
    }

    static __device__ void store(const struct coded &k,
                                 const float (&x)[PER_THREAD], int s, int64_t i,
                                 uint32_t h, bool mine)
    {
        uint32_t c[PER_THREAD];
        for (int j = 0; j < PER_THREAD; j++) {
            uint32_t random = h * iz_moment_odd(place_in_block() + j);
            uint32_t noise = iz_moment_noise(random, 16, k.state[s].positive);
            c[j] = iz_moment_bf16_random(x[j], noise) >> 16;
        }
        if (mine)
            store_halves((uint16_t *)k.state[s].codes + k.state[s].at + i, c);
    }
};

/* The power of the block that this thread's LANES have; all threads call it. */
static __device__ uint32_t power_of_block(const float *x, uint32_t binades)
{
    uint32_t most = 0;
    for (int j = 0; j < PER_THREAD; j++)
        most = max(most, iz_float_bits(x[j]) & 0x7fffffffu);
    for (int step = LANES / 2; step > 0; step /= 2)
        most = max(most, __shfl_xor_sync(IZ_ALL_LANES, most, step));
    return iz_moment_block_power(most, binades);
}

/* Two codes each of two words of a block are a thread's. */
struct fp8 {
    /* The first of them; a state's codes begin anywhere, behind the powers of
     * the one before. */
    static __device__ unsigned char *mine_of(const struct coded &k, int s,
                                             int64_t i)
    {
        uint32_t e = place_in_block(), half = IZ_MOMENT_BLOCK / 2;
        return k.state[s].codes + k.state[s].at + (i - e) + e % half * 2 +
               e / half * 2;
    }

    static __device__ void load(float (&to)[PER_THREAD], const struct coded &k,
                                int s, int64_t i)
    {
        const unsigned char *c = mine_of(k, s, i);
        float unit = iz_code_unit(
            k.state[s].power[(k.state[s].at + i) / IZ_MOMENT_BLOCK]);

        for (int j = 0; j < PER_THREAD; j++) {
            uint32_t one = c[j / 2 * 4 + j % 2];
            float x = k.state[s].positive ? iz_moment_v8(one, 0)
                                          : iz_moment_m8(one, 0);
            to[j] = x * unit;
        }
    }

    static __device__ void store(const struct coded &k,
                                 const float (&x)[PER_THREAD], int s, int64_t i,
                                 uint32_t h, bool mine)
    {
        bool positive = k.state[s].positive;
        uint32_t power =
            power_of_block(x, positive ? IZ_V_BINADES : IZ_M_BINADES);
        float inverse = iz_code_inverse(power);
        unsigned char *c = mine_of(k, s, i);

        if (!mine)
            return;
        for (int j = 0; j < PER_THREAD; j++) {
            uint32_t noise = iz_moment_noise(
                h * iz_moment_odd(place_in_block() + j), IZ_CODE_CUT, positive);
            uint32_t one = positive ? iz_moment_v8_random(x[j], inverse, noise)
                                    : iz_moment_m8_random(x[j], inverse, noise);
            c[j / 2 * 4 + j % 2] = (unsigned char)(one >> IZ_CODE_CUT);
        }
        if (threadIdx.x % LANES == 0)
            k.state[s].power[(k.state[s].at + i) / IZ_MOMENT_BLOCK] =
                (unsigned char)power;
    }
};

/* A thread's elements, from i on; a range may end between them. */
template <class F, class G, class O>
static __device__ void update_spans(const struct coded &k,
                                    float (&state)[F::STATES + 1][PER_THREAD],
                                    const G *g, O *out, int64_t i)
{
    float p[PER_THREAD], grad[PER_THREAD];
    int s = 0;
    iz_load_row(grad, g + i);
    if constexpr (F::MOVES)
        load_master(p, k.p + i, elem_of(k.lower, i), out + i);
    for (int j = 0; j < PER_THREAD; j++) {
        while (k.range[s].end <= i + j)
            s++;
        update_elem<F, PER_THREAD>(k.range[s].consts, p[j], state, j, grad[j]);
    }
    if constexpr (F::MOVES)
        store_master(k.p + i, elem_of(k.lower, i), elem_of(out, i), p);
    if (k.d)
        iz_store_row(k.d + i, state[F::STATES]);
}

/* Moves per element the gradient, the copy, 8 bytes of p, and of each state 4
 * in bf16, 2.03 in fp8: with Adam, gradient and copy in 16 bits 20 and 16.06,
 * and 2 less with p in two halves. */
template <class F, class T, class G, class O>
static __global__ void __launch_bounds__(THREADS)
    update_coded(struct coded k, const G *g, O *out)
{
    int64_t thread = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    int64_t i = thread * PER_THREAD;
    bool mine = i < k.n; /* with all of its block */
    float state[F::STATES + 1][PER_THREAD] = {};
    if (mine) {
        for (int s = 0; s < F::STATES; s++)
            T::load(state[s], k, s, i);
        update_spans<F>(k, state, g, out, i);
    }
    uint32_t h = iz_moment_block_bits(k.key, k.first + i);
    for (int s = 0; s < F::STATES; s++)
        T::store(k, state[s], s, i, h, mine);
}

template <class F, class T, class G, class O>
static void launch_coded(struct iz_exec *x, const struct iz_update *u)
{
    struct coded k = {};
    if (!iz_aligned(u->p, u->d, u->lower, u->g, u->out) ||
        u->n % IZ_MOMENT_BLOCK || u->at % IZ_MOMENT_BLOCK ||
        u->ranges > IZ_UPDATE_RANGES_MAX)
        iz_die("update with coded states: %lld elements, %d ranges, or an "
               "address that is no multiple of 16",
               (long long)u->n, u->ranges);
    k.n = u->n;
    k.first = u->first;
    k.key = u->key;
    k.p = u->p;
    k.d = u->d;
    k.lower = u->lower;
    for (int s = 0; s < F::STATES; s++) {
        struct iz_moments m = iz_update_state(u, s);
        k.state[s].codes = (unsigned char *)m.p;
        k.state[s].power = k.state[s].codes + m.n;
        k.state[s].at = iz_update_at(u, s);
        k.state[s].positive = m.which == IZ_MOMENT_V;
    }
    for (int s = 0; s < u->ranges; s++)
        k.range[s] = u->range[s];
    IZ_LAUNCH((update_coded<F, T, G, O>), iz_blocks(u->n, THREADS * PER_THREAD),
              THREADS, 0, x->stream, k, (const G *)u->g, (O *)u->out);
}

/* ---- the kernel of these types ---- */

template <class F>
static void update_by(struct iz_exec *x, const struct iz_update *u)
{
    iz_by_type(u->g_type, [&](auto g) {
        iz_by_type(u->out_type, [&](auto out) {
            using G = decltype(g);
            using O = decltype(out);
            if (u->type == IZ_MOMENT_FP8)
                launch_coded<F, fp8, G, O>(x, u);
            else if (u->type == IZ_MOMENT_BF16)
                launch_coded<F, bf16, G, O>(x, u);
            else
                launch_wide<F, G, O>(x, u);
        });
    });
}

void iz_update_cuda(struct iz_exec *x, const struct iz_update *u)
{
    if (u->n == 0)
        return;
    if (u->lower && (u->p || !u->out || u->out_type != IZ_BF16))
        iz_die("update: halves of a master without parameters in bf16");
    switch (u->optimizer) {
    case IZ_OPTIMIZER_ADAM:
    case IZ_OPTIMIZER_ADAMW:
        update_by<adam>(x, u);
        break;
    case IZ_OPTIMIZER_LION:
        update_by<lion>(x, u);
        break;
    case IZ_OPTIMIZER_MUON:
        update_by<muon>(x, u);
        break;
    case IZ_OPTIMIZER_DIRECTION:
        update_by<direction>(x, u);
        break;
    case IZ_OPTIMIZER_ALONG:
        iz_by_type(u->out_type, [&](auto out) {
            launch_wide<along, float, decltype(out)>(x, u);
        });
        break;
    default:
        iz_die("update: no kernel for optimizer %d", (int)u->optimizer);
    }
}
