/* SPDX-License-Identifier: Apache-2.0 */
/* See product.h. */
#include "tests/codelets/gpu/product.h"

#include <stdlib.h>
#include <string.h>

#include "codelets/kernels/cuda_lib.h"
#include "codelets/kernels/launch.h"
#include "tests/codelets/gpu/scratch.h"
#include "tests/fake/cublaslt.h"

static const struct iz_cuda_ops table = {.matmul_fwd = iz_matmul_fwd_cuda,
                                         .matmul_da = iz_matmul_da_cuda,
                                         .matmul_dw = iz_matmul_dw_cuda};
const struct iz_cuda_ops *const iz_cuda_ops = &table;

struct iz_cuda product_cuda;
static int runs;

struct product product_new(enum iz_dtype t, enum iz_dtype dw,
                           const int64_t s[3], bool out_in)
{
    int64_t m = s[0], in = s[1], out = s[2];
    int64_t rows = out_in ? out : in, cols = out_in ? in : out;
    struct product p = {.y = tensor_new(t, m, out, 1),
                        .r = tensor_new(t, m, out, 1),
                        .a = tensor_new(t, m, in, 1),
                        .w = tensor_new(t, rows, cols, 1),
                        .b = tensor_new(t, 1, out, 1),
                        .dy = tensor_new(t, m, out, 1),
                        .da = tensor_new(t, m, in, 1),
                        .dw = tensor_new(dw, rows, cols, 1),
                        .db = tensor_new(t, 1, out, 1)};

    p.l = (struct iz_linear){
        .w = p.w.v, .b = p.b.v, .dw = p.dw.v, .db = p.db.v, .out_in = out_in};
    p.want =
        calloc((size_t)((m + in) * (m + out) * 2 + in * out), sizeof *p.want);
    p.ref = (struct ref_matmul){.y = p.want,
                                .a = p.a.d,
                                .w = p.w.d,
                                .m = m,
                                .in = in,
                                .out = out,
                                .out_in = out_in};
    return p;
}

void product_free(struct product *p)
{
    struct tensor *all[] = {&p->y,  &p->r,  &p->a,  &p->w, &p->b,
                            &p->dy, &p->da, &p->dw, &p->db};

    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        tensor_free(all[i]);
    free(p->want);
}

void product_run(void (*op)(struct iz_exec *x, struct product *p),
                 struct product *p)
{
    struct iz_exec dry = iz_exec_dry(IZ_CUDA, p->a.v.dtype);
    struct iz_exec x = {.backend = IZ_CUDA,
                        .act = p->a.v.dtype,
                        .tf32 = p->tf32,
                        .fused_db = p->fused_db,
                        .cuda = &product_cuda};

    op(&dry, p);
    x.work = scratch_new(dry.work.peak, runs++);
    op(&x, p);
    assert_int_equal(x.work.used, 0);
    assert_int_equal(x.work.peak, dry.work.peak);
    assert_true(x.flops == dry.flops && x.bytes == dry.bytes);
    scratch_free(&x.work);
}

void product_forward(struct iz_exec *x, struct product *p)
{
    iz_matmul_fwd(x, p->y.v, p->ref.r ? p->r.v : IZ_NONE, p->a.v, &p->l);
}

static void backward_a(struct iz_exec *x, struct product *p)
{
    iz_matmul_da(x, p->da.v, p->dy.v, &p->l);
}

void product_backward_w(struct iz_exec *x, struct product *p)
{
    iz_matmul_dw(x, p->dy.v, p->a.v, &p->l);
}

void product_check_forward(struct product *p, bool with_r, bool with_b)
{
    p->ref.r = with_r ? p->r.d : NULL;
    p->ref.b = with_b ? p->b.d : NULL;
    p->l.b = with_b ? p->b.v : IZ_NONE;
    memset(p->y.v.p, 0xff, (size_t)iz_view_bytes(p->y.v));
    product_run(product_forward, p);
    ref_matmul(&p->ref);
    fixture_close("y", &p->y, p->want, PRODUCT_TOL);
}

/* scale a w: what adapters take. */
static void check_scale(struct product *p)
{
    p->ref.r = p->ref.b = NULL;
    p->l.b = IZ_NONE;
    p->l.scale = 0.375F;
    product_run(product_forward, p);
    p->l.scale = 0;
    ref_matmul(&p->ref);
    for (int64_t i = 0; i < iz_view_len(p->y.v); i++)
        p->want[i] *= 0.375;
    fixture_close("scale a w", &p->y, p->want, PRODUCT_TOL);
}

/* da = dy w^T is a forward with the weights the other way round. */
void product_check_da(struct product *p)
{
    struct ref_matmul da = {.y = p->want,
                            .a = p->dy.d,
                            .w = p->w.d,
                            .m = p->ref.m,
                            .in = p->ref.out,
                            .out = p->ref.in,
                            .out_in = !p->l.out_in};

    memset(p->da.v.p, 0xff, (size_t)iz_view_bytes(p->da.v));
    product_run(backward_a, p);
    ref_matmul(&da);
    fixture_close("da", &p->da, p->want, PRODUCT_TOL);
}

void product_want_dw(const struct product *p, double *to, const double *add)
{
    int64_t in = p->ref.in, out = p->ref.out;

    for (int64_t i = 0; i < in; i++)
        for (int64_t j = 0; j < out; j++) {
            int64_t at = p->l.out_in ? j * in + i : i * out + j;

            to[at] = add ? add[at] : 0;
            for (int64_t k = 0; k < p->ref.m; k++)
                to[at] += p->a.d[k * in + i] * p->dy.d[k * out + j];
        }
}

void product_want_db(const struct product *p, double *to)
{
    for (int64_t j = 0; j < p->ref.out; j++) {
        to[j] = 0;
        for (int64_t k = 0; k < p->ref.m; k++)
            to[j] += p->dy.d[k * p->ref.out + j];
    }
}

void product_check_dw(struct product *p, bool add)
{
    double *dw = p->want, *db = p->want + p->ref.in * p->ref.out;

    product_want_dw(p, dw, add ? p->dw.d : NULL);
    product_want_db(p, db);
    p->l.add = add;
    if (!add)
        memset(p->dw.v.p, 0xff, (size_t)iz_view_bytes(p->dw.v));
    memset(p->db.v.p, 0xff, (size_t)iz_view_bytes(p->db.v));
    product_run(product_backward_w, p);
    fixture_close("dw", &p->dw, dw, PRODUCT_TOL);
    fixture_close("db", &p->db, db, 1e-6);
}

void product_check_forwards(struct product *p)
{
    product_check_forward(p, false, false);
    product_check_forward(p, false, true);
    product_check_forward(p, true, false);
    product_check_forward(p, true, true);
    check_scale(p);
}

int product_renew(void **state)
{
    (void)state;
    iz_cublas_close(&product_cuda.blas);
    fake_cublaslt = (struct fake_cublaslt){0};
    return iz_cublas_open(&product_cuda.blas);
}

int product_end(int failed)
{
    iz_cublas_close(&product_cuda.blas);
    return failed;
}
