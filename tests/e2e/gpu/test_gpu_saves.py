# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of runs on a GPU, and m and v in fewer bytes there: the files and the
bits do not know where the states were."""
import pytest

import run
from rows import standin
from test_gpu import FAR, PLACE, ROW

pytestmark = pytest.mark.skipif(run.GPU not in ("standin", "real"),
                                reason="needs a GPU or its stand-in")
SAVE = {"run.save": True}
BESIDE = {"run.save_interval": 1, "run.save": False, "run.keep_last": 9}


@standin
def test_resume_on_the_gpu_and_on_the_cpu(start, place):
    """A checkpoint has no trace of where it was written."""
    row, out = {**ROW, **FAR, "dtype": "fp32"}, place.folder / "resumed"
    whole = start({**row, "steps": 5}, SAVE)
    start({**row, "steps": 2}, SAVE, output=out)
    r = start({**row, "steps": 5, "device": "cpu"}, SAVE, output=out,
              options=["--resume"])
    assert r.bits[-3:] == whole.bits[-3:] and r.hash == whole.hash


@pytest.mark.parametrize("stage,optimizer,param,ratio,dtype", [
    (0, "none", "none", 1, "bf16"), (2, "cpu", "none", 1, "fp32"),
    (3, "nvme", "nvme", 1, "bf16"), (2, "cpu", "none", 0.4, "bf16"),
    (3, "cpu", "cpu", 0.4, "fp32")])
def test_a_checkpoint_beside_training_is_that_of_one_for_which_it_waits(
        stage, optimizer, param, ratio, dtype, start):
    """States on the GPU come down through a worker of their own."""
    row = {**PLACE, "ranks": 2, "dtype": dtype, "micro": 2, "clip": 0.5,
           "stage": stage, "optimizer": optimizer, "param": param, "ratio": ratio,
           "delay_us": 300, "jitter_us": 500}
    wait, free = (start(row, {**BESIDE, "run.save_mode": mode})
                  for mode in ("sync", "async"))
    assert wait.numbers == free.numbers
    assert free.saved == [1, 2] and len(free.files) == 2 * 3
    assert wait.files == free.files


@standin
@pytest.mark.parametrize("dtype,param,more", [
    ("fp32", "none", {}), ("bf16", "cpu", {}),
    ("bf16", "cpu", {"update": "muon", "products": "host"})])
def test_a_checkpoint_does_not_know_the_ratio(dtype, param, more, start, place):
    """Its files are those of any other ratio, and any other one goes on; neither does
    the hash of each step."""
    row = {**ROW, **FAR, "dtype": dtype, "param": param, **more}
    out, save = place.folder / "resumed", {**SAVE, "run.hash_interval": 1}
    whole = start({**row, "steps": 5}, save)
    want = start({**row, "steps": 2}, SAVE).files
    r = start({**row, "ratio": 0.3, "steps": 2}, save, output=out)
    assert len(want) >= 2 and r.files == want
    for then in ({"ratio": 0.7, "steps": 4}, {"device": "cpu", "steps": 5}):
        r = start({**row, **then}, save, output=out, options=["--resume"])
    assert r.bits[-3:] == whole.bits[-3:] and r.hash == whole.hash
    states = [[x["hash"]["state"] for x in a.lines if "hash" in x] for a in (r, whole)]
    assert states[0] == states[1] and len(states[0]) == 5


# ---- m and v in fewer bytes ----

@standin
@pytest.mark.parametrize("kind, param, dtype", [("fp8", "cpu", "bf16"),
                                                ("bf16", "none", "fp32")])
def test_a_checkpoint_of_coded_states_does_not_know_where_they_were(
        kind, param, dtype, start, place):
    """On the GPU, on both sides, on the CPU: one file, and each goes on."""
    base = {**ROW, "stage": 3, "dtype": dtype, "moments": kind}
    some, most = ({**base, "optimizer": "cpu", "param": param, "ratio": ratio}
                  for ratio in (0.3, 0.7))
    whole = start({**base, "device": "cpu", "steps": 5}, SAVE)
    want = start({**base, "device": "cpu", "steps": 2}, SAVE).files
    out = place.folder / "resumed"
    for i, row in enumerate((some, most, base, some)):
        r = start({**row, "steps": 2 + i}, SAVE, output=out,
                  options=["--resume"] if i else [])
        if i == 0:
            assert len(want) >= 2 and r.files == want
    assert r.bits[-1:] == whole.bits[-1:] and r.hash == whole.hash


@standin
@pytest.mark.parametrize("ratio", (1, 0.4))
def test_checkpoints_of_coded_states_on_the_gpu_wait(ratio, start):
    """What auto chooses; those on the host alone are saved beside training."""
    row = {**ROW, "stage": 2, "optimizer": "cpu", "ratio": ratio, "moments": "fp8"}
    wait, free = start(row, {**BESIDE, "run.save_mode": "sync"}), start(row, BESIDE)
    assert wait.bits == free.bits and wait.files == free.files
    more = free.bytes_of("staging") - wait.bytes_of("staging")
    assert (more > 0) == (ratio == 1)
    if ratio < 1:
        run.refused(start(row, {**BESIDE, "run.save_mode": "async"}, good=False),
                    "run.save_mode", "state_dtype")
