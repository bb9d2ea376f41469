# SPDX-License-Identifier: Apache-2.0
"""Faults, and the copy of this tree that they are planted into: build-faults/tree."""
import fcntl
import os
import pathlib
import shlex
import shutil
import subprocess

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
WORK = ROOT / "build-faults"
TREE = WORK / "tree"
LIMIT_S = 1800  # of one build or test; a test that hangs has found the fault
STARPU = {"build": "starpu", "build-standin": "starpu-standin",
          "build-simgrid": "starpu-simgrid"}
OPTIONS = {"build": ["-Dcuda=disabled"], "build-standin": ["-Dcuda=standin"],
           "build-simgrid": ["-Dsimgrid=true"]}


class Trouble(Exception):
    """Neither caught nor missed: nothing can be said about the fault."""


def say(*words):
    print("[faults]", *words, flush=True)


class Fault:
    """One patch: what it breaks, and which tests see that."""

    def __init__(self, path):
        self.path, self.name = path, path.stem
        self.what, self.tests, self.files = "", [], []
        for line in path.read_text().splitlines():
            word, _, rest = line.partition(" ")
            if word == "What:":
                self.what = rest.strip()
            elif word == "Caught-by:":
                self.tests.append(rest.strip())
            elif word == "+++":
                self.files.append(rest.removeprefix("b/"))
        if not self.what or not self.tests:
            raise Trouble(f"{path.name}: no What: or no Caught-by: line")


# ---- the copy ----

def sources():
    """The files of this tree that git does not ignore, as they are now."""
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return sorted({n for n in names.split("\0") if (ROOT / n).is_file()})


def same(a, b):
    return b.is_file() and a.stat().st_mode == b.stat().st_mode and \
        a.read_bytes() == b.read_bytes()


def bring_up_to_date():
    """Touches only files that differ: the rest need not be built again."""
    wanted = sources()
    for name in wanted:
        a, b = ROOT / name, TREE / name
        if not same(a, b):
            b.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(a, b)
            shutil.copymode(a, b)
    keep = set(wanted)
    for folder, folders, names in os.walk(TREE):
        here = pathlib.Path(folder)
        folders[:] = [f for f in folders if f != "__pycache__" and not
                      (here == TREE and (f in STARPU or f == ".deps"))]
        for n in names:
            if str((here / n).relative_to(TREE)) not in keep:
                (here / n).unlink()
    if not (TREE / ".deps").exists():
        (TREE / ".deps").symlink_to(ROOT / ".deps")


def apply_patch(fault, tree=TREE, only=()):
    r = subprocess.run(
        ["git", "apply", *only, "--unsafe-paths", f"--directory={tree}",
         str(fault.path)], cwd="/", capture_output=True, text=True)
    if r.returncode:
        raise Trouble(f"{fault.name} does not apply:\n{r.stderr}")


def open_copy():
    """Returns what nobody else has while it is open: another one would undo what this
    one plants."""
    TREE.mkdir(parents=True, exist_ok=True)
    lock = open(WORK / "lock", "w", encoding="utf-8")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise Trouble("another one is at work in build-faults") from None
    (WORK / "log").write_text("")
    bring_up_to_date()
    return lock


# ---- building and testing ----

def environment(build):
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return {**os.environ, **(root if os.geteuid() == 0 else {}),
            **{"build-standin": {"IZ_TEST_GPU": "standin"},
               "build-simgrid": {"IZ_TEST_SIMGRID": "1"}}.get(build, {}),
            "PYTHONDONTWRITEBYTECODE": "1",
            "CCACHE_READONLY": "1",  # no other build shall find what has a fault
            "IZ_PROGRAM": str(TREE / build / "models" / "gpt2")}


def command(line, build):
    """Its exit status; its output is the end of build-faults/log."""
    with open(WORK / "log", "a", encoding="utf-8") as log:
        print("\n$", shlex.join(line), file=log, flush=True)
        try:
            return subprocess.run(
                line, cwd=TREE, env=environment(build), stdin=subprocess.DEVNULL,
                stdout=log, stderr=log, timeout=LIMIT_S, check=False).returncode
        except subprocess.TimeoutExpired:
            return 124


def set_up(build):
    if build not in STARPU:
        raise Trouble(f"{build} is none of {', '.join(STARPU)}")
    if (TREE / build / "build.ninja").exists():
        return
    found = ROOT / ".deps" / STARPU[build] / "lib" / "pkgconfig"
    if command(["meson", "setup", build, *OPTIONS[build],
                f"--pkg-config-path={found}"], build):
        raise Trouble(f"meson setup {build}: see build-faults/log")
