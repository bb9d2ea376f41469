# SPDX-License-Identifier: Apache-2.0
"""A run's metrics.jsonl as series over steps, read while it grows.

A file may end in the middle of a line, miss fields that a later version writes,
hold "nan" where a loss was not finite, and repeat steps: a resumed run appends to
the same file from its checkpoint on, and what it repeats counts instead of what was
there."""
import datetime
import fcntl
import importlib
import json
import math
import os
import pathlib
import sys
import typing

MOST = 2000  # points of a line in a picture
MOST_S = 1e9  # of what is left
# Okabe-Ito, told apart with any colour vision; then dashed.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9",
           "#000000")


def library(name, what, pip, has="__name__"):
    """A module, or the end with what to install for it."""
    try:
        found = importlib.import_module(name)
        if hasattr(found, has):
            return found
    except ImportError:
        pass
    sys.exit(f"monitor: {what} needs {pip}: pip install '{pip}'")


class Series(typing.NamedTuple):
    """One quantity: key in the file, what it is called, how it is drawn."""
    key: str
    title: str
    unit: str = ""
    scale: float = 1.0
    log: bool = False
    smooth: bool = False
    marks: str = None  # key of points drawn into the same picture

    @property
    def label(self):
        return f"{self.title}, {self.unit}" if self.unit else self.title


SERIES = (
    Series("loss", "loss", "nats per item", smooth=True,
           marks="validation_loss"),
    Series("grad_norm", "gradient norm", log=True, smooth=True),
    Series("lr", "learning rate"),
    Series("items_per_s", "throughput", "items/s", smooth=True),
    Series("resident_bytes", "resident memory", "MiB", scale=2 ** -20),
    Series("loss_scale", "loss scale", log=True),
    Series("router_balance", "balance of the experts"),
    Series("rewards/margins", "margin of the chosen texts", smooth=True,
           marks="eval_rewards/margins"),
    Series("rewards/accuracies", "chosen texts with more reward", smooth=True,
           marks="eval_rewards/accuracies"),
    Series("expert_most", "rows of the fullest expert", "even shares"),
)
KEYS = (*(k for s in SERIES for k in (s.key, s.marks) if k), "time", "seconds")


def number(value):
    """A float, NaN included, or None where there is none."""
    if isinstance(value, bool) or value is None:
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def printable(name):
    """A name of a file as text: bytes that are none become U+FFFD."""
    return os.fsencode(name).decode(errors="replace")


class Run:
    def __init__(self, path):
        self.path = pathlib.Path(path)
        if self.path.is_dir():
            self.path = self.path / "metrics.jsonl"
        self.name = printable(self.path.parent.resolve().name if self.path.name ==
                              "metrics.jsonl" else self.path.stem)
        self.forget()

    def forget(self):
        self.at, self.rest = 0, b""
        self.rows = {}  # step -> {key: value}
        self.series = {}  # what points() found in them
        self.last_step, self.restart = None, None
        self.summary = self.limit = None
        self.faulty = 0
        self.item = "item"  # token, image, ...

    def read(self):
        """Takes what the file has more than last time; whether it has more."""
        with open(self.path, "rb") as f:
            size = f.seek(0, 2)
            if size < self.at:  # another file under this name
                self.forget()
            f.seek(self.at)
            new = f.read()
        self.at += len(new)
        *lines, self.rest = (self.rest + new).split(b"\n")
        for line in filter(bytes.strip, lines):
            self.take(line)
        return bool(new)

    def ended(self):
        """Whether it has said its last, and nobody has the file: a run that is resumed
        has it while it loads."""
        if not self.summary:
            return False
        try:
            with open(self.path, "rb") as f:
                fcntl.flock(f, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as e:  # others: there are no locks here
            return not isinstance(e, BlockingIOError)
        return True

    def take(self, line):
        try:
            fields = json.loads(line)
            step = fields.get("step")
        except (ValueError, AttributeError, RecursionError):
            self.faulty += 1
            return
        if isinstance(fields.get("summary"), dict):
            self.summary = fields["summary"]
        elif isinstance(fields.get("limit"), dict):
            self.limit = fields["limit"].get("text")
        elif "start" in fields:
            self.summary = self.limit = None
        elif isinstance(fields.get("resumed"), dict):
            self.take_resumed(fields["resumed"].get("from"))
        elif isinstance(step, int) and not isinstance(step, bool):
            self.take_step(step, fields)

    def take_resumed(self, step):
        """What comes follows the checkpoint after this step."""
        if isinstance(step, int):
            self.go_back(step + 1)
            self.last_step = step

    def take_step(self, step, fields):
        """The values of a training step, or more of one that is there."""
        if "loss" in fields:
            if self.last_step is not None and step <= self.last_step:
                self.go_back(step)
            self.last_step = step
            self.summary = self.limit = None
        self.take_rate(fields)
        values = {k: number(fields.get(k)) for k in KEYS}
        row = {k: v for k, v in values.items() if v is not None}
        if "time" in self.rows.get(step, ()):
            row.pop("time", None)
        if row:
            self.rows.setdefault(step, {}).update(row)
            self.series.clear()

    def take_rate(self, fields):
        """A run names its rate after what the model reads: tokens_per_s,
        images_per_s, ..."""
        for key in list(fields):
            item, found, rest = key.partition("s_per_s")
            if found and not rest:
                self.item = item
                fields["items_per_s"] = fields[key]

    def go_back(self, step):
        """The run was resumed: what comes now replaces what was there."""
        for old in [s for s in self.rows if s >= step]:
            del self.rows[old]
        self.series.clear()
        self.restart = step

    def points(self, key):
        if key not in self.series:
            self.series[key] = [(step, row[key]) for step, row in
                                sorted(self.rows.items()) if key in row]
        return self.series[key]

    def last(self, key):
        return next((y for _, y in reversed(self.points(key))), None)

    def steps_wanted(self):
        """run.steps of the effective config beside the file, or None."""
        try:
            config = json.loads((self.path.parent / "config.json").read_text())
            return int(config["run"]["steps"])
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return None

    def line(self):
        """One line about where the run is, and one about what limited it."""
        step, wanted = self.last_step, self.steps_wanted()
        faulty = f"  ({self.faulty} lines not understood)" * bool(self.faulty)
        if step is None:
            return f"{self.name}: no step yet{faulty}"
        parts = [f"{self.name}: step {step}" + f" of {wanted}" * bool(wanted)]
        parts += [form.format(self.last(key)) for key, form in (
            ("loss", "loss {:.4f}"), ("validation_loss", "validation {:.4f}"),
            ("items_per_s", f"{{:.0f}} {self.item}s/s")) if self.last(key) is not None]
        last = [s for _, s in self.points("seconds")[-50:]]
        if self.summary:
            parts.append(str(self.summary.get("reason", "ended")))
        elif last and wanted and wanted > step:
            left = (wanted - step) * sum(last) / len(last)
            parts.append(f"{datetime.timedelta(seconds=round(left))} left"
                         if left < MOST_S else "years left")
        if self.restart:
            parts.append(f"(resumed at step {self.restart})")
        limit = f"\nlimited by {self.limit}" if self.limit else ""
        return "  ".join(parts) + faulty + limit


def open_runs(paths):
    runs = [Run(p) for p in paths]
    names = [r.name for r in runs]
    for r in runs:  # equal names: as much of the path as tells them apart
        if names.count(r.name) > 1:
            r.name = printable(r.path.parent if r.path.name == "metrics.jsonl"
                               else r.path)
    return runs


# ---- what is drawn ----

class Line(typing.NamedTuple):
    """What one run draws into one picture: its values, their means, the points of
    validation, the steps that are not finite."""
    number: int
    run: Run
    points: list
    even: list
    marks: list
    bad: list


def lines(series, runs, smooth, most):
    for i, r in enumerate(runs):
        points = [(x, y * series.scale) for x, y in r.points(series.key)]
        if points:
            even = smoothed(points, smooth if series.smooth else 1)
            yield Line(i, r, thinned(points, most), thinned(even, most),
                       finite(r.points(series.marks)),
                       [x for x, y in points if not math.isfinite(y)])


def logarithmic(series, drawn):
    """Whether a logarithm shows more of these lines."""
    values = [y for one in drawn for _, y in finite(one.points)]
    return series.log and bool(values) and \
        min(values) > 0 and max(values) > 30 * min(values)


def finite(points):
    return [(x, y) for x, y in points if math.isfinite(y)]


def smoothed(points, n):
    """Exponential mean over about n steps; gaps stay."""
    mean, out = None, []
    for x, y in points:
        if math.isfinite(y):
            mean = y if mean is None else mean + 2 / (n + 1) * (y - mean)
        out.append((x, mean if math.isfinite(y) else y))
    return out if n > 1 else points


def thinned(points, most):
    """At most about `most` points that keep the least and the most of each bucket
    and every gap."""
    if len(points) <= most:
        return points
    size = max(1, 2 * len(points) // most)
    out = []
    for i in range(0, len(points), size):
        bucket = points[i:i + size]
        good = finite(bucket)
        if len(good) < len(bucket):
            out.append((bucket[0][0], math.nan))
        if good:
            low, high = (f(good, key=lambda p: p[1]) for f in (min, max))
            out.extend(sorted({low, high}))
    return out


def shown(runs, only=()):
    """The series that are worth a picture: asked for, or with values that vary."""
    items = {r.item for r in runs}
    item = items.pop() if len(items) == 1 else "item"
    out = []
    for s in SERIES:
        values = {y for r in runs for _, y in r.points(s.key)}
        wanted = s.key in only if only else s.key != "loss_scale" or len(values) > 1
        if values and wanted:
            out.append(s._replace(unit=s.unit.replace("item", item)))
    return out
