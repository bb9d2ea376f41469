# SPDX-License-Identifier: Apache-2.0
"""A covering array: few rows in which every pair of values of two factors, and
every combination named besides, occurs at least once.  Greedy, seeded."""
import itertools
import random

CANDIDATES = 24  # rows tried for each one that is taken


def goals_of(factors, valid, extra=(), beside=None):
    """All that must occur, in an order that is always the same: sets of (factor,
    value).  `beside`: of pairs, only those with this factor."""
    goals = {frozenset(g.items()): None for g in extra}
    for a, b in itertools.combinations(factors, 2):
        for x, y in itertools.product(factors[a], factors[b]):
            if beside in (None, a, b) and valid({a: x, b: y}):
                goals[frozenset({(a, x), (b, y)})] = None
    return goals


def fill(row, factors, valid, goals, rng, few):
    """Completes a row, value by value, with what covers most; first with one of a
    few combinations."""
    def gain(more):
        pairs = itertools.product(more.items(), row.items())
        return sum(frozenset(p) in goals for p in pairs), rng.random()
    fit = [c for c in few if all(row.get(f, v) == v for f, v in c.items())
           and valid({**row, **c})]
    if fit:
        row |= max(fit, key=gain)
    rest = [f for f in factors if f not in row]
    rng.shuffle(rest)
    for f in rest:
        row[f] = max((v for v in factors[f] if valid({**row, f: v})),
                     key=lambda v, f=f: gain({f: v}))
    return row


def rows(factors, valid, extra=(), beside=None, few=(), seed=2):
    """`valid` judges partial rows, and every valid one can be completed.  `few`: the
    combinations of some factors that may occur, which have all of their pairs."""
    rng = random.Random(seed)
    goals, out = goals_of(factors, valid, extra, beside), []
    while goals:
        longest = max(map(len, goals))
        first = list(itertools.islice((g for g in goals if len(g) == longest), 50))
        tried = [fill(dict(rng.choice(first)), factors, valid, goals, rng, few)
                 for _ in range(CANDIDATES)]

        covered = [[g for g in goals if g <= set(row.items())] for row in tried]
        best = max(range(CANDIDATES), key=lambda i: len(covered[i]))
        for g in covered[best]:
            del goals[g]
        out.append({f: tried[best][f] for f in factors})
    return out
