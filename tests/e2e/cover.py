# SPDX-License-Identifier: Apache-2.0
"""A covering array: few rows in which every pair of values of two factors, and
every combination named besides, occurs at least once.  Greedy, seeded."""
import itertools
import random

CANDIDATES = 24  # rows tried for each one that is taken


def goals_of(factors, valid, extra=()):
    """All that must occur: sets of (factor, value)."""
    goals = {frozenset(g.items()) for g in extra}
    for a, b in itertools.combinations(factors, 2):
        for x, y in itertools.product(factors[a], factors[b]):
            if valid({a: x, b: y}):
                goals.add(frozenset({(a, x), (b, y)}))
    return goals


def fill(row, factors, valid, goals, rng):
    """Completes a row, value by value, with what covers most."""
    rest = [f for f in factors if f not in row]
    rng.shuffle(rest)
    for f in rest:
        def gain(v, f=f):
            pairs = sum(frozenset({(f, v), item}) in goals
                        for item in row.items())
            return pairs, rng.random()
        row[f] = max((v for v in factors[f] if valid({**row, f: v})), key=gain)
    return row


def rows(factors, valid, extra=(), seed=1):
    """`valid` judges partial rows, and every valid one can be completed."""
    rng = random.Random(seed)
    goals, out = goals_of(factors, valid, extra), []
    while goals:
        first = sorted(goals, key=lambda g: (-len(g), repr(sorted(g))))
        tried = [fill(dict(rng.choice(first[:50])), factors, valid, goals, rng)
                 for _ in range(CANDIDATES)]

        def covered(row):
            items = set(row.items())
            return {g for g in goals if g <= items}
        best = max(tried, key=lambda row: len(covered(row)))
        goals -= covered(best)
        out.append({f: best[f] for f in factors})
    return out
