# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the end-to-end tests."""
import contextlib
import errno
import fcntl
import os
import pathlib
import shutil
import tempfile

import pytest

import run


def pytest_configure(config):
    config.addinivalue_line("markers", "single: one rank, without mpirun")
    config.addinivalue_line("markers", "alone: with no other test beside it, as "
                            "what runs beside what depends on free cores")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """A run waits about a third of its time: for processes that start and end,
    for files, for other ranks."""
    return min(len(os.sched_getaffinity(0)) + 1, 8)


@contextlib.contextmanager
def turn(path):
    """One process at a time; beside it there may be several of pytest."""
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


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
    with turn(pathlib.Path(run.environment()["STARPU_HOME"]) / "measuring"):
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
