# SPDX-License-Identifier: Apache-2.0
"""The critical path of the traced steps, and what a step would take if a kind of
task took half its time."""
from . import figures


class Graph:
    """All tasks of all ranks.  A collective is one node: it begins when the last
    rank has begun it.  Before a node come the tasks whose data it needs and the
    one that its worker executed before."""

    def __init__(self, ranks):
        self.ranks = ranks
        base = [0]
        for r in ranks:
            base.append(base[-1] + len(r.tasks))
        self.node = list(range(base[-1]))  # of each task
        self.groups = figures.matched(ranks)
        for g in self.groups:
            for r, i in g:
                self.node[base[r] + i] = base[g[0][0]] + g[0][1]
        self.begin, self.end, self.who = {}, {}, {}
        self.before = {}
        for r, rank in enumerate(ranks):
            self.add_rank(r, rank, base[r])
        self.order = sorted(self.begin, key=lambda n: (self.begin[n],
                                                       self.end[n]))

    def add_rank(self, r, rank, base):
        t, last = rank.tasks, {}
        for i in sorted(range(len(t)), key=t.begin.__getitem__):
            n = self.node[base + i]
            before = self.before.setdefault(n, set())
            before.update(self.node[base + d] for d in t.deps_of(i))
            if t.worker[i] in last:
                before.add(last[t.worker[i]])
            before.discard(n)
            last[t.worker[i]] = n
            if n not in self.begin or t.begin[i] > self.begin[n]:
                self.begin[n], self.who[n] = t.begin[i], (r, i)
            self.end[n] = max(self.end.get(n, 0), t.end[i])

    def kind(self, n):
        r, i = self.who[n]
        return self.ranks[r].kinds[self.ranks[r].tasks.kind[i]]

    def clips(self, begin, end):
        """The nodes of the first and the last end of a step in the window; the
        first is None if there is no other."""
        ends = self.ranks[0].tasks.end
        found = [self.node[i] for i in figures.clips(self.ranks[0])
                 if begin <= ends[i] <= end + 1e-3]
        found = sorted(found, key=self.end.get) or [
            max(self.order, key=self.end.get)]
        return found[0] if len(found) > 1 else None, found[-1]


def walk(graph, last, begin):
    """The chain of tasks that ends with `last`, newest first, back to `begin`:
    each time the one whose end came last."""
    chain, n = [], last
    while n is not None and graph.end[n] > begin:
        chain.append(n)
        before = [b for b in graph.before[n]
                  if graph.begin[b] < graph.begin[n]]
        n = max(before, key=graph.end.get, default=None)
    return chain


def shares(graph, chain, begin, end):
    """({kind: us on the path}, us between its tasks, [(task, us before it)])."""
    kinds, gaps, steps, now = {}, 0.0, [], begin
    for n in reversed(chain):
        a, b = max(graph.begin[n], now), min(graph.end[n], end)
        gap = max(0.0, a - now)
        gaps += gap
        kinds[graph.kind(n)] = kinds.get(graph.kind(n), 0) + max(0.0, b - a)
        steps.append((n, gap))
        now = max(now, b)
    return kinds, gaps, steps


def replay(graph, first, last, factor):
    """us from the end of task `first` to that of `last` if every task began as
    soon as the ones before it had ended and took factor[kind] times as long."""
    done = {}
    for n in graph.order:
        ready = max((done.get(b, 0.0) for b in graph.before[n]), default=0.0)
        time = graph.end[n] - graph.begin[n]
        done[n] = ready + time * factor.get(graph.kind(n), 1.0)
    return done[last] - (done[first] if first is not None else 0.0)


def savings(graph, begin, end, kinds):
    """{kind: part of a step that would be saved if it took half the time}."""
    first, last = graph.clips(begin, end)
    base = replay(graph, first, last, {})
    if base <= 0:
        return {}
    return {k: 1 - replay(graph, first, last, {k: 0.5}) / base for k in kinds}


ADVICE = {
    ("forward", None): "forward: computation, which is what should take time",
    ("backward", None): "backward: computation, which is what should take time",
    ("fetch", "comm"): "fetches over the network: more samples per step, or "
                       "run.schedule=breadth_first, which fetches a unit once "
                       "for all micro-batches",
    ("fetch", "up"): "fetches to the GPU: more samples per step, or "
                     "run.schedule=breadth_first",
    ("fetch", None): "copies of parameters: more samples per step",
    ("reduce", "comm"): "reductions of gradients: fewer, larger micro-batches, "
                        "since each one reduces all gradients",
    ("reduce", None): "additions of gradients: fewer, larger micro-batches",
    ("offload", None): "gradients on their way to the host: fewer, larger "
                       "micro-batches",
    ("adam", None): "the optimizer: more cores per rank, more ranks, or "
                    "smaller chunks (zero_optimization.sub_group_size)",
    ("muon", None): "the updates of Muon: more samples per step, or more ranks",
    ("norm", None): "sums of squares: more cores per rank",
    ("load", None): "reads from disk: a faster disk, more buffers "
                    "(buffer_count), or a home in memory",
    ("store", None): "writes to disk: a faster disk, more buffers "
                     "(buffer_count), or a home in memory",
    ("snapshot", None): "copies for a checkpoint: a longer run.save_interval",
    ("save", None): "writes of a checkpoint: a longer run.save_interval",
    ("clip", None): "the scalars of a step: ranks that come late to it",
    ("batch", None): "reading samples: faster storage for the data",
    ("eval", None): "evaluations: a longer run.eval_interval",
    ("sample", None): "texts of the model: fewer run.sample_tokens",
}
GAPS = ("between tasks: larger tasks (a larger micro-batch, fewer slices) or "
        "fewer workers than cores")
RING = "fetches that wait for a free buffer: run.ring (now {ring})"


def where_of(graph, kind, chain):
    """Where most of a kind's time on the path was spent."""
    time = {}
    for n in chain:
        if graph.kind(n) == kind:
            r, i = graph.who[n]
            where = figures.WORKER_KINDS[graph.ranks[r].tasks.where[i]]
            time[where] = time.get(where, 0) + graph.end[n] - graph.begin[n]
    return max(time, key=time.get, default=None)


def waits_for_ring(graph, chain):
    """Tasks on the path that are fetches right behind a use of their buffer."""
    return sum(graph.kind(later) == "fetch" and
               graph.kind(earlier) in ("forward", "backward", "eval") and
               graph.who[earlier][0] == graph.who[later][0]
               for later, earlier in zip(chain, chain[1:]))


def words(graph, chain, saved, gap_percent):
    """What would shorten a step, most important first."""
    out = []
    for kind in sorted(saved, key=saved.get, reverse=True)[:4]:
        if saved[kind] < 0.01:
            continue
        where = where_of(graph, kind, chain)
        text = ADVICE.get((kind, where)) or ADVICE[kind, None]
        out.append(f"{text}. Half of it would save "
                   f"{100 * saved[kind]:.0f} % of a step.")
    if gap_percent >= 10:
        out.append(f"{gap_percent:.0f} % of the path lies {GAPS}.")
    ring = waits_for_ring(graph, chain)
    if ring > 1:
        now = graph.ranks[0].about["ring"]
        out.append(f"{ring} times {RING.format(ring=now)}.")
    return out


def late_words(graph, waited, last, span):
    """Whether ranks wait for each other."""
    part = 100 * sum(waited) / len(waited) / span
    if part < 5:
        return []
    who = max(last, key=last.get)
    return [f"{part:.0f} % of the time a rank's collectives wait for a rank "
            f"that comes later; rank {graph.ranks[who].number} is last at "
            f"{100 * last[who] / sum(last.values()):.0f} % of them."]


def analyse(ranks, begin, end, steps):
    graph = Graph(ranks)
    _, last = graph.clips(begin, end)
    chain = walk(graph, last, begin)
    kinds, gaps, tasks = shares(graph, chain, begin, end)
    present = sorted({graph.kind(n) for n in graph.order})
    saved = savings(graph, begin, end, present)
    gap_percent = 100 * gaps / (end - begin)
    took, waited, last = figures.waits(ranks, graph.groups, begin, end)
    return {
        "step_us": (end - begin) / steps, "steps": steps,
        "kinds": {k: v / steps for k, v in kinds.items()},
        "gaps_us": gaps / steps, "saved": saved,
        "words": (words(graph, chain, saved, gap_percent) +
                  late_words(graph, waited, last, end - begin)),
        "waits": {r.number: figures.part(w, us)
                  for r, w, us in zip(ranks, waited, took)},
        "chain": [describe(graph, n, gap, begin) for n, gap in tasks],
        "clocks": clock_words(*figures.backward(ranks, graph.groups))}


def clock_words(n, apart_us):
    return [f"{n} collectives end on one rank before another began them: the ranks' "
            f"clocks are at least {apart_us:.1f} µs apart."] if n else []


def describe(graph, n, gap, begin):
    r, i = graph.who[n]
    rank = graph.ranks[r]
    t = rank.tasks
    return {"rank": rank.number, "kind": graph.kind(n), "step": t.step[i],
            "unit": rank.unit_of(i),
            "worker": figures.worker_name(rank, t.worker[i]),
            "begin_us": graph.begin[n], "task": i, "gap_us": gap,
            "us": graph.end[n] - max(graph.begin[n], begin)}
