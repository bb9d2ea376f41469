# SPDX-License-Identifier: Apache-2.0
"""Runs a command traced and converts what StarPU wrote."""
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import threading

from . import figures, records

FLUSH = b"FxT is flushing"
MOST_TASKS = 600000
OURS = ("raw", "starvz", "report.html", "trace.json")


class Refused(Exception):
    """Something that the user has to change."""


def say(text):
    print(f"[trace] {text}", file=sys.stderr, flush=True)


def prepare(out):
    """An empty folder for the trace: nothing of an earlier one may be mixed
    in."""
    command = out / "raw" / "command"
    if out.exists() and any(out.iterdir()) and not command.exists():
        raise Refused(f"{out} is not empty and holds no trace: choose another "
                      "folder")
    for name in OURS:
        path = out / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    command.parent.mkdir(parents=True)
    command.touch()  # from now on it is a trace, whatever ends it
    return command.parent.resolve()


def environment(raw, steps):
    env = {k: v for k, v in os.environ.items()
           if k not in ("STARPU_GENERATE_TRACE", "STARPU_FXT_SUFFIX",
                        "IZ_TRACE_STEPS")}
    env["IZ_TRACE"] = str(raw)
    if steps:
        env["IZ_TRACE_STEPS"] = steps
    return env


def is_open_mpi(launcher):
    try:
        r = subprocess.run([launcher, "--version"], capture_output=True,
                           text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return "Open MPI" in r.stdout


def hand_on(command, names):
    """Open MPI gives ranks on other hosts only the variables it is told."""
    launcher = pathlib.Path(command[0]).name
    if launcher in ("mpirun", "mpiexec", "orterun") and is_open_mpi(command[0]):
        extra = [x for n in names for x in ("-x", n)]
        return [command[0], *extra, *command[1:]]
    return command


def pass_on(stream, flushes):
    """An error stream, and how often FxT says in a line of it that it wrote."""
    for line in stream:
        flushes.append(line.count(FLUSH))
        sys.stderr.buffer.write(line)
        sys.stderr.buffer.flush()


def run(command, raw, steps):
    """Returns the exit status and how often FxT wrote in the middle of it."""
    env = environment(raw, steps)
    names = [n for n in ("IZ_TRACE", "IZ_TRACE_STEPS",
                         "STARPU_TRACE_BUFFER_SIZE") if n in env]
    try:
        p = subprocess.Popen(hand_on(command, names), env=env,
                             stderr=subprocess.PIPE)
    except OSError as e:
        raise Refused(f"{command[0]}: {e.strerror}") from e
    # Ctrl-C is for the command: it ends its step, and the trace is made of it.
    old, flushes = signal.signal(signal.SIGINT, signal.SIG_IGN), []
    watch = threading.Thread(target=pass_on, args=(p.stderr, flushes), daemon=True)
    watch.start()
    status = p.wait()
    watch.join(10)  # what the command has left behind may hold the stream
    signal.signal(signal.SIGINT, old)
    return (128 - status if status < 0 else status), sum(flushes)  # as a shell


# ---- conversion ----

def parse(path, *keys):
    """The object in a file, which may be cut off; the innermost of `keys` in it."""
    try:
        found = rank = json.loads(path.read_text(encoding="utf-8"))
        for key in keys:
            rank = rank[key]
        return rank, found
    except (ValueError, KeyError, TypeError) as e:
        raise Refused(f"{path}: damaged or cut off ({e!r})") from e


def descriptions(raw):
    return [about for _, about in sorted(
        (parse(p, "rank") for p in raw.glob("rank-*.json")), key=lambda x: x[0])]


def find_fxt_tool(program):
    """That of the StarPU which the program runs with: each build has a format
    of its own."""
    r = subprocess.run(["ldd", program], capture_output=True, text=True)
    m = re.search(r"libstarpu-\S+ => (.+) \(0x", r.stdout)
    for above in pathlib.Path(m.group(1)).parents[1:3] if m else ():
        tool = above / "bin/starpu_fxt_tool"
        if os.access(tool, os.X_OK):
            return tool
    raise Refused(f"no starpu_fxt_tool beside {m.group(1) if m else 'StarPU'}, "
                  f"which {program} runs with")


def prof_file(raw, rank):
    found = [p for p in raw.glob("prof_file_*")
             if p.name.rpartition("_")[2] == str(rank)]
    if len(found) != 1:
        raise Refused(f"{raw} holds {len(found)} traces of rank {rank}; with "
                      "several hosts, copy them there and use --again")
    return found[0]


def tool_environment(about):
    """That of starpu_fxt_tool.  The one of simulations is a simulated program
    itself: it wants the platform that tools/simulate has made."""
    if not about["simulated"]:
        return None
    build = pathlib.Path(about["program"]).resolve().parent.parent
    return {**os.environ, "STARPU_HOSTNAME": "izar",
            "STARPU_PERF_MODEL_DIR": str(build / "platform")}


def convert(tool, raw, about):
    """Lets starpu_fxt_tool write one rank's files; returns their folder.  Each
    rank by itself: no limit of their number, and the clocks are ours."""
    rank = about["rank"]
    folder = raw / f"rank-{rank}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    r = subprocess.run([tool, "-memory-states", "-i", prof_file(raw, rank)],
                       cwd=folder, capture_output=True, text=True,
                       env=tool_environment(about))
    if r.returncode or not (folder / "tasks.rec").is_file():
        raise Refused(f"{tool} failed on rank {rank}:\n{r.stderr[-1000:]}")
    return folder


def count_tasks(folder):
    with open(folder / "tasks.rec", "rb") as f:
        return sum(line.startswith(b"EndTime:") for line in f)


def read_all(raw):
    """All ranks on one clock."""
    raw = raw.resolve()
    about = descriptions(raw)
    if not about:
        raise Refused(f"no trace in {raw}: the command must start a program of "
                      "izar that trains or simulates, and get as far as --steps")
    lost = set(range(about[0]["ranks"])) - {a["rank"] for a in about}
    if lost and not about[0]["simulated"]:
        raise Refused(f"no trace of rank {min(lost)} in {raw}; with several "
                      "hosts, copy the files there and use --again")
    tool = find_fxt_tool(about[0]["program"])
    ranks, tasks = [], 0
    for a in about:
        folder = convert(tool, raw, a)
        tasks += count_tasks(folder)
        if tasks > MOST_TASKS:
            raise Refused(f"the trace has {tasks} tasks or more, and this tool "
                          f"takes {MOST_TASKS} of all ranks together, which "
                          "keeps it under 2 GB: take fewer steps (--steps)")
        try:
            ranks.append(records.read_rank(a, folder))
        except records.BadTrace as e:
            raise Refused(str(e)) from e
        steps, wanted = len(figures.clips(ranks[-1])), a["to"] - a["from"]
        if steps < wanted:
            raise Refused(f"{prof_file(raw, a['rank'])} was cut off: {wanted} steps were "
                          f"traced, and {steps} are whole (was the disk full?)")
    records.align(ranks)
    return ranks
