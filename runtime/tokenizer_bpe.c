/* SPDX-License-Identifier: Apache-2.0 */
/* Byte-pair encoding of one piece: the pair of the lowest rank is merged first,
 * of equal ones the leftmost.  A heap of pairs keeps long pieces at n log n, a
 * cache of short ones makes most pieces a look-up. */
#include "runtime/tokenizer_parts.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define CACHE_SLOTS (1 << 16)
#define CACHE_BYTES 30
#define CACHE_IDS 8
#define NO_RANK INT32_MAX

/* 64 bytes; bytes is 0 in a free one. */
struct cached {
    uint8_t bytes, ids;
    char text[CACHE_BYTES];
    int32_t id[CACHE_IDS];
};

/* A token of the piece so far, in a list; its position is that of its first
 * byte. */
struct symbol {
    int32_t id, previous, next; /* -1: none */
    int32_t rank;               /* of the merge with the next; NO_RANK */
};

struct iz_bpe_work {
    struct cached *cache; /* a slot holds the last piece that fell on it */
    struct symbol *symbol;
    uint64_t *heap; /* rank << 32 | position; those of old pairs stay in it */
    int64_t room, heap_room, heap_count;
};

/* ---- merges ---- */

int iz_merges_open(struct iz_merges *m, int64_t count)
{
    uint64_t slots = 16;

    while (slots < 2 * (uint64_t)count)
        slots *= 2;
    m->mask = slots - 1;
    m->slot = malloc(slots * sizeof *m->slot);
    if (!m->slot)
        return -ENOMEM;
    memset(m->slot, 0xff, slots * sizeof *m->slot);
    return 0;
}

void iz_merges_close(struct iz_merges *m)
{
    free(m->slot);
    m->slot = NULL;
}

/* The slot of a pair, or the free one where it belongs. */
static struct iz_merge *place(const struct iz_merges *m, uint64_t pair)
{
    uint64_t i = iz_bytes_hash(&pair, sizeof pair);

    while (m->slot[i & m->mask].pair != pair &&
           m->slot[i & m->mask].pair != UINT64_MAX)
        i++;
    return &m->slot[i & m->mask];
}

static uint64_t pair_of(int32_t left, int32_t right)
{
    return (uint64_t)left << 32 | (uint64_t)right;
}

int iz_merges_add(struct iz_merges *m, int32_t left, int32_t right,
                  int32_t rank, int32_t id)
{
    struct iz_merge *slot = place(m, pair_of(left, right));

    if (slot->pair != UINT64_MAX)
        return -EEXIST;
    *slot = (struct iz_merge){pair_of(left, right), rank, id};
    return 0;
}

/* ---- scratch ---- */

int iz_bpe_work_open(struct iz_bpe_work **out)
{
    struct iz_bpe_work *w = calloc(1, sizeof *w);

    *out = w;
    if (!w)
        return -ENOMEM;
    w->cache = calloc(CACHE_SLOTS, sizeof *w->cache);
    return w->cache ? 0 : -ENOMEM;
}

void iz_bpe_work_close(struct iz_bpe_work **w)
{
    if (!*w)
        return;
    free((*w)->cache);
    free((*w)->symbol);
    free((*w)->heap);
    free(*w);
    *w = NULL;
}

/* A merge takes one pair out of the list and adds two: n symbols never put
 * more than 3n entries in the heap. */
static int room(struct iz_bpe_work *w, int64_t n)
{
    if (n <= w->room)
        return 0;
    free(w->symbol);
    free(w->heap);
    w->room = n < 1024 ? 1024 : n + n / 2;
    w->symbol = malloc((size_t)w->room * sizeof *w->symbol);
    w->heap = malloc((size_t)w->room * 3 * sizeof *w->heap);
    if (w->symbol && w->heap)
        return 0;
    w->room = 0;
    return -ENOMEM;
}

/* ---- the heap ---- */

static void heap_push(struct iz_bpe_work *w, uint64_t v)
{
    int64_t i = w->heap_count++;

    for (; i > 0 && w->heap[(i - 1) / 2] > v; i = (i - 1) / 2)
        w->heap[i] = w->heap[(i - 1) / 2];
    w->heap[i] = v;
}

static uint64_t heap_pop(struct iz_bpe_work *w)
{
    uint64_t top = w->heap[0], v = w->heap[--w->heap_count];
    int64_t i = 0;

    for (int64_t child; (child = 2 * i + 1) < w->heap_count; i = child) {
        child +=
            child + 1 < w->heap_count && w->heap[child + 1] < w->heap[child];
        if (w->heap[child] >= v)
            break;
        w->heap[i] = w->heap[child];
    }
    w->heap[i] = v;
    return top;
}

/* ---- one piece ---- */

/* Looks up the pair that begins at a position. */
static void pair_update(const struct iz_bpe *b, struct iz_bpe_work *w,
                        int32_t at)
{
    struct symbol *s = &w->symbol[at];
    const struct iz_merge *m;

    s->rank = NO_RANK;
    if (s->next < 0)
        return;
    m = place(&b->merges, pair_of(s->id, w->symbol[s->next].id));
    if (m->pair == UINT64_MAX)
        return;
    s->rank = m->rank;
    heap_push(w, (uint64_t)m->rank << 32 | (uint64_t)at);
}

static void list_begin(const struct iz_bpe *b, struct iz_bpe_work *w,
                       const char *text, int32_t n)
{
    w->heap_count = 0;
    for (int32_t i = 0; i < n; i++)
        w->symbol[i] = (struct symbol){
            .id = b->byte_id[(unsigned char)text[i]],
            .previous = i - 1,
            .next = i + 1 < n ? i + 1 : -1,
        };
    for (int32_t i = 0; i < n; i++)
        pair_update(b, w, i);
}

static void merge_at(const struct iz_bpe *b, struct iz_bpe_work *w, int32_t at)
{
    struct symbol *s = &w->symbol[at], *gone = &w->symbol[s->next];

    s->id = place(&b->merges, pair_of(s->id, gone->id))->id;
    s->next = gone->next;
    gone->rank = NO_RANK;
    if (s->next >= 0)
        w->symbol[s->next].previous = at;
    pair_update(b, w, at);
    if (s->previous >= 0)
        pair_update(b, w, s->previous);
}

static int merge_all(const struct iz_bpe *b, struct iz_bpe_work *w,
                     const char *text, int64_t bytes, struct iz_ids *out)
{
    assert(bytes > 0 && bytes <= INT32_MAX);
    if (room(w, bytes))
        return -ENOMEM;
    list_begin(b, w, text, (int32_t)bytes);
    while (w->heap_count > 0) {
        uint64_t top = heap_pop(w);
        int32_t at = (int32_t)(top & UINT32_MAX);

        if (w->symbol[at].rank == (int32_t)(top >> 32)) /* not an old pair */
            merge_at(b, w, at);
    }
    for (int32_t i = 0; i >= 0; i = w->symbol[i].next)
        out->id[out->count++] = w->symbol[i].id;
    return 0;
}

static void cache_fill(struct cached *c, const char *text, int64_t bytes,
                       const int32_t *id, int64_t ids)
{
    if (bytes > CACHE_BYTES || ids > CACHE_IDS)
        return;
    c->bytes = (uint8_t)bytes;
    c->ids = (uint8_t)ids;
    memcpy(c->text, text, (size_t)bytes);
    memcpy(c->id, id, (size_t)ids * sizeof *id);
}

static bool is_cached(const struct cached *c, const char *text, int64_t bytes)
{
    return c->bytes == bytes && memcmp(c->text, text, (size_t)bytes) == 0;
}

int iz_bpe_encode(const struct iz_bpe *b, struct iz_bpe_work *w,
                  const char *text, int64_t bytes, struct iz_ids *out)
{
    struct cached *c = &w->cache[bytes <= CACHE_BYTES
                                     ? iz_bytes_hash(text, bytes) % CACHE_SLOTS
                                     : 0];
    int64_t first = out->count;
    int32_t whole;

    if (bytes == 0)
        return 0;
    if (iz_ids_room(out, bytes))
        return -ENOMEM;
    if (is_cached(c, text, bytes)) {
        memcpy(out->id + first, c->id, c->ids * sizeof *c->id);
        out->count += c->ids;
        return 0;
    }
    whole = b->ignore_merges ? iz_words_find(&b->words, text, bytes) : -1;
    if (whole >= 0)
        out->id[out->count++] = whole;
    else if (merge_all(b, w, text, bytes, out))
        return -ENOMEM;
    cache_fill(c, text, bytes, out->id + first, out->count - first);
    return 0;
}
