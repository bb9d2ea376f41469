# SPDX-License-Identifier: Apache-2.0
"""One HTML file that needs nothing else: SVG in it, light and dark, and the values
under the pointer.  Without scripts it is the same picture.  Style and script are in page.css
and page.js beside this file."""
import html
import json
import math
import pathlib

from monitoring.runs import finite, item, not_finite, pieces, shown, span, thinned
from monitoring.scale import Scale, text, wide

WIDE, HIGH = 560, 250  # of a picture, in units of its own
LEFT, RIGHT, TOP, BOTTOM = 62, 22, 10, 30
MOST = 1200  # points of a line
RUNS = 8     # colours, as in page.css and page.js

HERE = pathlib.Path(__file__).parent


class Picture:
    def __init__(self, series, runs, smooth):
        self.series, self.runs = series, runs
        self.raw, self.even, values = {}, {}, []
        for i, r in enumerate(runs):
            points, even = r.drawn(series, smooth)
            values += [y for _, y in finite(points) + r.marks(series)]
            self.raw[i] = thinned(points, MOST)
            self.even[i] = thinned(even, MOST)
        self.ys = Scale(values, series.log and wide(values)).widened()
        self.xs = Scale(span(runs))

    def x(self, step):
        return LEFT + self.xs.at(step) * (WIDE - LEFT - RIGHT)

    def y(self, value):
        return TOP + (1 - self.ys.at(value)) * (HIGH - TOP - BOTTOM)

    def path(self, points, kind=""):
        d = ""
        for part in pieces(points):
            d += "M" + "L".join(f"{self.x(x):.1f} {self.y(y):.1f}"
                                for x, y in part)
            if len(part) == 1:
                d += "h.1"
        return f'<path class="{kind}" d="{d}"/>' if d else ""

    def axes(self):
        out = []
        for v in self.ys.ticks(5):
            y = self.y(v)
            out.append(f'<line class="grid" x1="{LEFT}" x2="{WIDE - RIGHT}" '
                       f'y1="{y:.1f}" y2="{y:.1f}"/>'
                       f'<text x="{LEFT - 7}" y="{y + 4:.1f}" '
                       f'text-anchor="end">{text(v)}</text>')
        whole = [v for v in self.xs.ticks(6) if float(v).is_integer()]
        for v in whole:
            out.append(f'<text x="{self.x(v):.1f}" y="{HIGH - 9}" '
                       f'text-anchor="middle">{text(v)}</text>')
        return "".join(out)

    def svg(self):
        out = [f'<svg viewBox="0 0 {WIDE} {HIGH}" role="img" '
               f'aria-label="{html.escape(self.series.label)} over steps">',
               self.axes()]
        for i, r in enumerate(self.runs):
            out.append(f'<g class="r{i % RUNS}">')
            if self.even[i] != self.raw[i]:
                out.append(self.path(self.raw[i], "raw"))
            out.append(self.path(self.even[i]))
            bad = not_finite(self.raw[i])
            out += [f'<text x="{self.x(x):.1f}" y="{HIGH - BOTTOM}" '
                    f'fill="currentColor" text-anchor="middle">×'
                    f"<title>not finite</title></text>" for x in bad]
            out += [f'<circle cx="{self.x(x):.1f}" cy="{self.y(y):.1f}" '
                    f'r="3.5"/>' for x, y in r.marks(self.series)]
            out.append("</g>")
        out.append(f'<line class="at" y1="{TOP}" y2="{HIGH - BOTTOM}"/></svg>')
        return "".join(out)

    def data(self):
        return {"from": self.xs.low, "to": self.xs.high, "left": LEFT,
                "right": RIGHT, "wide": WIDE,
                "runs": [{"run": i, "points":
                          [[x, y if math.isfinite(y) else None]
                           for x, y in points]}
                         for i, points in self.raw.items()]}

    def html(self):
        note = ""
        if self.series.marks and any(r.points(self.series.marks)
                                     for r in self.runs):
            note = " <span>circles: validation</span>"
        return (f"<figure><figcaption>{html.escape(self.series.label)}{note}"
                f"</figcaption>{self.svg()}<div class=tip></div></figure>")


def table(runs):
    head = ("run", "step", "loss", "validation", f"{item(runs)}s/s", "ended")
    rows = limits = ""
    for i, r in enumerate(runs):
        values = [r.last_step, *(v if v is None else format(v, form) for v, form in (
            (r.last("loss"), ".4f"), (r.last("validation_loss"), ".4f"),
            (r.last("items_per_s"), ".0f"))), (r.summary or {}).get("reason")]
        name = html.escape(r.name)
        rows += f'<tr><td><b class="r{i % RUNS}"><i></i></b>{name}' + "".join(
            f"<td>{'' if v is None else html.escape(str(v))}" for v in values) + "</tr>"
        if r.limit:
            limits += f"<p>{name}: limited by {html.escape(r.limit)}"
    return ("<div class=table><table><tr>" + "".join(f"<th>{h}" for h in head) +
            f"</tr>{rows}</table></div>{limits}")


def page(runs, only=(), smooth=1):
    pictures = [Picture(s, runs, smooth) for s in shown(runs, only)]
    title = html.escape(", ".join(r.name for r in runs))
    data = json.dumps([p.data() for p in pictures]).replace("<", "\\u003c")
    style, script = ((HERE / f"page.{kind}").read_text() for kind in ("css", "js"))
    return (f'<!doctype html><html lang="en"><meta charset="utf-8">'
            f'<meta name="viewport" content="width=device-width">'
            f"<title>{title}</title><style>{style}</style>"
            f"<header><h1>{title}</h1>"
            f"<button>light / dark</button></header>{table(runs)}<main>"
            + "".join(p.html() for p in pictures) +
            f'</main><script type="application/json" id="data">{data}</script>'
            f"<script>{script}</script></html>\n")
