# SPDX-License-Identifier: Apache-2.0
"""One HTML file that needs nothing else: SVG in it, light and dark, and the values
under the pointer.  Without scripts it is the same picture."""
import html
import json
import math

from monitoring.runs import finite, not_finite, pieces, shown, smoothed, span, \
    thinned
from monitoring.scale import Scale, text, wide

WIDE, HIGH = 560, 250  # of a picture, in units of its own
LEFT, RIGHT, TOP, BOTTOM = 62, 22, 10, 30
MOST = 1200  # points of a line
RUNS = 8     # colours

STYLE = """
:root { --page: #ffffff; --ink: #1a1a1a; --faint: #666; --grid: #e4e4e4;
  --box: #fafafa; --r0: #0072b2; --r1: #d55e00; --r2: #008f68; --r3: #b8578c;
  --r4: #b97f00; --r5: #2b8fc4; --r6: #000; --r7: #777; }
:root.dark { --page: #16181c; --ink: #e8e8e8; --faint: #a0a0a0; --grid: #33363c;
  --box: #1d2026; --r0: #56b4e9; --r1: #ff8a3d; --r2: #2fd0a0; --r3: #e69ac4;
  --r4: #f0c040; --r5: #8ab8ff; --r6: #fff; --r7: #aaa; }
@media (prefers-color-scheme: dark) { :root:not(.light) { --page: #16181c;
  --ink: #e8e8e8; --faint: #a0a0a0; --grid: #33363c; --box: #1d2026;
  --r0: #56b4e9; --r1: #ff8a3d; --r2: #2fd0a0; --r3: #e69ac4; --r4: #f0c040;
  --r5: #8ab8ff; --r6: #fff; --r7: #aaa; } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 1240px; padding: 20px; background: var(--page);
  color: var(--ink); font: 15px/1.5 system-ui, sans-serif }
h1 { font-size: 20px; margin: 0 0 8px }
header { display: flex; justify-content: space-between; align-items: start }
button { font: inherit; color: inherit; background: var(--box);
  border: 1px solid var(--grid); border-radius: 6px; padding: 3px 12px }
.table { overflow-x: auto; margin-bottom: 12px }
main { margin-top: 16px }
table { border-collapse: collapse; white-space: nowrap }
td, th { text-align: right; padding: 3px 18px 3px 0; font-variant-numeric: tabular-nums;
  border-bottom: 1px solid var(--grid); font-weight: normal }
th { color: var(--faint) }
td:first-child, th:first-child { text-align: left }
p { margin: 0 0 8px; color: var(--faint) }
i { display: inline-block; width: 22px; height: 4px; border-radius: 2px;
  margin-right: 8px; vertical-align: middle; background: currentColor }
main { display: grid; gap: 16px;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 480px), 1fr)) }
figure { margin: 0; padding: 10px 8px 4px; background: var(--box);
  border: 1px solid var(--grid); border-radius: 8px }
figcaption { padding-left: 6px }
figcaption span { color: var(--faint) }
svg { display: block; width: 100%; height: auto; font: 12px system-ui, sans-serif;
  fill: var(--faint) }
path { fill: none; stroke: currentColor; stroke-width: 1.8; stroke-linejoin: round }
path.raw { stroke-width: 1; opacity: .3 }
circle { fill: var(--box); stroke: currentColor; stroke-width: 1.8 }
.grid { stroke: var(--grid); stroke-width: 1 }
.at { stroke: var(--faint); stroke-dasharray: 3 3; visibility: hidden }
.tip { min-height: 1.5em; padding-left: 6px; color: var(--faint); font-size: 13px }
""" + "".join(f".r{i} {{ color: var(--r{i}) }}\n" for i in range(RUNS))

SCRIPT = """
const data = JSON.parse(document.getElementById('data').textContent)
document.querySelector('button').onclick = () => {
  const root = document.documentElement, dark = root.classList.contains('dark') ||
    (!root.classList.contains('light') &&
     matchMedia('(prefers-color-scheme: dark)').matches)
  root.className = dark ? 'light' : 'dark'
}
document.querySelectorAll('figure').forEach((figure, k) => {
  const svg = figure.querySelector('svg'), at = svg.querySelector('.at')
  const tip = figure.querySelector('.tip'), d = data[k]
  svg.onpointerleave = () => { at.style.visibility = 'hidden'; tip.textContent = '' }
  svg.onpointermove = e => {
    const box = svg.getBoundingClientRect()
    const x = (e.clientX - box.left) / box.width * d.wide
    const step = d.from + (x - d.left) / (d.wide - d.left - d.right) * (d.to - d.from)
    let best = null
    for (const r of d.runs) for (const p of r.points)
      if (best === null || Math.abs(p[0] - step) < Math.abs(best - step)) best = p[0]
    if (best === null) return
    const px = d.left + (best - d.from) / (d.to - d.from) * (d.wide - d.left - d.right)
    at.setAttribute('x1', px); at.setAttribute('x2', px)
    at.style.visibility = 'visible'
    tip.replaceChildren('step ' + best)
    for (const r of d.runs) {
      let near = null
      for (const p of r.points)
        if (near === null || Math.abs(p[0] - best) < Math.abs(near[0] - best)) near = p
      if (near === null) continue
      const mark = document.createElement('b'), line = document.createElement('i')
      mark.className = 'r' + r.run % %RUNS%
      mark.style.fontWeight = 'normal'; line.style.margin = '0 6px 0 16px'
      const value = near[1] === null ? 'not finite' : +near[1].toPrecision(6)
      mark.append(line, String(value))
      tip.append(mark)
    }
  }
})
""".replace("%RUNS%", str(RUNS))


class Picture:
    def __init__(self, series, runs, smooth):
        self.series, self.runs = series, runs
        self.raw, self.even, values = {}, {}, []
        for i, r in enumerate(runs):
            points = [(x, y * series.scale) for x, y in r.points(series.key)]
            values += [y for _, y in finite(points)]
            even = smoothed(points, smooth) if series.smooth else points
            self.raw[i] = thinned(points, MOST)
            self.even[i] = thinned(even, MOST)
            if series.marks:
                values += [y for _, y in finite(r.points(series.marks))]
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
            if self.series.marks:
                out += [f'<circle cx="{self.x(x):.1f}" cy="{self.y(y):.1f}" '
                        f'r="3.5"/>'
                        for x, y in finite(r.points(self.series.marks))]
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
    head = ("run", "step", "loss", "validation", "items/s", "ended")
    rows = []
    for i, r in enumerate(runs):
        def value(key, form):
            v = r.last(key)
            return "" if v is None else format(v, form)
        rows.append("".join((
            f'<tr><td><b class="r{i % RUNS}"><i></i></b>{html.escape(r.name)}',
            f"<td>{r.last_step if r.last_step is not None else ''}",
            f"<td>{value('loss', '.4f')}",
            f"<td>{value('validation_loss', '.4f')}",
            f"<td>{value('items_per_s', '.0f')}",
            f"<td>{html.escape(str((r.summary or {}).get('reason', '')))}",
            "</tr>")))
    limits = "".join(
        f"<p>{html.escape(r.name)}: limited by {html.escape(r.limit)}"
        for r in runs if r.limit)
    return ("<div class=table><table><tr>" +
            "".join(f"<th>{h}" for h in head) + "</tr>" + "".join(rows) +
            f"</table></div>{limits}")


def page(runs, only=(), smooth=1):
    pictures = [Picture(s, runs, smooth) for s in shown(runs, only)]
    title = ", ".join(r.name for r in runs)
    data = json.dumps([p.data() for p in pictures]).replace("<", "\\u003c")
    return (f'<!doctype html><html lang="en"><meta charset="utf-8">'
            f'<meta name="viewport" content="width=device-width">'
            f"<title>{html.escape(title)}</title><style>{STYLE}</style>"
            f"<header><h1>{html.escape(title)}</h1>"
            f"<button>light / dark</button></header>{table(runs)}<main>"
            + "".join(p.html() for p in pictures) +
            f'</main><script type="application/json" id="data">{data}</script>'
            f"<script>{SCRIPT}</script></html>\n")
