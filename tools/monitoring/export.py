# SPDX-License-Identifier: Apache-2.0
"""CSV, and event files of TensorBoard through its own package."""
import csv
import pathlib
import sys

from monitoring.runs import KEYS, library

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
    w = csv.DictWriter(out, ["run", "step", *columns], lineterminator="\n")
    w.writeheader()
    for r in runs:
        w.writerows({"run": r.name, "step": step, **row}
                    for step, row in sorted(r.rows.items()))


def float32(v):
    """Beyond the range of a float: infinity, as TensorBoard shows it."""
    return v if not abs(v) > 3.4028235e38 else float("inf" if v > 0 else "-inf")


def write_tensorboard(runs, folder):
    Event = library("tensorboard.compat.proto.event_pb2", "an event file",
                    "tensorboard").Event
    record = library("tensorboard.summary.writer.record_writer", "an event file",
                     "tensorboard")
    for r in runs:
        place = pathlib.Path(folder) / r.name.replace("/", "_")
        place.mkdir(parents=True, exist_ok=True)
        start = next((t for _, t in r.points("time")), 0.0)
        # One name for one run: a second export replaces the first.
        path = place / f"events.out.tfevents.{int(start):010d}.izar"
        others = [p for p in place.glob("events.out.tfevents.*") if p != path]
        if others:
            sys.exit(f"monitor: {place} has events of another run, {others[0].name}"
                     ": TensorBoard would mix them")
        writer = record.RecordWriter(open(path, "wb"))
        writer.write(Event(wall_time=start,
                           file_version="brain.Event:2").SerializeToString())
        for step, row in sorted(r.rows.items()):
            event = Event(wall_time=row.get("time", start), step=step)
            for key in filter(row.__contains__, TAGS):
                event.summary.value.add(tag=TAGS[key], simple_value=float32(row[key]))
            writer.write(event.SerializeToString())
        writer.close()
