/* SPDX-License-Identifier: Apache-2.0 */
/* Rotary positions on a GPU, with the angles of rope.c.  A block has as many
 * neighbouring rows as it has threads for their angles; it forms sines and
 * cosines once for all heads. */
#include "codelets/kernels/launch.cuh"

#include "codelets/ops/gpu_ops.h"
#include "codelets/ops/ops.h"

#define TWO_PI 6.28318530717958647692

enum { THREADS = 256 };

struct job {
    int64_t rows, ld, seq, first;
    int heads, d, half; /* half of what turns of a head */
    bool pairs;         /* columns 2i and 2i + 1 turn, else i and i + half */
    int each;           /* rows of a block */
    bool back;
    const int32_t *begins; /* [rows] in pinned memory, or NULL */
    int queries;           /* of these heads, if beta is not 0 */
    double beta, original;
};

/* The fraction of a circle is exact but for one rounding to double. */
static __device__ float angle_of(int64_t t, double turns_per_token)
{
    double turns = __dmul_rn((double)t, turns_per_token);
    return (float)((turns - rint(turns)) * TWO_PI);
}

/* N columns from lo on, and those `half` behind them; all multiplied by `by`.
 */
template <class T, int N>
static __device__ void turn(T *lo, int half, const float *cs, const float *sn,
                            float by)
{
    float a[N], b[N];
    iz_load_row(a, lo);
    iz_load_row(b, lo + half);
    for (int i = 0; i < N; i++) {
        float low = a[i], high = b[i];
        a[i] = (low * cs[i] - high * sn[i]) * by;
        b[i] = (high * cs[i] + low * sn[i]) * by;
    }
    iz_store_row(lo, a);
    iz_store_row(lo + half, b);
}

/* Moves each element of the heads in and out: 4 bytes with 16-bit types. */
template <class T, int N>
static __global__ void __launch_bounds__(THREADS)
    rotate(T *a, struct iz_rope_turns f, struct job j)
{
    __shared__ float cs[THREADS], sn[THREADS], by[THREADS];
    int64_t first = (int64_t)blockIdx.x * j.each;
    int left = j.rows - first < j.each ? (int)(j.rows - first) : j.each;
    int per = j.half / N;
    for (int i = (int)threadIdx.x; i < left * j.half; i += THREADS) {
        int64_t row = first + i / j.half;
        int64_t at = (j.first + row) % j.seq - (j.begins ? j.begins[row] : 0);
        float v = angle_of(at, f.f[i % j.half]);
        if (j.queries && i % j.half == 0)
            by[i / j.half] = iz_rope_query_factor(at, j.beta, j.original);
        cs[i] = cosf(v) * f.amplitude;
        sn[i] = (j.back ? -sinf(v) : sinf(v)) * f.amplitude;
    }
    __syncthreads();
    for (int i = (int)threadIdx.x; i < left * j.heads * per; i += THREADS) {
        int col = i % per * N, head = i / per % j.heads, r = i / per / j.heads;
        T *lo = a + (first + r) * j.ld + head * j.d;
        turn<T, N>(lo + (N == 1 && j.pairs ? 2 * col : col),
                   N == 1 && j.pairs ? 1 : j.half, cs + r * j.half + col,
                   sn + r * j.half + col, head < j.queries ? by[r] : 1);
    }
}

void iz_rope_cuda(struct iz_exec *x, struct iz_view a, struct iz_view begins,
                  const struct iz_rope *r, bool back)
{
    struct iz_rope_turns f = {};
    int half = iz_rope_turned(r) / 2;
    struct job j = {a.rows,
                    a.cols,
                    r->seq,
                    r->first,
                    r->heads,
                    r->d,
                    half,
                    r->pairs,
                    THREADS / half,
                    back,
                    (int32_t *)begins.p,
                    r->query_beta != 0 ? r->queries : 0,
                    r->query_beta,
                    r->original_seq};
    int64_t blocks = (j.rows + j.each - 1) / j.each;
    if (blocks > INT32_MAX)
        iz_die("rope of %lld rows: too many", (long long)j.rows);
    iz_rope_turns_of(&f, r);
    iz_by_type(a.dtype, [&](auto zero) {
        using T = decltype(zero);
        constexpr int per = 16 / sizeof(T);
        bool whole = iz_aligned(a.p) && half % per == 0 && j.ld % per == 0 &&
                     j.d % per == 0 && !j.pairs;
        IZ_LAUNCH((whole ? rotate<T, per> : rotate<T, 1>), (int)blocks, THREADS,
                  0, x->stream, (T *)a.p, f, j);
    });
}
