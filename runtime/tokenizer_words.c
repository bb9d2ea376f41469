/* SPDX-License-Identifier: Apache-2.0 */
/* The bytes of every token, by id and by bytes; see tokenizer_parts.h. */
#include "runtime/tokenizer_parts.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "codelets/base/mix.h"

uint64_t iz_bytes_hash(const void *p, int64_t n)
{
    const char *at = p;
    uint64_t h = iz_mix((uint64_t)n + IZ_GOLDEN), word;

    for (; n >= 8; n -= 8, at += 8) {
        memcpy(&word, at, 8);
        h = iz_mix(h ^ word);
    }
    word = 0;
    memcpy(&word, at, (size_t)n);
    return iz_mix(h ^ word);
}

int iz_words_open(struct iz_words *w, int32_t ids)
{
    uint64_t slots = 16;

    assert(ids >= 0 && ids <= IZ_TOKEN_MAX);
    while (slots < 2 * (uint64_t)ids)
        slots *= 2;
    *w = (struct iz_words){.ids = ids, .mask = slots - 1};
    w->word = malloc(((size_t)ids + 1) * sizeof *w->word);
    w->slot = malloc(slots * sizeof *w->slot);
    if (!w->word || !w->slot)
        return -ENOMEM;
    for (int32_t i = 0; i < ids; i++)
        w->word[i] = (struct iz_word){.bytes = -1};
    memset(w->slot, 0xff, slots * sizeof *w->slot);
    return 0;
}

void iz_words_close(struct iz_words *w)
{
    free(w->word);
    free(w->slot);
    free(w->text);
    *w = (struct iz_words){0};
}

/* The slot with this text, or the free one where it belongs. */
static int32_t *place(const struct iz_words *w, const void *text, int64_t bytes)
{
    uint64_t i = iz_bytes_hash(text, bytes);

    for (;; i++) {
        int32_t *slot = &w->slot[i & w->mask];
        const struct iz_word *word = &w->word[*slot < 0 ? 0 : *slot];

        if (*slot < 0 || (word->bytes == bytes &&
                          memcmp(w->text + word->at, text, (size_t)bytes) == 0))
            return slot;
    }
}

static int text_room(struct iz_words *w, int64_t bytes)
{
    int64_t room = w->text_room;
    char *grown;

    while (room - w->text_bytes < bytes)
        room = room ? 2 * room : 1 << 12;
    if (room == w->text_room)
        return 0;
    grown = realloc(w->text, (size_t)room);
    if (!grown)
        return -ENOMEM;
    w->text = grown;
    w->text_room = room;
    return 0;
}

int iz_words_add(struct iz_words *w, int32_t id, const void *text,
                 int64_t bytes, bool findable)
{
    assert(id >= 0 && id < w->ids && bytes >= 0 && bytes <= INT32_MAX);
    if (w->word[id].bytes >= 0)
        return -EEXIST;
    if (text_room(w, bytes))
        return -ENOMEM;
    if (findable) {
        int32_t *slot = place(w, text, bytes);

        if (*slot >= 0)
            return -EEXIST;
        *slot = id;
    }
    if (bytes > 0)
        memcpy(w->text + w->text_bytes, text, (size_t)bytes);
    w->word[id] = (struct iz_word){w->text_bytes, (int32_t)bytes};
    w->text_bytes += bytes;
    return 0;
}

int32_t iz_words_find(const struct iz_words *w, const void *text, int64_t bytes)
{
    return *place(w, text, bytes);
}
