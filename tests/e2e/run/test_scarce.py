# SPDX-License-Identifier: Apache-2.0
"""Memory that the system refuses to one rank of two: it says so, and the others
end with it."""
import pytest

import run

SCARCE = {"train_batch_size": 2, "model.layers": 39, "model.width": 6,
          "zero_optimization.stage": 3, "run.comm_timeout_s": 20,
          "run.steps": 1}
WEIGHTS = "the initial weights"


def scarce(place, c, victim, size):
    """The message of a run of two ranks in which the victim does not get size
    bytes.  The others are told at once: none waits in a collective."""
    r = place.launch(2, {**SCARCE, **c}, env={
        "LD_PRELOAD": run.built("tests/libscarce.so"), "SCARCE_RANK": str(victim),
        "SCARCE_BYTES": str(size)})
    assert "waited" not in r.err, str(r)
    assert not r.steps, str(r)
    return run.refused(r, f"rank {victim}: no memory for ")


@pytest.mark.parametrize("victim", (0, 1))
def test_memory_for_staging_that_one_rank_lacks(victim, place, nvme):
    """The list of 73 buffers, each a pointer and a handle."""
    c = {**run.offload(3, "nvme", "none", nvme),
         "zero_optimization.offload_optimizer.buffer_count": 73}
    assert "what was planned" in scarce(place, c, victim, 16 * 73)


@pytest.mark.parametrize("victim", (0, 1))
def test_memory_that_one_rank_lacks_in_an_import(victim, place):
    """A buffer of the adapters' values, and one of the folder's."""
    folder = place.folder / "weights"
    place.good(1, {**SCARCE, "run.export": str(folder)})
    c = {"model.import": str(folder), "lora": {"rank": 2, "targets": "*"}}
    assert WEIGHTS in scarce(place, c, victim, 1 << 19)
    assert "a buffer of parameters" in scarce(place, c, victim, 16 << 20)
