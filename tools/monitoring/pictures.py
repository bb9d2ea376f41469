# SPDX-License-Identifier: Apache-2.0
"""PNG and SVG through matplotlib."""
import io
import sys

from monitoring.runs import COLOURS, MOST, library, lines, logarithmic, shown


def style(i):
    return {"color": COLOURS[i % len(COLOURS)],
            "linestyle": ("-", "--", ":")[i // len(COLOURS) % 3]}


def draw(axes, series, drawn):
    for one in drawn:
        look = style(one.number)
        if one.even != one.points:
            axes.plot(*zip(*one.points), lw=0.7, alpha=0.3, **look)
        axes.plot(*zip(*one.even), lw=1.5, label=str(one.number), **look)
        if one.marks:
            axes.scatter(*zip(*one.marks), s=25, zorder=3, facecolors="white",
                         edgecolors=look["color"])
        axes.plot(one.bad, [0.02] * len(one.bad), "x", ms=5, color=look["color"],
                  transform=axes.get_xaxis_transform())
    if logarithmic(series, drawn):
        axes.set_yscale("log")
    else:
        axes.ticklabel_format(axis="y", useOffset=False)
    circles = "   (circles: validation)" * any(one.marks for one in drawn)
    axes.set_title(series.label + circles, loc="left", fontsize=10)
    axes.set_xlabel("step", fontsize=9)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(True, lw=0.5, color="#dddddd")
    axes.spines[["top", "right"]].set_visible(False)


def figure(runs, only, smooth):
    """All series over the same steps, one picture beside the other."""
    matplotlib = library("matplotlib.figure", "a picture", "matplotlib")
    series = shown(runs, only)
    if not series:
        sys.exit("monitor: no step to draw yet")
    across, down = min(2, len(series)), -(-len(series) // 2)
    whole = matplotlib.Figure(figsize=(5.2 * across, 2.5 * down + 0.5),
                              layout="constrained")
    axes = None
    for i, s in enumerate(series):
        axes = whole.add_subplot(down, across, i + 1, sharex=axes)
        draw(axes, s, list(lines(s, runs, smooth, MOST)))
    lines_of = {number: line for axes in whole.axes for line, number in
                zip(*axes.get_legend_handles_labels())}
    legend = whole.legend(lines_of.values(), lines_of, ncol=4, frameon=False,
                          loc="outside upper left", fontsize=9)
    for text in legend.get_texts():  # as a label a name may be hidden, or mathematics
        text.set(text=runs[int(text.get_text())].name, parse_math=False)
    return whole


def svg(runs, only, smooth):
    """The element alone, for a page."""
    text = io.StringIO()
    figure(runs, only, smooth).savefig(text, format="svg")
    return "<svg" + text.getvalue().partition("<svg")[2]
