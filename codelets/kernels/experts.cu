/* SPDX-License-Identifier: Apache-2.0 */
/* A mixture of experts on a GPU: which rows go where, rows there and back.  The
 * products are in codelets/gpu/experts_cuda.c.  Sums and places depend on the
 * numbers alone, never on which thread comes first. */
#include <math.h>

#include "codelets/kernels/launch.cuh"

#include "codelets/kernels/cuda_lib.h"
#include "codelets/ops/gpu_ops.h"

enum {
    THREADS = 256,
    WARPS = THREADS / 32,
    PER_LANE = IZ_EXPERTS_MOST / 32 /* experts: their bits fit into a word */
};
static_assert(PER_LANE <= 32, "taken");

/* What the kernels are given of iz_routes. */
struct routes {
    float *p, *lse, *weight;
    int32_t *place, *chosen, *end;
    int64_t rows;
    int experts, chosen_of_row;
    bool normalise;
    int first, here;
    const float *choice;
    int groups, kept;
    bool sigmoid;
    float scale;
};

static struct routes routes_of(const struct iz_routes *r)
{
    return {(float *)r->p.p,
            (float *)r->lse.p,
            (float *)r->weight.p,
            (int32_t *)r->place.p,
            (int32_t *)r->chosen.p,
            (int32_t *)r->end.p,
            r->place.rows,
            (int)r->end.cols,
            (int)r->place.cols,
            r->normalise,
            (int)r->first,
            (int)iz_route_experts_here(r),
            (const float *)(r->choice.rows ? r->choice.p : NULL),
            r->groups,
            r->kept,
            r->sigmoid,
            r->scale != 0 ? r->scale : 1};
}

/* Whether a row's choice number i is an expert whose weights are here. */
static __device__ bool is_here(const struct routes &r, int64_t i)
{
    int expert = r.chosen[i] - r.first;
    return expert >= 0 && expert < r.here;
}

static __device__ int64_t row_of_warp(void)
{
    return (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
}

static __device__ int rows_of(const struct routes &r, int i)
{
    return r.end[i] - (i ? r.end[i - 1] : 0);
}

/* ---- the router ---- */

/* The larger of two probabilities, of equal ones that of the lower number. */
struct best {
    float p;
    int i;
};

static __device__ struct best better(struct best a, struct best b)
{
    return b.p > a.p || (b.p == a.p && b.i < a.i) ? b : a;
}

static __device__ struct best best_of_lanes(struct best b)
{
    for (int step = 16; step > 0; step /= 2) {
        struct best other = {__shfl_xor_sync(IZ_ALL_LANES, b.p, step),
                             __shfl_xor_sync(IZ_ALL_LANES, b.i, step)};
        b = better(b, other);
    }
    return b;
}

/* Of the experts from `from` on and before `to` whose bit is not set in
 * `taken`, a bit for each of the lane's; what is no number is less than any. */
static __device__ struct best find_best(const struct routes &r, const float *p,
                                        int from, int to, uint32_t taken)
{
    struct best b = {-INFINITY, 0x7fffffff};
    int lane = (int)threadIdx.x % 32;
    for (int s = 0, i = lane; i < to; s++, i += 32) {
        float v = r.choice && i < r.experts ? p[i] + r.choice[i] : p[i];
        if (i >= from && !(taken >> s & 1))
            b = better(b, {v == v ? v : -INFINITY, i});
    }
    return best_of_lanes(b);
}

/* The lane's bits of all experts but those of the kept groups; a lane has the
 * sum of a group. */
static __device__ uint32_t take_groups(const struct routes &r, const float *p)
{
    int lane = (int)threadIdx.x % 32, each = r.experts / r.groups;
    struct best mine = {-INFINITY, 0x7fffffff};
    uint32_t taken = 0, kept = 0;
    for (int g = 0; g < r.groups; g++) {
        int from = g * each, to = from + each;
        struct best a = find_best(r, p, from, to, 0);
        uint32_t first = lane == a.i % 32 ? 1u << a.i / 32 : 0;
        struct best b = find_best(r, p, from, to, first);
        float sum = a.p + b.p;
        if (lane == g)
            mine = {sum == sum ? sum : -INFINITY, g};
    }
    for (int j = 0; j < r.kept; j++) {
        struct best b = best_of_lanes(mine);
        kept |= 1u << b.i;
        if (lane == b.i)
            mine = {-INFINITY, 0x7fffffff};
    }
    for (int s = 0, i = lane; i < r.experts; s++, i += 32)
        if (!(kept >> i / each & 1))
            taken |= 1u << s;
    return taken;
}

/* Of a row, for a warp: the choices in ascending order, `taken` having a bit
 * for each of the lane's experts; all weights by the sum of theirs. */
static __device__ void put_choices(const struct routes &r, int64_t t,
                                   uint32_t taken)
{
    int lane = (int)threadIdx.x % 32, k = r.chosen_of_row, before = 0;
    float *weight = r.weight + t * k, sum = 0;
    for (int s = 0; s * 32 < r.experts; s++) {
        bool mine = taken >> s & 1;
        unsigned all = __ballot_sync(IZ_ALL_LANES, mine);
        int at = before + __popc(all & ((1u << lane) - 1));
        int i = s * 32 + lane;
        if (mine) {
            float p = r.p[t * r.experts + i];
            r.chosen[t * k + at] = i;
            weight[at] = p >= 0 ? p : NAN;
        }
        before += __popc(all);
    }
    __syncwarp();
    for (int j = 0; r.normalise && lane == 0 && j < k; j++)
        sum += weight[j];
    for (int j = 0; lane == 0 && j < k; j++)
        weight[j] = (r.normalise ? weight[j] / sum : weight[j]) * r.scale;
}

static __device__ void softmax_row(float *p, float *lse, int e)
{
    int lane = (int)threadIdx.x % 32;
    float most = -INFINITY, sum = 0;
    for (int i = lane; i < e; i += 32)
        most = fmaxf(most, p[i]);
    most = iz_lanes_max<32>(most);
    for (int i = lane; i < e; i += 32) {
        p[i] = expf(p[i] - most);
        sum += p[i];
    }
    sum = iz_lanes_sum<32>(sum);
    for (int i = lane; i < e; i += 32)
        p[i] *= 1 / sum;
    if (lane == 0)
        *lse = most + logf(sum);
}

static __device__ void sigmoid_row(float *p, float *lse, int e)
{
    int lane = (int)threadIdx.x % 32;
    for (int i = lane; i < e; i += 32)
        p[i] = 1 / (1 + expf(-p[i]));
    if (lane == 0)
        *lse = 0;
}

/* Of a row, for a warp: probabilities; then its choice. */
static __global__ void __launch_bounds__(THREADS) route_rows(struct routes r)
{
    int64_t t = row_of_warp();
    int lane = (int)threadIdx.x % 32, e = r.experts, k = r.chosen_of_row;
    float *p = r.p + t * e;
    uint32_t taken = 0, here = 0;
    if (t >= r.rows)
        return;
    if (r.sigmoid)
        sigmoid_row(p, r.lse + t, e);
    else
        softmax_row(p, r.lse + t, e);
    if (r.groups > 1)
        taken = take_groups(r, p);
    for (int j = 0; j < k; j++) {
        struct best b = find_best(r, p, 0, e, taken);
        uint32_t bit = lane == b.i % 32 ? 1u << b.i / 32 : 0;
        taken |= bit;
        here |= bit;
    }
    put_choices(r, t, here);
}

/* A block for an expert: how many of n choices are its. */
static __global__ void __launch_bounds__(THREADS)
    count_chosen(int32_t *count, const int32_t *chosen, int64_t n)
{
    int mine = 0;
    for (int64_t i = threadIdx.x; i < n; i += THREADS)
        mine += chosen[i] == (int)blockIdx.x;
    mine = iz_block_sum(mine);
    if (threadIdx.x == 0)
        count[blockIdx.x] = mine;
}

/* A block for an expert: its rows follow those of the experts before it, in
 * ascending order.  Each thread has neighbours, and begins behind what the
 * threads before it have. */
static __global__ void __launch_bounds__(THREADS)
    place_chosen(struct routes r, const int32_t *count, int64_t n)
{
    __shared__ int part[THREADS];
    int at = 0, expert = (int)blockIdx.x;
    int64_t each = (n + THREADS - 1) / THREADS, from = threadIdx.x * each;
    int64_t to = min(from + each, n);
    for (int i = (int)threadIdx.x; i < expert; i += THREADS)
        at += count[i];
    at = iz_block_sum(at);
    int mine = 0;
    for (int64_t i = from; i < to; i++)
        mine += r.chosen[i] == expert;
    part[threadIdx.x] = mine;
    __syncthreads();
    if (threadIdx.x == 0)
        r.end[expert] = at + count[expert];
    for (int i = 0; i < (int)threadIdx.x; i++)
        at += part[i];
    for (int64_t i = from; i < to; i++)
        if (r.chosen[i] == expert)
            r.place[i] = at++;
}

void iz_route_fwd_cuda(struct iz_exec *x, const struct iz_routes *given,
                       struct iz_view scratch)
{
    struct routes r = routes_of(given);
    int64_t n = r.rows * r.chosen_of_row;
    int32_t *count = (int32_t *)scratch.p;
    x->cuda->ends_of = NULL;
    IZ_LAUNCH(route_rows, iz_blocks(r.rows, WARPS), THREADS, 0, x->stream, r);
    IZ_LAUNCH(count_chosen, r.experts, THREADS, 0, x->stream, count,
              (const int32_t *)r.chosen, n);
    IZ_LAUNCH(place_chosen, r.experts, THREADS, 0, x->stream, r,
              (const int32_t *)count, n);
}

/* Parts of the sums over all p, each times the rows of its expert, and over the
 * squares of lse. */
static __global__ void __launch_bounds__(THREADS)
    sum_routes(double *part, struct routes r)
{
    double balance = 0, z = 0;
    int64_t first = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    int64_t step = (int64_t)gridDim.x * THREADS, n = r.rows * r.experts;
    for (int64_t i = first; i < n; i += step)
        balance += (double)r.p[i] * rows_of(r, (int)(i % r.experts));
    for (int64_t t = first; t < r.rows; t += step)
        z += (double)r.lse[t] * (double)r.lse[t];
    balance = iz_block_sum(balance);
    z = iz_block_sum(z);
    if (threadIdx.x == 0) {
        part[2 * blockIdx.x] = balance;
        part[2 * blockIdx.x + 1] = z;
    }
}

static __global__ void aux_of_routes(struct iz_aux *aux, const double *part,
                                     int parts, struct routes r, double balance,
                                     double z)
{
    double m = (double)r.rows, b_sum = 0, z_sum = 0;
    double even = m * r.chosen_of_row / r.experts;
    for (int i = 0; i < parts; i++) {
        b_sum += part[2 * i];
        z_sum += part[2 * i + 1];
    }
    b_sum *= r.experts / (m * m);
    aux->loss += balance * b_sum + z * z_sum / m;
    aux->balance += b_sum;
    aux->z += z_sum / m;
    aux->routers++;
    for (int i = 0; i < r.experts; i++) {
        aux->least = fmin(aux->least, rows_of(r, i) / even);
        aux->most = fmax(aux->most, rows_of(r, i) / even);
    }
}

void iz_route_aux_cuda(struct iz_exec *x, struct iz_aux *aux,
                       const struct iz_routes *given, double balance, double z,
                       struct iz_view scratch)
{
    struct routes r = routes_of(given);
    int parts = (int)(scratch.cols / 2);
    IZ_LAUNCH(sum_routes, parts, THREADS, 0, x->stream, (double *)scratch.p, r);
    IZ_LAUNCH(aux_of_routes, 1, 1, 0, x->stream, aux, (const double *)scratch.p,
              parts, r, balance, z);
}

/* dp of expert i of row t. */
static __device__ float dp_of(const struct routes &r, const float *dweight,
                              int64_t t, int i, float by, float dot, float sum)
{
    int k = r.chosen_of_row;
    float d = by != 0 ? by * (float)rows_of(r, i) : 0;
    for (int j = 0; j < k; j++)
        if (r.chosen[t * k + j] == i)
            d += r.normalise ? (r.scale * dweight[t * k + j] - dot) / sum
                             : r.scale * dweight[t * k + j];
    return d;
}

/* A row for a warp. */
template <class T>
static __global__ void __launch_bounds__(THREADS)
    route_bwd(T *dlogits, const float *dweight, struct routes r, float by,
              float z)
{
    int64_t t = row_of_warp();
    int lane = (int)threadIdx.x % 32, e = r.experts, k = r.chosen_of_row;
    const float *p = r.p + t * e;
    float of_chosen = 0, weighed = 0, dot = 0;
    if (t >= r.rows)
        return;
    for (int64_t j = t * k; j < (t + 1) * k; j++) {
        of_chosen += p[r.chosen[j]];
        weighed += dweight[j] * r.weight[j];
    }
    for (int i = lane; i < e; i += 32)
        dot += p[i] * dp_of(r, dweight, t, i, by, weighed, of_chosen);
    dot = iz_lanes_sum<32>(dot);
    for (int i = lane; i < e; i += 32) {
        float d = dp_of(r, dweight, t, i, by, weighed, of_chosen);
        float of = r.sigmoid ? d * (1 - p[i]) : d - dot + z * r.lse[t];
        iz_store(dlogits + t * e + i, p[i] * of);
    }
}

void iz_route_bwd_cuda(struct iz_exec *x, struct iz_view dlogits,
                       struct iz_view dweight, const struct iz_routes *given,
                       float balance, float z)
{
    struct routes r = routes_of(given);
    float by = balance * r.experts / ((float)r.rows * (float)r.rows);
    iz_by_type(dlogits.dtype, [&](auto zero) {
        using T = decltype(zero);
        IZ_LAUNCH(route_bwd<T>, iz_blocks(r.rows, WARPS), THREADS, 0, x->stream,
                  (T *)dlogits.p, (const float *)dweight.p, r, by,
                  2 * z / (float)r.rows);
    });
}

/* ---- rows to experts and back, a block for each ---- */

/* f(i, N) for pieces of N elements of a row of n, or f(i, 1). */
template <class T, class F>
static __device__ void each_piece(int64_t n, bool at_once, const F &f)
{
    constexpr int N = 16 / sizeof(T);
    if (at_once)
        for (int64_t i = threadIdx.x * N; i < n; i += THREADS * N)
            f(i, std::integral_constant<int, N>());
    else
        for (int64_t i = threadIdx.x; i < n; i += THREADS)
            f(i, std::integral_constant<int, 1>());
}

template <class T>
static __global__ void __launch_bounds__(THREADS)
    dispatch(T *y, const T *a, struct routes r, int64_t c, bool at_once)
{
    int64_t row = blockIdx.x;
    if (!is_here(r, row))
        return;
    T *to = y + r.place[row] * c;
    const T *from = a + row / r.chosen_of_row * c;
    each_piece<T>(c, at_once, [&](int64_t i, auto count) {
        float v[decltype(count)::value];
        iz_load_row(v, from + i);
        iz_store_row(to + i, v);
    });
}

void iz_experts_dispatch_cuda(struct iz_exec *x, struct iz_view y,
                              struct iz_view a, const struct iz_routes *given)
{
    struct routes r = routes_of(given);
    iz_by_type(y.dtype, [&](auto zero) {
        using T = decltype(zero);
        const T *from = (const T *)a.p;
        IZ_LAUNCH(dispatch<T>, (unsigned)y.rows, THREADS, 0, x->stream,
                  (T *)y.p, from, r, a.cols,
                  iz_pieces_aligned<T>(a.cols, from, (T *)y.p));
    });
}

template <class T>
static __global__ void __launch_bounds__(THREADS)
    combine(T *y, const T *c, const T *a, struct routes r, int64_t n, bool back,
            bool at_once)
{
    int64_t row = blockIdx.x;
    int k = r.chosen_of_row;
    const int32_t *place = r.place + row * k;
    const float *weight = r.weight + row * k;
    each_piece<T>(n, at_once, [&](int64_t i, auto count) {
        constexpr int N = decltype(count)::value;
        float sum[N] = {0}, v[N];
        if (c)
            iz_load_row(sum, c + row * n + i);
        for (int s = 0; s < k; s++) {
            int j = back ? k - 1 - s : s;
            if (!is_here(r, row * k + j))
                continue;
            iz_load_row(v, a + place[j] * n + i);
            for (int q = 0; q < N; q++)
                sum[q] += (back ? 1 : weight[j]) * v[q];
        }
        iz_store_row(y + row * n + i, sum);
    });
}

void iz_experts_combine_cuda(struct iz_exec *x, struct iz_view y,
                             struct iz_view c, struct iz_view a,
                             const struct iz_routes *given, bool back)
{
    struct routes r = routes_of(given);
    iz_by_type(y.dtype, [&](auto zero) {
        using T = decltype(zero);
        const T *add = c.rows ? (const T *)c.p : NULL;
        const T *from = (const T *)a.p;
        IZ_LAUNCH(combine<T>, (unsigned)y.rows, THREADS, 0, x->stream, (T *)y.p,
                  add, from, r, y.cols, back,
                  iz_pieces_aligned<T>(y.cols, add, from, (T *)y.p));
    });
}

/* n elements from p on become w times as much. */
template <class T>
static __device__ void scale_row(T *p, int64_t n, float w, bool at_once)
{
    each_piece<T>(n, at_once, [&](int64_t i, auto count) {
        constexpr int N = decltype(count)::value;
        float v[N];
        iz_load_row(v, p + i);
        for (int s = 0; s < N; s++)
            v[s] *= w;
        iz_store_row(p + i, v);
    });
}

template <class T>
static __global__ void __launch_bounds__(THREADS)
    weigh_bwd(float *dweight, T *g, T *du, const T *dg, struct routes r,
              int64_t f, bool at_once)
{
    int64_t row = blockIdx.x, at = r.place[row] * f;
    if (!is_here(r, row))
        return;
    float dot = 0, w = r.weight[row];
    each_piece<T>(f, at_once, [&](int64_t i, auto count) {
        constexpr int N = decltype(count)::value;
        float v[N], d[N];
        iz_load_row(v, g + at + i);
        iz_load_row(d, dg + at + i);
        for (int s = 0; s < N; s++)
            dot += v[s] * d[s];
    });
    dot = iz_block_sum(dot);
    if (threadIdx.x == 0)
        dweight[row] = dot;
    scale_row(g + at, f, w, at_once);
    scale_row(du + 2 * at, 2 * f, w, at_once);
}

void iz_experts_weigh_bwd_cuda(struct iz_exec *x, struct iz_view dweight,
                               struct iz_view g, struct iz_view du,
                               struct iz_view dg, const struct iz_routes *given)
{
    struct routes r = routes_of(given);
    iz_by_type(g.dtype, [&](auto zero) {
        using T = decltype(zero);
        const T *d = (const T *)dg.p;
        IZ_LAUNCH(weigh_bwd<T>, (unsigned)g.rows, THREADS, 0, x->stream,
                  (float *)dweight.p, (T *)g.p, (T *)du.p, d, r, g.cols,
                  iz_pieces_aligned<T>(g.cols, d, (T *)g.p, (T *)du.p));
    });
}

/* dweight[i] += <dy, b>; dy becomes weight times as much. */
template <class T>
static __global__ void __launch_bounds__(THREADS)
    bias_bwd(float *dweight, T *dy, const float *b, struct routes r, int64_t c)
{
    int64_t i = blockIdx.x;
    if (!is_here(r, i))
        return;
    T *row = dy + r.place[i] * c;
    float dot = 0;
    b += (r.chosen[i] - r.first) * c;
    for (int64_t j = threadIdx.x; j < c; j += THREADS) {
        float v = iz_load(row + j);
        dot += v * b[j];
        iz_store(row + j, v * r.weight[i]);
    }
    dot = iz_block_sum(dot);
    if (threadIdx.x == 0)
        dweight[i] += dot;
}

void iz_experts_bias_bwd_cuda(struct iz_exec *x, struct iz_view dweight,
                              struct iz_view dy, struct iz_view b,
                              const struct iz_routes *given)
{
    struct routes r = routes_of(given);
    iz_by_type(dy.dtype, [&](auto zero) {
        using T = decltype(zero);
        IZ_LAUNCH(bias_bwd<T>, (unsigned)dy.rows, THREADS, 0, x->stream,
                  (float *)dweight.p, (T *)dy.p, (const float *)b.p, r,
                  dy.cols);
    });
}
