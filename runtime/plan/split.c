/* SPDX-License-Identifier: Apache-2.0 */
/* Which chunks of an offloaded optimizer are updated by the GPU, and what it
 * keeps for them; see plan.h. */
#include <math.h>

#include "codelets/base/int64.h"
#include "runtime/plan/split.h"
#include "runtime/plan/unit_sizes.h"

#define BUFFERS 8 /* chunks on their way to the GPU and back, at least */

static int64_t elems_of(const struct iz_plan_unit *g, int chunks)
{
    return min64(chunks * g->chunk, g->owned);
}

int64_t iz_plan_host_elems(const struct iz_plan_unit *g)
{
    return elems_of(g, g->host_chunks);
}

int64_t iz_plan_grads_apart(const struct iz_plan *p,
                            const struct iz_plan_unit *g)
{
    return p->zero.grads_apart && g->n ? g->owned - iz_plan_host_elems(g) : 0;
}

/* The number of chunks whose elements are nearest to `want`, the smaller one of
 * two. */
static int nearest(const struct iz_plan_unit *g, double want)
{
    int best = 0;
    for (int n = 1; n <= g->chunks; n++)
        if (fabs((double)elems_of(g, n) - want) <
            fabs((double)elems_of(g, best) - want))
            best = n;
    return best;
}

/* A unit may have one chunk: what its share of whole chunks is too much or too
 * little, the next units make good. */
void iz_plan_split(struct iz_plan *p, const struct iz_config *c)
{
    bool divided = p->target.gpu && p->zero.state.home == IZ_HOME_CPU;
    double want = 0, have = 0;
    int64_t chunk = 0, elem = 0;
    for (int u = 0; u < p->n_units; u++) {
        struct iz_plan_unit *g = &p->unit[u];
        g->host_chunks = g->chunks;
        if (!divided || !g->n)
            continue;
        want += c->zero.optimizer.ratio * (double)g->owned;
        g->host_chunks = nearest(g, want - have);
        have += (double)iz_plan_host_elems(g);
        if (g->host_chunks < g->chunks && g->chunk > chunk)
            chunk = g->chunk;
    }
    p->zero.divided = divided && c->zero.optimizer.ratio < 1;
    p->zero.split = chunk > 0;
    p->zero.grads_apart = p->zero.split && (p->ranks == 1 || p->target.nccl);
    if (!p->zero.grads_apart)
        elem = iz_dtype_bytes(p->grad_type);
    if (p->zero.param.home != IZ_HOME_NONE)
        elem += iz_dtype_bytes(p->param_type);
    p->staging[IZ_STAGING_SPLIT].bytes = chunk * elem;
    p->staging[IZ_STAGING_SPLIT].n =
        p->staging[IZ_STAGING_SPLIT].bytes ? BUFFERS : 0;
}

/* The update of a chunk waits for the forward that the GPU is in, and its
 * buffer with it: one forward lets as many chunks pass as there are buffers,
 * and with one for each chunk all may pass before the first. */
void iz_plan_split_widen(struct iz_plan *p, int64_t bytes)
{
    struct iz_plan_staging *s = &p->staging[IZ_STAGING_SPLIT];
    int64_t chunks = 0;
    for (int u = 0; u < p->n_units; u++)
        chunks += p->unit[u].chunks - p->unit[u].host_chunks;
    if (!s->n || chunks <= s->n)
        return;
    s->n += (int)min64(bytes / s->bytes, chunks - s->n);
}

void iz_plan_split_print(const struct iz_plan *p, FILE *out)
{
    int chunks = 0, host = 0;
    double owned = 0, of_host = 0;
    if (!p->zero.divided)
        return;
    for (int u = 0; u < p->n_units; u++) {
        const struct iz_plan_unit *g = &p->unit[u];
        chunks += g->chunks;
        host += g->host_chunks;
        owned += (double)g->owned;
        of_host += (double)iz_plan_host_elems(g);
    }
    fprintf(out,
            "      optimizer: %d of %d chunks on the host, the others on the "
            "GPU",
            host, chunks);
    if (p->staging[IZ_STAGING_SPLIT].n)
        fprintf(out, " through %d buffers", p->staging[IZ_STAGING_SPLIT].n);
    fprintf(out, "; effective ratio %.3f\n", of_host / owned);
}
