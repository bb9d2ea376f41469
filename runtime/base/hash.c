/* SPDX-License-Identifier: Apache-2.0 */
/* Eight independent lanes of xor, multiply, shift: the multiplier is the only
 * port that limits (8 bytes per cycle), which is far above any disk. */
#include "runtime/base/hash.h"

#include <assert.h>
#include <string.h>

#include "codelets/base/mix.h"

#define LANES 8

/* For a fixed lane a bijection of the word, for a fixed word one of the lane: a
 * single changed word can never be lost on the way to the end. */
static uint64_t absorb(uint64_t lane, uint64_t word)
{
    lane = (lane ^ word) * IZ_GOLDEN;
    return lane ^ (lane >> 32);
}

static void absorb_block(uint64_t lane[LANES], const unsigned char *p)
{
    uint64_t word[LANES];
    memcpy(word, p, sizeof(word));
    for (int i = 0; i < LANES; i++)
        lane[i] = absorb(lane[i], word[i]);
}

uint64_t iz_hash(const void *p, int64_t bytes)
{
    const int64_t block = LANES * (int64_t)sizeof(uint64_t);
    const unsigned char *from = p;
    uint64_t lane[LANES], h = (uint64_t)bytes;
    unsigned char tail[LANES * sizeof(uint64_t)] = {0};
    int64_t i;
    assert(bytes >= 0);
    for (int j = 0; j < LANES; j++)
        lane[j] = iz_mix((uint64_t)j + 1);
    for (i = 0; i + block <= bytes; i += block)
        absorb_block(lane, from + i);
    if (i < bytes) {
        memcpy(tail, from + i, (size_t)(bytes - i));
        absorb_block(lane, tail);
    }
    for (int j = 0; j < LANES; j++)
        h = iz_mix(absorb(h, lane[j]));
    return h;
}
