/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/plan/unit_sizes.h"

#include "codelets/base/int64.h"
#include "runtime/plan/matrices.h"
#include "runtime/plan/split.h"

#define PAGE_BYTES 4096 /* of a disk */

int64_t iz_plan_chunk_bytes(const struct iz_plan *p,
                            const struct iz_plan_unit *g, int chunk)
{
    return round_up(iz_plan_states(p, p->zero.state.home, g->chunk,
                                   iz_plan_chunk_lacks(p, g, chunk))
                        .bytes,
                    PAGE_BYTES);
}

int64_t iz_plan_boundary_bytes(const struct iz_plan *p,
                               const struct iz_model *m, int unit)
{
    return iz_dtype_bytes(p->target.act) * m->unit[unit].out_elems * p->samples;
}

int64_t iz_plan_boundary_room(const struct iz_plan *p)
{
    return iz_dtype_bytes(p->target.act) * p->act.boundary_elems;
}

int64_t iz_plan_saved(const struct iz_plan *p, const struct iz_model *m,
                      int unit, enum iz_recompute level)
{
    return m->unit[unit].forward && unit >= p->first_trained
               ? p->cost[unit].save_bytes[level]
               : 0;
}

int64_t iz_plan_gathered(const struct iz_plan_unit *g)
{
    return g->rows ? g->packed : g->padded + g->frozen.padded + g->quant.n;
}

int64_t iz_plan_quant_filed(const struct iz_plan_unit *g, int chunk)
{
    const struct iz_plan_frozen *w = &g->quant.words;
    return round_up(min64(w->shard - chunk * w->chunk, w->chunk),
                    PAGE_BYTES / 4);
}

int64_t iz_plan_filed(const struct iz_plan *p, const struct iz_plan_unit *g)
{
    return (p->zero.param.home == IZ_HOME_NVME ? g->chunk * g->chunks : 0) +
           (p->zero.frozen.home == IZ_HOME_NVME
                ? g->frozen.chunk * g->frozen.chunks
                : 0);
}

int64_t iz_plan_sent(const struct iz_plan_unit *g)
{
    return g->rows ? g->packed : g->padded;
}

int64_t iz_plan_grads(const struct iz_plan *p, const struct iz_plan_unit *g)
{
    int64_t n = p->zero.grad.whole ? g->padded : g->shard;
    return g->rows ? min64(n, g->packed) : n;
}

int64_t iz_plan_piece(const struct iz_plan *p, const struct iz_plan_unit *g,
                      int i)
{
    int64_t apart = iz_plan_grads_apart(p, g);
    return i == g->pieces
               ? apart
               : min64(iz_plan_grads(p, g) - apart - i * g->piece, g->piece);
}

int64_t iz_plan_squared(const struct iz_plan *p, const struct iz_plan_unit *g)
{
    bool comm = p->ranks > 1 && !p->target.nccl && !g->split_accum;
    bool cut = p->target.gpu ? iz_plan_grads_to_host(p) : g->pieces > 1;
    return cut && !comm && g->n ? g->owned : 0;
}

int64_t iz_plan_sum(const struct iz_plan *p, const struct iz_plan_unit *g)
{
    bool own =
        p->zero.sums == IZ_SUMS_IN_RING || p->zero.sums == IZ_SUMS_OF_UNIT;
    if (p->zero.sums_on_gpu)
        return g->n && g->contributions > 1 ? iz_plan_host_elems(g) : 0;
    return own && g->n ? iz_plan_sent(g) : 0;
}

/* Not near that of a unit with two uses: others come between them. */
bool iz_plan_ring_sum(const struct iz_plan *p, const struct iz_plan_unit *g)
{
    return p->zero.sums == IZ_SUMS_IN_RING && !(p->zero.sums_on_gpu && g->ties);
}

bool iz_plan_straight(const struct iz_plan *p, bool first)
{
    return first && (p->ranks > 1 || p->param_type == p->grad_type);
}
