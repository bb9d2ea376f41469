/* SPDX-License-Identifier: Apache-2.0 */
/* See cores_share.h.  Where any two sets are apart or one holds the other, the
 * processors of a set that are in no smaller one have the same contenders: the
 * ranks whose sets hold it.  Those with the fewest come first, so that a rank
 * has what nobody else can take before it is given of what others need. */
#include "runtime/machine/cores_share.h"

#include <assert.h>
#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>

#include "codelets/base/take.h"

struct share {
    int n;
    const hwloc_bitmap_t *set;
    hwloc_bitmap_t *own;
    int *give;           /* of the processors at hand, to each rank */
    hwloc_bitmap_t atom; /* these */
};

static bool holds(const struct share *s, int outer, int inner)
{
    return hwloc_bitmap_isincluded(s->set[inner], s->set[outer]);
}

static bool same(const struct share *s, int a, int b)
{
    return hwloc_bitmap_isequal(s->set[a], s->set[b]);
}

static bool find_cross(const struct share *s, int cross[2])
{
    for (int a = 0; a < s->n; a++)
        for (int b = a + 1; b < s->n; b++)
            if (hwloc_bitmap_intersects(s->set[a], s->set[b]) &&
                !holds(s, a, b) && !holds(s, b, a)) {
                cross[0] = a;
                cross[1] = b;
                return true;
            }
    return false;
}

/* The contender with the fewest processors so far; of several the last. */
static int poorest(const struct share *s, int inner)
{
    int best = -1, least = 0;
    for (int r = 0; r < s->n; r++) {
        int has = hwloc_bitmap_weight(s->own[r]) + s->give[r];
        if (holds(s, r, inner) && (best < 0 || has <= least)) {
            best = r;
            least = has;
        }
    }
    return best;
}

/* What is in the set of rank r and in none inside of it, end to end. */
static void share_atom(struct share *s, int r)
{
    hwloc_bitmap_copy(s->atom, s->set[r]);
    for (int q = 0; q < s->n; q++) {
        s->give[q] = 0;
        if (holds(s, r, q) && !same(s, r, q))
            hwloc_bitmap_andnot(s->atom, s->atom, s->set[q]);
    }
    for (int left = hwloc_bitmap_weight(s->atom); left > 0; left--)
        s->give[poorest(s, r)]++;
    int at = -1;
    for (int q = 0; q < s->n; q++)
        while (s->give[q]-- > 0) {
            at = hwloc_bitmap_next(s->atom, at);
            hwloc_bitmap_set(s->own[q], (unsigned)at);
        }
}

/* Each set once, those that hold others before these. */
static void share_all(struct share *s)
{
    int largest = 0;
    for (int r = 0; r < s->n; r++) {
        int size = hwloc_bitmap_weight(s->set[r]);
        largest = size > largest ? size : largest;
    }
    for (int size = largest; size > 0; size--)
        for (int r = 0; r < s->n; r++) {
            bool first = hwloc_bitmap_weight(s->set[r]) == size;
            for (int q = 0; q < r && first; q++)
                first = !same(s, q, r);
            if (first)
                share_atom(s, r);
        }
}

/* For rank r, of the ranks with its set the i-th, the i-th of it in turn. */
static void take_in_turn(struct share *s, int r)
{
    int i = 0, at = -1;
    for (int q = 0; q < r; q++)
        i += same(s, q, r);
    for (i %= hwloc_bitmap_weight(s->set[r]); i >= 0; i--)
        at = hwloc_bitmap_next(s->set[r], at);
    hwloc_bitmap_set(s->own[r], (unsigned)at);
}

int iz_share_out(hwloc_bitmap_t *set, int n, int cross[2])
{
    struct share s = {.n = n, .set = set};
    assert(n > 0);
    if (find_cross(&s, cross))
        return -EINVAL;
    s.own = iz_take(n, sizeof(*s.own), "cores");
    s.give = iz_take(n, sizeof(*s.give), "cores");
    s.atom = hwloc_bitmap_alloc();
    for (int i = 0; i < n; i++)
        s.own[i] = hwloc_bitmap_alloc();
    share_all(&s);
    for (int i = 0; i < n; i++)
        if (hwloc_bitmap_iszero(s.own[i]))
            take_in_turn(&s, i);
    for (int i = 0; i < n; i++) {
        hwloc_bitmap_copy(set[i], s.own[i]);
        hwloc_bitmap_free(s.own[i]);
    }
    hwloc_bitmap_free(s.atom);
    free(s.own);
    free(s.give);
    return 0;
}
