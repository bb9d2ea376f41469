# SPDX-License-Identifier: Apache-2.0
"""Writes trace.json, the Trace Event Format that Perfetto and Chrome open, event
by event."""
import json

from . import figures


class Writer:
    def __init__(self, f):
        self.f, self.first = f, True

    def put(self, **event):
        self.f.write("[\n" if self.first else ",\n")
        self.first = False
        json.dump(event, self.f, separators=(",", ":"))


def us(t):
    return round(t, 3)


def name_rank(w, rank):
    w.put(ph="M", name="process_name", pid=rank.number, tid=0,
          args={"name": rank.name()})
    for n in range(len(rank.about["workers"])):
        w.put(ph="M", name="thread_name", pid=rank.number, tid=n,
              args={"name": figures.worker_name(rank, n)})
        w.put(ph="M", name="thread_sort_index", pid=rank.number, tid=n,
              args={"sort_index": n})


def put_tasks(w, rank):
    t = rank.tasks
    for i in range(len(t)):
        args = {"unit": rank.unit_of(i), "step": t.step[i] + 1, "position": t.position[i],
                "job": t.job[i], "priority": t.priority[i]}
        if t.bytes[i]:
            args["bytes"] = t.bytes[i]
        if t.flops[i]:
            args["flops"] = round(t.flops[i])
        w.put(ph="X", name=rank.kinds[t.kind[i]], cat="task", pid=rank.number,
              tid=t.worker[i], ts=us(t.begin[i]),
              dur=us(t.end[i] - t.begin[i]), args=args)


def put_runtime(w, rank):
    for worker, spans in rank.runtime_us.items():
        for a, b in spans:
            if b - a >= 5:  # shorter ones would be most of the file
                w.put(ph="X", name="StarPU", cat="runtime", pid=rank.number,
                      tid=worker, ts=us(a), dur=us(b - a))


def put_counters(w, rank, memory):
    for i in range(0, len(rank.ready), 2):
        w.put(ph="C", name="ready tasks", pid=rank.number,
              ts=us(rank.ready[i]), args={"tasks": rank.ready[i + 1]})
    for tier, m in memory.items():
        for name, points in m["series"].items():
            for when, value in points:
                w.put(ph="C", name=f"{tier}: {name}", pid=rank.number,
                      ts=us(when), args={"bytes": value})


def write(path, ranks, memories):
    with open(path, "w", encoding="utf-8") as f:
        f.write('{"displayTimeUnit":"ms","traceEvents":')
        w = Writer(f)
        for rank, memory in zip(ranks, memories):
            name_rank(w, rank)
            put_tasks(w, rank)
            put_runtime(w, rank)
            put_counters(w, rank, memory)
            for step, end in figures.step_ends(rank):
                w.put(ph="i", s="p", name=f"end of step {step + 1}",
                      pid=rank.number, tid=0, ts=us(end))
        f.write("\n]}\n")
