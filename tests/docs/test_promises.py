# SPDX-License-Identifier: Apache-2.0
"""docs/promises.md: its commands print what it says."""
import os
import pathlib
import re
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/promises.md").read_text()
BUILD = pathlib.Path(os.environ.get("IZ_PROGRAM", ROOT / "build/models/gpt2")).parents[1]
# For root, and for more ranks than cores (tests/e2e/run.py).
OMPI = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
BLOCKS = re.findall(r"```sh\n(.*?)```", PAGE, re.S)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    to = tmp_path_factory.mktemp("promises")
    (to / "config.json").write_text(re.search(r"```json\n(.*?)```", PAGE, re.S)[1])
    shutil.copy(ROOT / "README.md", to / "text.txt")
    return to


def pattern(line):
    words = [re.escape(w) for w in line.split()]
    return r"\s+".join(words).replace(r"\.\.\.", ".*?")


@pytest.mark.parametrize("block", BLOCKS, ids=lambda b: b.split("\n", 1)[0][:60])
def test_a_promise_is_kept(block, folder):
    """In order: later ones have what the first ones made."""
    path = f"{BUILD}/models:{BUILD}/tools:{os.environ['PATH']}"
    said = subprocess.run(["bash", "-c", block], cwd=folder, text=True, timeout=240,
                          env={**os.environ, **OMPI, "PATH": path}, check=False, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT).stdout
    for line in re.findall(r"^#> (.*)$", block, re.M):
        assert re.search(pattern(line), said), f"no {line!r} in\n{said}"
