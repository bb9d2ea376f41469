/* SPDX-License-Identifier: Apache-2.0 */
/* Rotary positions on a GPU, with the angles of rope.c.  A block has as many
 * neighbouring rows as it has threads for their angles; it forms sines and
 * cosines once for all heads. */
#include "codelets/kernels/launch.cuh"

#include "codelets/ops/gpu_ops.h"
#include "codelets/ops/ops.h"

#define TWO_PI 6.28318530717958647692

enum { THREADS = 256 };

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

/* Moves each element of the heads in and out: 4 bytes with 16-bit types.  half
 * of what turns of a head; begins [rows] in pinned memory, or NULL. */
template <class T, int N>
static __global__ void __launch_bounds__(THREADS)
    rotate(T *a, int64_t rows, int64_t ld, const int32_t *begins,
           struct iz_rope r, struct iz_rope_turns f, int half, bool back)
{
    __shared__ float cs[THREADS], sn[THREADS], by[THREADS];
    int each = THREADS / half, per = half / N;
    int queries = r.query_beta != 0 ? r.queries : 0;
    int64_t first = (int64_t)blockIdx.x * each;
    int left = rows - first < each ? (int)(rows - first) : each;
    for (int i = (int)threadIdx.x; i < left * half; i += THREADS) {
        int64_t row = first + i / half;
        int64_t at = (r.first + row) % r.seq - (begins ? begins[row] : 0);
        float v = angle_of(at, f.f[i % half]);
        if (queries && i % half == 0)
            by[i / half] =
                iz_rope_query_factor(at, r.query_beta, r.original_seq);
        cs[i] = cosf(v) * f.amplitude;
        sn[i] = (back ? -sinf(v) : sinf(v)) * f.amplitude;
    }
    __syncthreads();
    for (int i = (int)threadIdx.x; i < left * r.heads * per; i += THREADS) {
        int col = i % per * N, head = i / per % r.heads, m = i / per / r.heads;
        T *lo = a + (first + m) * ld + head * r.d;
        turn<T, N>(lo + (N == 1 && r.pairs ? 2 * col : col),
                   N == 1 && r.pairs ? 1 : half, cs + m * half + col,
                   sn + m * half + col, head < queries ? by[m] : 1);
    }
}

void iz_rope_cuda(struct iz_exec *x, struct iz_view a, struct iz_view begins,
                  const struct iz_rope *r, bool back)
{
    struct iz_rope_turns f = {};
    int half = iz_rope_turned(r) / 2, each = THREADS / half;
    int64_t blocks = (a.rows + each - 1) / each;
    if (blocks > INT32_MAX)
        iz_die("rope of %lld rows: too many", (long long)a.rows);
    iz_rope_turns_of(&f, r);
    iz_by_type(a.dtype, [&](auto zero) {
        using T = decltype(zero);
        constexpr int per = 16 / sizeof(T);
        bool whole = iz_aligned(a.p) && half % per == 0 && a.cols % per == 0 &&
                     r->d % per == 0 && !r->pairs;
        IZ_LAUNCH((whole ? rotate<T, per> : rotate<T, 1>), (int)blocks, THREADS,
                  0, x->stream, (T *)a.p, a.rows, a.cols,
                  (const int32_t *)begins.p, *r, f, half, back);
    });
}
