# SPDX-License-Identifier: Apache-2.0
"""CSV, and event files of TensorBoard through its own package."""
import csv
import pathlib
import sys

from monitoring.runs import KEYS

TAGS = {"loss": "train/loss", "validation_loss": "validation/loss",
        "grad_norm": "train/grad_norm", "lr": "train/lr",
        "loss_scale": "train/loss_scale",
        "router_balance": "experts/balance", "expert_most": "experts/most",
        "rewards/margins": "rewards/margins",
        "rewards/accuracies": "rewards/accuracies",
        "eval_rewards/margins": "validation/rewards/margins",
        "eval_rewards/accuracies": "validation/rewards/accuracies",
        "items_per_s": "speed/items_per_s",
        "resident_bytes": "memory/resident_bytes"}


def write_csv(runs, out):
    columns = [k for k in KEYS if any(r.points(k) for r in runs)]
    w = csv.writer(out, lineterminator="\n")
    w.writerow(["run", "step", *columns])
    for r in runs:
        rows = {}
        for k in columns:
            for step, value in r.points(k):
                rows.setdefault(step, {})[k] = value
        for step in sorted(rows):
            w.writerow([r.name, step, *(repr(rows[step][k]) if k in rows[step]
                                        else "" for k in columns)])


# ---- TensorBoard ----

def library():
    """What makes an event, and what writes records of events."""
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter
    except ImportError:
        sys.exit("monitor: event files need tensorboard: pip install "
                 "tensorboard (or --csv, which needs nothing)")
    return Event, RecordWriter


def float32(v):
    """Beyond the range of a float: infinity, as TensorBoard shows it."""
    return v if not abs(v) > 3.4028235e38 else float("inf" if v > 0 else "-inf")


def event_rows(run):
    """(time, step, {tag: value}) in the order of steps.  A step without a time
    has that of the one before."""
    clock, rows = run.clock(), {}
    for key, tag in TAGS.items():
        for step, value in run.points(key):
            rows.setdefault(step, {})[tag] = float32(value)
    at = min(clock.values(), default=0.0)
    for step in sorted(rows):
        at = clock.get(step, at)
        yield at, step, rows[step]


def write_tensorboard(runs, folder):
    Event, RecordWriter = library()
    for r in runs:
        place = pathlib.Path(folder) / r.name.replace("/", "_")
        place.mkdir(parents=True, exist_ok=True)
        start = min(r.clock().values(), default=0.0)
        # One name for one run: a second export replaces the first.
        path = place / f"events.out.tfevents.{int(start):010d}.izar"
        others = [p for p in place.glob("events.out.tfevents.*") if p != path]
        if others:
            sys.exit(f"monitor: {place} has events of another run, {others[0].name}"
                     ": TensorBoard would mix them")
        writer = RecordWriter(open(path, "wb"))
        events = [Event(wall_time=start, file_version="brain.Event:2")]
        for time, step, values in event_rows(r):
            events.append(Event(wall_time=time, step=step))
            for tag, value in values.items():
                events[-1].summary.value.add(tag=tag, simple_value=value)
        for event in events:
            writer.write(event.SerializeToString())
        writer.close()
