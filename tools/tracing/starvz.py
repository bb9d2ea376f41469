# SPDX-License-Identifier: Apache-2.0
"""StarVZ's pictures, where R, StarVZ and pajeng are installed.  StarVZ 0.8 reads
columns of Paje events by their place, and StarPU added some in 1.4.8, so the
trace is written over into the layout that StarVZ knows."""
import os
import pathlib
import shutil
import subprocess

from . import run

R_PACKAGES = ("data.tree", "arrow", "starvz")
PROGRAMS = ("Rscript", "pj_dump", "rec2csv", "awk", "gzip")


# ---- the layout of columns that StarVZ knows ----

EVENT_20 = ("Time Container Type Value Size Params Footprint Tag JobId "
            "SubmitOrder GFlop X Y Iteration Subiteration NumaNodes").split()
LINK_MORE = "MPITAG MPIType Priority Handle".split()


FILL = {"MPITAG": "0", "MPIType": "IntraNode", "Priority": "0"}


def link_fields(number, have):
    """What StarVZ wants of the begin (23) and the end (24) of a link."""
    if number == "24":
        return have[:6] + LINK_MORE
    return [f for f in have if f not in ("HName", "X", "Y")]


def compatible(source, target):
    """Copies a paje.trace line by line: events have the fields that StarVZ wants,
    and what the trace lacks of them is filled in."""
    number, fields, wanted = None, {}, {"20": EVENT_20}
    with open(source, encoding="utf-8", errors="replace") as f, \
            open(target, "w", encoding="utf-8") as out:
        for line in f:
            words = line[1:].split() if line.startswith("%") else None
            if words is None:
                n, _, rest = line.partition("\t")
                if n in wanted:
                    have = dict(zip(fields[n], rest.rstrip("\n").split("\t")))
                    line = "\t".join([n, *(have.get(k, FILL.get(k, '""'))
                                           for k in wanted[n])]) + "\n"
            elif words[:1] == ["EventDef"]:
                number = words[2]
                fields[number] = []
            elif words[:1] == ["EndEventDef"]:
                if number in ("23", "24"):
                    wanted[number] = link_fields(number, fields[number])
                out.writelines(f"%\t{k}\t{'date' if k == 'Time' else 'string'}\n"
                               for k in wanted.get(number, ()))
            elif words:
                fields[number].append(words[0])
                if number in ("20", "23", "24"):
                    continue  # they come at the end of the definition
            out.write(line)


# ---- its configuration, from the colours of the program ----

def panel(name, active, **more):
    body = ", ".join([f"active: {'TRUE' if active else 'FALSE'}",
                      *(f"{k}: {v}" for k, v in more.items())])
    return f"{name}: {{{body}}}\n"


def configuration(about):
    """The colours are those of the codelets, and all panels that mean something
    for this run."""
    tasks = "".join(f"  {k['name']}: {{color: \"{k['color']}\", use: TRUE}}\n"
                    for k in about["kinds"] if k["name"] == k["codelet"])
    return ("app_tasks:\n" + tasks + "base_size: 14\nexpand: 0.02\n" +
            panel("guided", False) + panel("title", True, height=0.5) +
            panel("kiteration", True, legend="TRUE", height=3, subite="TRUE") +
            "st:\n  active: TRUE\n  outliers: FALSE\n  alpha: 1.0\n"
            "  idleness: TRUE\n  makespan: TRUE\n  cpb: FALSE\n"
            "  abe: {active: FALSE}\n  height: 3\n  expand: 0.05\n" +
            panel("starpu", True, legend="TRUE", height=3) +
            panel("submitted", True, legend="TRUE", height=1.5) +
            panel("ready", True, legend="TRUE", height=1.5))


# ---- is it here? ----

def r_has(package):
    r = subprocess.run(["Rscript", "-e", f"cat(nzchar(system.file(package="
                        f"'{package}')))"], capture_output=True, text=True)
    return r.stdout.strip().endswith("TRUE")


def missing():
    """What StarVZ's pictures need and is not here."""
    lost = [p for p in PROGRAMS if not shutil.which(p)]
    if "Rscript" in lost:
        return lost + [f"R package {p}" for p in R_PACKAGES]
    return lost + [f"R package {p}" for p in R_PACKAGES if not r_has(p)]


def tools_folder():
    r = subprocess.run(["Rscript", "-e", "cat(system.file('tools', "
                        "package='starvz'))"], capture_output=True, text=True)
    return pathlib.Path(r.stdout.strip())


# ---- draw ----

FILES = ("tasks.rec", "data.rec", "dag.dot")


def draw_rank(tool, raw, out, rank):
    """One rank in a fresh folder: StarVZ deletes what it has read."""
    work = out / f"rank-{rank.number}"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    folder = raw / f"rank-{rank.number}"
    compatible(folder / "paje.trace", work / "paje.trace")
    for name in FILES:
        shutil.copy(folder / name, work / name)
    (out / "starvz.yaml").write_text(configuration(rank.about),
                                     encoding="utf-8")
    picture = out / f"rank-{rank.number}.png"
    env = {**os.environ, "STARVZ_TOOLS": str(tool.parent)}
    r = subprocess.run([tool, "-t", "-k", "-c", out / "starvz.yaml", "-s",
                        picture, work], env=env, capture_output=True,
                       text=True)
    made = [p for p in out.glob("*.png")
            if p.stem == picture.stem or p.stem.startswith(picture.stem + "-")]
    if r.returncode or not made:
        run.say(f"StarVZ drew nothing of rank {rank.number}:\n"
                f"{(r.stdout + r.stderr)[-1000:]}")
        return False
    shutil.rmtree(work)
    return True


def draw(folder, ranks):
    """True where it drew; without StarVZ nothing is said but that."""
    lost = missing()
    if lost:
        run.say(f"no StarVZ pictures: {', '.join(lost)} not installed "
                "(tools/trace --install-starvz)")
        return False
    out = (folder / "starvz").resolve()
    out.mkdir(exist_ok=True)
    tool = tools_folder() / "starvz"
    raw = (folder / "raw").resolve()
    return all([draw_rank(tool, raw, out, r) for r in ranks])


# ---- install ----

def install():
    """Installs what can be, then tells what is still missing and where it is."""
    subprocess.run([pathlib.Path(__file__).with_name("install-starvz")])
    lost = missing()
    for p in lost:
        run.say(f"missing: {p}")
    if any("R package" in p for p in lost):
        run.say("R packages: in R, install.packages(c('data.tree', 'arrow')) "
                "from CRAN and remotes::install_github('schnorr/starvz'); or "
                "conda install -c conda-forge r-arrow. Everything else works "
                "without them.")
    return 1 if lost else 0
