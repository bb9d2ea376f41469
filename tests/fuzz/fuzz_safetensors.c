/* SPDX-License-Identifier: Apache-2.0 */
/* libFuzzer: any bytes as a safetensors file, to the reader of published
 * models (its first byte even) and to that of checkpoints (odd); and what they
 * accept is read to its last byte. */
#include <assert.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/ckpt/rank_file.h"
#include "runtime/hf/folder.h"

/* The bytes at the end of a heap block of their own: one too far is seen. */
static void published(const uint8_t *data, size_t size)
{
    unsigned char *copy = malloc(size ? size : 1);
    struct iz_hf_file f = {.path = "fuzz", .map = copy, .bytes = (int64_t)size};
    volatile unsigned char last = 0;

    memcpy(copy, data, size);
    if (iz_hf_file_parse(&f, NULL) == 0)
        for (int i = 0; i < f.n_entries; i++) {
            const struct iz_hf_entry *e = &f.entry[i];

            assert(e->data >= copy && e->data + e->bytes <= copy + size);
            for (int64_t k = 0; k < e->bytes; k++)
                last = e->data[k];
        }
    (void)last;
    iz_hf_file_clear(&f);
    free(copy);
}

static void read_piece(const struct iz_safetensors *s, const struct iz_piece *p)
{
    float *block = malloc(IZ_BLOCK * sizeof *block);

    assert(iz_safetensors_find(s, p->name));
    for (int64_t b = 0; b < iz_piece_blocks(p); b++)
        iz_safetensors_read(s, p, b, block);
    free(block);
}

/* Its reader takes files. */
static void checkpoint(const uint8_t *data, size_t size)
{
    char path[] = "/dev/shm/izar-fuzz-XXXXXX";
    int fd = mkstemp(path);
    struct iz_safetensors *s = NULL;

    assert(fd >= 0 && write(fd, data, size) == (ssize_t)size);
    if (iz_safetensors_open(&s, path) == 0)
        for (int i = 0; i < s->n_pieces; i++)
            read_piece(s, &s->piece[i]);
    iz_safetensors_close(&s);
    close(fd);
    unlink(path);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size && data[0] % 2)
        checkpoint(data + 1, size - 1);
    else if (size)
        published(data + 1, size - 1);
    return 0;
}
