# SPDX-License-Identifier: Apache-2.0
"""Plots of characters: braille dots in colour where the terminal has both, else
a letter per run.  Standard library only."""
import math
import os
import sys

from monitoring.runs import finite, not_finite, pieces, shown, span, thinned
from monitoring.scale import Scale, text, wide

COLOURS = (39, 208, 42, 170, 220, 45, 160, 250)  # of 256, told apart
LETTERS = "abcdefghijklmnopqrstuvwxyz"
AXIS = 9  # columns of the numbers at the left
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


class Look:
    """What the output can show."""

    def __init__(self, out):
        encoding = (getattr(out, "encoding", None) or "").lower()
        self.tty = out.isatty()
        self.braille = "utf" in encoding
        self.colour = self.tty and not os.environ.get("NO_COLOR") and \
            os.environ.get("TERM") != "dumb"

    def styled(self, code, s):
        return f"\x1b[{code}m{s}\x1b[0m" if self.colour else s

    def paint(self, run, s):
        return self.styled(f"38;5;{COLOURS[run % len(COLOURS)]}", s)

    def dim(self, s):
        return self.styled(2, s)

    def bold(self, s):
        return self.styled(1, s)


class Canvas:
    """rows x cols characters, each with the run that drew into it last."""

    def __init__(self, rows, cols, dots):
        self.rows, self.cols = rows, cols
        self.wide, self.high = (2, 4) if dots else (1, 1)
        self.bits = [[0] * cols for _ in range(rows)]
        self.owner = [[None] * cols for _ in range(rows)]

    def dot(self, x, y, run):
        """x, y in 0..1 from the lower left."""
        px = min(int(x * self.cols * self.wide), self.cols * self.wide - 1)
        py = min(int((1 - y) * self.rows * self.high),
                 self.rows * self.high - 1)
        if px < 0 or py < 0:
            return
        row, col = py // self.high, px // self.wide
        self.bits[row][col] |= DOTS[py % self.high][px % self.wide]
        self.owner[row][col] = run

    def line(self, a, b, run):
        n = 1 + int(max(abs(b[0] - a[0]) * self.cols * self.wide,
                        abs(b[1] - a[1]) * self.rows * self.high))
        for i in range(n + 1):
            self.dot(a[0] + (b[0] - a[0]) * i / n, a[1] + (b[1] - a[1]) * i / n,
                     run)

    def text(self, row, look):
        out = []
        for bits, run in zip(self.bits[row], self.owner[row]):
            if run is None:
                out.append(" ")
            elif self.wide == 2:
                out.append(look.paint(run, chr(0x2800 + bits)))
            else:
                out.append(look.paint(run, LETTERS[run % len(LETTERS)]))
        return "".join(out)


def draw(canvas, points, xs, ys, run):
    for part in pieces(points):
        at = [(xs.at(x), ys.at(y)) for x, y in part]
        for a, b in zip(at[:1] + at, at):
            canvas.line(a, b, run)


def title_of(series, runs, look, cols):
    """The name, and the last value of each run."""
    parts, length = [look.bold(series.label)], len(series.label)
    for i, r in enumerate(runs):
        points = r.points(series.key)
        bad = not_finite(points)
        if not points:
            continue
        value = text(points[-1][1] * series.scale)
        note = f" (not finite: step {bad[-1]})" if bad else ""
        length += 2 + len(value) + len(note)
        if length > cols:
            break
        parts.append(look.paint(i, value) + note)
    # colours take no columns
    return "  ".join(parts), length


def panel(series, runs, look, cols, rows, smooth):
    """Lines of text, of exactly cols columns each."""
    lines, values = {}, []
    for i, r in enumerate(runs):
        lines[i] = thinned(r.drawn(series, smooth)[1], 4 * cols)
        values += [y for _, y in finite(lines[i]) + r.marks(series)]
    ys, xs = Scale(values, series.log and wide(values)), Scale(span(runs))
    canvas = Canvas(rows, cols - AXIS, look.braille and
                    (look.colour or len(runs) == 1))
    for i, points in lines.items():
        draw(canvas, points, xs, ys, i)
        for x, y in runs[i].marks(series):
            canvas.dot(xs.at(x), ys.at(y), i)
    title, length = title_of(series, runs, look, cols)
    out = [title + " " * max(0, cols - length)]
    bar = "│" if look.braille else "|"
    labels = {0: text(ys.high), rows - 1: text(ys.low)}
    if rows >= 6:
        labels[rows // 2] = text(math.sqrt(ys.low * ys.high) if ys.log else
                                 (ys.low + ys.high) / 2)
    for row in range(rows):
        label = labels.get(row, "")[:AXIS - 2]
        out.append(look.dim(f"{label:>{AXIS - 2}} {bar}") + canvas.text(row, look))
    left, right = text(xs.low), text(xs.high)
    gap = cols - AXIS - len(left) - len(right)
    out.append(look.dim(" " * AXIS + left + " " * max(1, gap) + right))
    return out


def legend(runs, look):
    out = []
    for i, r in enumerate(runs):
        mark = "━━" if look.colour and look.braille else LETTERS[i % len(LETTERS)]
        out.append(look.paint(i, mark) + " " + r.line())
        if r.restarts:
            out[-1] += f"  (resumed at step {r.restarts[-1]})"
        if r.faulty:
            out[-1] += f"  ({r.faulty} lines not understood)"
    return out


def render(runs, look, cols, lines, only=(), smooth=1):
    """The whole picture as lines of at most `cols` columns."""
    series = shown(runs, only)
    head = legend(runs, look)
    if not series:
        return head
    across = 2 if cols >= 100 and len(series) > 1 else 1
    down = (len(series) + across - 1) // across
    rows = max(4, min(14, (lines - len(head) - 2) // down - 3))
    width = cols // across - (across - 1)
    out = [*head, ""]
    for i in range(0, len(series), across):
        panels = [panel(s, runs, look, width, rows, smooth)
                  for s in series[i:i + across]]
        for parts in zip(*panels):
            out.append("  ".join(parts).rstrip())
        out.append("")
    return out


class Screen:
    """Redraws in place, without flicker: home, then line by line."""

    def __init__(self, out=sys.stdout):
        self.out, self.look, self.first = out, Look(out), True

    def size(self):
        try:
            size = os.get_terminal_size(self.out.fileno())
            return size.columns, size.lines
        except OSError:
            return 80, 200

    def show(self, lines):
        if self.look.tty:
            _, height = self.size()
            end = "\x1b[K\n"
            begin = "\x1b[2J\x1b[H" if self.first else "\x1b[H"
            body = end.join(lines[:height - 1])
            self.out.write(f"{begin}{body}{end}\x1b[J")
        else:
            self.out.write("\n".join(lines) + "\n")
        self.out.flush()
        self.first = False
