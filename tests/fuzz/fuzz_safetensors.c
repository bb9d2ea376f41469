/* SPDX-License-Identifier: Apache-2.0 */
/* libFuzzer: any bytes as a safetensors file, to the reader of published
 * models (its first byte even) and to that of checkpoints (odd); and what they
 * accept is read to its last byte. */
#include <assert.h>
#include <stdlib.h>
#include <unistd.h>

#include "runtime/ckpt/rank_file.h"

static void published(const char *path)
{
    struct iz_st s;
    volatile unsigned char last = 0;
    if (iz_st_open(&s, "", path, NULL) == 0 && iz_st_map(&s) == 0)
        for (int i = 0; i < s.n; i++) {
            const struct iz_st_tensor *t = &s.tensor[i];
            assert(iz_st_find(&s, t->name));
            assert(t->data >= s.map && t->data + t->bytes <= s.map + s.bytes);
            for (int64_t k = 0; k < t->bytes; k++)
                last = t->data[k];
        }
    iz_st_close(&s);
}

static void read_piece(const struct iz_safetensors *s, const struct iz_piece *p)
{
    float *block = malloc(IZ_CKPT_BLOCK * sizeof(*block));
    assert(iz_safetensors_find(s, p->name));
    for (int64_t b = 0; b < iz_piece_blocks(p); b++)
        iz_safetensors_read(s, p, b, block);
    free(block);
}

static void checkpoint(const char *path)
{
    struct iz_safetensors *s;
    if (iz_safetensors_open(&s, path) == 0)
        for (int i = 0; i < s->n_pieces; i++)
            read_piece(s, &s->piece[i]);
    iz_safetensors_close(&s);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char path[] = "/dev/shm/izar-fuzz-XXXXXX";
    int fd = size ? mkstemp(path) : -1;
    if (!size)
        return 0;
    assert(fd >= 0 && write(fd, data + 1, size - 1) == (ssize_t)(size - 1));
    if (data[0] % 2)
        checkpoint(path);
    else
        published(path);
    close(fd);
    unlink(path);
    return 0;
}
