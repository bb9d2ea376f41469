# SPDX-License-Identifier: Apache-2.0
"""What all measurements share: figures with their spread, the machine, programs,
training runs and simulations.  A case is a module of bench/cases with ABOUT and
run(bench)."""
import concurrent.futures
import contextlib
import ctypes
import json
import os
import pathlib
import platform
import random
import re
import signal
import statistics
import subprocess
import tempfile
import time
import traceback

ROOT = pathlib.Path(__file__).resolve().parent.parent
DROP = ("STARPU_SCHED", "STARPU_NCPU", "STARPU_NCPUS", "OPENBLAS_CORETYPE")


def printed(*argv):
    """What a command prints, or says where it prints nothing; None if it is not there."""
    try:
        out = subprocess.run(argv, capture_output=True, text=True, check=False,
                             timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return out.stdout or out.stderr


def sh(*argv, check=True):
    """What a command prints; RuntimeError where it fails."""
    p = subprocess.run([str(x) for x in argv], capture_output=True, text=True,
                       check=False)
    if check and p.returncode:
        raise RuntimeError(f"{' '.join(map(str, argv))}: {p.stderr.strip()}")
    return p.stdout.strip()


def first_line(*argv):
    """Of what a command prints; "absent" if it is not there."""
    text = printed(*argv)
    return "absent" if text is None else (text.splitlines() or ["?"])[0].strip()


def package(name):
    """Version as pkg-config knows it, also where tools/setup has put it."""
    path = f"{ROOT}/.deps/starpu/lib/pkgconfig:{os.environ.get('PKG_CONFIG_PATH', '')}"
    return first_line("env", f"PKG_CONFIG_PATH={path}",
                      "pkg-config", "--modversion", name)


def proc(file, key):
    """What a file of /proc says behind a key, or None."""
    text = pathlib.Path("/proc", file).read_text()
    found = re.search(rf"^{key}\s*:\s*(.*)", text, re.M)
    return found and found[1].strip()


def machine():
    return {"cpu": proc("cpuinfo", "model name") or platform.machine(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_mib": int(proc("meminfo", "MemTotal").split()[0]) // 1024,
            "kernel": platform.release(),
            "system": first_line("sh", "-c", ". /etc/os-release; echo $PRETTY_NAME"),
            "compiler": first_line("cc", "--version"),
            "mpi": first_line("mpirun", "--version"),
            "starpu": package("starpu-1.4"), "blas": package("openblas"),
            "liburing": package("liburing"),
            "izar": first_line("git", "-C", str(ROOT), "describe", "--always",
                               "--dirty")}


def spread(values):
    """Median and the middle half: what is outside is the machine's noise."""
    low, _, high = statistics.quantiles(values, n=4, method="inclusive") \
        if len(values) > 1 else 3 * values
    return {"median": statistics.median(values), "low": low, "high": high,
            "n": len(values)}


def environment(home=ROOT / "build" / "starpu-home"):
    """The caller's, without what would override a config; home: where StarPU keeps
    what it measures."""
    env = {k: v for k, v in os.environ.items() if k not in DROP}
    home.mkdir(parents=True, exist_ok=True)
    env.update(IZ_PLAIN="1", STARPU_SILENT="1", STARPU_HOME=str(home))
    if os.geteuid() == 0:
        env.update(OMPI_ALLOW_RUN_AS_ROOT="1",
                   OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    return env


def ranks_line(ranks):
    if not ranks or ranks == 1:
        return []
    return ["mpirun", "-np", str(ranks), "--oversubscribe", "--bind-to", "none"]


def end(p, send=os.killpg):
    """Of a program that leads a session, and of all that it has started; with
    send=os.kill a launcher gets the time to end what it has started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if p.poll() is not None:
            return
        send(p.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            p.wait(5)


def text_file(folder):
    """A text to train on, the same everywhere."""
    path = folder / "text"
    if not path.exists():
        words = "the of and to in that is was he for it with as his on be at by".split()
        path.write_text(" ".join(random.Random(1).choices(words, k=700000)))
    return path


DAY_S = 86400
LIBC = ctypes.CDLL(None)


def with_parent():
    """In a new process, before it starts a program (preexec_fn): the kernel kills it
    when its parent is gone, also by SIGKILL (prctl(2), PR_SET_PDEATHSIG)."""
    LIBC.prctl(1, signal.SIGKILL)


def record(report):
    """JSON with a line for each figure and each sample: what contains no other."""
    return re.sub(r"([\[{])\n([^\[\]{}]*)\n *([\]}])", lambda m: m[1] + re.sub(
        r"\n *", " ", m[2].strip()) + m[3], json.dumps(report, indent=1)) + "\n"


def write_json(path, value):
    """A kill leaves the old file or the new one."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(json.dumps(value, indent=1))
    new.replace(path)


def json_lines(path):
    """The complete lines of a file that may have been cut off, or may not be there."""
    text = path.read_text() if path.is_file() else ""
    return [json.loads(x) for x in text[:text.rfind("\n") + 1].splitlines()]


def shipped(name):
    """A config of configs/."""
    return json.loads((ROOT / f"configs/{name}.json").read_text())


def settings(changes):
    """Options of the program that set keys of its config."""
    return [x for k, v in changes.items()
            for x in ("--set", f"{k}={v if isinstance(v, (str, pathlib.Path)) else json.dumps(v)}")]


def simulate(config, machine, *options):
    """What tools/simulate finds of a config, on the machine of a file or of a dict; with
    --plan nothing.  None where it does not fit."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "config.json"
        path.write_text(json.dumps(config))
        if isinstance(machine, dict):
            described, machine = machine, pathlib.Path(folder) / "machine.json"
            machine.write_text(json.dumps(described))
        r = subprocess.run([ROOT / "tools/simulate", path, "--machine", machine,
                            *map(str, options)], text=True, capture_output=True,
                           check=False)
    if "this run needs" in r.stderr and r.returncode:
        return None
    if r.returncode:
        raise RuntimeError(r.stderr.strip() or r.stdout.strip() or
                           f"exit status {r.returncode}")
    return {} if "--plan" in options else json.loads(
        r.stdout.strip().splitlines()[-1])["simulation"]


def side_by_side(f, values):
    """[f(value)], as many at a time as there are cores."""
    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(f, values))


RECORDED = ("step_s", "forward_s", "backward_s", "optimizer_s")


def recorded(path, untested=True):
    """(row, measured, simulated) of every row of a record's simulated.json, which says
    what the figures are; measured: RECORDED, as if the head had been padded.  untested:
    also of rows that a test leaves out."""
    record = json.loads(pathlib.Path(path).read_text())
    machine = shipped(f"machines/{record['machine']}")

    def one(row):
        found = simulate(record["configs"][row["config"]],
                         {**machine, **record["rates"], **row.get("rates", {})},
                         *(x for k, v in row["sets"].items()
                           for x in ("--set", f"{k}={json.dumps(v)}")))
        head = row.get("head_s", 0)
        return row, {k: row[k] - (head if k in ("step_s", "backward_s") else 0)
                     for k in RECORDED}, found

    return side_by_side(one, (x for x in record["rows"] if untested or "untested" not in x))


class Absent(Exception):
    """What a case needs is not on this machine; the text says how to get it."""


class Case:
    """The figures of one case."""

    def __init__(self, bench, name, about):
        self.bench, self.name, self.about = bench, name, about
        self.quick, self.folder = bench.quick, bench.folder
        self.figures, self.commands, self.configs, self.raw = [], [], [], []

    def figure(self, name, values, unit, target=None, better="more", note=""):
        """values: a number, or one per round.  target: the least (or, with better
        "less", the most) that is wanted."""
        values = list(values) if isinstance(values, (list, tuple)) else [values]
        f = {"name": name, "unit": unit, "better": better, **spread(values)}
        if target is not None:
            f["target"] = target
        if note:
            f["note"] = note
        self.figures.append(f)
        print("  " + figure_line(f), flush=True)
        return f["median"]

    def bf16_products(self):
        """Whether this machine makes products of bf16."""
        try:
            self.call([self.program("bench/bench_gemm"), 1, 1, "bf16", 64, 1,
                       "64:64", "64:64"])
        except RuntimeError as e:
            if "gemm: bf16:" not in str(e):
                raise
            return False
        return True

    def call(self, argv, **more):
        """Runs a program of ours or another and returns what it printed; begun: called
        with its process."""
        line = [str(x) for x in argv]
        text = " ".join(line).replace(str(ROOT) + "/", "")
        for name in ("IZ_BENCH_PYTHON", "IZ_BENCH_LLMC"):
            if path := os.environ.get(name):
                text = text.replace(path, f"${name}")
        text = re.sub(re.escape(str(self.folder)) + r"/(run-\w+/)?", "", text)
        if text not in self.commands:
            self.commands.append(text)
        env = {**environment(), **more.pop("env", {})}
        limit_s, begun = more.pop("timeout", 600), more.pop("begun", lambda p: None)
        p = subprocess.Popen(line, env=env, cwd=more.pop("cwd", ROOT), text=True,
                             stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE, start_new_session=True)
        try:
            begun(p)
            out, err = p.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{text}: no end after {limit_s} s") from None
        finally:
            end(p)
        if p.returncode:
            raise RuntimeError(f"{text}: exit status {p.returncode}\n"
                               f"{out[-2000:]}{err[-2000:]}")
        return out

    def call_json(self, argv, **more):
        """What a program printed, a JSON object per line."""
        return [json.loads(x) for x in self.call(argv, **more).splitlines()
                if x.startswith("{")]

    def program(self, name):
        """Path of a program of build/, made if need be."""
        return self.bench.program(name)

    def remember(self, config):
        """What differs from one training run to the next is in its config."""
        kept = {k: v for k, v in config.items() if k != "data"}
        kept["run"] = {k: v for k, v in config["run"].items() if k != "output"}
        kept = json.loads(json.dumps(kept).replace(f"{ROOT}/", ""))
        if kept not in self.configs:
            self.configs.append(kept)

    def train(self, config, ranks=None, program="models/gpt2", prefix=(), **more):
        """A training run; more: as in call."""
        with tempfile.TemporaryDirectory(prefix="run-", dir=self.folder) as out:
            out = pathlib.Path(out)
            path = out / "in.json"
            config = json.loads(json.dumps(config))
            config.setdefault("data", {"path": str(text_file(self.folder)),
                                       "bytes": True})
            config.setdefault("run", {})
            config["run"].update(output=str(out / "out"), save=False)
            path.write_text(json.dumps(config))
            self.remember(config)
            self.call([*(prefix or ranks_line(ranks)), self.program(program), path],
                      **more)
            tasks = out / "out/tasks.jsonl"
            return Training(json_lines(out / "out/metrics.jsonl"),
                            json_lines(tasks) if tasks.exists() else [])


class Training:
    """What a training run wrote."""

    SKIP = 2  # steps in which memory is touched for the first time

    def __init__(self, lines, tasks=()):
        self.lines = lines
        self.tasks = tasks
        steps = [x for x in lines if "seconds" in x]
        self.steps = steps[self.SKIP:] or steps
        self.summary = self.last("summary")

    def last(self, key):
        found = [x[key] for x in self.lines if key in x]
        return found[-1] if found else None

    def median(self, key):
        return statistics.median(x[key] for x in self.steps)

    @property
    def step_s(self):
        return self.median("seconds")

    @property
    def tasks_per_step(self):
        return self.summary["tasks"] / self.summary["steps"]


class Bench:
    def __init__(self, quick, folder):
        self.quick, self.folder = quick, pathlib.Path(folder)
        self.built, self.stopped = set(), False

    def program(self, name):
        path = ROOT / "build" / name
        if name not in self.built:
            p = subprocess.run(["ninja", "-C", ROOT / "build", name], text=True,
                               capture_output=True, check=False)
            if p.returncode:
                raise RuntimeError(f"ninja -C build {name} failed; tools/setup makes "
                                   f"build/\n{p.stdout[-2000:]}{p.stderr[-2000:]}")
            self.built.add(name)
        return path


GPT = {"layers": 6, "heads": 6, "width": 384, "seq": 256, "vocab": 256}
GPT2_124M = {"layers": 12, "heads": 12, "width": 768, "seq": 256, "vocab": 50257}
OFFLOAD = {"stage": 3, "offload_optimizer": {"device": "cpu"},
           "offload_param": {"device": "cpu"}}


def gpt_config(micro=4, accum=1, zero=None, steps=8, model=None, **run):
    """A GPT of 6 layers of width 384 unless `model` says otherwise."""
    return {"train_micro_batch_size_per_gpu": micro,
            "gradient_accumulation_steps": accum,
            "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
            "zero_optimization": zero or {"stage": 0},
            "model": {**GPT, **(model or {})},
            "run": {"steps": steps, **run}}


# ---- the table ----

def number(x):
    return f"{x:.3g}" if abs(x) < 1000 else f"{x:.0f}"


def met(f):
    """Whether the target is met, None without one."""
    if "target" not in f:
        return None
    return f["median"] >= f["target"] if f["better"] == "more" \
        else f["median"] <= f["target"]


def figure_line(f):
    text = f"{f['name']:<52} {number(f['median']):>8} {f['unit']:<10}"
    if f["n"] > 1:
        text += f" {number(f['low'])} .. {number(f['high'])}"
    if met(f) is not None:
        sign = ">=" if f["better"] == "more" else "<="
        text += f"  target {sign} {number(f['target'])}: " + \
            ("met" if met(f) else "MISSED")
    return text + (f"  ({f['note']})" if f.get("note") else "")


def print_table(report):
    m = report["machine"]
    print(f"\n{m['cpu']}, {m['cores']} cores, {m['memory_mib']} MiB; "
          f"load {report['load_before']:.1f} before, "
          f"{report['load_after']:.1f} after; izar {m['izar']}")
    for name, case in report["cases"].items():
        print(f"\n{name}: {case['about']} [{case['seconds']:.0f} s]")
        if "absent" in case:
            print(f"  absent: {case['absent']}")
        if "error" in case:
            print(f"  FAILED: {case['error'].splitlines()[0]}")
        for f in case["figures"]:
            print("  " + figure_line(f))
        for x in case.get("raw", ()):
            if "absent" in x and "peer" in x:
                print(f"  {x['peer']}: absent: {x['absent']}")


def run_case(bench, name, module):
    case = Case(bench, name, module.ABOUT)
    print(f"{name}: {module.ABOUT}", flush=True)
    begin, out = time.monotonic(), {}
    try:
        module.run(case)
    except Absent as why:
        out["absent"] = str(why)
        print(f"  absent: {why}", flush=True)
    except (Exception, KeyboardInterrupt, SystemExit) as why:
        # one case must not lose what others measured, nor what it has itself
        bench.stopped = not isinstance(why, Exception)
        out["error"] = f"{type(why).__name__}: {why}"
        out["traceback"] = traceback.format_exc().replace(f"{ROOT}/", "")
        print(f"  FAILED: {out['error']}", flush=True)
    return {"about": module.ABOUT, "seconds": time.monotonic() - begin,
            "commands": case.commands, "figures": case.figures, **out,
            **({"configs": case.configs} if case.configs else {}),
            **({"raw": case.raw} if case.raw else {})}
