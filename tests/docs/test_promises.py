# SPDX-License-Identifier: Apache-2.0
"""docs/promises.md: its commands print what it says.  So does the plan in docs/zero.md."""
import json
import os
import re
import shutil
import subprocess

import pytest

from test_adding import BUILD, ROOT

PAGE = (ROOT / "docs/promises.md").read_text()
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


def test_the_worked_example_is_a_plan(folder):
    home = {"device": "cpu"}
    (folder / "example.json").write_text(json.dumps({
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4,
        "bf16": {"enabled": True}, "model": {"preset": "gpt2-124m"}, "data": {"path": "none"},
        "zero_optimization": {"stage": 3, "offload_optimizer": home, "offload_param": home,
                              "stage3_prefetch_bucket_size": 1e7},
        "run": {"workers": 2, "cpu_products": "fp32", "device": "cpu",
                "memory_limit_bytes": 4 << 30}}))
    said = subprocess.run([BUILD / "models/gpt2", "example.json", "--plan", "--ranks", "4"],
                          cwd=folder, text=True, check=False, stdout=subprocess.PIPE).stdout
    page = (ROOT / "docs/zero.md").read_text()
    assert re.search(r"^plan: .*?(?=```)", page, re.M | re.S)[0] in said
