# SPDX-License-Identifier: Apache-2.0
"""The diffs of docs/adding.md: applied to a copy of the tree, built without
warnings, and run.  In front of each block, a word in backquotes names its file;
a block without one belongs to the file of the block before.  A diff has no line
numbers: its old lines must stand in the file once.  A block of C begins a file
or goes on with it.  Behind <!-- shown --> a block is only read."""
import json
import os
import pathlib
import re
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("IZ_PROGRAM",
                                    ROOT / "build/models/gpt2")).parents[1]
NAME = re.compile(r"`([\w./-]+\.(?:c|h|cu|py|build))`")


def blocks(text):
    """Yields (file, kind, lines) of each block to apply, in order."""
    name, shown, block, kind = None, False, None, None
    prose = ""
    for line in text.splitlines():
        if block is not None:
            if line == "```":
                if kind in ("c", "diff") and not shown:
                    yield name, kind, block
                block, shown, prose = None, False, ""
            else:
                block.append(line)
        elif line.startswith("```"):
            kind, block = line[3:], []
            name = (NAME.findall(prose) or [name])[-1]
        elif line.startswith("## "):
            name, prose = None, ""
        else:
            shown |= line == "<!-- shown -->"
            prose = prose + line + "\n" if line else prose


def apply_diff(path, lines):
    """Replaces the old lines of a diff, which must stand in the file once."""
    old = "".join(l[1:] + "\n" for l in lines if l[:1] != "+")
    new = "".join(l[1:] + "\n" for l in lines if l[:1] != "-")
    text = path.read_text()
    assert text.count(old) == 1, \
        f"{path.name}: {text.count(old)} places have the lines\n{old}"
    path.write_text(text.replace(old, new))


def apply_page(tree):
    """Applies every block to the tree; returns the files that were changed."""
    changed = {}
    for name, kind, lines in blocks((ROOT / "docs/adding.md").read_text()):
        assert name, f"no file is named for the block\n{lines}"
        path = tree / name
        if kind == "diff":
            apply_diff(path, lines)
        else:
            assert name in changed or not path.exists() or \
                name.startswith("tests/"), f"{name}: exists already"
            with path.open("a") as file:
                file.write("\n".join(lines) + "\n")
        changed.setdefault(name, 0)
        changed[name] += 1
    return changed


def check(*command, cwd, **more):
    """What a command printed, which must have succeeded; without the settings that
    make a test program report to somebody else."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("CMOCKA")}
    env.update(more)
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=env, text=True,
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def pkg_config_path():
    """Where the build has looked for its libraries."""
    options = json.loads(check("meson", "introspect", "--buildoptions", BUILD,
                               cwd=ROOT).partition("\n")[0] or "[]")
    return [o["value"] for o in options if o["name"] == "pkg_config_path"][0]


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the tree with everything on the page, built."""
    to = tmp_path_factory.mktemp("adding") / "izar"
    shutil.copytree(ROOT, to, symlinks=True, ignore=lambda folder, names: [
        n for n in names if pathlib.Path(folder) == ROOT and
        (n.startswith((".", "build")) or n in ("runs", "data", "tokens"))
        or n in ("__pycache__", "results", "corpus")])
    changed = apply_page(to)
    assert len(changed) >= 15, sorted(changed)
    check("meson", "setup", "build", "-Dcuda=disabled", "-Dwerror=true", "-Doptimization=0",
          "--pkg-config-path", ":".join(pkg_config_path()), cwd=to)
    check("ninja", "-C", "build", "models/mlp", "models/gpt2", "tests/test_ops",
          "tests/test_keys", "tests/codelets/gpu/update.emulated.o", cwd=to)
    text = subprocess.run(["build/models/gpt2", "--help-markdown"], cwd=to,
                          check=True, capture_output=True).stdout
    (to / "docs/config.md").write_bytes(text)
    (to / "text").write_bytes(b"the cat sat on the mat and looked at the dog\n" * 200)
    return to


def run(tree, program, optimizer=None, **settings):
    """Runs a program of the tree with settings of the section `run`; returns its exit
    status and what it printed."""
    config = {"train_batch_size": 4, "optimizer": optimizer or {},
              "data": {"path": "text", "bytes": True},
              "run": {"output": str(tree / "runs/one"), "steps": 20, "workers": 1,
                      "save": False, "hash": True, **settings}}
    if program == "gpt2":
        config["model"] = {"layers": 1, "heads": 2, "width": 16, "seq": 16,
                           "vocab": 256}
    (tree / "config.json").write_text(json.dumps(config))
    done = subprocess.run([f"build/models/{program}", "config.json"], cwd=tree,
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, timeout=600,
                          env={**os.environ, "STARPU_HOME": str(tree)})
    shutil.rmtree(config["run"]["output"], ignore_errors=True)
    return done.returncode, done.stdout


def losses(out):
    return [float(x) for x in re.findall(r"^step \d+/\d+ +loss ([0-9.]+)", out, re.M)]


def test_the_model_learns(tree):
    status, out = run(tree, "mlp", optimizer={"type": "AdamW", "params": {"lr": 0.01}})
    assert status == 0, out
    assert losses(out)[0] > losses(out)[-1] + 0.5, out


def test_the_op_is_what_its_test_says(tree):
    out = check("build/tests/test_ops", "rows", cwd=tree)
    assert "relu" in out, out


def test_the_optimizer_learns(tree):
    status, out = run(tree, "gpt2", optimizer={
        "type": "Signum", "params": {"lr": 0.003, "momentum": 0.8}})
    assert status == 0, out
    assert losses(out)[0] > losses(out)[-1] + 0.3, out


def test_the_key_is_kept_and_documented(tree):
    status, out = run(tree, "gpt2", stop_loss=100, save=True)
    assert status == 0 and len(losses(out)) == 1, out
    status, out = run(tree, "gpt2", stop_loss=100)
    assert status == 1 and "run.stop_loss" in out, out
    check("build/tests/test_keys", cwd=tree)


def test_headers_are_installed_with_what_they_include(tree):
    names = re.findall(r"'([\w/]+\.h)'", (tree / "meson.build").read_text().partition(
        "install_headers(")[2].partition("subdir:")[0])
    assert "models/parts.h" in names
    for name in names:
        included = re.findall(r'^#include "(.+)"', (tree / name).read_text(), re.M)
        assert set(included) <= set(names), name
