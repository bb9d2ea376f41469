/* SPDX-License-Identifier: Apache-2.0 */
/* libFuzzer: any bytes as a tokenizer.json.  If it is accepted, its tokens are
 * within its vocabulary. */
#include <stdlib.h>
#include <string.h>

#include "runtime/tokenizer.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char text[] = "it's  \xc3\xa9 12\n\xff<|endoftext|>";
    struct iz_tokenizer *t;
    struct iz_encoder *e;
    struct iz_ids ids = {0};

    if (iz_tokenizer_open_json(&t, "fuzz", (const char *)data, (int64_t)size))
        return 0;
    if (iz_encoder_open(&e, t) == 0) {
        for (int special = 0; special < 2; special++)
            iz_encode(e, text, (int64_t)strlen(text), special, &ids);
        for (int64_t i = 0; i < ids.count; i++)
            if (ids.id[i] < 0 || ids.id[i] >= iz_tokenizer_vocab(t))
                abort();
    }
    free(ids.id);
    iz_encoder_close(&e);
    iz_tokenizer_close(&t);
    return 0;
}
