# SPDX-License-Identifier: Apache-2.0
"""Starts the program the way a user does, always under a time limit, and reads
back what it left: exit status, both streams and metrics.jsonl."""
import atexit
import collections
import contextlib
import copy
import functools
import json
import os
import pathlib
import random
import re
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/runtime/hf"))
import folder as hf  # noqa: E402

PROGRAM = os.environ.get("IZ_PROGRAM", str(ROOT / "build" / "models" / "gpt2"))
BUILD = pathlib.Path(PROGRAM).resolve().parents[1]
GPU = os.environ.get("IZ_TEST_GPU", "")  # standin, real or kernels
FULL = os.environ.get("IZ_TEST_FULL") == "1"
# Of one run; a run takes about a second on an idle machine.
TIMEOUT_S = int(os.environ.get("IZ_TEST_TIMEOUT_S", 240))
MIB = 1 << 20

# Odd on purpose: nothing divides by 2, 3 and 4 ranks, so shards are padded, and
# five equal blocks are more than the rings of the tests hold.
MODEL = {"layers": 5, "heads": 3, "width": 24, "seq": 16, "vocab": 256}
UNITS = set(range(MODEL["layers"] + 2))
GPT2 = {"layers": 12, "heads": 12, "width": 768, "seq": 1024, "vocab": 50257}
# Nothing moves: the loss of a step is that of the weights at the start.
STILL = {"optimizer.params.lr": 0.0, "optimizer.params.weight_decay": 0.0,
         "run.steps": 1}


def built(path):
    """Another program or library of the same build."""
    path = BUILD / path
    assert path.is_file(), f"{path} is not built"
    return str(path)


def sampled(r):
    """The text that a run has written at its end, with its prompt."""
    assert "\nsample (temperature" in r.out, str(r)
    text = r.out.split("\nsample (temperature")[1].partition("\n")[2]
    return text.partition("\nweights hash")[0]


def sizes(model):
    """Parameters of embedding, blocks and head of a GPT-2, whose weight is the
    embedding's."""
    c = model["width"]
    return [(model["vocab"] + model["seq"]) * c,
            *[12 * c * c + 13 * c] * model["layers"], 2 * c]


def parameters(model):
    return sum(sizes(model))


def padded(n, ranks=1):
    """Elements of a unit: each rank's shard is a multiple of 64."""
    return -(-n // (64 * ranks)) * 64 * ranks


def units(model, ranks=1):
    return [padded(n, ranks) for n in sizes(model)]


def planned(text, names):
    """Bytes of the classes in the printed table, all tiers together."""
    rows = re.findall(r"^  ([a-z ]+?) +([\d.]+) +([\d.]+) +([\d.]+)$", text,
                      re.M)
    assert {name for name, *_ in rows} >= set(names), text
    return sum(float(x) for name, *mib in rows if name in names
               for x in mib) * MIB


def merge(into, changes):
    """Applies dotted keys, {"run.steps": 3}, or nested ones."""
    for key, value in changes.items():
        place = into
        *sections, last = key.split(".")
        for s in sections:
            place = place.setdefault(s, {})
        if isinstance(value, dict) and isinstance(place.get(last), dict):
            merge(place[last], value)
        else:
            place[last] = copy.deepcopy(value)
    return into


def text_file(path, size=60000):
    """Words in a seeded random order: learnable, the same on every machine."""
    rng = random.Random(7)
    words = ("the of and a to in is it you that he was for on are with as his "
             "they be at one have this from or had by hot word but what some "
             "we can out other were all there when up use your how").split()
    text = " ".join(rng.choice(words) for _ in range(size // 2))
    path.write_bytes(text.encode()[:size])
    return path


def typed(dtype, **fp16):
    """Parameters of this type, and settings that only fp16 has."""
    more = fp16 if dtype == "fp16" else {}
    return {} if dtype == "fp32" else {
        f"{dtype}.enabled": True, **{f"fp16.{k}": v for k, v in more.items()}}


def base_config(data, output):
    """Three steps of the small model, everything that may vary at its plainest."""
    return {
        "train_batch_size": 4,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW",
                      "params": {"lr": 3e-3, "weight_decay": 0.1}},
        "model": dict(MODEL),
        "data": {"path": str(data), "bytes": True},
        "run": {"output": str(output), "steps": 3, "workers": 2, "slices": 1,
                "hash": True, "save": False, "recompute": "full",
                # auto measures, and bits must not depend on that
                "cpu_products": "fp32", "cpu_kernels": "BLAS",
                "sum_order": "ranks_first"},
    }


@functools.cache
def session():
    """Where MPI has its sockets: the paths of those must be short."""
    folder = tempfile.mkdtemp(prefix="izar")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def environment(extra=None):
    """The caller's, without what would override a config."""
    drop = ("STARPU_SCHED", "STARPU_NCPU", "STARPU_NCPUS", "OPENBLAS_CORETYPE")
    # What StarPU measures once belongs to one build: another one, with a GPU or
    # without, would measure again and say so.  Tests that run side by side measure
    # for themselves, or one would read a file that another is writing.
    home = BUILD / "starpu-home" / os.environ.get("PYTEST_XDIST_WORKER", "alone")
    home.mkdir(parents=True, exist_ok=True)
    env = {
        **{k: v for k, v in os.environ.items() if k not in drop},
        "IZ_PLAIN": "1",
        # Less than the usual 0.15 s on every core, in thousands of runs.
        "IZ_REFERENCE_GEMM": "64",
        "STARPU_HOME": str(home),
        # Its word of MPI_Finalize may come later than the end of a rank on a busy machine;
        # that of another status or a signal still counts (docs/dependencies.md).
        "OMPI_MCA_orte_allowed_exit_without_sync": "1",
        # More ranks than cores, for Open MPI 4 and 5; other launchers do not ask.
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        # Thousands of runs start MPI: without a look for networks, of which they use none,
        # without a daemon for a single rank, without a second's grace for ranks that end.
        "OMPI_MCA_pml": "ob1",
        "OMPI_MCA_ess_singleton_isolated": "1",
        "OMPI_MCA_odls_base_sigkill_timeout": "0",
        # Such ranks all have one name, and so one folder: that of others at their start or
        # end would be in the way.
        "OMPI_MCA_orte_tmpdir_base": session(),
        # Idle threads of OpenBLAS would spin for longer than a run computes.
        "OPENBLAS_THREAD_TIMEOUT": "4",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        # A third of such a start is looking at devices on the bus, of which none matters.
        **({} if GPU == "real" else {"HWLOC_COMPONENTS": "-pci,-linuxio"}),
        **(extra or {})}
    return {k: v for k, v in env.items() if v is not None}


MPIRUN = ["mpirun", "--bind-to", "none"]


def apart(*commands):
    """A run of ranks that each have a command of their own.  Between colons they would
    end mpirun of Open MPI 5.0.7 by a signal (docs/dependencies.md)."""
    cases = " ".join(f"{i}) exec {shlex.join(map(str, words))} ;;"
                     for i, words in enumerate(commands))
    return [*MPIRUN, "-np", str(len(commands)), "sh", "-c",
            f"case ${{OMPI_COMM_WORLD_RANK:-$PMI_RANK}} in {cases} esac"]


def call(*line, output=ROOT, env=None, timeout_s=TIMEOUT_S, **more):
    """Runs any command to its end."""
    line, begin = list(map(str, line)), time.monotonic()
    p = subprocess.run(line, env=environment(env), capture_output=True, text=True,
                       stdin=subprocess.DEVNULL, timeout=timeout_s, **more)
    return Result(p.returncode, p.stdout, p.stderr, output,
                  time.monotonic() - begin, line)


def ckpt(*args, rc=0, **more):
    """tools/ckpt."""
    r = call(built("tools/ckpt"), *args, **more)
    assert r.rc == rc and not DUMPS.search(r.out + r.err), str(r)
    return r


class Result:
    """What a run left behind."""

    def __init__(self, rc, out, err, output, seconds, line):
        self.rc, self.out, self.err, self.seconds = rc, out, err, seconds
        self.output, self.line = pathlib.Path(output), line
        self.lines = read_lines(self.output / "metrics.jsonl")

    @property
    def steps(self):
        return [x for x in self.lines if "loss" in x]

    @property
    def losses(self):
        return [x["loss"] for x in self.steps]

    @property
    def bits(self):
        """All that must be the same bit for bit: 17 digits tell doubles apart."""
        return [(x["step"], x["loss"], x["grad_norm"], x["lr"],
                 x["loss_scale"], x["skipped"]) for x in self.steps]

    def last(self, key):
        found = [x[key] for x in self.lines if key in x]
        assert found, f"no {key} in metrics.jsonl\n{self}"
        return found[-1]

    @property
    def hash(self):
        return self.last("weights_hash")

    @property
    def numbers(self):
        """What a run has computed, to the bit: every step, and the weights."""
        return self.bits, self.hash

    @property
    def validation(self):
        return [x["validation_loss"] for x in self.lines if "validation_loss" in x]

    @property
    def config(self):
        """The settings it ran with, as it wrote them."""
        return json.loads((self.output / "config.json").read_text())

    @property
    def tasks(self):
        return read_lines(self.output / "tasks.jsonl")

    def units(self, task, times=1):
        """The units that have such a task so many times in a step, or more; of the
        losses it has none."""
        return {unit for unit, n in self.per_step(task).items() if n >= times}

    def per_step(self, task):
        """How many such tasks a unit has in the first step."""
        return collections.Counter(t["unit"] for t in self.tasks if t["task"] == task
                                   and t["step"] == self.tasks[0]["step"]
                                   and t["unit"] >= 0)

    @property
    def summary(self):
        return self.last("summary")

    @property
    def memory(self):
        """{(class, tier): (planned, allocated)} of the last run."""
        return {(x["memory"], x["tier"]):
                (x["planned_bytes"], x["allocated_bytes"])
                for x in self.lines if "memory" in x}

    def bytes_of(self, *classes):
        return sum(have for (name, _), (_, have) in self.memory.items()
                   if name in classes)

    def bytes_in(self, *tiers):
        return sum(have for (_, tier), (_, have) in self.memory.items()
                   if tier in tiers)

    @property
    def saved(self):
        return saved(self.output)

    @property
    def files(self):
        return checkpoints(self.output)

    def __str__(self):
        return (f"$ {' '.join(self.line)}\nexit status {self.rc} after "
                f"{self.seconds:.1f} s\n--- stdout\n{self.out[-3000:]}"
                f"\n--- stderr\n{self.err[-3000:]}")


def read_lines(path):
    """The complete lines of a file that may still be written."""
    if not path.is_file():
        return []
    text = path.read_text()
    return [json.loads(x) for x in text[:text.rfind("\n") + 1].splitlines()]


def saved(output):
    """The steps of which there are complete checkpoints."""
    return sorted(int(p.name[5:]) for p in (output / "checkpoints").glob("step-*")
                  if p.name[5:].isdigit())


def checkpoints(output):
    """{name: bytes} of all files of all checkpoints, and of an index what it says, but
    for whose it is."""
    def content(path):
        if path.name != "index.json":
            return path.read_bytes()
        return json.dumps({k: v for k, v in json.loads(path.read_text()).items()
                           if k not in ("run", "identity", "seal")}).encode()
    folder = output / "checkpoints"
    return {str(p.relative_to(folder)): content(p)
            for p in sorted(folder.rglob("*")) if p.is_file()}


def iz_hash(data):
    """runtime/base/hash.c."""
    most, golden = (1 << 64) - 1, 0x9e3779b97f4a7c15

    def mix(z):
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9 & most
        z = (z ^ z >> 27) * 0x94d049bb133111eb & most
        return z ^ z >> 31

    def absorb(lane, word):
        lane = (lane ^ word) * golden & most
        return lane ^ lane >> 32
    words = struct.unpack(f"<{-(-len(data) // 64) * 8}Q",
                          data + bytes(-len(data) % 64))
    lanes = [functools.reduce(absorb, words[j::8], mix(j + 1)) for j in range(8)]
    return functools.reduce(lambda h, lane: mix(absorb(h, lane)), lanes, len(data))


def edit_index(output, change):
    """Changes what the newest checkpoint says, under a new seal."""
    path = output / f"checkpoints/step-{saved(output)[-1]:08}/index.json"
    j = json.loads(path.read_text())
    del j["seal"]
    change(j)
    body = json.dumps(j)[:-1]
    path.write_text(f'{body},\n"seal": "{iz_hash(body.encode()):016x}"\n}}\n')


def forget(output):
    """As before checkpoints told of what run they are."""
    edit_index(output, lambda j: [j.pop(k) for k in ("run", "identity")])


def arrays(output, step):
    """{name: bytes} of a checkpoint that one rank wrote."""
    path = output / f"checkpoints/step-{step:08}/rank-00000-of-00001.safetensors"
    return {k: data for k, (_, _, data) in hf.read_file(path, None).items()}


def alive(pid):
    """Not gone, and not a zombie that nobody has asked after."""
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def all_gone(pids):
    """Whether all have ended, now or soon: a launcher may end before its ranks."""
    end = time.monotonic() + TIMEOUT_S
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    return not any(map(alive, pids))


def children(pid, name=None):
    """Pids of the direct children of a process, or of those that have this name."""
    found = []
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            named, _, fields = stat.read_text().rpartition(")")
            if int(fields.split()[1]) == pid and name in (None, named.partition("(")[2]):
                found.append(int(stat.parent.name))
    return found


def stacks(pid):
    """Where each thread of a process stands, if gdb can say."""
    with contextlib.suppress(FileNotFoundError, subprocess.TimeoutExpired):
        r = subprocess.run(["gdb", "-p", str(pid), "-batch", "-ex",
                            "thread apply all bt 12"], capture_output=True,
                           text=True, timeout=60, stdin=subprocess.DEVNULL)
        return "\n".join(x for x in r.stdout.splitlines() if x.startswith(("Thread ", "#")))
    return ""


class Run:
    """A run that is under way."""

    def __init__(self, line, config, env=None):
        self.output = pathlib.Path(json.loads(
            pathlib.Path(config).read_text())["run"]["output"])
        self.line = line
        self.begin = time.monotonic()
        # Files, not pipes: nobody reads while the run is under way.
        self.streams = [pathlib.Path(f"{config}.{x}") for x in ("out", "err")]
        with open(self.streams[0], "wb") as out, \
                open(self.streams[1], "wb") as err:
            self.process = subprocess.Popen(
                self.line, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                env=environment(env), start_new_session=True)

    def pids(self):
        """Those of the ranks: MPICH's mpirun has a process between itself and them."""
        pid = self.process.pid
        between = children(pid, "hydra_pmi_proxy") or [pid]
        return [y for x in between for y in children(x)] if self.line[0] == MPIRUN[0] \
            else [pid]

    def text(self, stream):
        return self.streams[stream].read_text(errors="replace")

    def signal(self, number, only=None):
        pids = self.pids()
        for pid in pids if only is None else [pids[only]]:
            os.kill(pid, number)

    def until(self, condition, what):
        """Waits for what must come while the run goes on."""
        end, over = time.monotonic() + TIMEOUT_S, False
        while not condition():
            assert not over, f"ended before {what}\n{self.finish()}"
            over = self.process.poll() is not None or time.monotonic() > end
            time.sleep(0.01)

    def step(self):
        """The last that it has told of."""
        return max((x.get("step", 0) for x in
                    read_lines(self.output / "metrics.jsonl")), default=0)

    def until_step(self, step):
        self.until(lambda: self.step() >= step, f"step {step}")

    def kill(self):
        """mpirun puts its ranks into process groups of their own.  One that writes to
        a disk may be there for a while, with its lock on the output."""
        pids = self.pids()
        for pid in [*pids, self.process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        all_gone(pids)

    def finish(self, timeout_s=TIMEOUT_S):
        late = None
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            late = "\n\n".join(map(stacks, self.pids()))
            self.kill()
        r = Result(self.process.returncode, self.text(0), self.text(1),
                   self.output, time.monotonic() - self.begin, self.line)
        assert late is None, f"still running after {timeout_s} s\n{r}\n{late}"
        return r


class Place:
    """A folder of a test with its data, in which runs are started."""

    def __init__(self, folder, data):
        self.folder, self.data, self.count = folder, data, 0
        self.program, self.model, self.bytes = PROGRAM, MODEL, True

    def use(self, program, model=None, records=None):
        """Another model's program, whose shape is this or all that a test says."""
        self.program, self.model = str(program), model or {}
        if records:
            self.data, self.bytes = records, False

    def wrap(self, script):
        """Runs the program by a script that names it {}."""
        path = self.folder / "program"
        path.write_text(script.format(shlex.quote(self.program)))
        path.chmod(0o755)
        self.program = str(path)

    def config(self, overrides, output=None):
        """Writes a config of its own for each run; returns its path."""
        self.count += 1
        output = output or self.folder / f"out{self.count}"
        path = self.folder / f"config{self.count}.json"
        config = base_config(self.data, output)
        config["model"] = dict(self.model)
        if not self.bytes:
            del config["data"]["bytes"]
        path.write_text(json.dumps(merge(config, overrides), indent=1))
        return path

    def command(self, ranks, config, options=()):
        """One rank is started without mpirun."""
        mpirun = [] if ranks == 1 else [*MPIRUN, "-np", str(ranks)]
        return [*mpirun, self.program, str(config), *map(str, options)]

    def start(self, ranks, overrides, options=(), output=None, env=None):
        """What is in capitals is a variable."""
        env = {**{k: v for k, v in overrides.items() if k.isupper()}, **(env or {})}
        config = self.config({k: v for k, v in overrides.items() if k not in env}, output)
        return Run(self.command(ranks, config, options), config, env)

    def launch(self, *args, timeout_s=TIMEOUT_S, **kwargs):
        return self.start(*args, **kwargs).finish(timeout_s)

    def apart(self, settings, overrides, options=(), **more):
        """Ranks of one run, each behind words of its own: env A=1, taskset."""
        config = self.config(overrides)
        return call(*apart(*([*words, self.program, config, *options]
                             for words in settings)),
                    output=self.folder / f"out{self.count}", **more)

    def halves(self, ranks, first, second):
        """A run that goes on with the checkpoint of another."""
        return self.good(ranks, second, ["--resume"], self.good(ranks, first).output)

    def as_it_is(self, config, options=()):
        """A run of a whole config, to which nothing is added."""
        self.count += 1
        path = self.folder / f"config{self.count}.json"
        path.write_text(json.dumps(config))
        r = Run(self.command(1, path, options), path).finish()
        assert r.rc == 0, str(r)
        return r

    def good(self, *args, **kwargs):
        """A run that must succeed and allocate exactly its plan."""
        r = self.launch(*args, **kwargs)
        assert r.rc == 0, str(r)
        # Both are sums over the list of places: each was handed to its owner.
        assert all(planned == have for planned, have in r.memory.values()), \
            f"{r.memory}\n{r}"
        return r

    def weights(self, name, overrides):
        """A run of one rank, and the weights at its end, by tensor."""
        out = self.folder / name
        r = self.good(1, {**overrides, "run.export": str(out)})
        return r, {k.removeprefix("transformer."): t[2] for k, t in hf.read(out).items()}

    def clear(self):
        shutil.rmtree(self.folder, ignore_errors=True)


def offload(stage, optimizer, param, nvme):
    """The zero section; homes as in DeepSpeed's config, nvme a folder.  Of parameters
    it may be "trained/frozen"."""
    zero = {"stage": stage}
    for name, homes in (("offload_optimizer", optimizer), ("offload_param", param)):
        home, *frozen = homes.split("/")
        if homes != "none":
            zero[name] = {"device": home}
        if frozen:
            zero[name]["frozen_device"] = frozen[0]
        if "nvme" in homes:
            zero[name]["nvme_path"] = str(nvme)
    return {"zero_optimization": zero}


DUMPS = re.compile(r"Assertion|\*\*\*|core dumped|Backtrace|Segmentation|"
                   r"AddressSanitizer|runtime error|\[starpu\]\[|Traceback|"
                   r"Aborted|Process received signal")


def refused(r, *words, status=1, everyone=False):
    """A clean refusal: the status, one message with these words, no dump.
    `everyone`: each rank may say the same."""
    assert r.rc == status, str(r)
    assert not DUMPS.search(r.out + r.err), str(r)
    lines = [x for x in r.err.splitlines() if all(w in x for w in words)]
    if everyone:
        lines = list(set(lines))
    assert len(lines) == 1, f"wanted one line with {words}\n{r}"
    return lines[0]
