# SPDX-License-Identifier: Apache-2.0
"""PNG and SVG through matplotlib."""
import os
import sys

from monitoring.runs import finite, not_finite, shown, span, thinned
from monitoring.scale import wide

# Okabe-Ito, told apart with any colour vision; then dashed.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9",
           "#000000")
MOST = 4000  # points of a line


SYSTEM = "/usr/bin/python3"  # the one that packages of the distribution are for
AGAIN = "IZ_MONITOR_AGAIN"


def library():
    try:
        import matplotlib
    except ImportError:
        other = sys.prefix != sys.base_prefix or \
            not os.path.samefile(SYSTEM, sys.executable)
        if os.access(SYSTEM, os.X_OK) and other and not os.environ.get(AGAIN):
            os.environ[AGAIN] = "1"
            os.execv(SYSTEM, [SYSTEM, *sys.argv])
        sys.exit("monitor: PNG and SVG need matplotlib: apt-get install "
                 "python3-matplotlib (or --html, which needs nothing)")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    return plt


def style(i):
    return {"color": COLOURS[i % len(COLOURS)],
            "linestyle": ("-", "--", ":")[i // len(COLOURS) % 3]}


def draw(axes, series, runs, smooth):
    values = []
    for i, r in enumerate(runs):
        points, even = r.drawn(series, smooth)
        values += [y for _, y in finite(points)]
        if even is not points:
            faint = thinned(points, MOST)
            axes.plot(*zip(*faint), lw=0.7, alpha=0.3, **style(i))
        if points:
            axes.plot(*zip(*thinned(even, MOST)), lw=1.5, **style(i))
        marks = r.marks(series)
        if marks:
            axes.plot(*zip(*marks), "o", ms=5, mfc="white", mew=1.5,
                      color=style(i)["color"])
        bad = not_finite(points)
        if bad:
            axes.plot(bad, [0.02] * len(bad), "x", ms=5,
                      transform=axes.get_xaxis_transform(),
                      color=style(i)["color"])
    if series.log and wide(values):
        axes.set_yscale("log")
    title = series.label
    if series.marks and any(r.points(series.marks) for r in runs):
        title += "   (circles: validation)"
    axes.set_title(title, loc="left", fontsize=10, color="#333333")
    axes.grid(True, lw=0.5, color="#dddddd")
    axes.set_axisbelow(True)
    first, last = span(runs)
    pad = 0.01 * (last - first) or 1
    axes.set_xlim(first - pad, last + pad)
    axes.tick_params(which="both", labelsize=8, colors="#555555", length=3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#999999")
    axes.ticklabel_format(axis="x", style="plain", useOffset=False)
    if axes.get_yscale() == "linear":
        axes.ticklabel_format(axis="y", useOffset=False)


def save(runs, paths, only=(), smooth=1):
    plt = library()
    series = shown(runs, only)
    if not series:
        sys.exit("monitor: no step to draw yet")
    across = 1 if len(series) == 1 else 2
    down = (len(series) + across - 1) // across
    figure, grid = plt.subplots(down, across, squeeze=False,
                                figsize=(5.2 * across, 2.5 * down + 0.5))
    flat = [a for row in grid for a in row]
    for axes, s in zip(flat, series):
        draw(axes, s, runs, smooth)
    for axes in flat[len(series):]:
        axes.axis("off")
    for axes in flat[max(0, len(series) - across):len(series)]:
        axes.set_xlabel("step", fontsize=9, color="#555555")
    lines = [plt.Line2D([], [], lw=2, **style(i)) for i in range(len(runs))]
    top = 1 - 0.42 / figure.get_figheight()
    figure.legend(lines, [r.name for r in runs], loc="upper left", ncol=4,
                  frameon=False, fontsize=9, bbox_to_anchor=(0.01, 1))
    figure.tight_layout(rect=(0, 0, 1, top))
    for path in paths:
        figure.savefig(path, dpi=150)
    plt.close(figure)
