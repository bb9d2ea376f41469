# SPDX-License-Identifier: Apache-2.0
"""Reads the black boxes of a run that did not go on (runtime/report/box.h): as tasks for
the pictures, and in words, which rank waits for what."""
import re

from . import figures, records, run

LATE_S = 60  # boxes that are further apart are of different times


def read_boxes(output):
    """In order of ranks."""
    found = [box for _, box in sorted(
        (run.parse(p, "about", "rank") for p in output.glob("stuck-rank*.json")
         if re.fullmatch(r"stuck-rank\d+\.json", p.name)), key=lambda x: x[0])]
    if not found:
        raise run.Refused(f"{output} holds no stuck-rank*.json")
    return found


def running(box):
    return [x for x in box["unended"] if "worker" in x]


def rank_of(box):
    """Its tasks; those that run end where the box was written."""
    tasks = box["tasks"] + [{**x, "end_us": max(box["now_us"], x["begin_us"])}
                            for x in running(box)]
    if not tasks:
        raise run.Refused(f"the box of rank {box['about']['rank']} has no task")
    steps = [x["step"] for x in tasks]
    rank = records.Rank({**box["about"], "from": min(steps), "to": max(steps) + 1})
    where = [figures.WORKER_KINDS.index(w) for w in rank.about["workers"]]
    rows = sorted((x["end_us"], x["begin_us"], x["worker"], rank.kinds.index(x["task"]),
                   where[x["worker"]], x["unit"], x["position"], x["step"],
                   0, 0, job, 0, ()) for job, x in enumerate(tasks))
    records.fill(rank.tasks, rows, dict.fromkeys(range(len(rows)), ()))
    return rank


def task_words(box, x):
    units = box["about"]["units"]
    unit = f" of {units[x['unit']]}" if 0 <= x["unit"] < len(units) else ""
    return f"{x['task']}{unit} in step {x['step'] + 1}"


def since(box, x):
    return f"{(box['now_us'] - x['begin_us']) / 1e6:.3f} s"


def collective_words(box):
    c = box.get("collective")
    if not c:
        return "has begun no collective"
    name = f"collective {c['number']}, {c['kind']} ({c['what']})"
    if c.get("ended"):
        return f"has ended {name}"
    return f"is in {name}, since {since(box, c)}"


def words_of(box):
    a, head = box["about"], f"rank {box['about']['rank']}"
    yield (f"{head} on {a['host']}, pid {box['pid']}, {box['step']} steps submitted: "
           f"{box['reason']}")
    yield f"{head} {collective_words(box)}"
    for x in running(box):
        yield f"{head} runs {task_words(box, x)}, since {since(box, x)}"
    by_number = {x["number"]: x for x in box["unended"]}
    waiting = [x for x in box["unended"] if "after" in x]
    for x in waiting[:3]:
        after = [task_words(box, by_number[n]) for n in x["after"] if n in by_number]
        yield (f"{head}: {task_words(box, x)} waits for " +
               (", ".join(after) if after else "a worker"))
    if len(waiting) > 3:
        yield f"{head}: {len(waiting)} tasks or more wait"


def between_ranks(boxes):
    """Who is behind: all ranks begin the same collectives in the same order."""
    about = boxes[0]["about"]
    lost = set(range(about["ranks"])) - {b["about"]["rank"] for b in boxes}
    for rank in sorted(lost):
        yield f"rank {rank} wrote none: it is stopped or gone, or on another host"
    times = [b["time"] for b in boxes]
    if max(times) - min(times) > LATE_S:
        yield "the boxes are of different times: some may be of a run before"
    at = {b["about"]["rank"]: b.get("collective", {}).get("number", 0) for b in boxes}
    last = min(at.values())
    behind = sorted(r for r, n in at.items() if n == last)
    if last < max(at.values()):
        yield (f"rank{'s'[:len(behind) > 1]} {', '.join(map(str, behind))} "
               f"{'are' if len(behind) > 1 else 'is'} behind the others, which have "
               f"begun collective {max(at.values())}")


def words(boxes):
    return [*between_ranks(boxes), *(w for b in boxes for w in words_of(b))]


def read_all(boxes):
    """All ranks on one clock."""
    ranks = [rank_of(b) for b in boxes]
    records.align(ranks)
    return ranks
