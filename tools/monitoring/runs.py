# SPDX-License-Identifier: Apache-2.0
"""A run's metrics.jsonl as series over steps, read while it grows.

A file may end in the middle of a line, miss fields that a later version writes,
hold "nan" where a loss was not finite, and repeat steps: a resumed run appends to
the same file from its checkpoint on, and what it repeats counts instead of what was
there."""
import itertools
import json
import math
import pathlib
import typing

MIB = 1 << 20


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
    Series("resident_bytes", "resident memory", "MiB", scale=1 / MIB),
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
    except (TypeError, ValueError):
        return None


class Run:
    def __init__(self, path):
        self.path = pathlib.Path(path)
        if self.path.is_dir():
            self.path = self.path / "metrics.jsonl"
        self.name = self.path.parent.resolve().name \
            if self.path.name == "metrics.jsonl" else self.path.stem
        self.forget()

    def forget(self):
        self.at, self.rest = 0, b""
        self.data = {k: [] for k in KEYS}  # of (step, value), steps ascending
        self.last_step, self.restarts = None, []
        self.summary = self.limit = None
        self.ended, self.faulty = False, 0
        self.item = "item"  # token, image, ...

    # ---- reading ----

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
        for line in lines:
            if line.strip():
                self.take(line)
        return bool(new)

    def take(self, line):
        try:
            fields = json.loads(line)
            if not isinstance(fields, dict):
                raise ValueError
        except (ValueError, RecursionError):
            self.faulty += 1
            return
        step = fields.get("step")
        if isinstance(fields.get("summary"), dict):
            self.summary, self.ended = fields["summary"], True
        elif isinstance(fields.get("limit"), dict):
            self.limit = fields["limit"].get("text")
        elif isinstance(step, int) and not isinstance(step, bool):
            self.take_step(step, fields)

    def take_step(self, step, fields):
        if "loss" in fields:
            if self.last_step is not None and step <= self.last_step:
                self.go_back(step)
            self.last_step = step
            self.ended = False
        self.take_rate(fields)
        for key in KEYS:
            value = number(fields.get(key))
            if value is None:
                continue
            points = self.data[key]
            if points and points[-1][0] >= step:
                if "loss" in fields or key == "validation_loss":
                    points[-1] = (step, value)
                continue
            points.append((step, value))

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
        for points in self.data.values():
            while points and points[-1][0] >= step:
                points.pop()
        self.restarts.append(step)

    # ---- what it tells ----

    def points(self, key):
        return self.data[key]

    def drawn(self, series, smooth):
        """The points of a series, and those of its line."""
        points = [(x, y * series.scale) for x, y in self.points(series.key)]
        return points, smoothed(points, smooth) if series.smooth else points

    def marks(self, series):
        return finite(self.points(series.marks)) if series.marks else []

    def last(self, key):
        return self.data[key][-1][1] if self.data[key] else None

    def steps_wanted(self):
        """run.steps of the effective config beside the file, or None."""
        try:
            config = json.loads((self.path.parent / "config.json").read_text())
            return int(config["run"]["steps"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None

    def clock(self):
        """Unix time of each step: as written, or counted back from when the file
        was changed last."""
        written = dict(self.data["time"])
        if written:
            return written
        seconds = self.data["seconds"]
        at = self.path.stat().st_mtime - sum(s for _, s in seconds)
        times = {}
        for step, s in seconds:
            at += s
            times[step] = at
        return times

    def line(self):
        """One line about where the run is."""
        step, wanted = self.last_step, self.steps_wanted()
        if step is None:
            return f"{self.name}: no step yet"
        parts = [f"{self.name}: step {step}"]
        if wanted:
            parts[0] += f" of {wanted}"
        parts += [form.format(self.last(key)) for key, form in (
            ("loss", "loss {:.4f}"), ("validation_loss", "validation {:.4f}"),
            ("items_per_s", f"{{:.0f}} {self.item}s/s")) if self.last(key) is not None]
        last = [s for _, s in self.data["seconds"][-50:]]
        if self.ended:
            parts.append(str(self.summary.get("reason", "ended")))
        elif wanted and last and wanted > step:
            parts.append(f"{duration((wanted - step) * sum(last) / len(last))}"
                         " left")
        return "  ".join(parts)


def duration(s):
    if s < 100:
        return f"{s:.0f} s"
    if s < 6000:
        return f"{s / 60:.0f} min"
    return f"{s / 3600:.1f} h"


def open_runs(paths):
    runs = [Run(p) for p in paths]
    for r in runs:  # equal names: as much of the path as tells them apart
        same = [o for o in runs if o is not r and o.name == r.name]
        if same:
            r.name = str(r.path.parent if r.path.name == "metrics.jsonl"
                         else r.path)
    return runs


def finite(points):
    return [(x, y) for x, y in points if math.isfinite(y)]


def not_finite(points):
    return [x for x, y in points if not math.isfinite(y)]


def pieces(points):
    """Unbroken parts: a value that is not finite is a gap."""
    return [list(part) for good, part in itertools.groupby(
        points, lambda p: math.isfinite(p[1])) if good]


def smoothed(points, n):
    """Exponential mean over about n steps; gaps stay."""
    if n <= 1:
        return points
    mean, out = None, []
    for x, y in points:
        if math.isfinite(y):
            mean = y if mean is None else mean + 2 / (n + 1) * (y - mean)
        out.append((x, mean if math.isfinite(y) else y))
    return out


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


def span(runs):
    """First and last step of all runs: every picture has the same."""
    steps = [p[i][0] for r in runs for p in r.data.values() if p
             for i in (0, -1)]
    return (min(steps), max(steps)) if steps else ()


def item(runs):
    """What all runs count: token, image; "item" if they differ."""
    names = {r.item for r in runs}
    return names.pop() if len(names) == 1 else "item"


def shown(runs, only=()):
    """The series that are worth a picture: asked for, or with values that vary."""
    out = []
    for s in SERIES:
        found = [finite(r.points(s.key)) for r in runs]
        values = {y for points in found for _, y in points}
        if only and s.key not in only and s.title not in only:
            continue
        if any(r.points(s.key) for r in runs) and \
                (only or s.key != "loss_scale" or len(values) > 1):
            out.append(s._replace(unit=s.unit.replace("item", item(runs))))
    return out
