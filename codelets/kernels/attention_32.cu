/* SPDX-License-Identifier: Apache-2.0 */
/* Attention with fp32 multiply-adds, by the same algorithm as attention_16.cuh,
 * for heads of any width up to 256: of fp32 activations, and of fp16 ones on
 * GPUs before compute capability 8.0, which lack the instructions of that file.
 * Shared memory holds fp32 either way, so fp16 is rounded to once, at the end.
 *
 * A block has 16 x 16 threads and tiles of B rows: thread (y, x) has the rows y
 * + 16 i and the columns x + 16 j of a tile of scores, and of a sum over such a
 * tile the columns 4 x + 64 g and the three after each.  Scores go through
 * shared memory to be summed over.  Widths are padded to DP columns of zeros;
 * rows in shared memory are 16 bytes longer, so that 16-byte reads of eight of
 * them lie in different banks. */
#include "codelets/kernels/attention.cuh"
#include "codelets/kernels/launch.cuh"

#include <float.h>

enum { THREADS = 256, SIDE = 16 };

/* Elements from one row in shared memory to the next. */
template <int N> constexpr int pitch = N + 4;

static __device__ __forceinline__ int thread_row(int i)
{
    return (int)threadIdx.x / SIDE + SIDE * i;
}

static __device__ __forceinline__ int thread_col(int j)
{
    return (int)threadIdx.x % SIDE + SIDE * j;
}

/* Copies B rows, zeros after the first `left` of them. */
template <int DP, int B, class T>
static __device__ __forceinline__ void load_rows(float *to, const T *from,
                                                 int64_t ld, int left, int d)
{
    for (int i = (int)threadIdx.x; i < B * DP; i += THREADS) {
        int r = i / DP, c = i % DP;
        to[r * pitch<DP> + c] =
            r < left && c < d ? iz_load(from + r * ld + c) : 0;
    }
}

/* s = a b^T: two tiles of rows. */
template <int DP, int R>
static __device__ __forceinline__ void
rows_by_rows(float (&s)[R][R], const float *a, const float *b)
{
    for (int i = 0; i < R * R; i++)
        s[i / R][i % R] = 0;
    for (int k = 0; k < DP; k += 4) {
        float ra[R][4], rb[R][4];
#pragma unroll
        for (int i = 0; i < R; i++) {
            iz_load_row<4>(ra[i], a + thread_row(i) * pitch<DP> + k);
            iz_load_row<4>(rb[i], b + thread_col(i) * pitch<DP> + k);
        }
#pragma unroll
        for (int i = 0; i < R * R * 4; i++)
            s[i / 4 / R][i / 4 % R] +=
                ra[i / 4 / R][i % 4] * rb[i / 4 % R][i % 4];
    }
}

template <int R>
static __device__ __forceinline__ void attention_32_put(float *w,
                                                        const float (&s)[R][R])
{
#pragma unroll
    for (int i = 0; i < R * R; i++)
        w[thread_row(i / R) * pitch<R * SIDE> + thread_col(i % R)] =
            s[i / R][i % R];
}

/* acc += w b: w [B,B] and b [B,DP] in shared memory. */
template <int DP, int R>
static __device__ __forceinline__ void
add_product(float (&acc)[R][DP / 16], const float *w, const float *b)
{
    b += threadIdx.x % SIDE * 4;
#pragma unroll 4
    for (int k = 0; k < R * SIDE; k++) {
        float rb[DP / 16];
#pragma unroll
        for (int g = 0; g < DP / 64; g++) {
            float part[4];
            iz_load_row<4>(part, b + k * pitch<DP> + 64 * g);
#pragma unroll
            for (int i = 0; i < 4; i++)
                rb[4 * g + i] = part[i];
        }
#pragma unroll
        for (int i = 0; i < R; i++) {
            float p = w[thread_row(i) * pitch<R * SIDE> + k];
#pragma unroll
            for (int x = 0; x < DP / 16; x++)
                acc[i][x] += p * rb[x];
        }
    }
}

/* Writes, or adds, acc, row i times by[i]; `left` rows and d columns exist. */
template <int DP, bool ADD = false, int R, class T>
static __device__ __forceinline__ void
store_rows(T *to, int64_t ld, int left, int d, const float (&acc)[R][DP / 16],
           const float (&by)[R])
{
    int first = (int)threadIdx.x % SIDE * 4;
#pragma unroll
    for (int i = 0; i < R * DP / 16; i++) {
        int x = i % (DP / 16), r = thread_row(i / (DP / 16));
        int c = first + x / 4 * 64 + x % 4;
        float v = acc[i / (DP / 16)][x] * by[i / (DP / 16)];
        if (r < left && c < d)
            iz_store(to + r * ld + c, ADD ? iz_load(to + r * ld + c) + v : v);
    }
}

/* What a product of a query and a key is multiplied by: with a cap, before
 * tanh, whose result is multiplied by the cap. */
template <bool CAP>
static __device__ __forceinline__ float scale_of(const struct iz_heads &a)
{
    return CAP ? a.scale / a.cap : a.scale;
}

/* One more tile of products of one row: turns them into exponentials of scores
 * relative to the largest so far, and what was summed before as well.  The keys
 * from `first` to `live` are seen.  sum is this thread's part. */
template <bool CAP, int R, int N>
static __device__ __forceinline__ void soften(float (&s)[R], float (&acc)[N],
                                              float *top, float *sum, int first,
                                              int live, float scale, float cap)
{
    float high = *top, keep;
#pragma unroll
    for (int j = 0; j < R; j++) {
        bool seen = thread_col(j) >= first && thread_col(j) < live;
        s[j] = seen ? s[j] * scale : -INFINITY;
        if (CAP && seen)
            s[j] = cap * tanhf(s[j]);
        high = fmaxf(high, s[j]);
    }
    high = iz_lanes_max<SIDE>(high); /* that share a row */
    keep = expf(*top - high);
    *sum *= keep;
#pragma unroll
    for (int j = 0; j < R; j++) {
        s[j] = expf(s[j] - high);
        *sum += s[j];
    }
#pragma unroll
    for (int x = 0; x < N; x++)
        acc[x] *= keep;
    *top = high;
}

/* One tile of queries of one head against all keys that it sees; keys and
 * values take turns in shared memory. */
template <class T, int DP, int B, bool CAP>
static __global__ void __launch_bounds__(THREADS) attend_32(struct iz_heads a)
{
    constexpr int R = B / SIDE;
    IZ_SHARED(float, qs);
    float *ks = qs + B * pitch<DP>, *w = ks + B * pitch<DP>;
    struct iz_attention_place here = iz_attention_place(a, 1);
    int head = here.head, i0 = a.first + here.after * B, left = a.end - i0;
    int64_t ld = a.ldk, row = i0;
    const T *q = (const T *)a.q + iz_head_q(a, head);
    const T *k = (const T *)a.k + iz_head_k(a, head);
    const T *v = k + a.kv;
    float *lse = a.lse + iz_head_lse(a, head) + i0;
    float acc[R][DP / 16] = {}, s[R][R], top[R], sum[R], inv[R];
    int end = a.full ? a.seq : min(i0 + B, a.seq);
    int sample = head / a.heads, first[R];
    for (int i = 0; i < R; i++) {
        top[i] = -FLT_MAX; /* finite: differences are numbers */
        sum[i] = 0;
        first[i] = iz_head_begins(a, sample, i0 + thread_row(i));
    }
    load_rows<DP, B>(qs, q + row * a.ld, a.ld, left, a.d);
    for (int j0 = iz_head_begins(a, sample, i0) / B * B; j0 < end; j0 += B) {
        __syncthreads();
        load_rows<DP, B>(ks, k + j0 * ld, ld, a.seq - j0, a.d);
        __syncthreads();
        rows_by_rows<DP>(s, qs, ks);
        for (int i = 0; i < R; i++)
            soften<CAP>(s[i], acc[i], &top[i], &sum[i], first[i] - j0,
                        a.full ? a.seq - j0 : i0 - j0 + thread_row(i) + 1,
                        scale_of<CAP>(a), a.cap);
        attention_32_put(w, s);
        __syncthreads();
        load_rows<DP, B>(ks, v + j0 * ld, ld, a.seq - j0, a.d);
        __syncthreads();
        add_product<DP>(acc, w, ks);
    }
    float sink = iz_head_sink(a, sample, head);
    for (int i = 0; i < R; i++) {
        float all = iz_lanes_sum<SIDE>(sum[i]);
        inv[i] = iz_head_share(sink, 1, &top[i], &all);
        if (thread_row(i) < left && thread_col(0) == 0)
            lse[thread_row(i)] = top[i] + logf(all);
    }
    store_rows<DP>((T *)a.o + iz_head_o(a, head) + row * a.c, a.c, left, a.d,
                   acc, inv);
}

/* Probability of a product, and the gradient of it before `scale` from that of
 * the probability; zeros for keys that the query does not see. */
template <bool CAP>
static __device__ __forceinline__ void grad(float *s, float *ds, float lse,
                                            float delta, bool dead, float scale,
                                            float cap)
{
    float t = CAP ? tanhf(*s * scale) : *s;
    float p = dead ? 0 : expf(t * (CAP ? cap : scale) - lse);
    *s = p;
    *ds = dead ? 0 : p * (*ds - delta);
    if (CAP)
        *ds *= 1 - t * t;
}

/* dk and dv of one tile of keys of a group of heads, over all queries of these
 * that see its first key, head by head. */
template <class T, int DP, int B, bool CAP>
static __global__ void __launch_bounds__(THREADS) key_grads(struct iz_heads a)
{
    constexpr int R = B / SIDE;
    IZ_SHARED(float, ks);
    float *vs = ks + B * pitch<DP>, *qs = vs + B * pitch<DP>;
    float *ys = qs + B * pitch<DP>, *w = ys + B * pitch<DP>;
    struct iz_attention_place here = iz_attention_place(a, a.group);
    int group = here.head, k0 = here.tile * B, head = group * a.group;
    int start = a.full ? a.first : max(k0, a.first), i0 = start;
    int sample = head / a.heads, stop = iz_head_ends(a, sample, k0 + B);
    int64_t ld = a.ldk, first = iz_head_k(a, head) + k0 * ld;
    const T *k = (const T *)a.k + first;
    float acc_k[R][DP / 16] = {}, acc_v[R][DP / 16] = {}, by[R], one[R];
    float s[R][R], ds[R][R];
    if (stop <= start)
        return; /* no row sees them */
    load_rows<DP, B>(ks, k, ld, a.seq - k0, a.d);
    load_rows<DP, B>(vs, k + a.kv, ld, a.seq - k0, a.d);
    while (head < (group + 1) * a.group) {
        const T *q = (const T *)a.q + iz_head_q(a, head);
        const T *dy = (const T *)a.dy + iz_head_o(a, head);
        const float *lse = a.lse + iz_head_lse(a, head);
        const float *delta = a.delta + iz_head_lse(a, head);
        int64_t row = i0;
        load_rows<DP, B>(qs, q + row * a.ld, a.ld, a.end - i0, a.d);
        load_rows<DP, B>(ys, dy + row * a.c, a.c, a.end - i0, a.d);
        __syncthreads();
        rows_by_rows<DP>(s, ks, qs);
        rows_by_rows<DP>(ds, vs, ys);
        for (int i = 0; i < R * R; i++) {
            int t = i0 + thread_col(i % R);
            int key = k0 + thread_row(i / R);
            bool dead = t >= a.end || (!a.full && key > t) ||
                        key < iz_head_begins(a, sample, t);
            grad<CAP>(&s[i / R][i % R], &ds[i / R][i % R], dead ? 0 : lse[t],
                      dead ? 0 : delta[t], dead, scale_of<CAP>(a), a.cap);
        }
        attention_32_put(w, s);
        __syncthreads();
        add_product<DP>(acc_v, w, ys);
        __syncthreads();
        attention_32_put(w, ds);
        __syncthreads();
        add_product<DP>(acc_k, w, qs);
        __syncthreads();
        i0 += B;
        if (i0 >= stop) {
            i0 = start;
            head++;
        }
    }
    for (int i = 0; i < R; i++) {
        by[i] = a.scale;
        one[i] = 1;
    }
    if (a.adds) {
        float *dk = (float *)a.dk + first;
        store_rows<DP, true>(dk, ld, a.seq - k0, a.d, acc_k, by);
        store_rows<DP, true>(dk + a.kv, ld, a.seq - k0, a.d, acc_v, one);
    } else {
        T *dk = (T *)a.dk + first;
        store_rows<DP>(dk, ld, a.seq - k0, a.d, acc_k, by);
        store_rows<DP>(dk + a.kv, ld, a.seq - k0, a.d, acc_v, one);
    }
}

/* dq of one tile of queries of one head, over all keys that it sees. */
template <class T, int DP, int B, bool CAP>
static __global__ void __launch_bounds__(THREADS) query_grads(struct iz_heads a)
{
    constexpr int R = B / SIDE;
    IZ_SHARED(float, qs);
    float *ys = qs + B * pitch<DP>, *ks = ys + B * pitch<DP>;
    float *vs = ks + B * pitch<DP>, *w = vs + B * pitch<DP>;
    struct iz_attention_place here = iz_attention_place(a, 1);
    int head = here.head, i0 = a.first + here.after * B, left = a.end - i0;
    int64_t ld = a.ldk, row = i0, at = iz_head_lse(a, head) + i0;
    const T *q = (const T *)a.q + iz_head_q(a, head);
    const T *k = (const T *)a.k + iz_head_k(a, head);
    const T *dy = (const T *)a.dy + iz_head_o(a, head) + row * a.c;
    T *dq = (T *)a.dq + iz_head_q(a, head) + row * a.ld;
    float acc[R][DP / 16] = {}, s[R][R], ds[R][R], by[R], lse[R], delta[R];
    int end = a.full ? a.seq : min(i0 + B, a.seq);
    int sample = head / a.heads, first[R];
    for (int i = 0; i < R; i++) {
        first[i] = iz_head_begins(a, sample, i0 + thread_row(i));
        bool dead = thread_row(i) >= left;
        lse[i] = dead ? 0 : a.lse[at + thread_row(i)];
        delta[i] = dead ? 0 : a.delta[at + thread_row(i)];
        by[i] = a.scale;
    }
    load_rows<DP, B>(qs, q + row * a.ld, a.ld, left, a.d);
    load_rows<DP, B>(ys, dy, a.c, left, a.d);
    for (int j0 = iz_head_begins(a, sample, i0) / B * B; j0 < end; j0 += B) {
        load_rows<DP, B>(ks, k + j0 * ld, ld, a.seq - j0, a.d);
        load_rows<DP, B>(vs, k + a.kv + j0 * ld, ld, a.seq - j0, a.d);
        __syncthreads();
        rows_by_rows<DP>(s, qs, ks);
        rows_by_rows<DP>(ds, ys, vs);
        for (int i = 0; i < R * R; i++) {
            int seen = a.full ? a.seq - 1 : i0 + thread_row(i / R);
            int key = j0 + thread_col(i % R);
            grad<CAP>(&s[i / R][i % R], &ds[i / R][i % R], lse[i / R],
                      delta[i / R], key > seen || key < first[i / R],
                      scale_of<CAP>(a), a.cap);
        }
        attention_32_put(w, ds);
        __syncthreads();
        add_product<DP>(acc, w, ks);
        __syncthreads();
    }
    store_rows<DP>(dq, a.ld, left, a.d, acc, by);
}

/* Bytes of shared memory: tiles of rows, and one of scores. */
template <int DP, int B> static int bytes_of(int tiles)
{
    return (tiles * B * pitch<DP> + B * pitch<B>)*(int)sizeof(float);
}

template <class T, int DP, int B, bool CAP>
static void run_backward(const struct iz_heads *a, void *stream)
{
    void (*keys)(struct iz_heads) = key_grads<T, DP, B, CAP>;
    void (*queries)(struct iz_heads) = query_grads<T, DP, B, CAP>;
    int bytes = bytes_of<DP, B>(4);
    IZ_LAUNCH(keys, iz_attention_blocks(a->seq, B, a->all / a->group), THREADS,
              bytes, stream, *a);
    IZ_LAUNCH(queries, iz_attention_blocks(a->end - a->first, B, a->all),
              THREADS, bytes, stream, *a);
}

/* f(zero of the type, width, capped): fp32 or fp16, and columns of 64, 128 or
 * 256. */
template <class F>
static void by_kind(const struct iz_heads *a, enum iz_dtype t, const F &f)
{
    iz_by_width(a->d <= 64    ? 64
                : a->d <= 128 ? 128
                              : 256,
                [&](auto width) {
                    constexpr int DP = decltype(width)::value;
                    if constexpr (DP % 64 == 0)
                        iz_by_cap(a, [&](auto capped) {
                            if (t == IZ_F16)
                                f(iz_f16(), width, capped);
                            else
                                f(0.0f, width, capped);
                        });
                });
}

void iz_attention_fwd_32(const struct iz_heads *a, enum iz_dtype t,
                         void *stream)
{
    by_kind(a, t, [&](auto zero, auto width, auto capped) {
        constexpr int DP = decltype(width)::value, B = 64 * 64 / DP;
        void (*k)(struct iz_heads) =
            attend_32<decltype(zero), DP, B, decltype(capped)::value>;
        IZ_LAUNCH(k, iz_attention_blocks(a->end - a->first, B, a->all), THREADS,
                  (bytes_of<DP, B>(2)), stream, *a);
    });
}

/* Tiles are smaller for wider heads, so that all tiles of backward fit into the
 * shared memory that a block may have: 96 KiB or more, and 64 KiB at compute
 * capability 7.5, which has smaller tiles and no room for the widest heads
 * (attention.c refuses them). */
void iz_attention_bwd_32(const struct iz_heads *a, enum iz_dtype t,
                         int capability, void *stream)
{
    by_kind(a, t, [&](auto zero, auto width, auto capped) {
        constexpr int DP = decltype(width)::value, B = 64 * 64 / DP;
        constexpr bool CAP = decltype(capped)::value;
        constexpr int HALF = DP < 256 ? B / 2 : B;
        if (DP < 256 && capability == 75)
            run_backward<decltype(zero), DP, HALF, CAP>(a, stream);
        else
            run_backward<decltype(zero), DP, B, CAP>(a, stream);
    });
}
