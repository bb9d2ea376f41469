/* SPDX-License-Identifier: Apache-2.0 */
/* libFuzzer: any bytes as text.  Tokens decode to the same bytes; with form C,
 * to text of which the tokens are the same. */
#include <stdlib.h>
#include <string.h>

#include "runtime/tokenizer.h"
#include "tests/tools/tokenizer/small.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void must(int good)
{
    if (!good)
        abort();
}

static void there_and_back(struct iz_tokenizer *t, struct iz_encoder *e,
                           const char *text, int64_t n, int exact)
{
    static struct iz_ids ids, again;
    int64_t bytes;
    char *back;

    ids.count = again.count = 0;
    must(iz_encode(e, text, n, false, &ids) == 0);
    back = iz_decode(t, ids.id, ids.count, &bytes);
    must(back != NULL);
    if (exact)
        must(bytes == n && memcmp(back, text, (size_t)n) == 0);
    must(iz_encode(e, back, bytes, false, &again) == 0);
    must(again.count == ids.count &&
         (ids.count == 0 ||
          memcmp(again.id, ids.id, (size_t)ids.count * sizeof *ids.id) == 0));
    free(back);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct iz_tokenizer *t[SMALL_FAMILIES];
    static struct iz_encoder *e[SMALL_FAMILIES];

    for (int f = 0; f < SMALL_FAMILIES; f++) {
        if (!t[f]) {
            t[f] = small_tokenizer((enum small_family)f);
            must(t[f] && iz_encoder_open(&e[f], t[f]) == 0);
        }
        there_and_back(t[f], e[f], (const char *)data, (int64_t)size,
                       f != SMALL_QWEN2);
    }
    return 0;
}
