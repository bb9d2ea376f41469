# SPDX-License-Identifier: Apache-2.0
"""CSV, and event files of TensorBoard.

An event file is a sequence of records: length (uint64), masked CRC-32C of it, the
data, masked CRC-32C of those, all little-endian (TensorFlow's TFRecord).  The data
are messages of event.proto, of which four fields are written here."""
import csv
import pathlib
import struct
import sys

from monitoring.runs import KEYS

TAGS = {"loss": "train/loss", "validation_loss": "validation/loss",
        "grad_norm": "train/grad_norm", "lr": "train/lr",
        "loss_scale": "train/loss_scale",
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

def crc_table():
    table = []
    for n in range(256):
        for _ in range(8):
            n = n >> 1 ^ (0x82f63b78 if n & 1 else 0)  # Castagnoli, reflected
        table.append(n)
    return table


CRC = crc_table()


def masked_crc(data):
    crc = 0xffffffff
    for b in data:
        crc = CRC[(crc ^ b) & 0xff] ^ crc >> 8
    crc ^= 0xffffffff
    return ((crc >> 15 | crc << 17) + 0xa282ead8) & 0xffffffff


def record(data):
    length = struct.pack("<Q", len(data))
    return (length + struct.pack("<I", masked_crc(length)) + data +
            struct.pack("<I", masked_crc(data)))


def varint(n):
    out = bytearray()
    while n > 0x7f:
        out.append(n & 0x7f | 0x80)
        n >>= 7
    out.append(n)
    return bytes(out)


def field(number, data):
    """A field of bytes, text or a message."""
    return varint(number << 3 | 2) + varint(len(data)) + data


def event(time, body, step=None):
    """wall_time (1, double), step (2, int64), then body."""
    out = b"\x09" + struct.pack("<d", time)
    if step is not None:
        out += b"\x10" + varint(step)
    return out + body


def scalars(values):
    """summary (5) of values (1) with tag (1) and simple_value (2, float)."""
    return field(5, b"".join(
        field(1, field(1, tag.encode()) + b"\x15" + struct.pack("<f", v))
        for tag, v in values))


def float32(v):
    """Beyond the range of a float: infinity, as TensorBoard shows it."""
    try:
        struct.pack("<f", v)
        return v
    except OverflowError:
        return float("inf") if v > 0 else float("-inf")


def event_file(run):
    """The bytes of one run's file."""
    clock, rows = run.clock(), {}
    for key, tag in TAGS.items():
        for step, value in run.points(key):
            rows.setdefault(step, []).append((tag, float32(value)))
    start = min(clock.values(), default=0.0)
    out = [record(event(start, field(3, b"brain.Event:2")))]
    at = start
    for step in sorted(rows):
        at = clock.get(step, at)
        out.append(record(event(at, scalars(rows[step]), step)))
    return int(start), b"".join(out)


def write_tensorboard(runs, folder):
    for r in runs:
        place = pathlib.Path(folder) / r.name.replace("/", "_")
        place.mkdir(parents=True, exist_ok=True)
        second, data = event_file(r)
        # One name for one run: a second export replaces the first.
        path = place / f"events.out.tfevents.{second:010d}.izar"
        others = [p for p in place.glob("events.out.tfevents.*") if p != path]
        if others:
            sys.exit(f"monitor: {place} has events of another run, {others[0].name}"
                     ": TensorBoard would mix them")
        path.write_bytes(data)
