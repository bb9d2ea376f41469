# SPDX-License-Identifier: Apache-2.0
"""Reads what one rank left: the program's description, and tasks.rec, data.rec
and paje.trace of starpu_fxt_tool.  Line by line into arrays of numbers, so that
a trace of a million tasks stays far below 2 GB.  Columns of Paje events are
found by their names in the header, because StarPU adds some now and then."""
import json
import re
from array import array

# of a task's tag; see codelets/task/task.h
PLACE_BITS, UNIT_BITS, BYTES_BITS = 4, 16, 40
TOKEN = re.compile(r'"([^"]*)"|(\S+)')
# States of a worker in which it neither works for a task nor prepares one.
NOT_RUNTIME = {"Idle", "Sleeping", "Initializing", "Deinitializing",
               "Executing"}


class BadTrace(Exception):
    """The files are not what they should be."""


class Tasks:
    """One array per property; times in us since the begin of the trace."""

    def __init__(self):
        self.begin, self.end = array("d"), array("d")
        self.kind, self.worker, self.place = array("b"), array("h"), array("b")
        self.unit, self.turn, self.step = array("i"), array("i"), array("i")
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

    @property
    def units(self):
        return self.about["units"]

    def name(self):
        return f"rank {self.number}"


def read_about(path):
    with open(path, encoding="utf-8") as f:
        return json.load(f)


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

def tokens(line):
    return [a or b for a, b in TOKEN.findall(line)]


class Paje:
    """The events of a Paje file with their fields by name."""

    def __init__(self, path):
        self.file = open(path, encoding="utf-8", errors="replace")
        self.names = {}  # number of an event: its name
        self.fields = {}  # and of its fields

    def close(self):
        self.file.close()

    def define(self, words):
        if words[0] == "EventDef":
            self.number = words[2]
            self.names[self.number] = words[1].removeprefix("Paje")
            self.fields[self.number] = []
        elif words[0] != "EndEventDef":
            self.fields[self.number].append(words[0])

    def events(self, wanted):
        """Yields (name, {field: value}) of the events whose name is wanted."""
        for line in self.file:
            if line.startswith("%"):
                words = line[1:].split()
                if words:
                    self.define(words)
                continue
            number = line.split(None, 1)[:1]
            if not number or self.names.get(number[0]) not in wanted:
                continue
            values = tokens(line)
            yield (self.names[number[0]],
                   dict(zip(self.fields[number[0]], values[1:])))


def worker_number(container):
    """w12 -> 12; None: no worker."""
    m = re.fullmatch(r"(?:\d+_)?w(\d+)", container)
    return int(m.group(1)) if m else None


class PajeReader:
    """Collects from paje.trace what the task records do not have."""

    WANTED = {"SetState", "SetVariable", "NewEvent", "DefineEntityValue"}

    def __init__(self, rank):
        self.rank = rank
        self.label = {}  # alias of a state: its name
        self.state = {}  # worker: (since, name)
        self.spans = {}

    def leave(self, worker, now):
        since, name = self.state.pop(worker, (0, None))
        if name and name not in NOT_RUNTIME and now > since:
            self.spans.setdefault(worker, []).append((since, now))

    def set_state(self, e):
        worker = worker_number(e.get("Container", ""))
        if e.get("Type") != "WS" or worker is None:
            return
        now, value = float(e["Time"]), e["Value"]
        self.leave(worker, now)
        name = self.label.get(value, value)
        if name not in self.rank.codelets:
            self.state[worker] = (now, name)

    def read(self, path):
        ready, paje = [], Paje(path)
        for name, e in paje.events(self.WANTED):
            if name == "SetState":
                self.set_state(e)
            elif name == "SetVariable":
                if e["Type"] == "nready":
                    ready.append((float(e["Time"]), float(e["Value"])))
            elif name == "NewEvent":
                if e.get("Value") == "begin of the trace":
                    self.rank.zero_ms = float(e["Time"])
            else:
                self.label[e.get("Alias", e["Name"])] = e["Name"]
        paje.close()
        return ready


# ---- tasks.rec ----

def split_tag(tag):
    """(kind, place, unit, bytes); unit -1: none."""
    unit = tag >> BYTES_BITS & ((1 << UNIT_BITS) - 1)
    where = tag >> (UNIT_BITS + BYTES_BITS)
    return (where >> PLACE_BITS, where & ((1 << PLACE_BITS) - 1),
            -1 if unit >> 15 else unit, tag & ((1 << BYTES_BITS) - 1))


class TaskReader:
    """Fills rank.tasks, in the order of their begin on each worker."""

    def __init__(self, rank):
        self.rank = rank
        self.handle = {}  # of StarPU: index in rank.handles
        self.before = {}  # job: jobs that it depends on, of what is no task
        self.jobs_before = {}  # the same of the tasks
        self.rows = []

    def read_handles(self, path):
        for r in records(path):
            self.handle[r["Handle"]] = len(self.rank.handles)
            self.rank.handles.append((r.get("Name", ""), int(r["Size"])))

    def data_of(self, r):
        out = []
        for h, mode in zip(r.get("Handles", "").split(),
                           r.get("Modes", "").split()):
            if h in self.handle:
                out.append(2 * self.handle[h] + (mode == "W"))
        return out

    def take(self, r, zero_ms):
        job = int(r["JobId"])
        before = [int(j) for j in r.get("DependsOn", "").split()]
        ours = r.get("Name") in self.rank.codelets
        if not ours or "EndTime" not in r or "WorkerId" not in r:
            self.before[job] = before
            return
        kind, place, unit, size = split_tag(int(r["Tag"], 16))
        numbers = [int(n) for n in r.get("Iteration", "").split()] + [-1, -1]
        self.jobs_before[job] = before
        begin = (float(r.get("StartTime", 0)) - zero_ms) * 1e3
        end = (float(r["EndTime"]) - zero_ms) * 1e3
        self.rows.append((end, begin, int(r["WorkerId"]), kind, place, unit,
                          numbers[1], numbers[0], size,
                          float(r.get("GFlop", 0)) * 1e9, job,
                          int(r.get("Priority", 0)), self.data_of(r)))

    def resolve(self, index, job):
        """Tasks before a job, through what StarPU itself put between them."""
        found, todo, seen = set(), list(self.jobs_before[job]), set()
        while todo:
            j = todo.pop()
            if j in index:
                found.add(index[j])
            elif j not in seen:
                seen.add(j)
                todo += self.before.get(j, ())
        return sorted(found)

    def read(self, path, zero_ms):
        for r in records(path):
            self.take(r, zero_ms)
        self.rows.sort()
        self.fill()

    def fill(self):
        """A worker executes one task after the other: what it was handed
        before the end of the last one began when that one ended."""
        t, last = self.rank.tasks, {}
        index = {row[10]: i for i, row in enumerate(self.rows)}
        for row in self.rows:
            end, begin, worker = row[:3]
            t.begin.append(min(end, max(begin, last.get(worker, begin))))
            t.end.append(end)
            last[worker] = end
            for column, value in zip((t.worker, t.kind, t.place, t.unit, t.turn,
                                      t.step, t.bytes, t.flops, t.job,
                                      t.priority), row[2:12]):
                column.append(value)
            t.data.extend(row[12])
            t.first_datum.append(len(t.data))
            t.deps.extend(self.resolve(index, row[10]))
            t.first_dep.append(len(t.deps))
        self.rows = []


def read_rank(about, folder):
    """One rank from the folder that starpu_fxt_tool wrote."""
    rank = Rank(about)
    paje = PajeReader(rank)
    ready = paje.read(folder / "paje.trace")
    if rank.zero_ms is None:
        raise BadTrace(f"{folder}/paje.trace does not say where the trace "
                       "begins")
    zero = rank.zero_ms
    for when, n in ready:
        if when >= zero:
            rank.ready.extend(((when - zero) * 1e3, n))
    rank.runtime_us = {w: [((a - zero) * 1e3, (b - zero) * 1e3)
                           for a, b in s if b > zero]
                       for w, s in paje.spans.items()}
    tasks = TaskReader(rank)
    tasks.read_handles(folder / "data.rec")
    tasks.read(folder / "tasks.rec", zero)
    if not len(rank.tasks):
        raise BadTrace(f"{folder}/tasks.rec has no task of izar")
    return rank


def align(ranks):
    """Puts all ranks on the clock of the first.  Ranks of one host have one
    clock; between hosts the trace began behind a barrier, at the same time."""
    first = {}
    base = ranks[0].about["begin_ns"]
    for r in ranks:
        about = r.about
        host = first.setdefault(about["host"], about["begin_ns"])
        same = about["host"] == ranks[0].about["host"]
        shift = (about["begin_ns"] - (base if same else host)) / 1e3
        t = r.tasks
        if shift:
            for column in (t.begin, t.end):
                for i, v in enumerate(column):
                    column[i] = v + shift
            for i in range(0, len(r.ready), 2):
                r.ready[i] += shift
            r.runtime_us = {w: [(a + shift, b + shift) for a, b in s]
                            for w, s in r.runtime_us.items()}
