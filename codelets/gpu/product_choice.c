/* SPDX-License-Identifier: Apache-2.0 */
/* Which of cuBLASLt's algorithms a product has: the library's first choice, or
 * the fastest of several, measured before the first step.  The measured ones
 * are a list in words, because equal bits need equal algorithms: on all ranks,
 * and when the run goes on.  cublasLt.h allows an algorithm to be kept as the
 * eight numbers that it is, for the same version of the library. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "codelets/base/int64.h"
#include "codelets/gpu/matmul_cuda.h"
#include "codelets/gpu/pattern.h"
#include "codelets/gpu/stopwatch.h"

enum {
    WORDS = sizeof(cublasLtMatmulAlgo_t) / sizeof(uint64_t),
    ENTRY = 17 * (WORDS + 1) + 1 /* of a list, as text */
};

#define HEX "0123456789abcdef"

/* ---- the products that were asked for ---- */

static double weight(const struct iz_product_plan *q)
{
    return (double)q->calls * (double)q->key.m * (double)q->key.n *
           (double)q->key.k;
}

/* Most flops first; the same order on every rank. */
static int heavier(const void *left, const void *right)
{
    const struct iz_product_plan *a = *(struct iz_product_plan *const *)left,
                                 *b = *(struct iz_product_plan *const *)right;
    uint64_t h = iz_product_hash(&a->key), g = iz_product_hash(&b->key);
    double v = weight(a), w = weight(b);
    return v != w ? (v < w) - (v > w) : (h > g) - (h < g);
}

static int asked_plans(struct iz_cublas *b,
                       struct iz_product_plan *out[IZ_PRODUCT_PLANS])
{
    int n = 0;
    for (int i = 0; i < IZ_PRODUCT_PLANS; i++)
        if (b->plan[i].calls && b->plan[i].possible)
            out[n++] = &b->plan[i];
    qsort(out, (size_t)n, sizeof(*out), heavier);
    return n;
}

/* ---- times ---- */

/* Gives p memory of the scratch arena: [workspace][what is read][d],
 * with random numbers.  False: there is too little. */
static bool place(struct iz_exec *x, struct iz_product *p,
                  struct iz_view *scratch)
{
    struct iz_view *read[] = {&p->a, &p->b, &p->bias};
    int64_t bytes = 0, at[3], first = round_up(IZ_PRODUCT_SCRATCH, 256);
    for (int i = 0; i < 3; i++) {
        at[i] = first + bytes;
        bytes += round_up(iz_view_bytes(*read[i]), 256);
    }
    int64_t all = bytes + iz_view_bytes(p->d);
    if (first + all > x->work.size)
        return false;
    *scratch = (struct iz_view){.p = x->work.base,
                                .dtype = IZ_U8,
                                .rows = 1,
                                .cols = IZ_PRODUCT_SCRATCH};
    for (int i = 0; i < 3; i++)
        read[i]->p = x->work.base + at[i];
    p->d.p = x->work.base + first + bytes;
    if (p->c.rows)
        p->c = p->d;
    /* d too, which may be added to: pairs of 16 bits are small in fp32 */
    iz_pattern_fill(x->work.base + first, all, p->a.dtype);
    return true;
}

/* A product that is timed, by the algorithm of q; the library may refuse it
 * after all. */
struct timed {
    struct iz_product_plan *q;
    struct iz_product p;
    struct iz_view scratch;
};

static bool run_product(struct iz_exec *x, const void *arg)
{
    const struct timed *t = arg;
    return iz_product_enqueue(x, t->q, &t->p, t->scratch) ==
           CUBLAS_STATUS_SUCCESS;
}

/* Gives q the fastest of its algorithms; false, and the first one: there was
 * too little memory or time to try all. */
static bool take_fastest(struct iz_exec *x, struct iz_product_plan *q,
                         struct iz_stopwatch *w, struct iz_product_choice *c)
{
    cublasLtMatmulAlgo_t algo[IZ_PRODUCT_ALGOS];
    struct timed t = {.q = q, .p = q->asked};
    int n = iz_product_search(x->cuda->blas, q, algo), best = 0;
    double first = 0, least = 0;
    if (iz_stopwatch_over(w) || !place(x, &t.p, &t.scratch))
        return false;
    for (int i = 0; i < n && !iz_stopwatch_over(w); i++) {
        q->algo = algo[i];
        double s = iz_stopwatch_best(w, x, run_product, &t);
        if (i == 0)
            first = least = s;
        else if (s >= 0 && s < (best ? least : first * IZ_STOPWATCH_GAIN)) {
            best = i;
            least = s;
        }
    }
    bool whole = !iz_stopwatch_over(w) && first >= 0;
    q->algo = algo[whole ? best : 0];
    if (!whole)
        return false;
    c->first_s += (double)q->calls * first;
    c->best_s += (double)q->calls * least;
    return true;
}

/* ---- the list ---- */

/* " KEY:WORD.WORD..." without the last words that are 0. */
static int put_entry(char to[ENTRY], const struct iz_product_plan *q)
{
    int last = WORDS - 1;
    while (last > 0 && !q->algo.data[last])
        last--;
    int n = snprintf(to, ENTRY, " %016llx",
                     (unsigned long long)iz_product_hash(&q->key));
    for (int i = 0; i <= last; i++)
        n += snprintf(to + n, ENTRY - (size_t)n, "%c%llx", i ? '.' : ':',
                      (unsigned long long)q->algo.data[i]);
    return n;
}

static bool is_first(struct iz_cublas *b, struct iz_product_plan *q)
{
    struct iz_product_plan other = *q;
    iz_product_take_first(b, &other);
    return memcmp(&other.algo, &q->algo, sizeof(q->algo)) == 0;
}

void iz_product_time(struct iz_exec *x, double budget_s, char *list,
                     size_t size, struct iz_product_choice *c)
{
    struct iz_product_plan *q[IZ_PRODUCT_PLANS];
    struct iz_stopwatch w;
    int n = asked_plans(x->cuda->blas, q);
    int used = snprintf(list, size, "cublasLt %zu", cublasLtGetVersion());
    iz_stopwatch_open(&w, budget_s);
    for (int i = 0; i < n; i++) {
        c->timed += take_fastest(x, q[i], &w, c);
        char entry[ENTRY];
        int more = put_entry(entry, q[i]);
        if (is_first(x->cuda->blas, q[i]) || used + more >= (int)size)
            continue;
        memcpy(list + used, entry, (size_t)more + 1);
        used += more;
    }
    iz_stopwatch_close(&w);
    c->seconds = w.spent_s;
}

static bool refuse(struct iz_refusal *why, const char *at, const char *text)
{
    snprintf(why->why, sizeof(why->why), "%.*s: %s", (int)strcspn(at, " "),
             *at ? at : "the end", text);
    return false;
}

static bool get_entry(const char **at, unsigned long long *key,
                      cublasLtMatmulAlgo_t *algo)
{
    const char *p = *at;
    char *end;
    *algo = (cublasLtMatmulAlgo_t){{0}};
    *key = strtoull(p, &end, 16);
    if (end != p + 16 || *end != ':' || !strchr(HEX, *p))
        return false;
    for (int i = 0; i < WORDS; i++) {
        p = end + 1;
        errno = 0;
        algo->data[i] = strtoull(p, &end, 16);
        if (end == p || errno || !strchr(HEX, *p))
            return false;
        if (*end != '.')
            break;
    }
    *at = end;
    return !*end || *end == ' ';
}

static bool take_entry(struct iz_cublas *b, struct iz_product_plan *q,
                       const cublasLtMatmulAlgo_t *algo, const char *at,
                       struct iz_refusal *why)
{
    cublasLtMatmulHeuristicResult_t r = {0};
    cublasStatus_t s = cublasLtMatmulAlgoCheck(b->lt, &q->op, &q->b, &q->a,
                                               &q->d, &q->d, algo, &r);
    if (s != CUBLAS_STATUS_SUCCESS)
        return refuse(why, at, cublasLtGetStatusString(s));
    if (!iz_matmul_in_order(algo))
        return refuse(why, at, "its sums have no fixed order");
    if (r.workspaceSize > (size_t)IZ_PRODUCT_WORKSPACE)
        return refuse(why, at, "it needs more than its workspace");
    q->algo = *algo;
    return true;
}

bool iz_product_take(struct iz_exec *x, const char *list,
                     struct iz_product_choice *c, struct iz_refusal *why)
{
    struct iz_product_plan *q[IZ_PRODUCT_PLANS];
    struct iz_cublas *b = x->cuda->blas;
    unsigned long long version = 0, key;
    int n = asked_plans(b, q), used = 0;
    const char *at = list;
    cublasLtMatmulAlgo_t algo;
    sscanf(list, "cublasLt %llu%n", &version, &used);
    at += used;
    if (!used || (*at && *at != ' '))
        return refuse(why, list, "not a list of algorithms");
    if (version != cublasLtGetVersion()) {
        snprintf(why->why, sizeof(why->why),
                 "a list for cuBLASLt %llu, and here is %zu", version,
                 cublasLtGetVersion());
        return false;
    }
    c->asked = n;
    for (int i = 0; i < n; i++)
        iz_product_take_first(b, q[i]);
    while (*at == ' ') {
        const char *entry = ++at;
        int i = 0;
        if (!get_entry(&at, &key, &algo))
            return refuse(why, entry, "not an algorithm of a list");
        while (i < n && iz_product_hash(&q[i]->key) != key)
            i++;
        if (i == n)
            return refuse(why, entry, "not a product of this run");
        if (!take_entry(b, q[i], &algo, entry, why))
            return false;
        c->others++;
    }
    return true;
}
