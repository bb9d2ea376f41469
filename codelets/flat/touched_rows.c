/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/flat/touched_rows.h"

#include <string.h>

int64_t iz_touched_list_bytes(int units, int64_t rows)
{
    return (units + 1) * (int64_t)sizeof(int64_t) +
           rows * (int64_t)sizeof(int32_t);
}

struct iz_touched iz_touched_of(const void *list, int units, int unit,
                                int64_t cols)
{
    const int64_t *first = list;
    return (struct iz_touched){.row = (const int32_t *)(first + units + 1) +
                                      first[unit],
                               .n = first[unit + 1] - first[unit],
                               .cols = cols};
}

int64_t iz_touched_find(const int32_t *row, int64_t n, int64_t r)
{
    int64_t low = 0, high = n;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (row[middle] < r)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

int64_t iz_touched_packed(const struct iz_touched *r, int64_t flat)
{
    int64_t row = flat / r->cols, k = iz_touched_find(r->row, r->n, row);
    bool here = k < r->n && r->row[k] == row;
    return k * r->cols + (here ? flat - row * r->cols : 0);
}

/* Neighbours are one range. */
bool iz_touched_next(const struct iz_touched *r, int64_t from, int64_t to,
                     struct iz_touched_range *p)
{
    int64_t k = p->n ? p->next : iz_touched_find(r->row, r->n, from / r->cols);
    if (k >= r->n || r->row[k] * r->cols >= to)
        return false;
    int64_t begin = r->row[k] * r->cols;
    p->packed = k * r->cols;
    if (begin < from) {
        p->packed += from - begin;
        begin = from;
    }
    while (k + 1 < r->n && r->row[k + 1] == r->row[k] + 1)
        k++;
    int64_t end = (r->row[k] + INT64_C(1)) * r->cols;
    p->flat = begin;
    p->n = (end < to ? end : to) - begin;
    p->next = k + 1;
    return true;
}

void iz_touched_pack(const struct iz_touched *r, int64_t from, int64_t to,
                     int64_t size, void *packed, const void *flat)
{
    struct iz_touched_range p = {0};
    while (iz_touched_next(r, from, to, &p))
        memcpy((char *)packed + p.packed * size,
               (const char *)flat + (p.flat - from) * size,
               (size_t)(p.n * size));
}

void iz_touched_unpack(const struct iz_touched *r, int64_t from, int64_t to,
                       int64_t size, void *flat, const void *packed)
{
    struct iz_touched_range p = {0};
    while (iz_touched_next(r, from, to, &p))
        memcpy((char *)flat + (p.flat - from) * size,
               (const char *)packed + p.packed * size, (size_t)(p.n * size));
}

/* Moves the keys from `in` to `out` in the order of one byte; false: they all
 * have the same one and nothing was moved. */
static bool sort_by_byte(uint64_t *out, const uint64_t *in, int64_t n,
                         int shift)
{
    int64_t at[256] = {0}, sum = 0;
    for (int64_t i = 0; i < n; i++)
        at[in[i] >> shift & 255]++;
    for (int b = 0; b < 256; b++) {
        int64_t count = at[b];
        if (count == n)
            return false;
        at[b] = sum;
        sum += count;
    }
    for (int64_t i = 0; i < n; i++)
        out[at[in[i] >> shift & 255]++] = in[i];
    return true;
}

int64_t iz_touched_sort(uint64_t *key, uint64_t *scratch, int64_t n)
{
    uint64_t *from = key, *to = scratch;
    int64_t kept = 0;
    for (int shift = 0; n && shift < 64; shift += 8)
        if (sort_by_byte(to, from, n, shift)) {
            uint64_t *t = from;
            from = to;
            to = t;
        }
    for (int64_t i = 0; i < n; i++)
        if (i == 0 || from[i] != from[i - 1])
            key[kept++] = from[i];
    return kept;
}
