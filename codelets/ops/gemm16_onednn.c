/* SPDX-License-Identifier: Apache-2.0 */
/* Products of bf16 through oneDNN's matmul primitive, of fp32 through its
 * sgemm. The library keeps what it compiled for a shape in a cache of its own,
 * so making the primitive again for every product costs some microseconds. */
#define _GNU_SOURCE
#include <assert.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "codelets/base/die.h"
#include "codelets/ops/gemm16.h"
#include IZ_ONEDNN

/* A matrix. */
struct layout {
    dnnl_dims_t dims, strides;
    dnnl_data_type_t type;
};

static struct {
    pthread_once_t once;
    dnnl_engine_t engine;
    const char *missing, *missing_16; /* the latter of bf16 alone */
} here = {.once = PTHREAD_ONCE_INIT};

static dnnl_data_type_t type_of(enum iz_dtype t)
{
    return t == IZ_BF16 ? dnnl_bf16 : dnnl_f32;
}

static struct layout plain(int64_t rows, int64_t cols, bool transposed,
                           dnnl_data_type_t type)
{
    return (struct layout){
        .dims = {rows, cols},
        .strides = {transposed ? 1 : cols, transposed ? rows : 1},
        .type = type};
}

enum { A, B, BIAS, C, OPERANDS };

/* A product being made. */
struct product {
    iz_desc d[OPERANDS];
    dnnl_primitive_desc_t pd;
    int64_t scratch; /* bytes */
};

static int attributes(dnnl_primitive_attr_t *out, bool add)
{
    dnnl_post_ops_t ops = NULL;
    int r = dnnl_primitive_attr_create(out);
    if (!r)
        r = dnnl_primitive_attr_set_scratchpad_mode(*out,
                                                    dnnl_scratchpad_mode_user);
    if (r || !add)
        return r;
    r = dnnl_post_ops_create(&ops);
    if (!r)
        r = iz_desc_add(ops);
    if (!r)
        r = dnnl_primitive_attr_set_post_ops(*out, ops);
    dnnl_post_ops_destroy(ops);
    return r;
}

static void product_close(struct product *p)
{
    for (int i = 0; i < OPERANDS; i++)
        iz_desc_close(&p->d[i]);
    if (p->pd)
        dnnl_primitive_desc_destroy(p->pd);
}

/* An OpenMP library gives every calling thread a team unless told otherwise;
 * the scratch of a product depends on it. */
static void one_thread(void)
{
    static _Thread_local bool done;
    void (*set)(int) = NULL;
    if (done)
        return;
    done = true;
    *(void **)&set = dlsym(RTLD_DEFAULT, "omp_set_num_threads");
    if (set)
        set(1);
}

static int product_open(struct product *p, const struct iz_gemm16 *g)
{
    struct layout l[OPERANDS] = {
        [A] = plain(g->m, g->k, g->ta, dnnl_bf16),
        [B] = plain(g->k, g->n, g->tb, dnnl_bf16),
        [BIAS] = plain(1, g->n, false, type_of(g->bias_type)),
        [C] = plain(g->m, g->n, false, type_of(g->c_type))};
    dnnl_primitive_attr_t attr = NULL;
    int r = 0;
    assert(g->m > 0 && g->n > 0 && g->k > 0);
    memset(p, 0, sizeof(*p));
    one_thread();
    for (int i = 0; i < OPERANDS && !r; i++)
        if (i != BIAS || g->biased)
            r = iz_desc_open(&p->d[i], 2, l[i].dims, l[i].strides, l[i].type);
    if (!r)
        r = attributes(&attr, g->add);
    if (!r)
        r = iz_desc_product(&p->pd, here.engine, &p->d[A], &p->d[B],
                            g->biased ? &p->d[BIAS] : NULL, &p->d[C], attr);
    if (attr)
        dnnl_primitive_attr_destroy(attr);
    if (!r)
        p->scratch = (int64_t)dnnl_memory_desc_get_size(
            dnnl_primitive_desc_query_md(p->pd, dnnl_query_scratchpad_md, 0));
    return r;
}

static void look(void)
{
    const dnnl_version_t *v = dnnl_version();
    struct iz_gemm16 small = {.m = 16, .n = 16, .k = 16, .c_type = IZ_F32};
    struct product p = {0};
    if (v->major != IZ_ONEDNN_MAJOR)
        here.missing = "oneDNN is another version than at build time";
    else if (v->cpu_runtime != DNNL_RUNTIME_OMP &&
             v->cpu_runtime != DNNL_RUNTIME_SEQ)
        here.missing = "this oneDNN cannot be held to one thread per caller";
    else if (dnnl_engine_create(&here.engine, dnnl_cpu, 0))
        here.missing = "oneDNN has no engine for this processor";
    else if (product_open(&p, &small))
        here.missing_16 = "oneDNN multiplies no bf16 on this processor";
    product_close(&p);
}

const char *iz_gemm16_onednn_missing(void)
{
    pthread_once(&here.once, look);
    return here.missing;
}

const char *iz_gemm16_missing(void)
{
    const char *why = iz_gemm16_onednn_missing();
    return why ? why : here.missing_16;
}

void iz_gemm_onednn(const struct iz_gemm *g)
{
    one_thread();
    int r = (int)dnnl_sgemm(g->ta ? 'T' : 'N', g->tb ? 'T' : 'N', g->m, g->n,
                            g->k, g->alpha, g->a, g->lda, g->b, g->ldb, g->beta,
                            g->c, g->ldc);
    if (r)
        iz_die("a product by oneDNN failed (%d)", r);
}

void iz_gemm16_name(char *out, size_t size)
{
    const dnnl_version_t *v = dnnl_version();
    snprintf(out, size, "oneDNN %d.%d.%d", v->major, v->minor, v->patch);
}

int64_t iz_gemm16_scratch(const struct iz_gemm16 *g)
{
    struct product p;
    if (iz_gemm16_missing())
        return 0;
    if (product_open(&p, g))
        iz_die("oneDNN refuses a product of bf16 [%lld,%lld] [%lld,%lld]",
               (long long)g->m, (long long)g->k, (long long)g->k,
               (long long)g->n);
    int64_t bytes = p.scratch;
    product_close(&p);
    return bytes;
}

static int run(struct product *p, const struct iz_gemm16 *g)
{
    static const int name[OPERANDS + 1] = {DNNL_ARG_SRC, DNNL_ARG_WEIGHTS,
                                           DNNL_ARG_BIAS, DNNL_ARG_DST,
                                           DNNL_ARG_SCRATCHPAD};
    void *at[OPERANDS + 1] = {(void *)g->a, (void *)g->b, (void *)g->bias, g->c,
                              g->scratch};
    dnnl_exec_arg_t arg[OPERANDS + 1];
    dnnl_primitive_t primitive = NULL;
    dnnl_stream_t stream = NULL;
    dnnl_dims_t bytes = {p->scratch}, stride = {1};
    iz_desc scratch = {0};
    int n = 0, r = iz_desc_open(&scratch, 1, bytes, stride, dnnl_u8);
    for (int i = 0; i <= OPERANDS && !r; i++) {
        if (i == BIAS && !g->biased)
            continue;
        arg[n].arg = name[i];
        r = iz_desc_memory(&arg[n].memory, i < OPERANDS ? &p->d[i] : &scratch,
                           here.engine, at[i]);
        n += !r;
    }
    if (!r)
        r = dnnl_stream_create(&stream, here.engine, dnnl_stream_default_flags);
    if (!r)
        r = dnnl_primitive_create(&primitive, p->pd);
    if (!r)
        r = dnnl_primitive_execute(primitive, stream, n, arg);
    if (!r)
        r = dnnl_stream_wait(stream);
    while (n)
        dnnl_memory_destroy(arg[--n].memory);
    iz_desc_close(&scratch);
    if (primitive)
        dnnl_primitive_destroy(primitive);
    if (stream)
        dnnl_stream_destroy(stream);
    return r;
}

void iz_gemm16(const struct iz_gemm16 *g)
{
    struct product p = {0};
    int r = -1;
    if (!iz_gemm16_missing())
        r = product_open(&p, g);
    if (!r)
        r = run(&p, g);
    product_close(&p);
    if (r)
        iz_die("a product of bf16 failed (%d)", r);
}
