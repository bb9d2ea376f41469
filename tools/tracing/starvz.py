# SPDX-License-Identifier: Apache-2.0
"""StarVZ's folder.  OUT/starvz/data gets the traces of all ranks as one, on one
clock, with names of workers: that is what ViTE and StarVZ read, here or on another
machine.  Where R, StarVZ and PajeNG are installed (tools/setup --starvz), StarVZ
puts its tables beside it and draws OUT/starvz/starvz.png.

StarVZ 0.8 reads columns of Paje events by their place, and StarPU added some in
1.4.8, so events are written in the layout that StarVZ knows."""
import heapq
import os
import pathlib
import re
import shutil
import subprocess

from . import figures, records, run

R_PACKAGES = ("data.tree", "arrow", "starvz")
PROGRAMS = ("Rscript", "pj_dump", "rec2csv", "awk", "gzip")
LIBRARY = pathlib.Path(__file__).resolve().parents[2] / ".deps/R"
MOST_RANKS = 8  # in the picture


# ---- one Paje trace of all ranks ----

EVENT_20 = ("Time Container Type Value Size Params Footprint Tag JobId "
            "SubmitOrder GFlop X Y Iteration Subiteration NumaNodes").split()
LINK_MORE = "MPITAG MPIType Priority Handle".split()
FILL = {"MPITAG": "0", "MPIType": "IntraNode", "Priority": "0"}
ROOT = "MPIroot"  # the one container that all ranks share
OF_RANK = {"Container", "StartContainer", "EndContainer", "JobId"}


def wanted(number, have):
    """The fields that StarVZ wants of an event."""
    if number == "20":
        return EVENT_20
    if number == "24":
        return have[:6] + LINK_MORE
    if number == "23":
        return [f for f in have if f not in ("HName", "X", "Y")]
    return have


def header_lines(events):
    for number, (name, fields) in events.items():
        yield f"%EventDef\tPaje{name}\t{number}\n"
        for f in wanted(number, fields):
            yield f"%\t{f}\t{'date' if f == 'Time' else 'string'}\n"
        yield "%EndEventDef\n"


def title(rank, e):
    """What pictures call a container: of a worker with what it does.  Threads, of
    which several have one name, by their alias: StarVZ takes equal names for one
    container."""
    name = e["Alias" if e["Type"] == "T" else "Name"].strip('"')
    worker = re.fullmatch(r"w(\d+)", e["Alias"])
    if worker:
        cpu = "host" if "compute" in rank.about["workers"] else "compute"
        what = figures.worker_name(rank, int(worker[1]))
        name += " " + re.sub("^GPU", "compute", re.sub("^CPU", cpu, what))
    return f'"{rank.number}_{name}"'


def of_rank(rank, name, e):
    """Marks what belongs to a rank; definitions and the root belong to all."""
    def mark(value):
        return re.sub('^"?', rf"\g<0>{rank.number}_", value)
    if name == "CreateContainer" and e["Alias"] != ROOT:
        e["Name"], e["Alias"] = title(rank, e), mark(e["Alias"])
    elif name == "DestroyContainer":
        e["Name"] = mark(e["Name"])
    for f in OF_RANK & e.keys():
        if e[f] not in (ROOT, "0"):
            e[f] = mark(e[f])


def paje_lines(rank, path, delta_ms):
    """Yields (time, line); -1 is the time of what all ranks have."""
    events = records.paje_header(path)
    for number, e in records.paje_lines(path, events):
        name, fields = events[number]
        time = -1.0
        if "Time" in e and e.get("Alias") != ROOT:
            time = float(e["Time"]) + delta_ms
            e["Time"] = f"{time:.6f}"
        of_rank(rank, name, e)
        yield time, "\t".join([number, *(e.get(f, FILL.get(f, '""'))
                                        for f in wanted(number, fields))]) + "\n"


def merge_paje(ranks, paths, delta, target):
    common = set()
    with open(target, "w", encoding="utf-8") as out:
        out.writelines(header_lines(records.paje_header(paths[0])))
        for time, line in heapq.merge(*map(paje_lines, ranks, paths, delta),
                                      key=lambda x: x[0]):
            if time >= 0 or line not in common:
                out.write(line)
            if time < 0:
                common.add(line)


# ---- the same of the records and the graph ----

def add_records(out, rank, path, delta_ms):
    """Jobs by rank; step and position in columns of their own."""
    of_rank = f"{rank.number}_"
    with open(path, encoding="utf-8", errors="replace") as f:
        for line in f:
            key, _, value = line.rstrip("\n").partition(": ")
            if key in ("JobId", "DependsOn"):
                value = " ".join(of_rank + j for j in value.split())
            elif key in ("SubmitTime", "StartTime", "EndTime"):
                value = f"{float(value) + delta_ms:.6f}"
            elif key == "MPIRank":
                value = str(rank.number)
            elif key == "Iteration":
                step, *position = value.split()
                out.write("".join(f"Subiteration: {p}\n" for p in position[:1]))
                value = step
            out.write(f"{key}: {value}\n" if key else "\n")
        out.write("\n")


def add_graph(out, rank, path):
    with open(path, encoding="utf-8", errors="replace") as f:
        for line in f:
            if "task_" in line:
                out.write(line.replace("task_", f"task_{rank.number}_"))


def write(folder, ranks, raw):
    """OUT/starvz/data, from the ranks' own files, of which paje.trace then goes."""
    data = folder / "data"
    shutil.rmtree(data, ignore_errors=True)
    data.mkdir(parents=True)
    delta = [r.shift_us / 1e3 - r.zero_ms for r in ranks]
    delta = [d - min(delta) for d in delta]
    paths = [raw / f"rank-{r.number}" for r in ranks]
    merge_paje(ranks, [p / "paje.trace" for p in paths], delta, data / "paje.trace")
    for name in ("tasks.rec", "data.rec"):
        with open(data / name, "w", encoding="utf-8") as out:
            for r, p, d in zip(ranks, paths, delta):
                add_records(out, r, p / name, d)
    with open(data / "dag.dot", "w", encoding="utf-8") as out:
        out.write("digraph G {\n")
        for r, p in zip(ranks, paths):
            add_graph(out, r, p / "dag.dot")
        out.write("}\n")
    for p in paths:
        (p / "paje.trace").unlink()
    config = folder / "starvz.yaml"
    if not config.exists():
        config.write_text(configuration(ranks), encoding="utf-8")


# ---- its configuration, from the colours of the program ----

def panel(name, **more):
    body = ", ".join(["active: TRUE", *(f"{k}: {v}" for k, v in more.items())])
    return f"{name}: {{{body}}}\n"


def configuration(ranks):
    """The colours are those of the codelets, and all panels that mean something
    for these runs."""
    tasks = "".join(f"  {k['name']}: {{color: \"{k['color']}\", use: TRUE}}\n"
                    for k in ranks[0].about["kinds"] if k["name"] == k["codelet"])
    shown = ranks[:MOST_RANKS]
    some = f"selected_nodes: {[r.number for r in shown]}\n" if shown != ranks else ""
    rows = sum(len(r.about["workers"]) for r in shown)
    return ("# Kept by tools/trace OUT --again; remove it for a new one.\n"
            "# limits: {start: 1000, end: 1500}  # ms from the first task: a part\n" +
            some + "app_tasks:\n" + tasks + "base_size: 14\nexpand: 0.02\n"
            "guided: {active: FALSE}\n" + panel("title", height=0.5) +
            panel("kiteration", legend="TRUE", subite="TRUE",
                  height=3 if some else 3 * len(shown),
                  pernode="FALSE" if some else "TRUE") +
            panel("st", outliers="FALSE", alpha=1.0, idleness="TRUE",
                  makespan="TRUE", cpb="FALSE", abe="{active: FALSE}",
                  height=0.6 * rows, expand=0.05) +
            panel("starpu", legend="TRUE", height=0.6 * rows) +
            panel("submitted", legend="TRUE", height=1.5) +
            panel("ready", legend="TRUE", height=1.5))


# ---- is it here? ----

def environment():
    path = [str(LIBRARY), os.environ.get("R_LIBS", "")]
    return {**os.environ, "R_LIBS": ":".join(p for p in path if p)}


def ask_r(code):
    """What R prints."""
    r = subprocess.run(["Rscript", "-e", code], capture_output=True, text=True,
                       env=environment())
    return r.stdout.strip()


def missing():
    """What StarVZ's pictures need and is not here."""
    lost = [p for p in PROGRAMS if not shutil.which(p)]
    have = [] if "Rscript" in lost else ask_r(
        "cat(Filter(function(p) nzchar(system.file(package = p)), "
        f"c{R_PACKAGES}))").split()
    return lost + [f"R package {p}" for p in R_PACKAGES if p not in have]


# ---- draw ----

def draw(folder):
    """True where it drew; without StarVZ nothing is said but that."""
    lost = missing()
    if lost:
        run.say(f"no StarVZ picture: {', '.join(lost)} not installed "
                "(tools/setup --starvz)")
        return False
    folder = folder.resolve()
    data, picture = folder / "data", folder / "starvz.png"
    picture.unlink(missing_ok=True)
    tools = pathlib.Path(ask_r("cat(system.file('tools', package = 'starvz'))"))
    r = subprocess.run([tools / "starvz", "-t", "-k", "-c", folder / "starvz.yaml",
                        "-s", picture, data], capture_output=True, text=True,
                       env={**environment(), "STARVZ_TOOLS": str(tools)})
    for p in (*data.glob("*.gz"), *data.glob("*.csv")):
        p.unlink()
    if r.returncode or not picture.is_file():
        run.say(f"StarVZ drew nothing:\n{(r.stdout + r.stderr)[-1000:]}")
        return False
    run.say(f"{picture}, tables in {data}")
    if ask_r("cat('arrow_info' %in% getNamespaceExports('arrow'))") != "TRUE":
        run.say("these tables are R's own, not Parquet: a stand-in for Apache Arrow "
                "wrote them (tools/setup --starvz)")
    return True
