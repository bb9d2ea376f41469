/* SPDX-License-Identifier: Apache-2.0 */
/* Takes the plan's places, one after the other, and hands each to its owner;
 * see alloc.h. */
#include <string.h>
#include <unistd.h>

#include "runtime/engine/alloc.h"

/* ---- owners ---- */

/* Where the handle of a place is kept that is registered as it is; NULL: it has
 * none.  Where somebody keeps its address, *address is that pointer's, of
 * whichever type; *at: where its offset in a file is kept. */
static starpu_data_handle_t *owner_of(struct iz_engine *e,
                                      const struct iz_place *a, void **address,
                                      int64_t **at)
{
    int of = a->of, i = a->index;
    struct iz_chunk *k;
    switch (a->what) {
    case IZ_DATUM_SCRATCH:
        *address = &e->scratch[i];
        return NULL;
    case IZ_DATUM_BOUNCE:
        *address = &e->bounce.buffer;
        return NULL;
    case IZ_DATUM_SQUARES:
        *address = &e->scalar.sums;
        return NULL;
    case IZ_DATUM_LOGITS:
        return &e->scalar.logits_handle;
    case IZ_DATUM_SECONDARY:
        return &e->unit[of].secondary_handle;
    case IZ_DATUM_STATE:
    case IZ_DATUM_SPLIT_STATE:
        k = &e->unit[of].chunk[i];
        *address = &k->state;
        *at = &k->state_at;
        return &k->state_handle;
    case IZ_DATUM_SPLIT_GRAD:
        return &e->unit[of].grad_apart_handle[i];
    case IZ_DATUM_OWN_SUM:
        return &e->unit[of].sum_handle[i];
    case IZ_DATUM_STAGING:
    case IZ_DATUM_SPLIT_STAGING:
    case IZ_DATUM_QUANT_STAGING:
        *address = &e->staging[of].buffer[i].p;
        return &e->staging[of].buffer[i].handle;
    case IZ_DATUM_MATRIX:
        return &e->matrices.buffer[i].handle[IZ_SIDE_HOST];
    case IZ_DATUM_MATRIX_DEVICE:
        return &e->matrices.buffer[i].handle[IZ_SIDE_DEVICE];
    case IZ_DATUM_TOUCHED:
        return &e->touched.list[i].handle;
    case IZ_DATUM_TOUCHED_SCRATCH:
        return &e->touched.scratch.handle;
    case IZ_DATUM_GATHERED:
        return &e->ring[of].param[i].handle;
    case IZ_DATUM_UNIT_GRAD:
        return &e->ring[of].grad[i].handle;
    case IZ_DATUM_RING_SUM:
        return &e->ring[of].sum[i].handle;
    case IZ_DATUM_BOUNDARY_SLOT:
        return &e->boundaries.slot[i].handle;
    case IZ_DATUM_BATCH:
        *address = &e->track[i].batch;
        return &e->track[i].batch_handle;
    case IZ_DATUM_DY:
        return &e->track[i].d_handle;
    case IZ_DATUM_REFERENCE:
        return &e->track[of].reference_handle[i];
    case IZ_DATUM_BOUNDARY:
        *at = &e->track[i].boundary_at[of];
        return &e->track[i].boundary_handle[of];
    case IZ_DATUM_SAVED:
        return &e->track[i].saved_handle[of];
    default:
        return NULL;
    }
}

/* p: its memory; NULL in a file, where its handle is a token. */
static void hand_over(struct iz_engine *e, const struct iz_place *a, void *p)
{
    int x = iz_datum_infos[a->what].of_unit ? a->of : a->index;
    switch (a->what) {
    case IZ_DATUM_PARAM:
    case IZ_DATUM_FROZEN:
    case IZ_DATUM_QUANT:
        iz_unit_memory_params(e, a, p);
        return;
    case IZ_DATUM_GRAD:
    case IZ_DATUM_BLOCK_SUMS:
        iz_unit_memory_pieces(e, a, p);
        return;
    case IZ_DATUM_COLL:
        e->coll->scratch = p;
        e->coll->scratch_bytes = a->bytes;
        return;
    case IZ_DATUM_COLL_STAGING:
    case IZ_DATUM_COLL_EXCHANGE:
        iz_coll_gpu_open(e->coll,
                         &(struct iz_coll_gpu){.nccl = e->plan.target.nccl,
                                               .buffer = p,
                                               .buffer_bytes = a->bytes});
        return;
    default:
        break;
    }
    void *address = NULL;
    int64_t *at = NULL;
    starpu_data_handle_t *h = owner_of(e, a, &address, &at);
    if (address)
        memcpy(address, &p, sizeof(p));
    if (at)
        *at = a->at;
    if (h)
        *h = p ? iz_handle_open(e, p, a->bytes, a->what, x)
               : iz_handle_token(e, a->what, x);
}

/* ---- files ---- */

/* A file has all places of a class in the nvme tier. */
static int open_file(struct iz_engine *e, struct iz_nvme **f, const char *what,
                     const char *dir, enum iz_class class)
{
    char name[64];
    int64_t bytes = e->plan.bytes.b[IZ_TIER_NVME][class];
    if (!bytes || e->simulated)
        return 0;
    snprintf(name, sizeof(name), "izar-%d-rank%d-%s", (int)getpid(),
             e->plan.rank, what);
    return iz_nvme_open(f, dir, name, bytes, e->config->run.nvme_checksum);
}

static int open_files(struct iz_engine *e)
{
    const struct iz_zero_config *z = &e->config->zero;
    int r = open_file(e, &e->file.state, "state", z->optimizer.nvme_path,
                      IZ_MEM_STATE);
    if (!r)
        r = open_file(e, &e->file.param, "param", z->param.nvme_path,
                      IZ_MEM_PARAM);
    return r ? r
             : open_file(e, &e->file.boundary, "boundary",
                         e->config->boundary_path, IZ_MEM_BOUNDARY);
}

/* ---- all ---- */

int iz_places_open(struct iz_engine *e)
{
    const struct iz_places *l = &e->plan.places;
    for (int i = 0; i < l->n; i++) {
        const struct iz_place *a = &l->list[i];
        enum iz_class class = iz_datum_infos[a->what].class;
        void *p = NULL;
        if (a->tier == IZ_TIER_NVME)
            iz_memory_note(e->memory, a->tier, class, a->bytes);
        else
            p = iz_memory_take(e->memory, a->tier, class, a->bytes);
        hand_over(e, a, p);
    }
    return open_files(e);
}
