# SPDX-License-Identifier: Apache-2.0
"""Writes report.html: one file that needs nothing else.  What stays the same in it is in
report.html, .css and .js beside this file."""
import html
import itertools
import json
import pathlib
import string

from . import figures

HERE = pathlib.Path(__file__).parent
MOST_RANKS = 8  # in the pictures; the tables have all
MOST_TASKS = 60000  # in the pictures
MOST_POINTS = 4000  # of a curve
BINS = 600
# The row within a unit, from top to bottom, of a codelet's tasks; 1: of all others.
BANDS = {"batch": 0, "fetch": 0, "reduce": 2, "offload": 2, "norm": 2, "save": 2,
         "adam": 3}
COLORS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00",
          "#f0e442", "#999999", "#88ccee", "#ddcc77", "#aa4499"]

# ---- text ----


def ms(us):
    return f"{us / 1e3:.3f}" if us < 1e6 else f"{us / 1e3:.1f}"


def duration(us):
    if us >= 1e6:
        return f"{us / 1e6:.3f} s"
    return f"{us / 1e3:.2f} ms" if us >= 1e3 else f"{us:.1f} µs"


def percent(v):
    return "" if v is None else f"{v:.1f}"


def mib(n):
    return f"{n / 2**20:.2f}" if n < 2**30 else f"{n / 2**20:.0f}"


def rate(v, unit):
    for prefix in ("", "k", "M", "G", "T", "P"):
        if v < 999.5 or prefix == "P":
            return f"{v:.3g} {prefix}{unit}/s" if v else ""
        v /= 1000


def esc(v):
    return html.escape(str(v))


def table(head, rows, text=1):
    """The first `text` columns are words; a cell may be (colour, words)."""
    def cell(tag, v, i):
        mark = ' class="text"' if i < text else ""
        color, v = v if isinstance(v, tuple) else ("", v)
        inner = f'<i data-color="{color}"></i>' if color else ""
        return f"<{tag}{mark}>{inner}{esc(v)}</{tag}>"
    def row(tag, values):
        return "".join(cell(tag, v, i) for i, v in enumerate(values))
    return ('<div class="scroll"><table><thead><tr>' + row("th", head) +
            "</tr></thead><tbody>" +
            "".join(f"<tr>{row('td', r)}</tr>" for r in rows) +
            "</tbody></table></div>")


# ---- tables ----

def worker_table(rows):
    many = len({r["rank"] for r in rows}) > 1
    def row(r):
        span = (r["busy_us"] + r["transfer_us"] + r["runtime_us"] +
                r["idle_us"]) or 1
        name = (f'rank {r["rank"]}: ' if many else "") + r["name"]
        return [name, r["tasks"], *(percent(100 * r[k] / span) for k in
                ("busy_us", "transfer_us", "runtime_us", "idle_us"))]
    return table(["worker", "tasks", "busy %", "transfer %", "StarPU %",
                  "idle %"], [row(r) for r in rows])


def kind_table(rows, colors):
    def row(k):
        speed = (rate(k["flops_per_s"], "FLOP") if k["flops"] else
                 rate(k["bytes_per_s"], "B"))
        return [(colors[k["kind"]], k["kind"]), k["where"], k["count"],
                ms(k["total_us"]), ms(k["mean_us"]), ms(k["median_us"]),
                ms(k["max_us"]), speed, percent(k["limit_percent"]),
                percent(k["hidden_percent"])]
    return table(["task", "workers", "count", "total ms", "mean ms", "median ms",
                  "longest ms", "achieved", "% of limit", "hidden %"],
                 [row(k) for k in rows], 2)


def hidden_rows(kinds):
    """What ran beside a forward or backward, by what it is."""
    groups = {"up": "copies to the GPU", "down": "copies to the host",
              "comm": "collectives", "io": "disk"}
    sums = {}
    for k in kinds:
        if k["hidden_percent"] is None:
            continue
        name = "optimizer" if k["codelet"] == "adam" else "the rest"
        if k["kind"] in figures.TRANSFER:
            name = groups.get(k["where"], "copies and sums in memory")
        sums[name] = [a + b for a, b in zip(
            sums.get(name, (0, 0.0, 0.0, 0)),
            (k["count"], k["total_us"], k["hidden_us"], k["bytes"]))]
    return sums


def hidden_table(sums):
    return table(["kind", "tasks", "total ms", "hidden ms", "hidden %", "MiB"],
                 [[name, n, ms(total), ms(under),
                   percent(100 * under / total if total else 0),
                   mib(size) if size else ""]
                  for name, (n, total, under, size) in sums.items()])


def link_table(rows, waits):
    """waits: {rank: the part of its collectives' time that is waiting for others}"""
    def row(r):
        many = f'rank {r["rank"]}: ' if len(waits) > 1 else ""
        wait = waits[r["rank"]] if r["link"] == "network" else None
        return [many + r["link"], r["tasks"], mib(r["bytes"]),
                ms(r["busy_us"]), rate(r["bytes_per_s"], "B"),
                percent(r["limit_percent"]), percent(r["hidden_percent"]),
                percent(wait)]
    return table(["link", "tasks", "MiB", "busy ms", "while busy",
                  "% of limit", "hidden %", "waits for ranks %"],
                 [row(r) for r in rows])


def memory_table(ranks, memories):
    rows = []
    for rank, tiers in zip(ranks, memories):
        for tier, m in tiers.items():
            used = figures.peak(m["series"].values())
            rows.append([f"rank {rank.number}: {tier}", mib(used),
                         mib(m["plan"]), percent(100 * used / m["plan"])])
    return table(["memory", "most in use, MiB", "planned MiB", "%"], rows)


def path_section(ranks, path, colors):
    """Nothing of a box, which does not tell what its tasks waited for."""
    if not any(r.tasks.deps for r in ranks):
        return ""
    step = path["step_us"]
    rows = [[(colors[k], k), ms(us), percent(100 * us / step),
             percent(100 * path["saved"].get(k, 0))]
            for k, us in sorted(path["kinds"].items(), key=lambda x: -x[1])]
    rows.append(["between tasks", ms(path["gaps_us"]),
                 percent(100 * path["gaps_us"] / step), ""])
    words = "".join(f"<li>{esc(w)}</li>" for w in path["words"])
    return ("<h2>What would shorten a step</h2>"
            f"<ul>{words or '<li>nothing stands out</li>'}</ul>" +
            table(["on the path", "ms per step", "% of it",
                   "saved by half, %"], rows) +
            chain_details(path["chain"], colors))


def chain_details(chain, colors, most=400):
    """The path of the last step, task by task."""
    last = max((c["step"] for c in chain), default=0)
    tail = [c for c in chain if c["step"] == last][-most:]
    rows = [[(colors[c["kind"]], f'{c["kind"]} {c["unit"]}'.strip()),
             f'rank {c["rank"]}', c["worker"], ms(c["begin_us"]), ms(c["us"]),
             ms(c["gap_us"])] for c in tail]
    return (f"<details><summary>the path of step {last + 1}, {len(rows)} tasks"
            "</summary>" + table(["task", "", "worker", "begins ms", "takes ms",
                                  "after a gap of ms"], rows, 3) + "</details>")


# ---- data of the pictures ----

def thin(points):
    """At most MOST_POINTS of a step function, the largest of each bucket."""
    if len(points) <= MOST_POINTS:
        return points
    size, out = len(points) / MOST_POINTS, []
    for n in range(MOST_POINTS):
        part = points[int(n * size):int((n + 1) * size)]
        if part:
            out.append((part[0][0], max(v for _, v in part)))
    return out


def columns(points):
    points = thin(points)
    return [[round(t, 1) for t, _ in points], [v for _, v in points]]


def task_data(rank, begin, end):
    t = rank.tasks
    inside = [i for i in range(len(t)) if t.end[i] >= begin and t.begin[i] <= end]
    return {"b": [round(t.begin[i], 1) for i in inside],
            "d": [round(t.end[i] - t.begin[i], 1) for i in inside],
            **{key: [column[i] for i in inside] for key, column in
               (("w", t.worker), ("k", t.kind), ("u", t.unit), ("s", t.step),
                ("n", t.bytes))},
            "f": [round(t.flops[i]) for i in inside]}


def rank_data(rank, memory, begin, end, bins):
    ready = rank.ready
    pairs = [(ready[i], int(ready[i + 1])) for i in range(0, len(ready), 2)
             if ready[i] <= end]
    series = figures.link_series(rank, begin, end, bins)
    links = {link: {"v": [round(v) for v in series[link]],
                    "limit": rank.about["rates"].get(where, {}).get("bytes_per_s", 0)}
             for link, where in figures.LINKS.items() if link in series}
    tiers = {tier: {"plan": m["plan"], "classes": [
        {"name": name, "plan": m["classes"].get(name, 0),
         "points": columns(m["series"][name])}
        for name in sorted(m["series"],
                           key=lambda n: -m["classes"].get(n, 0))]}
        for tier, m in memory.items()}
    return {"rank": rank.number,
            "workers": [figures.worker_name(rank, w)
                        for w in range(len(rank.about["workers"]))],
            "links": links, "memory": tiers, "ready": columns(pairs),
            **task_data(rank, begin, end)}


def picture_range(ranks, begin, end):
    """Everything, or as many whole steps as the pictures hold, one at least."""
    def tasks_in(a, b):
        return sum(len(figures.indexes(r, a, b)) for r in shown_ranks(ranks))
    first = min(min(r.tasks.begin) for r in ranks)
    last = max(max(r.tasks.end) for r in ranks)
    if tasks_in(first, last) <= MOST_TASKS:
        return first, last, []
    ends = [e for _, e in figures.step_ends(ranks[0]) if begin < e <= end] or [end]
    stop = max((e for e in ends if tasks_in(begin, e) <= MOST_TASKS),
               default=ends[0])
    total = sum(len(r.tasks) for r in ranks)
    return begin, stop, [f"The pictures show part of the {total} tasks; the "
                         "tables count all."]


def shown_ranks(ranks):
    n = min(len(ranks), MOST_RANKS)
    return [ranks[i * len(ranks) // n] for i in range(n)]


def picture_data(ranks, memories, span):
    shown = shown_ranks(ranks)
    begin, end = span
    classes = dict.fromkeys(c for m in memories for tier in m.values()
                            for c in (*tier["classes"], *tier["series"]))
    data = [rank_data(r, memories[ranks.index(r)], begin, end, BINS)
            for r in shown]
    return {
        "kinds": [{"name": k["name"], "color": k["color"],
                   "band": BANDS.get(k["codelet"], 1)}
                  for k in ranks[0].about["kinds"]],
        "units": ranks[0].units, "range": [begin, end],
        "ends": [round(e, 1) for _, e in figures.step_ends(ranks[0])],
        "bins": [round(begin + i * (end - begin) / BINS, 1)
                 for i in range(BINS)],
        "classes": dict(zip(classes, itertools.cycle(COLORS))), "ranks": data,
        "linkColors": dict(zip(figures.LINKS, COLORS)),
        "tiers": sorted({t for m in memories for t in m},
                        key=("device", "cpu", "nvme").index)}


# ---- the page ----

def keys(colors):
    return '<div class="keys">' + "".join(
        f'<span><i data-color="{c}"></i>{esc(n)}</span>'
        for n, c in colors.items()) + "</div>"


UNSUNG = ("the rest", "copies and sums in memory")  # without a card


def cards(window, workers, hidden):
    begin, end, steps = window
    compute = [w for w in workers if w["where"] in ("compute", "host")]
    gpu = [w for w in compute if w["where"] == "compute"] or compute
    busy = 100 * sum(w["busy_us"] for w in gpu) / ((end - begin) * len(gpu))
    items = [(duration((end - begin) / steps),
              f"a step (mean of {steps})"),
             (f"{busy:.1f} %", "GPU busy" if gpu is not compute else
              "compute workers busy")]
    for name, (_, total, under, _) in hidden.items():
        if name not in UNSUNG and total:
            items.append((f"{100 * under / total:.1f} %", f"{name} hidden"))
    return '<div class="cards">' + "".join(
        f'<div class="card"><b>{esc(v)}</b><span>{esc(t)}</span></div>'
        for v, t in items) + "</div>"


def legend(ranks):
    used = {k for r in shown_ranks(ranks) for k in r.tasks.kind}
    return "".join(
        f'<button data-kind="{i}" title="show only these">'
        f'<i data-color="{k["color"]}"></i>{k["name"]}</button>'
        for i, k in enumerate(ranks[0].about["kinds"]) if i in used)


def about_line(a):
    where = ("a simulated run" if a["simulated"] else
             f"a run on {a['host']}" + (" with a GPU" if a["gpu"] else ""))
    first, last = a["from"] + 1, a["to"]
    steps = f"Steps {first} to {last}" if first < last else f"Step {first}"
    return esc(f"{steps} of {where}, "
               f"{a['ranks']} rank{'s' if a['ranks'] > 1 else ''}, "
               f"{len(a['units'])} units, izar {a['version']}.")


def rank_choice(shown):
    if len(shown) < 2:
        return ""
    first = " selected" if len(shown) > 4 else ""
    return ('<select id="rank"><option value="-1">all ranks</option>' + "".join(
        f'<option value="{i}"{first if i == 0 else ""}>rank {r.number}</option>'
        for i, r in enumerate(shown)) + "</select>")


def write(path_out, ranks, memories, path, command, warnings):
    """memories: of each rank; path: what path.analyse found."""
    window = figures.window(ranks)
    begin, end, _ = window
    colors = {k["name"]: k["color"] for k in ranks[0].about["kinds"]}
    span = picture_range(ranks, begin, end)
    data = picture_data(ranks, memories, span[:2])
    workers = figures.workers(ranks, begin, end)
    kinds = figures.kinds(ranks, begin, end)
    hidden = hidden_rows(kinds)
    used = {k: c for k, c in data["linkColors"].items()
            if any(k in r["links"] for r in data["ranks"])}
    links = figures.links(ranks, begin, end)
    page = string.Template((HERE / "report.html").read_text(encoding="utf-8"))
    path_out.write_text(page.substitute(
        title=esc(f"izar: {path_out.resolve().parent.name}"),
        css=(HERE / "report.css").read_text(encoding="utf-8"),
        js=(HERE / "report.js").read_text(encoding="utf-8"),
        about=about_line(ranks[0].about), command=esc(command),
        warnings=esc("\n".join(warnings)), cards=cards(window, workers, hidden),
        path=path_section(ranks, path, colors), legend=legend(ranks),
        choice=rank_choice(shown_ranks(ranks)), classes=keys(data["classes"]),
        memory="".join(f'<div><canvas id="memory-{t}"></canvas></div>'
                       for t in data["tiers"]),
        links=keys(used),
        worker_table=worker_table(workers), kind_table=kind_table(kinds, colors),
        hidden_table=hidden_table(hidden),
        link_table=link_table(links, path["waits"]),
        memory_table=memory_table(ranks, memories),
        begin=duration(begin), end=duration(end),
        notes="".join(f"<li>{esc(n)}</li>" for n in (*span[2], *path["clocks"])),
        data=json.dumps(data, separators=(",", ":")).replace("</", "<\\/")),
        encoding="utf-8", errors="replace")
