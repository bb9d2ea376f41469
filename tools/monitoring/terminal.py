# SPDX-License-Identifier: Apache-2.0
"""Plots of characters through plotext: braille dots in colour where the terminal
has both, else a letter per run."""
import os
import sys
import textwrap

from monitoring.runs import library, lines, logarithmic, shown

COLOURS = (39, 208, 42, 170, 220, 45, 160, 250)  # of 256, told apart
LETTERS = "abcdefghijklmnopqrstuvwxyz"
FRAME = str.maketrans("┌┐└┘─│┤├┬┴┼", "++++-||||++")


class Screen:
    """Where the plots appear, and what it can show."""

    def __init__(self, out=sys.stdout):
        self.out, self.first = out, True
        self.tty = out.isatty() and os.environ.get("TERM") != "dumb"
        self.unicode = "utf" in (getattr(out, "encoding", None) or "").lower()
        self.colour = self.tty and not os.environ.get("NO_COLOR")

    def size(self):
        try:
            return tuple(os.get_terminal_size(self.out.fileno()))
        except OSError:
            return 80, 200

    def marker(self, one, runs):
        return "braille" if self.unicode and (self.colour or len(runs) == 1) else \
            LETTERS[one % len(LETTERS)]

    def show(self, rows):
        """Redraws in place, without flicker: home, then line by line."""
        if self.tty:
            end = "\x1b[K\n"
            begin = "\x1b[2J\x1b[H" if self.first else "\x1b[H"
            body = end.join(rows[:self.size()[1] - 1])
            self.out.write(f"{begin}{body}{end}\x1b[J")
        else:
            self.out.write("\n".join(rows) + "\n")
        self.out.flush()
        self.first = False


def legend(runs, screen, cols):
    out = []
    for i, r in enumerate(runs):
        first, *more = (part for line in r.line().splitlines()
                        for part in textwrap.wrap(line, max(cols - 3, 20)))
        mark = screen.marker(i, runs)
        if mark == "braille":
            mark = "━━"
        if screen.colour:
            mark = f"\x1b[38;5;{COLOURS[i % len(COLOURS)]}m{mark}\x1b[0m"
        out += [f"{mark} {first}", *("   " + m for m in more)]
    return out


def title_of(series, drawn, cols):
    """The name, and the last value of each run, as far as they fit."""
    title = series.label
    for one in drawn:
        value = one.run.last(series.key) * series.scale
        title += f"  {value:.0f}" if 1e4 < abs(value) < 1e9 else f"  {value:.4g}"
        if one.bad:
            title += f" (not finite: step {one.bad[-1]})"
    return title[:cols - 2]


def draw(plot, series, drawn, runs, screen):
    """One series into plotext's picture `plot`."""
    for one in drawn:
        look = {"color": COLOURS[one.number % len(COLOURS)],
                "marker": screen.marker(one.number, runs)}
        plot.plot(*zip(*one.even), **look)
        if one.marks:
            plot.scatter(*zip(*one.marks), **look)
    if logarithmic(series, drawn):
        plot.yscale("log")
    steps = [step for r in runs for step in r.rows]
    first, last = min(steps), max(steps)
    plot.xlim(first, max(last, first + 1))
    plot.xticks(sorted({first, last}))


def render(runs, screen, only, smooth):
    """The whole picture as lines that fit the screen."""
    cols, height = screen.size()
    series = shown(runs, only)
    head = legend(runs, screen, cols)
    if not series:
        return head
    plotext = library("plotext", "the terminal", "plotext<6", has="subplots")
    across = 2 if cols >= 100 and len(series) > 1 else 1
    down = -(-len(series) // across)
    rows = max(8, min(18, (height - len(head) - 2) // down))
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.limitsize(False, False)
    plotext.subplots(down, across)
    plotext.plot_size(cols, rows * down)
    for i, s in enumerate(series):
        drawn = list(lines(s, runs, smooth, 4 * cols))
        panel = plotext.subplot(i // across + 1, i % across + 1)
        panel.title(title_of(s, drawn, cols // across))
        draw(panel, s, drawn, runs, screen)
    if len(series) < across * down:
        plotext.subplot(down, across).frame(False)
    text = plotext.build()
    if not screen.colour:
        text = plotext.uncolorize(text)
    if not screen.unicode:
        text = text.translate(FRAME)
    return [*head, "", *(line.rstrip() for line in text.splitlines())]
