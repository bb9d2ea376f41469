/* SPDX-License-Identifier: Apache-2.0 */
/* Few numbers per rank and array are gathered; every rank draws the same
 * conclusions from them. */
#include "runtime/ckpt/shares.h"

#include <errno.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "codelets/base/die.h"
#include "codelets/base/mix.h"
#include "runtime/base/hash.h"
#include "runtime/base/text.h"

/* How the arrays are held, and what this rank writes of them. */
struct share {
    const struct iz_ckpt *k;
    struct iz_coll *c;
    const int64_t *span;    /* [ranks][n_parts][2]: first and count */
    struct iz_piece *piece; /* [n_parts], to fill */
};

static uint64_t parts_hash(const struct iz_ckpt *k)
{
    uint64_t h = (uint64_t)k->n_parts;
    for (int i = 0; i < k->n_parts; i++) {
        const char *name = k->part[i].name;
        h = iz_mix(h + iz_hash(name, (int64_t)strlen(name)));
        h = iz_mix(h + (uint64_t)k->part[i].total);
    }
    return h;
}

static int parts_check(const struct iz_ckpt *k, struct iz_coll *c)
{
    int64_t mine = (int64_t)parts_hash(k), *all = iz_agree_numbers(c, &mine, 1);
    int err = 0;
    for (int q = 0; q < c->size; q++)
        if (all[q] != all[0])
            err = -EINVAL;
    free(all);
    if (err && c->rank == 0)
        fprintf(stderr,
                "izar: checkpoint: ranks differ in their lists of arrays\n");
    return err;
}

/* first and count of part i on rank q. */
static const int64_t *span(const struct share *s, int i, int q)
{
    return s->span + 2 * ((int64_t)q * s->k->n_parts + i);
}

static bool replicated(const struct share *s, int i)
{
    for (int q = 0; q < s->c->size; q++)
        if (span(s, i, q)[0] != 0 || span(s, i, q)[1] != s->k->part[i].total)
            return false;
    return true;
}

/* Whether the ranks' pieces, in order of ranks, lie end to end and fill the
 * array. */
static bool tiled(const struct share *s, int i)
{
    int64_t end = 0;
    for (int q = 0; q < s->c->size; q++) {
        const int64_t *p = span(s, i, q);
        if (p[1] < 0 || (p[1] > 0 && p[0] != end))
            return false;
        end += p[1];
    }
    return end == s->k->part[i].total;
}

static int share_set(struct share *s, int i)
{
    const struct iz_ckpt_part *part = &s->k->part[i];
    struct iz_piece *p = &s->piece[i];
    int64_t size = s->c->size, rank = s->c->rank;
    memcpy(p->name, part->name, sizeof(p->name));
    p->total = part->total;
    p->first = part->count > 0 ? part->first : 0;
    p->count = part->count;
    if (replicated(s, i)) {
        p->first = p->total / size * rank + p->total % size * rank / size;
        p->count = p->total / size * (rank + 1) +
                   p->total % size * (rank + 1) / size - p->first;
    } else if (!tiled(s, i)) {
        if (rank == 0) /* all of them see it */
            return iz_refuse(
                stderr,
                "checkpoint: the ranks' pieces of %s do not lie end to "
                "end over %" PRId64 " elements",
                part->name, part->total);
    }
    p->hash = calloc((size_t)iz_piece_blocks(p) + 1, sizeof(*p->hash));
    return p->hash ? 0 : -ENOMEM;
}

/* Every rank's pieces; malloc'ed. */
static int64_t *spans_gather(const struct iz_ckpt *k, struct iz_coll *c)
{
    int n = k->n_parts;
    int64_t *mine = calloc(2 * (size_t)n + 1, sizeof(*mine));
    if (!mine)
        iz_die("checkpoint: no memory for %d arrays", n);
    for (int64_t i = 0; i < n; i++) {
        mine[2 * i] = k->part[i].first;
        mine[2 * i + 1] = k->part[i].count;
    }
    int64_t *all = iz_agree_numbers(c, mine, 2 * n);
    free(mine);
    return all;
}

int iz_ckpt_shares(const struct iz_ckpt *k, struct iz_coll *c,
                   struct iz_piece *piece)
{
    struct share s = {.k = k, .c = c, .piece = piece};
    int64_t *all, offset = 0;
    int err = parts_check(k, c);

    if (err)
        return err; /* on all ranks */
    s.span = all = spans_gather(k, c);
    for (int i = 0; i < k->n_parts && !err; i++) {
        err = share_set(&s, i);
        piece[i].offset = offset;
        offset += 4 * piece[i].count;
    }
    free(all);
    return iz_agree(c, err);
}
