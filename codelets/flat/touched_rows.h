/* SPDX-License-Identifier: Apache-2.0 */
/* The rows of a table that a step touches.  Only these are gathered and
 * reduced, packed: end to end in ascending order.  "flat" is a position in all
 * rows of the table, end to end. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

/* Borrowed numbers of touched rows, ascending, each once; cols: elements of a
 * row. */
struct iz_touched {
    const int32_t *row;
    int64_t n, cols;
};

/* The touched rows of all units of a model are one buffer: first[units + 1],
 * then the rows of unit u from first[u] to first[u + 1] - 1. */
int64_t iz_touched_list_bytes(int units, int64_t rows);
struct iz_touched iz_touched_of(const void *list, int units, int unit,
                                int64_t cols);

/* Where row r is in row[n], ascending: the first that is not below it. */
int64_t iz_touched_find(const int32_t *row, int64_t n, int64_t r);

/* Elements of touched rows before a flat position: where it is, packed. */
int64_t iz_touched_packed(const struct iz_touched *r, int64_t flat);

static inline int64_t iz_touched_elems(const struct iz_touched *r)
{
    return r->n * r->cols;
}

/* Touched elements that follow each other. */
struct iz_touched_range {
    int64_t flat, packed, n;
    int64_t next; /* the row behind it in the list */
};

/* The next range within the flat positions [from, to); a range of zeros begins.
 * False: there is none. */
bool iz_touched_next(const struct iz_touched *r, int64_t from, int64_t to,
                     struct iz_touched_range *p);

/* Copies the touched rows within flat positions [from, to), elements of
 * `size` bytes.  `flat` begins with position `from`, `packed` with the first
 * touched row. */
void iz_touched_pack(const struct iz_touched *r, int64_t from, int64_t to,
                     int64_t size, void *packed, const void *flat);
void iz_touched_unpack(const struct iz_touched *r, int64_t from, int64_t to,
                       int64_t size, void *flat, const void *packed);

/* Sorts n keys and drops repetitions; returns how many are left.  scratch: n
 * keys. */
int64_t iz_touched_sort(uint64_t *key, uint64_t *scratch, int64_t n);
