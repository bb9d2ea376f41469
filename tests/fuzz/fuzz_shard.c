/* SPDX-License-Identifier: Apache-2.0 */
/* libFuzzer: any bytes as a token shard and its mask.  The first four bytes are
 * the sequence length, a bit for the mask, and how many of the other bytes are
 * the shard's; what is accepted is read whole. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/data/data.h"

#define VOCAB 50257

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void write_file(const char *path, const uint8_t *data, size_t size)
{
    FILE *f = fopen(path, "wb");
    if (!f || fwrite(data, 1, size, f) != size || fclose(f) != 0)
        abort();
}

static void read_all(const struct iz_data *d, int seq)
{
    int32_t input[128], target[128];
    for (int s = IZ_TRAIN; s <= IZ_VAL; s++) {
        int64_t n = iz_data_windows(d, (enum iz_split)s);
        for (int64_t i = 0; i < 2 * n && i < 500; i++) {
            iz_data_sample(d, (enum iz_split)s, i, input, target);
            for (int k = 0; k < seq; k++)
                if (input[k] < 0 || input[k] >= VOCAB || target[k] < -1 ||
                    target[k] >= VOCAB)
                    abort();
        }
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct iz_data_config c = {.val_fraction = 0.2, .document_end = -1};
    char mask[IZ_PATH_MAX];
    struct iz_data *d = NULL;
    if (size < 4)
        return 0;
    int seq = 1 + (data[0] & 127);
    size_t shard = (size_t)(data[2] | data[3] << 8);
    shard = shard < size - 4 ? shard : size - 4;
    snprintf(c.path, sizeof(c.path), "/dev/shm/izar-fuzz-%d.bin",
             (int)getpid());
    snprintf(mask, sizeof(mask), "/dev/shm/izar-fuzz-%d.mask", (int)getpid());
    write_file(c.path, data + 4, shard);
    if (data[1] & 1)
        write_file(mask, data + 4 + shard, size - 4 - shard);
    if (iz_data_look(&c, stderr) == 0 &&
        iz_data_open(&d, &c, seq, VOCAB, 1, data[1] & 2) == 0)
        read_all(d, seq);
    iz_data_close(&d);
    remove(c.path);
    remove(mask);
    return 0;
}
