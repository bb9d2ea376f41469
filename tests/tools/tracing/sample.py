#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""The small trace of these tests: three steps of a simulated run on a GPU with
offload.  `tests/tools/tracing/sample.py FOLDER` makes it anew; it need not be of the
program as it is now, since it is the converter that it tests."""
import gzip
import json
import pathlib
import re
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path.insert(0, str(ROOT / "tools"))
from tracing import run  # noqa: E402

FILES = HERE / "sample"
CONVERTED = ("tasks.rec", "data.rec", "paje.trace")
MACHINE = ROOT / "configs/machines/v100-32-dgx2.json"


def trace(out):
    """Traces the simulation; returns what it says about itself."""
    r = subprocess.run([ROOT / "tools/trace", out, "--no-starvz", "--",
                        ROOT / "tools/simulate", FILES / "config.json",
                        "--machine", MACHINE], capture_output=True, text=True)
    assert r.returncode == 0, r.stdout + r.stderr
    return json.loads(re.search(r'^\{"simulation".*$', r.stdout,
                                re.M).group(0))["simulation"]


def unpack(folder):
    """The committed trace as starpu_fxt_tool wrote it."""
    for name in CONVERTED:
        (folder / name).write_bytes(
            gzip.decompress((FILES / f"{name}.gz").read_bytes()))
    return json.loads((FILES / "rank-0.json").read_text())


def write(out):
    says = trace(out)
    (FILES / "simulation.json").write_text(json.dumps(says, indent=1) + "\n")
    raw = (out / "raw").resolve()
    a = run.descriptions(raw)[0]
    (FILES / "rank-0.json").write_text("{" + ",\n".join(
        f"{json.dumps(k)}: {json.dumps(v)}" for k, v in
        {**a, "program": "gpt2", "host": "sample"}.items()) + "}\n")
    folder = run.convert(run.find_fxt_tool(a["program"]), raw, a)
    for name in CONVERTED:
        data = (folder / name).read_bytes()
        (FILES / f"{name}.gz").write_bytes(gzip.compress(data, 9, mtime=0))


if __name__ == "__main__":
    write(pathlib.Path(sys.argv[1]))
