# SPDX-License-Identifier: Apache-2.0
"""Writes trace.json, the Trace Event Format that Perfetto and Chrome open, event
by event."""
import json

from . import figures


def us(t):
    return round(t, 3)


def events(rank, memory):
    t, pid = rank.tasks, rank.number
    yield dict(ph="M", name="process_name", pid=pid, tid=0, args={"name": rank.name()})
    for n in range(len(rank.about["workers"])):
        yield dict(ph="M", name="thread_name", pid=pid, tid=n,
                   args={"name": figures.worker_name(rank, n)})
        yield dict(ph="M", name="thread_sort_index", pid=pid, tid=n,
                   args={"sort_index": n})
    for i in range(len(t)):
        args = {"unit": rank.unit_of(i), "step": t.step[i] + 1,
                "position": t.position[i], "job": t.job[i], "priority": t.priority[i]}
        if t.bytes[i]:
            args["bytes"] = t.bytes[i]
        if t.flops[i]:
            args["flops"] = round(t.flops[i])
        yield dict(ph="X", name=rank.kinds[t.kind[i]], cat="task", pid=pid,
                   tid=t.worker[i], ts=us(t.begin[i]),
                   dur=us(t.end[i] - t.begin[i]), args=args)
    for worker, spans in rank.runtime_us.items():
        for a, b in spans:
            if b - a >= 5:  # shorter ones would be most of the file
                yield dict(ph="X", name="StarPU", cat="runtime", pid=pid,
                           tid=worker, ts=us(a), dur=us(b - a))
    for i in range(0, len(rank.ready), 2):
        yield dict(ph="C", name="ready tasks", pid=pid, ts=us(rank.ready[i]),
                   args={"tasks": rank.ready[i + 1]})
    for tier, m in memory.items():
        for name, points in m["series"].items():
            for when, value in points:
                yield dict(ph="C", name=f"{tier}: {name}", pid=pid, ts=us(when),
                           args={"bytes": value})
    for step, end in figures.step_ends(rank):
        yield dict(ph="i", s="p", name=f"end of step {step + 1}", pid=pid, tid=0,
                   ts=us(end))


def write(path, ranks, memories):
    with open(path, "w", encoding="utf-8") as f:
        f.write('{"displayTimeUnit":"ms","traceEvents":')
        before = "[\n"
        for rank, memory in zip(ranks, memories):
            for event in events(rank, memory):
                f.write(before + json.dumps(event, separators=(",", ":")))
                before = ",\n"
        f.write("\n]}\n")
