# SPDX-License-Identifier: Apache-2.0
"""Reads what one rank left: the program's description, and tasks.rec, data.rec
and paje.trace of starpu_fxt_tool.  Line by line into arrays of numbers, so that
a trace of a million tasks stays far below 2 GB.  Columns of Paje events are
found by their names in the header, because StarPU adds some now and then."""
import re
from array import array

# of a task's tag; see codelets/task/task.h
WHERE_BITS, UNIT_BITS, BYTES_BITS = 4, 16, 40
WORD = re.compile(r'"[^"]*"|\S+')
WORKER = re.compile(r"(?:\d+_)?w(\d+)")
# States of a worker in which it neither works for a task nor prepares one.
NOT_RUNTIME = {"Idle", "Sleeping", "Initializing", "Deinitializing",
               "Executing"}


class BadTrace(Exception):
    """The files are not what they should be."""


class Tasks:
    """One array per property; times in us since the begin of the trace."""

    def __init__(self):
        self.begin, self.end = array("d"), array("d")
        self.kind, self.worker, self.where = array("b"), array("h"), array("b")
        self.unit, self.position, self.step = array("i"), array("i"), array("i")
        self.bytes, self.flops = array("q"), array("d")
        self.job, self.priority = array("q"), array("i")
        # deps[first_dep[i]:first_dep[i + 1]]: indexes of the tasks before it
        self.deps, self.first_dep = array("i"), array("q", [0])
        # the same for its data: index of the handle * 2 + (1: overwritten)
        self.data, self.first_datum = array("i"), array("q", [0])

    def __len__(self):
        return len(self.begin)

    def deps_of(self, i):
        return self.deps[self.first_dep[i]:self.first_dep[i + 1]]

    def data_of(self, i):
        return self.data[self.first_datum[i]:self.first_datum[i + 1]]


class Rank:
    """Everything about one rank."""

    def __init__(self, about):
        self.about = about
        self.number = about["rank"]
        self.kinds = [k["name"] for k in about["kinds"]]
        self.codelets = {k["codelet"] for k in about["kinds"]}
        self.tasks = Tasks()
        self.handles = []  # (name, bytes)
        self.ready = array("d")  # time, number, time, number, ...
        self.runtime_us = {}  # worker: [(begin, end)] of StarPU's own work
        self.zero_ms = None  # the begin of the trace in the files' time
        self.shift_us = 0.0  # of that begin on the clock of all ranks

    @property
    def units(self):
        return self.about["units"]

    def name(self):
        return f"rank {self.number}"

    def unit_of(self, i):
        """The name of a task's unit, or nothing."""
        unit = self.tasks.unit[i]
        return self.units[unit] if 0 <= unit < len(self.units) else ""


def records(path):
    """Yields the records of a .rec file as dicts: "Key: value" lines, ended by
    an empty one."""
    record = {}
    with open(path, encoding="utf-8", errors="replace") as f:
        for line in f:
            key, colon, value = line.rstrip("\n").partition(": ")
            if colon:
                record[key] = value
            elif record:
                yield record
                record = {}
    if record:
        yield record


# ---- paje.trace ----

def paje_header(path):
    """{number of an event: (name, fields)}, in the order of the file."""
    events = {}
    with open(path, encoding="utf-8", errors="replace") as f:
        for line in f:
            word, *more = line[1:].split() or [""]
            if not line.startswith("%"):
                break
            if word == "EventDef":
                fields = []
                events[more[1]] = more[0].removeprefix("Paje"), fields
            elif word not in ("", "EndEventDef"):
                fields.append(word)
    return events


def paje_lines(path, events):
    """Yields (number, {field: value}) of these events, values as they are written."""
    with open(path, encoding="utf-8", errors="replace") as f:
        for line in f:
            number = "".join(line.split(None, 1)[:1])
            if number in events:
                yield number, dict(zip(events[number][1], WORD.findall(line)[1:]))


def paje_events(path, wanted):
    """Yields (name, {field: value}) of the events whose name is wanted."""
    events = {n: e for n, e in paje_header(path).items() if e[0] in wanted}
    for number, e in paje_lines(path, events):
        yield events[number][0], {f: v.strip('"') for f, v in e.items()}


def read_paje(rank, path):
    """What the task records do not have: the begin of the trace, how many tasks
    were ready, and when StarPU itself kept a worker busy."""
    ready, spans = [], {}
    label, state = {}, {}  # of a state's alias; of a worker: since when it is in it
    quiet = NOT_RUNTIME | rank.codelets | {None}
    for event, e in paje_events(path, {"SetState", "SetVariable", "NewEvent",
                                       "DefineEntityValue"}):
        worker = WORKER.fullmatch(e.get("Container", ""))
        if event == "DefineEntityValue":
            label[e.get("Alias", e["Name"])] = e["Name"]
        elif event == "NewEvent" and e.get("Value") == "begin of the trace":
            rank.zero_ms = float(e["Time"])
        elif event == "SetVariable" and e["Type"] == "nready":
            ready.append((float(e["Time"]), float(e["Value"])))
        elif event == "SetState" and e.get("Type") == "WS" and worker:
            now, number = float(e["Time"]), int(worker[1])
            since, name = state.get(number, (now, None))
            if name not in quiet and now > since:
                spans.setdefault(number, []).append((since, now))
            state[number] = now, label.get(e["Value"], e["Value"])
    zero = rank.zero_ms
    if zero is None:
        raise BadTrace(f"{path} does not say where the trace begins")
    for when, n in ready:
        if when >= zero:
            rank.ready.extend(((when - zero) * 1e3, n))
    rank.runtime_us = {w: [((a - zero) * 1e3, (b - zero) * 1e3)
                           for a, b in s if b > zero] for w, s in spans.items()}


# ---- tasks.rec ----

def split_tag(tag):
    """(kind, where, unit, bytes); unit -1: none."""
    unit = tag >> BYTES_BITS & ((1 << UNIT_BITS) - 1)
    top = tag >> (UNIT_BITS + BYTES_BITS)
    return (top >> WHERE_BITS, top & ((1 << WHERE_BITS) - 1),
            -1 if unit >> 15 else unit, tag & ((1 << BYTES_BITS) - 1))


def task_row(r, zero_ms, handle):
    """What fill() puts into the columns; sorted by the end."""
    kind, where, unit, size = split_tag(int(r["Tag"], 16))
    # steps from 0, as in the description; a trace counts them from 1
    step, position = ([int(n) for n in r.get("Iteration", "").split()] + [0, -1])[:2]
    data = [2 * handle[h] + (mode == "W")
            for h, mode in zip(r.get("Handles", "").split(),
                               r.get("Modes", "").split()) if h in handle]
    return ((float(r["EndTime"]) - zero_ms) * 1e3,
            (float(r.get("StartTime", 0)) - zero_ms) * 1e3, int(r["WorkerId"]),
            kind, where, unit, position, step - 1, size, float(r.get("GFlop", 0)) * 1e9,
            int(r["JobId"]), int(r.get("Priority", 0)), data)


def tasks_before(job, before, index):
    """Through what StarPU itself put between them."""
    found, todo, seen = set(), list(before[job]), set()
    while todo:
        j = todo.pop()
        if j in index:
            found.add(index[j])
        elif j not in seen:
            seen.add(j)
            todo += before.get(j, ())
    return sorted(found)


def fill(t, rows, before):
    """A worker executes one task after the other: what it was handed before the
    end of the last one began when that one ended."""
    last, index = {}, {row[10]: i for i, row in enumerate(rows)}
    for end, begin, worker, *more, data in rows:
        t.begin.append(min(end, max(begin, last.get(worker, begin))))
        t.end.append(end)
        t.worker.append(worker)
        last[worker] = end
        for column, value in zip((t.kind, t.where, t.unit, t.position, t.step,
                                  t.bytes, t.flops, t.job, t.priority), more):
            column.append(value)
        t.data.extend(data)
        t.first_datum.append(len(t.data))
        t.deps.extend(tasks_before(t.job[-1], before, index))
        t.first_dep.append(len(t.deps))


def read_tasks(rank, folder):
    """Handles and tasks, in the order of their end."""
    handle = {}  # of StarPU: index in rank.handles
    before, rows = {}, []  # before: of a job, those that it depends on
    for r in records(folder / "data.rec"):
        handle[r["Handle"]] = len(rank.handles)
        rank.handles.append((r.get("Name", ""), int(r["Size"])))
    for r in records(folder / "tasks.rec"):
        before[int(r["JobId"])] = [int(j) for j in r.get("DependsOn", "").split()]
        if r.get("Name") in rank.codelets and "EndTime" in r and "WorkerId" in r:
            rows.append(task_row(r, rank.zero_ms, handle))
    if not rows:
        raise BadTrace(f"{folder}/tasks.rec has no task of izar")
    rows.sort()
    fill(rank.tasks, rows, before)


def read_rank(about, folder):
    """One rank from the folder that starpu_fxt_tool wrote."""
    rank = Rank(about)
    read_paje(rank, folder / "paje.trace")
    read_tasks(rank, folder)
    return rank


def earliest(rank):
    """The least time of all that is kept of a rank."""
    never = float("inf")
    return min(min(rank.tasks.begin), min(rank.ready[::2], default=never),
               *(min(s)[0] for s in rank.runtime_us.values()))


def align(ranks):
    """Puts all ranks on one clock, which begins with what came first.  Ranks of
    one host have one clock; between hosts the trace began behind a barrier, at
    the same time."""
    first = {}
    base = ranks[0].about
    for r in ranks:
        about = r.about
        host = first.setdefault(about["host"], about["begin_ns"])
        same = about["host"] == base["host"]
        r.shift_us = (about["begin_ns"] - (base["begin_ns"] if same else host)) / 1e3
    zero = min(earliest(r) + r.shift_us for r in ranks)
    for r in ranks:
        r.shift_us -= zero
        for column in (r.tasks.begin, r.tasks.end):
            for i, v in enumerate(column):
                column[i] = v + r.shift_us
        for i in range(0, len(r.ready), 2):
            r.ready[i] += r.shift_us
        r.runtime_us = {w: [(a + r.shift_us, b + r.shift_us) for a, b in s]
                        for w, s in r.runtime_us.items()}
