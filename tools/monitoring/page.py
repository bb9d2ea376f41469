# SPDX-License-Identifier: Apache-2.0
"""One HTML file that needs nothing else: plotly is in it, and for readers without
scripts a picture of matplotlib."""
import html
import math

from monitoring import pictures
from monitoring.runs import COLOURS, MOST, library, lines, logarithmic, shown

PAGE = """<!doctype html><html lang="en"><meta charset="utf-8">
<meta name="viewport" content="width=device-width"><title>{title}</title><style>
:root {{ background: white; font: 15px system-ui, sans-serif }}
:root.dark {{ filter: invert(.9) hue-rotate(180deg) }}
p {{ white-space: pre-wrap }}
noscript svg {{ width: 100%; height: auto }}
</style><h1>{title}</h1><button>light / dark</button>
{lines}<noscript>{svg}</noscript>{plot}<script>
const root = document.documentElement.classList
root.toggle('dark', matchMedia('(prefers-color-scheme: dark)').matches)
document.querySelector('button').onclick = () => root.toggle('dark')
</script></html>
"""


def add(chart, go, one, place, named):
    """A run's line in the picture at `place`; the legend has it once."""
    colour = COLOURS[one.number % len(COLOURS)]
    dash = ("solid", "dash", "dot")[one.number // len(COLOURS) % 3]

    def trace(points, shown=False, **more):
        chart.add_trace(go.Scatter(
            x=[x for x, _ in points], showlegend=shown, legendgroup=one.number,
            y=[y if math.isfinite(y) else None for _, y in points],
            name=html.escape(one.run.name), **more), *place)

    if one.even != one.points:
        trace(one.points, mode="lines", opacity=0.3, hoverinfo="skip",
              line={"color": colour, "width": 1, "dash": dash})
    trace(one.even, one.number not in named, mode="lines",
          line={"color": colour, "dash": dash})
    named.add(one.number)
    if one.marks:
        trace(one.marks, mode="markers", hovertemplate="%{y} (validation)",
              marker={"color": colour, "symbol": "circle-open", "size": 8})
    for x in one.bad:
        chart.add_annotation(x=x, y=0, text="×", showarrow=False, row=place[0],
                             col=place[1], font={"color": colour},
                             hovertext=f"step {x}: not finite")
        chart.layout.annotations[-1].yref += " domain"


def chart(runs, only, smooth):
    go = library("plotly.graph_objects", "a page", "plotly")
    series = shown(runs, only)
    drawn = [list(lines(s, runs, smooth, MOST)) for s in series]
    down = -(-len(series) // 2)
    whole = library("plotly.subplots", "a page", "plotly").make_subplots(
        down, 2, shared_xaxes="all", horizontal_spacing=0.07,
        vertical_spacing=0.2 / down, subplot_titles=[
            s.label + " (circles: validation)" * any(one.marks for one in d)
            for s, d in zip(series, drawn)])
    named = set()
    for i, (s, d) in enumerate(zip(series, drawn)):
        place = (i // 2 + 1, i % 2 + 1)
        for one in d:
            add(whole, go, one, place, named)
        whole.update_yaxes(type="log" if logarithmic(s, d) else "linear",
                           row=place[0], col=place[1])
    whole.update_xaxes(showticklabels=True)
    whole.update_layout(
        template="plotly_white", hovermode="x unified", height=300 * down + 80,
        margin={"l": 60, "r": 20, "t": 80, "b": 40},
        legend={"orientation": "h", "y": 1 + 0.1 / down, "yanchor": "bottom"})
    return whole


def page(runs, only, smooth):
    svg = pictures.svg(runs, only, smooth)
    plot = chart(runs, only, smooth).to_html(
        full_html=False, include_plotlyjs=True, config={"displaylogo": False})
    return PAGE.format(title=html.escape(", ".join(r.name for r in runs)),
                       lines="".join(f"<p>{html.escape(r.line())}" for r in runs),
                       svg=svg, plot=plot)
