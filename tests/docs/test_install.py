# SPDX-License-Identifier: Apache-2.0
"""What `meson install` gives: the programs behind one command, and what the model of
docs/adding.md needs to be built outside the tree."""
import json
import os
import pathlib
import re
import subprocess

import pytest

from test_adding import BUILD, ROOT, blocks, check, losses, pkg_config_path


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with nothing but an installed izar."""
    to = tmp_path_factory.mktemp("install")
    check("meson", "install", "-C", BUILD, "--no-rebuild", "--destdir", to / "root",
          cwd=to)
    (to / "text").write_bytes(b"the cat sat on the mat and looked at the dog\n" * 200)
    return to


def found(place, name):
    """The one installed file of this name."""
    paths = list((place / "root").rglob(name))
    assert len(paths) == 1, paths
    return paths[0]


def train(place, *command, **model):
    """Two steps."""
    config = {"train_batch_size": 4, "model": model,
              "data": {"path": "text", "bytes": True},
              "run": {"output": "out-" + pathlib.Path(command[-1]).name, "steps": 2,
                      "workers": 1, "save": False, "hash_interval": 1}}
    (place / "config.json").write_text(json.dumps(config))
    out = check(*command, "config.json", cwd=place, STARPU_HOME=str(place))
    assert len(losses(out)) == 2, out


def test_the_command_starts_the_programs(place):
    izar = found(place, "bin") / "izar"
    train(place, izar, "gpt2", layers=1, heads=2, width=16, seq=16, vocab=256)
    again = check(izar, "replay", "out-gpt2", "--steps", "1:2", "--set",
                  "zero_optimization.stage=3", cwd=place, STARPU_HOME=str(place))
    assert "equal: steps 1 to 2" in again
    def says(*words):
        done = subprocess.run([izar, *words], capture_output=True, text=True)
        return (done.stdout + done.stderr).lower()

    names = re.findall(r"^  (\w+)$", says(), re.M)
    assert {"gpt2", "llama", "moe", "vit", "dlrm", "ckpt", "records", "monitor",
            "tokenize", "trace"} == set(names)
    for name in names:
        assert "usage: " in says(name, "--help"), name


def test_a_model_outside_the_tree_trains(place):
    page = (ROOT / "docs/adding.md").read_text()
    folder = place / "mlp"
    folder.mkdir()
    (folder / "mlp.c").write_text("".join(
        line + "\n" for name, kind, lines in blocks(page)
        if name == "models/mlp.c" for line in lines))
    build = page.partition("```meson\n")[2].partition("```")[0]
    (folder / "meson.build").write_text(build)
    pc = found(place, "izar.pc").parent
    path = os.pathsep.join([str(pc), *pkg_config_path(),
                            os.environ.get("PKG_CONFIG_PATH", "")])
    out = check("meson", "setup", "build", "-Dwerror=true", cwd=folder,
                PKG_CONFIG_PATH=path)
    out += check("ninja", "-C", "build", cwd=folder)
    assert "warning" not in out.lower(), out
    train(place, folder / "build/mlp")
