# SPDX-License-Identifier: Apache-2.0
"""Homes on several disks: the bits of one disk, whatever their rates are."""
import re

import pytest

import run

# Several turns of 1 MiB of each kind.
BIG = {"model.width": 192, "model.heads": 6}


def homes(folders):
    config = run.offload(3, "nvme", "nvme", "")
    for section in ("offload_optimizer", "offload_param"):
        config["zero_optimization"][section]["nvme_path"] = folders
    return {**config, **BIG, "activation_checkpointing.cpu_checkpointing": True,
            "activation_checkpointing.nvme_path": folders, "run.nvme_checksum": True}


@pytest.mark.parametrize("ranks, imported", ((1, False), (2, False), (1, True)))
def test_several_disks_change_no_bit(ranks, imported, place, nvme):
    """Of a model that is imported nobody writes the states before a step does."""
    folders, weights = [nvme / "a", nvme / "b", nvme / "c"], place.folder / "weights"
    for f in folders:
        f.mkdir(exist_ok=True)
    if imported:
        place.good(1, {**BIG, "run.steps": 0, "run.export": str(weights)})
    more = {"model.import": str(weights)} if imported else {}
    one = place.good(ranks, {**homes(str(nvme)), **more})
    three = place.good(ranks, {**homes([str(f) for f in folders]), **more})
    assert three.numbers == one.numbers
    assert "on disks" not in one.out
    for what in ("states", "parameters", "boundaries"):
        line = re.search(rf"{what} on disks, MiB of 64: (.*)", three.out)[1]
        shares = re.findall(r"(\d+) in (\S+) \(([\d.]+) GB/s\)", line)
        assert [x[1] for x in shares] == [str(f) for f in folders]
        assert sum(int(x[0]) for x in shares) == 64
    assert not any(list(f.iterdir()) for f in folders)
