# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the end-to-end tests."""
import errno
import os
import pathlib
import shutil
import tempfile

import pytest

import run


def pytest_configure(config):
    config.addinivalue_line("markers", "single: one rank, without mpirun")


def takes_direct_io(folder):
    """tmpfs may have no O_DIRECT, which the nvme tier needs."""
    probe = folder / "probe"
    try:
        os.close(os.open(probe, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600))
    except OSError as e:
        if e.errno != errno.EINVAL:
            raise
        return False
    finally:
        probe.unlink(missing_ok=True)
    return True


@pytest.fixture(scope="session")
def workplace(tmp_path_factory):
    """A folder on a disk; that of the build where the usual one is memory."""
    if not pathlib.Path(run.PROGRAM).is_file():
        pytest.fail(f"{run.PROGRAM} is not built")
    folder = tmp_path_factory.mktemp("e2e")
    own = None
    if not takes_direct_io(folder):
        build = pathlib.Path(run.PROGRAM).resolve().parents[1]
        folder = own = pathlib.Path(tempfile.mkdtemp(prefix="e2e", dir=build))
    yield folder
    if own:
        shutil.rmtree(own, ignore_errors=True)


@pytest.fixture(scope="session")
def text(workplace):
    return run.text_file(workplace / "text.txt")


@pytest.fixture(scope="session")
def nvme(workplace):
    folder = workplace / "nvme"
    folder.mkdir()
    if not takes_direct_io(folder):
        pytest.skip("no file system with O_DIRECT for the nvme tier")
    return folder


@pytest.fixture(scope="session", autouse=True)
def measured(request):
    """StarPU measures the bus when a build first runs, and says so."""
    if os.environ.get("IZ_TEST_SIMGRID") == "1":
        return
    workplace = request.getfixturevalue("workplace")
    text = request.getfixturevalue("text")
    p = run.Place(pathlib.Path(tempfile.mkdtemp(dir=workplace)), text)
    p.good(None, {"run.steps": 1})
    p.clear()


@pytest.fixture(scope="session")
def narrow_products(workplace, text):
    """Skips where no products of bf16 can be made on the CPU."""
    p = run.Place(pathlib.Path(tempfile.mkdtemp(dir=workplace)), text)
    r = p.launch(None, {"bf16.enabled": True, "run.cpu_products": "bf16"}, ["--plan"])
    p.clear()
    if r.rc:
        assert "run.cpu_products: bf16: " in r.err, str(r)
        pytest.skip(r.err.strip())


@pytest.fixture
def place(workplace, text):
    """Where one test starts its runs; removed behind it."""
    p = run.Place(pathlib.Path(tempfile.mkdtemp(dir=workplace)), text)
    yield p
    p.clear()
