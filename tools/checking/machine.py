# SPDX-License-Identifier: Apache-2.0
"""The machine: where its libraries are, what it says of itself, how fast its memory is,
and the GPU's clocks and power while everything else runs."""
import glob
import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import time
from datetime import datetime

from checking.small import TABLE, command
from checking.work import PACKED, ROOT, Job, harness

# Where a machine may have CUDA's libraries beside the linker's own list.
CUDA_DIRS = ("/usr/local/cuda/lib64", "/usr/local/cuda-*/lib64",
             "/usr/lib/x86_64-linux-gnu", "/usr/local/nvidia/lib64")


def linked(files, env):
    """What the linker says of their libraries."""
    return subprocess.run(["ldd", *files], capture_output=True, text=True, env=env).stdout


def missing(said):
    """Libraries and versions that it does not find."""
    return sorted({*re.findall(r"^\s*(\S+) => not found", said, re.M),
                   *re.findall(r"version `(\S+)' not found", said)})


def library_dirs():
    """Where libraries may be: CUDA's folders, and Python packages of any python3."""
    roots = {p for p in sys.path if "site-packages" in p or "dist-packages" in p}
    roots |= set(glob.glob("/opt/*/.venv/lib/python3*/site-packages"))
    return [d for pattern in (*CUDA_DIRS, *(f"{r}/nvidia/*/lib" for r in sorted(roots)))
            for d in sorted(glob.glob(pattern))]


def environment(files, folder):
    """With the folders of the libraries that the linker does not find by itself."""
    env = harness.environment(folder)
    env.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
               OMPI_MCA_btl="self,vader", OMPI_MCA_pml="ob1",
               OMPI_MCA_btl_vader_single_copy_mechanism="none")
    env.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # nvidia-smi's
    env.setdefault("CUDA_VISIBLE_DEVICES", "0")
    if PACKED:  # each library with its own plugins, and not with the machine's
        env.update(OPAL_PREFIX=str(ROOT), OPAL_LIBDIR=str(ROOT / "lib"),
                   OPAL_BINDIR=str(ROOT / "bin"), PMIX_LIBDIR=str(ROOT / "lib"),
                   PMIX_INSTALL_PREFIX=str(ROOT),
                   PMIX_MCA_mca_base_component_path=str(ROOT / "lib/pmix"),
                   PATH=f"{ROOT / 'bin'}:{env['PATH']}")
    # A pack's own libraries before those of the same names that a folder of CUDA's
    # may have beside these.
    have = [str(ROOT / "lib")] * PACKED + [
        x for x in env.get("LD_LIBRARY_PATH", "").split(":") if x]
    said, dirs = linked(files, env), library_dirs()
    lost, cuda = missing(said), re.search(r"libcudart\.so\.(\d+)", said)
    # also what the programs look for themselves, and the compiler that cuDNN loads
    own = [f"{x}.so.{cuda[1]}" for x in ("libcublasLt", "libnvrtc") if cuda]
    for name in (*lost, *own, "libcudnn.so.9"):
        found = [d for d in dirs if os.path.exists(os.path.join(d, name))]
        if found and not set(found) & set(have):
            have.insert(int(PACKED) if name in lost else len(have), found[0])
    env["LD_LIBRARY_PATH"] = ":".join(have)
    return env


def may_lock():
    """Whether this process may lock as much memory as there is."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return limit == resource.RLIM_INFINITY or bool(
        int(harness.proc("self/status", "CapEff"), 16) >> 14 & 1)


# ---- what it says of itself --------------------------------------------------

CARD = ("name", "driver_version", "memory.total", "memory.used", "pcie.link.gen.max",
        "pcie.link.width.current", "power.limit", "clocks.max.sm", "pci.bus_id")


def smi(*what):
    """The command that asks for figures of the GPU that programs have, of several."""
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    return ["nvidia-smi", f"--id={gpu}", f"--query-gpu={','.join(what)}",
            "--format=csv,noheader"]


def facts(c):
    gpu = harness.first_line(*smi(*CARD)).split(", ")
    found = {"card": dict(zip(CARD, gpu)), "cores": len(os.sched_getaffinity(0)),
             "lscpu": harness.printed("env", "LC_ALL=C", "lscpu"),
             "memory": {x: harness.proc("meminfo", x)
                        for x in ("MemTotal", "MemAvailable")},
             "disk_free_gib": shutil.disk_usage(c.folder).free >> 30,
             "kernel": os.uname().release, "locks": may_lock(),
             "nvcc": (harness.printed("nvcc", "--version") or "absent")[-200:],
             "libraries": c.env.get("LD_LIBRARY_PATH", "")}
    c.add("machine", "facts", "passed", f"{', '.join(gpu)}; {found['cores']} cores; "
          f"{found['memory']}", **found)


def begin(c):
    """Why nothing can run here, or ""; facts."""
    lost = missing(linked(c.programs.values(), c.env))
    if lost:
        return f"these libraries are nowhere on this machine: {' '.join(lost)}"
    # it measures the bus, which all others then know
    start = TABLE["gpt2 fp32"]._replace(name="first start")
    for _, _, text, _ in c.run([command(c, start, "cuda")]):
        none = re.search(r"^izar: run.device: cuda: (.*)", text, re.M)
        if none:
            return f"no GPU: {none[1]}"
    for _ in c.todo("machine", ["facts"]):
        facts(c)
    return ""


def memory(c):
    """What cores reach together: every kernel of the host, and a loop that only moves the
    same bytes."""
    cores = len(os.sched_getaffinity(0))
    threads = {f"memory of {n}": n for n in (1, cores - 2) if 0 < n < cores}
    for name in c.todo("machine", threads):
        line = [c.programs["bench_kernels"], threads[name], 0.01 if c.o.tiny else 0.25]
        for _, status, text, seconds in c.run([Job(name, line, 40)]):
            adam = re.findall(r"^adam .*?\S+ GB/s.*?limit\s+\S+ GB/s", text, re.M)
            c.add("machine", name, c.outcome(status, 40), adam[0] if adam else "", text=text,
                  seconds=seconds)


CALIBRATE_S = 35  # a little more than it takes


def calibrate(c):
    """The machine file that plans and simulations take."""
    todo = c.todo("machine", [] if c.o.tiny else ["calibrate"])
    jobs = [Job(name, [c.programs["calibrate"], c.out / "machine.json"], 90)
            for name in todo if c.left() > CALIBRATE_S]
    for job, status, text, seconds in c.run(jobs):
        c.add("machine", job.name, c.outcome(status, job.limit_s), f"{seconds} s",
              tail=text[-1500:])


# ---- clocks ------------------------------------------------------------------

class Clocks:
    """Clock, power and the reasons for a lower clock, 20 times a second, into a file."""

    def __init__(self, c):
        self.path = c.out / "clocks.csv"
        self.p = None
        if shutil.which("nvidia-smi"):
            with open(self.path, "a") as out:
                self.p = subprocess.Popen(
                    [*smi("timestamp", "clocks.sm", "power.draw", "temperature.gpu",
                          "clocks_event_reasons.active"), "-lms", "50"], stdout=out,
                    stderr=subprocess.STDOUT, preexec_fn=harness.with_parent)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.p:
            harness.end(self.p, os.kill)

    def busy(self, begin_s, end_s=None):
        """Medians of clock and power between two times, of the half with most power: what
        a run has while it computes; {} where nothing is known."""
        seen = []
        for line in self.path.read_text().splitlines() if self.p else ():
            found = re.match(r"(\S+ \S+), (\d+) MHz, ([\d.]+) W", line)
            at = found and datetime.strptime(found[1], "%Y/%m/%d %H:%M:%S.%f").timestamp()
            if found and begin_s <= at <= (end_s or time.time()):
                seen.append((float(found[3]), int(found[2])))
        seen = sorted(seen)[len(seen) // 2:]
        return {"clock_mhz": statistics.median(x[1] for x in seen),
                "power_w": statistics.median(x[0] for x in seen)} if seen else {}
