/* SPDX-License-Identifier: Apache-2.0 */
/* Work arenas between two strips. */
#include "tests/codelets/gpu/scratch.h"

#include <stdlib.h>
#include <string.h>

#include "tests/codelets/ops/fixture.h"

enum { STRIP = 256, STRIP_BYTE = 0x3c };

/* Before the strip lies its distance to the start of the memory. */
struct iz_arena scratch_new(int64_t bytes, int turn)
{
    int64_t shift = 64 + turn % 4 * 64;
    char *mem = fixture_take(bytes + shift + 2 * STRIP);

    memcpy(mem + shift - sizeof mem, &mem, sizeof mem);
    memset(mem + shift, STRIP_BYTE, STRIP);
    memset(mem + shift + STRIP + bytes, STRIP_BYTE, STRIP);
    return (struct iz_arena){.base = mem + shift + STRIP, .size = bytes};
}

void scratch_free(struct iz_arena *a)
{
    char *mem;

    for (int i = 0; i < STRIP; i++) {
        assert_int_equal(a->base[i - STRIP], STRIP_BYTE);
        assert_int_equal(a->base[a->size + i], STRIP_BYTE);
    }
    memcpy(&mem, a->base - STRIP - sizeof mem, sizeof mem);
    free(mem);
    *a = (struct iz_arena){0};
}
