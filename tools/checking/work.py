# SPDX-License-Identifier: Apache-2.0
"""A check: what runs, side by side or alone, what it printed, and what is known of it, a
line of JSON per case as soon as it is known."""
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
import harness  # noqa: E402

ROOT = harness.ROOT
PACKED = (ROOT / "bin" / "gpt2").is_file()
PROGRAMS = {**{x: f"models/{x}" for x in ("gpt2", "llama", "moe", "vit", "dlrm")},
            "test_ops_gpu": "tests/test_ops_gpu", "bench_ops": "bench/bench_ops",
            "bench_kernels": "bench/bench_kernels",
            "calibrate": "tools/calibrate"}

FINAL = ("passed", "failed", "skipped")


def say(text=""):
    print(text, flush=True)


def programs(build):
    """{name: file} of a build folder, or of a pack."""
    return {name: (ROOT / "bin" / name if PACKED and not build else
                   Path(build or ROOT / "build-gpu", file)).resolve()
            for name, file in PROGRAMS.items()}


class Stopped(BaseException):
    """A signal: what runs is ended, what is known stays.  by: its name; Python drops
    what is raised inside some of its own callbacks, such as those of a fork."""

    by = None

    @classmethod
    def look(cls):
        if cls.by:
            raise cls(cls.by)


class Job(NamedTuple):
    name: str
    line: list
    limit_s: float
    env: dict = {}


class Running:
    """A process with its own session, so that nothing that it starts outlives it."""

    def __init__(self, check, job):
        check.count += 1
        self.job, self.path = job, check.folder / f"out{check.count}.txt"
        self.begin = time.monotonic()
        with open(self.path, "wb") as out:
            self.p = subprocess.Popen(
                [str(x) for x in job.line], stdin=subprocess.DEVNULL, stdout=out,
                stderr=subprocess.STDOUT, env={**check.env, **job.env},
                cwd=check.folder, start_new_session=True,
                preexec_fn=harness.with_parent)

    def over(self):
        return self.p.poll() is not None or \
            time.monotonic() > self.begin + max(self.job.limit_s, 1)

    def end(self, log):
        """(job, status, output, seconds); status None where it had to be ended."""
        status = self.p.poll()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.p.pid, signal.SIGKILL)
        self.p.wait()
        text, seconds = self.path.read_text(errors="replace"), time.monotonic() - self.begin
        with open(log, "a") as f:
            f.write(f"\n#### {self.job.name}, exit {status}, {seconds:.1f} s: "
                    f"{' '.join(map(str, self.job.line))}\n{text}")
        self.path.unlink()
        return self.job, status, text, round(seconds, 1)


class Check:
    """options: those of tools/gpu-check; folder: for what is needed only now."""

    def __init__(self, options, folder, env):
        self.o, self.folder, self.env = options, folder, env
        self.programs = programs(options.build)
        self.out = Path(options.out).absolute()
        self.out.mkdir(parents=True, exist_ok=True)
        self.results, self.log = self.out / "results.jsonl", self.out / "log.txt"
        self.end = time.monotonic() + options.limit
        self.count, self.wanted = 0, {}
        if self.results.is_file():  # a kill may have left a part of a line
            found = self.results.read_bytes()
            os.truncate(self.results, found.rfind(b"\n") + 1)
        self.known = {(x["part"], x["name"]): x for x in harness.json_lines(self.results)}

    def left(self):
        return self.end - time.monotonic()

    def todo(self, part, names):
        """Which of the cases of a part are to run: those of --only that have no good
        result."""
        chosen = [n for n in names if not self.o.only or any(
            x in f"{part} {n}" for x in self.o.only.split(","))]
        self.wanted.update({(part, n): None for n in chosen})
        return [n for n in chosen if self.known.get((part, n), {}).get("status")
                not in ("passed", "skipped")]

    def run(self, jobs, at_once=1):
        """Yields (job, status, output, seconds) of each as it ends; starts none when the
        time is over."""
        waiting, running = list(jobs), []
        try:
            while running or waiting and self.left() > 0:
                Stopped.look()
                while waiting and len(running) < at_once and self.left() > 0:
                    job = waiting.pop(0)
                    running.append(Running(self, job._replace(
                        limit_s=min(job.limit_s, self.left()))))
                for r in [r for r in running if r.over()]:
                    running.remove(r)
                    yield r.end(self.log)
                time.sleep(0.01)
        finally:
            for r in running:
                r.end(self.log)

    def add(self, part, name, status, line="", **found):
        """A result, and a line about it.  One that is not final is not kept as known."""
        r = {"part": part, "name": name, "status": status, **found}
        self.known[part, name] = r
        with open(self.results, "a") as f:
            f.write(json.dumps(r) + "\n")
        say(f"{name:<30}{status:<13}{line}")
        if status == "failed":
            say("".join(f"  | {x}\n" for x in found.get("tail", "").splitlines()[-6:]))
        return r

    def outcome(self, status, limit_s):
        """Of a program: what it did not end for lack of this check's time is no failure."""
        if status is None:
            return "failed" if self.left() > 0 and limit_s > 0 else "not finished"
        return "failed" if status else "passed"

    def tell(self):
        """The exit status, and what it means."""
        if not self.wanted:
            say(f"--only {self.o.only}: no case of this call has one of these words")
            return 2
        status = {x: self.known.get(x, {}).get("status", "left out") for x in self.wanted}
        say()
        for part in dict.fromkeys(p for p, _ in self.wanted):
            own = [s for (p, _), s in status.items() if p == part]
            say(f"{part:<12}" + ", ".join(f"{own.count(s)} {s}"
                                          for s in dict.fromkeys(own)))
        for (part, name), s in status.items():
            if s not in ("passed", "skipped"):
                say(f"{s}: {part}: {name}")
        say(f"results: {self.results}; what the programs printed: {self.log}")
        if "failed" in status.values():
            return 1
        return 0 if set(status.values()) <= set(FINAL) else 3
