# SPDX-License-Identifier: Apache-2.0
"""What the numbers of a trace say: busy times, hidden shares, bytes per link,
memory in use.  Times in us."""
import bisect
import statistics

COMPUTE = ("forward", "backward", "eval", "sample")
TRANSFER = ("load", "fetch", "reduce", "offload", "store", "snapshot", "save")
WORKER_KINDS = ("compute", "host", "comm", "up", "down", "io")  # enum iz_where
# What crosses each, as in WORKER_KINDS.
LINKS = {"network": "comm", "to the GPU": "up", "to the host": "down",
         "disk read": "io", "disk write": "io"}


# ---- intervals ----

def unite(spans):
    """Sorted, joined where they touch."""
    out = []
    for a, b in sorted(s for s in spans if s[0] < s[1]):
        if out and a <= out[-1][1]:
            out[-1][1] = max(out[-1][1], b)
        else:
            out.append([a, b])
    return out


def length(united):
    return sum(b - a for a, b in united)


def cut(spans, begin, end):
    return [(max(a, begin), min(b, end)) for a, b in spans
            if b > begin and a < end]


class Cover:
    """How much of a span lies in a united list."""

    def __init__(self, united):
        self.begin = [a for a, _ in united]
        self.end = [b for _, b in united]

    def of(self, a, b):
        total, i = 0.0, bisect.bisect_right(self.end, a)
        while i < len(self.begin) and self.begin[i] < b:
            total += min(b, self.end[i]) - max(a, self.begin[i])
            i += 1
        return total


# ---- the window ----

def clips(rank):
    """The tasks that end a step.  An evaluation has a clip too, but not at the end
    of the graph of a step."""
    t, clip = rank.tasks, rank.kinds.index("clip")
    last = 2 * len(rank.units)
    return [i for i in range(len(t)) if t.kind[i] == clip and t.position[i] == last]


def step_ends(rank):
    """[(step, its end)] in order."""
    t = rank.tasks
    return sorted((t.step[i], t.end[i]) for i in clips(rank))


def window(ranks):
    """From the end of one step to that of another: whole steps, each with the
    optimizer of the one before under it.  (begin, end, steps).  A trace of one
    step is taken as it is."""
    ends = step_ends(ranks[0])
    if len(ends) > 1:
        return ends[0][1], ends[-1][1], len(ends) - 1
    t = ranks[0].tasks
    return min(t.begin), max(t.end), 1


def indexes(rank, begin, end):
    t = rank.tasks
    return [i for i in range(len(t)) if t.end[i] > begin and t.begin[i] < end]


def collect(groups, rank, begin, end, key):
    """Adds the tasks that end in the window to their groups; key(i): the group of
    a task, or None.  Returns the cover of the forwards and backwards that may
    run beside them."""
    t, inside = rank.tasks, indexes(rank, begin, end)
    compute = Cover(unite([(t.begin[i], t.end[i]) for i in inside
                           if rank.kinds[t.kind[i]] in COMPUTE]))
    for i in inside:
        name = key(i) if begin < t.end[i] <= end else None
        if name is None:
            continue
        g = groups.setdefault(name, {
            "spans": [], "bytes": 0, "flops": 0.0, "hidden_us": 0.0,
            "limit": rank.about["rates"].get(WORKER_KINDS[t.where[i]]) or {}})
        g["spans"].append((t.begin[i], t.end[i]))
        g["bytes"] += t.bytes[i]
        g["flops"] += t.flops[i]
        g["hidden_us"] += compute.of(t.begin[i], t.end[i])
    return compute


def part(some, of):
    return 100 * some / of if of else None


# ---- workers ----

def worker_name(rank, w):
    """What a worker is there for, numbered where there are several."""
    title = {"compute": "GPU", "host": "CPU", "comm": "collectives",
             "up": "copies to GPU", "down": "copies to host", "io": "disk"}
    workers = rank.about["workers"]
    same = [i for i, p in enumerate(workers) if p == workers[w]]
    number = f" {same.index(w)}" if len(same) > 1 else ""
    return title[workers[w]] + number


def is_transfer(rank, i):
    """Moves bytes over a link, rather than adding within one memory."""
    t = rank.tasks
    return (rank.kinds[t.kind[i]] in TRANSFER and
            WORKER_KINDS[t.where[i]] not in ("compute", "host"))


def workers(ranks, begin, end):
    """Rows of busy, transfer, runtime and idle parts of the window."""
    rows, span = [], end - begin
    for rank in ranks:
        t = rank.tasks
        busy = {w: ([], []) for w in range(len(rank.about["workers"]))}
        for i in indexes(rank, begin, end):
            busy[t.worker[i]][is_transfer(rank, i)].append(
                (t.begin[i], t.end[i]))
        for w, (work, moves) in busy.items():
            work_us, moves_us = (length(unite(cut(x, begin, end)))
                                 for x in (work, moves))
            taken = Cover(unite(work + moves))
            own = unite(cut(rank.runtime_us.get(w, ()), begin, end))
            runtime_us = sum(b - a - taken.of(a, b) for a, b in own)
            rows.append({
                "rank": rank.number, "worker": w, "name": worker_name(rank, w),
                "where": rank.about["workers"][w],
                "tasks": len(work) + len(moves),
                "busy_us": work_us, "transfer_us": moves_us,
                "runtime_us": runtime_us,
                "idle_us": max(0.0, span - work_us - moves_us - runtime_us)})
    return rows


# ---- kinds ----

def kinds(ranks, begin, end):
    """Rows per kind of tasks and workers: tasks that end in the window, with their
    rates and the part of their time that a forward or backward ran beside them."""
    groups, rows = {}, []
    for rank in ranks:
        t = rank.tasks
        collect(groups, rank, begin, end,
                lambda i, t=t: (t.kind[i], t.where[i]))
    for kind, where in sorted(groups):
        g, name = groups[kind, where], ranks[0].kinds[kind]
        us = [b - a for a, b in g.pop("spans")]
        total, limit = sum(us), g.pop("limit")
        for what in ("bytes", "flops"):  # the limit is of flops where there are any
            rate = g[f"{what}_per_s"] = g[what] / total * 1e6 if total else 0
            if what == "bytes" or g["flops"]:
                g["limit_percent"] = part(rate, limit.get(f"{what}_per_s")) or None
        rows.append({
            "kind": name, "codelet": ranks[0].about["kinds"][kind]["codelet"],
            "where": WORKER_KINDS[where], **g, "count": len(us),
            "total_us": total, "mean_us": total / len(us),
            "median_us": statistics.median(us), "max_us": max(us),
            "hidden_percent": (None if name in COMPUTE else
                               part(g["hidden_us"], total))})
    return rows


# ---- links ----

def link_of(rank, i):
    """Which link a task uses, or None."""
    t = rank.tasks
    where, kind = WORKER_KINDS[t.where[i]], rank.kinds[t.kind[i]]
    if where == "io":
        return "disk read" if kind == "load" else "disk write"
    return next((k for k, p in LINKS.items() if p == where and t.bytes[i]), None)


def links(ranks, begin, end):
    """Rows per rank and link: bytes of the tasks that end in the window."""
    rows = []
    for rank in ranks:
        found = {}
        compute = collect(found, rank, begin, end,
                          lambda i, rank=rank: link_of(rank, i))
        for link in filter(found.get, LINKS):
            f, spans = found[link], unite(found[link]["spans"])
            busy = length(spans)
            rate = f["bytes"] / busy * 1e6 if busy else 0
            rows.append({
                "rank": rank.number, "link": link, "tasks": len(f["spans"]),
                "bytes": f["bytes"], "busy_us": busy, "bytes_per_s": rate,
                "limit_percent": part(rate, f["limit"].get("bytes_per_s")),
                "hidden_percent": part(sum(compute.of(a, b) for a, b in spans),
                                       busy) or 0})
    return rows


def link_series(rank, begin, end, bins):
    """{link: [bytes per second in each bin]}: a task's bytes are spread over
    its time."""
    t, width, out = rank.tasks, (end - begin) / bins, {}
    for i in indexes(rank, begin, end):
        link = link_of(rank, i)
        if not link:
            continue
        row = out.setdefault(link, [0.0] * bins)
        a, b = t.begin[i], max(t.end[i], t.begin[i] + 1e-3)
        rate = t.bytes[i] / (b - a)
        first = max(0, int((a - begin) / width))
        for k in range(first, min(bins - 1, int((b - begin) / width)) + 1):
            left = begin + k * width
            row[k] += rate * max(0.0, min(b, left + width) - max(a, left))
    return {link: [v / width * 1e6 for v in row] for link, row in out.items()}


# ---- memory ----

def live_spans(rank, begin, end):
    """[(handle, begin, end)] in which the content of each handle is needed: from
    the begin of the task that overwrites it to the end of the last one that
    uses that content."""
    t, open_since, last, out = rank.tasks, {}, {}, []
    for i in sorted(range(len(t)), key=t.begin.__getitem__):
        for code in t.data_of(i):
            h, fresh = code >> 1, code & 1
            if fresh:
                if h in last:
                    out.append((h, open_since.get(h, begin), last[h]))
                open_since[h] = t.begin[i]
                last[h] = t.end[i]
            else:
                last[h] = max(t.end[i], last.get(h, 0))
    for h, until in last.items():
        # What was never overwritten is kept for good.
        kept = h not in open_since
        out.append((h, open_since.get(h, begin), end if kept else until))
    return out


def memory(rank, begin, end):
    """{tier: {"plan": bytes, "classes": {class: plan}, "series": {class:
    [(time, bytes)]}}}: bytes in use, by class.  Classes without handles (scratch,
    the collectives' own buffers, files) count as in use all the time."""
    data = rank.about["data"]
    tiers, events = {}, {}
    for row in rank.about["plan"]:
        tier = tiers.setdefault(row["tier"],
                                {"plan": 0, "classes": {}, "series": {}})
        tier["plan"] += row["bytes"]
        tier["classes"][row["class"]] = row["bytes"]
    for h, a, b in live_spans(rank, begin, end):
        name, size = rank.handles[h]
        if name in data and size:
            key = data[name]["tier"], data[name]["class"]
            if key[0] in tiers:
                events.setdefault(key, []).extend(((a, size), (b, -size)))
    for (tier, name), list_ in events.items():
        tiers[tier]["series"][name] = running(list_)
    for tier in tiers.values():
        for name, size in tier["classes"].items():
            tier["series"].setdefault(name, [(begin, size)])
    return tiers


def running(events):
    """[(time, sum so far)], one entry per time."""
    total, out = 0, []
    for when, change in sorted(events):
        total += change
        if out and out[-1][0] == when:
            out[-1] = (when, total)
        else:
            out.append((when, total))
    return out


def peak(series):
    """Largest sum of several step functions."""
    events = []
    for points in series:
        last = 0
        for when, value in points:
            events.append((when, value - last))
            last = value
    return max((v for _, v in running(events)), default=0)


# ---- clocks ----

def matched(ranks):
    """Lists of (rank, task) that are one collective.  Every rank starts the
    same ones in the same order, so the n-th of a kind is the same."""
    found = {}
    for r, rank in enumerate(ranks):
        t, count = rank.tasks, {}
        comm = WORKER_KINDS.index("comm")
        for i in sorted((i for i in range(len(t)) if t.where[i] == comm),
                        key=t.begin.__getitem__):
            key = t.kind[i], t.unit[i], t.step[i], t.position[i]
            n = count[key] = count.get(key, 0) + 1
            found.setdefault((*key, n), []).append((r, i))
    return [m for m in found.values() if len(m) == len(ranks) > 1]


def waits(ranks, groups, begin, end):
    """Of the collectives that the last rank begins in the window: ([us that they
    took on each rank], [us of them that it waited for a later one], {rank: how often
    it came last})."""
    took, waited, last = [0.0] * len(ranks), [0.0] * len(ranks), {}
    for g in groups:
        latest, who = max((ranks[r].tasks.begin[i], r) for r, i in g)
        if not begin <= latest < end:
            continue
        last[who] = last.get(who, 0) + 1
        for r, i in g:
            t = ranks[r].tasks
            took[r] += t.end[i] - t.begin[i]
            waited[r] += min(latest, t.end[i]) - t.begin[i]
    return took, waited, last


def backward(ranks, groups):
    """(how many collectives end on one rank before another began, the largest
    such time): by so much the clocks are apart at least."""
    worst, n = 0.0, 0
    for g in groups:
        gap = (max(ranks[r].tasks.begin[i] for r, i in g) -
               min(ranks[r].tasks.end[i] for r, i in g))
        n += gap > 0
        worst = max(worst, gap)
    return n, worst
