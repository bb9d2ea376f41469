# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the end-to-end tests."""
import contextlib
import errno
import fcntl
import hashlib
import os
import pathlib
import pickle
import tempfile

import pytest

import rows
import run

# For runs that belong to no case: tests/faults/matrix.py asks which case comes where.
OF_NONE = {"IZ_REACHED": None}


def pytest_configure(config):
    config.addinivalue_line("markers", "sanitized: of one rank, and reaches what "
                            "no unit does: the sanitizers run it too")
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
    try:
        os.close(os.open(folder / "probe", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600))
        return True
    except OSError as e:
        assert e.errno == errno.EINVAL, e
        return False


@pytest.fixture(scope="session")
def workplace(tmp_path_factory):
    """A folder on a disk; that of the build where the usual one is memory."""
    if not pathlib.Path(run.PROGRAM).is_file():
        pytest.fail(f"{run.PROGRAM} is not built")
    folder = tmp_path_factory.mktemp("e2e")
    if takes_direct_io(folder):
        yield folder
    else:
        with tempfile.TemporaryDirectory(prefix="e2e", dir=run.BUILD,
                                         ignore_cleanup_errors=True) as own:
            yield pathlib.Path(own)


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


@contextlib.contextmanager
def place_for(workplace, text):
    p = run.Place(pathlib.Path(tempfile.mkdtemp(dir=workplace)), text)
    yield p
    p.clear()


@pytest.fixture(scope="session", autouse=True)
def measured(request):
    """StarPU measures the bus when a build first runs, and says so."""
    if os.environ.get("IZ_TEST_SIMGRID") == "1":
        return
    fixtures = [request.getfixturevalue(x) for x in ("workplace", "text")]
    with turn(pathlib.Path(run.environment()["STARPU_HOME"]) / "measuring"), \
            place_for(*fixtures) as p:
        p.good(1, {"run.steps": 1}, env=OF_NONE)


@pytest.fixture(scope="session")
def bf16_products(workplace, text):
    """Skips where no products of bf16 can be made on the CPU."""
    with place_for(workplace, text) as p:
        r = p.launch(1, {"bf16.enabled": True, "run.cpu_products": "bf16"}, ["--plan"],
                     env=OF_NONE)
    if r.rc:
        assert "run.cpu_products: bf16: " in r.err, str(r)
        pytest.skip(r.err.strip())


@pytest.fixture(scope="session")
def known_gpu(workplace, text):
    """StarPU has measured the bus of one GPU and of several, with copies of its own."""
    row = {**rows.PLAIN, "dtype": "fp32", "steps": 0, "device": "cuda"}
    with place_for(workplace, text) as p:
        for gpus in (1,) if rows.REAL else (1, 2, 3, 4):
            p.good(1, rows.config_of(row, None),
                   env={**rows.environment(p, {**row, "ranks": gpus}), **OF_NONE})


@pytest.fixture
def place(workplace, text):
    """Where one test starts its runs; removed behind it."""
    with place_for(workplace, text) as p:
        yield p


@pytest.fixture(scope="module")
def shared(workplace, text):
    """Where a module's tests start what several of them read."""
    with place_for(workplace, text) as p:
        yield p


class References:
    """What runs have given that others are compared with, by what was run: a file
    each, so that processes that run tests side by side share them."""

    def __init__(self, folder):
        self.folder = folder
        folder.mkdir(exist_ok=True)

    def path(self, key):
        return self.folder / hashlib.sha1(repr(key).encode()).hexdigest()

    def __contains__(self, key):
        return "IZ_REACHED" not in os.environ and self.path(key).exists()

    def __getitem__(self, key):
        return pickle.loads(self.path(key).read_bytes())

    def __setitem__(self, key, value):
        new = self.path(key).with_suffix(f".{os.getpid()}")
        new.write_bytes(pickle.dumps(value))
        new.rename(self.path(key))

    def made(self, key, make):
        """By the process of pytest that is the first to ask."""
        with turn(self.path(key).with_suffix(".turn")):
            if key not in self:
                self[key] = make()
        return self[key]


@pytest.fixture(scope="session")
def references(tmp_path_factory):
    folder = tmp_path_factory.getbasetemp()
    several = os.environ.get("PYTEST_XDIST_WORKER")
    return References((folder.parent if several else folder) / "references")


@pytest.fixture(scope="session")
def known(references, workplace, text):
    """known(ranks, config): a good run that several tests read and none writes to, made
    once."""
    def known(ranks, config, **more):
        return references.made((ranks, config, more), lambda: run.Place(pathlib.Path(
            tempfile.mkdtemp(dir=references.folder)), text).good(ranks, config, **more))
    return known


@pytest.fixture
def start(place, nvme):
    """Starts a row's run, with changes and with a row's model if it has one."""
    def start(row, changes=None, good=True, env=None, **more):
        if "model" in row:
            rows.use(place, row["model"])
        if run.GPU:
            env = {**rows.environment(place, row), **(env or {})}
        env = {**rows.on(row.get("hosts", "one")), **(env or {})}
        act = place.good if good else place.launch
        return act(row["ranks"], {**rows.config_of(row, nvme), **(changes or {})},
                   env=env, **more)
    return start


@pytest.fixture
def compare(start, references, place):
    """compare(row, plain, changes, before): a row's run.  All that it computes and saves is
    that of the plain row, which is run once for all that ask.  With a row `before` that
    is its first half, and each step is saved; else the last alone, for no step waits."""
    def compare(row, plain, changes=None, before=None):
        changes = {**rows.SAVED, **(changes or {})}

        def make():
            r = start(plain, {**changes, "run.save_mode": "sync"})
            return rows.told(r), rows.figures(r)
        (numbers, states, files), figures = references.made(
            (sorted(plain.items()), changes), make)
        more = {**changes, "run.inject_seed": 3 + row.get("ring", 0),
                "run.nvme_checksum": not before}  # with which training waits for a save
        if not before:
            more |= {"run.save_interval": 0, "run.hash_interval": 0}
        output = place.folder / f"compared{place.count}"
        if before:
            start(before, more, output=output)
        r = start(row, more, output=output, options=["--resume"] if before else [])
        have = rows.told(r)
        assert have[0] == numbers, str(r)
        assert have[1].items() <= states.items() and have[2].items() <= files.items()
        assert [pytest.approx(x, rel=1e-12) for x in rows.figures(r)] == figures
        assert "overflows" not in row["dtype"] or len({x["skipped"] for x in r.steps}) == 2
        assert len(r.bits) == row["steps"] == r.saved[-1]
        assert len(r.saved) == len(have[1]) == row["steps"] or not before
        return r
    return compare


@pytest.fixture
def kept(place):
    """kept(ranks, key, value, first, then, lost, words): a run that begins with the first
    settings has this value, or any if it is None.  It keeps it when it goes on with the
    others, which leave it open, and has the numbers of a run that never stopped.  Where
    it cannot be had, with what is lost, that is refused once, with these words."""
    def kept(ranks, key, value, first, then, lost=None, words=()):
        out, name = place.folder / f"kept{place.count}", key.removeprefix("run.")
        first = {"run.save": True, **first}
        had = place.good(ranks, first, output=out).config["run"][name]
        whole = place.good(ranks, {**first, key: had, "run.steps": 6})
        r = place.good(ranks, {**first, **then, "run.steps": 6}, ["--resume"], out)
        assert r.numbers == whole.numbers, str(r)
        assert r.config["run"][name] == had and value in (had, None), str(r)
        if lost:
            less = place.launch(ranks, {**first, **then, "run.steps": 9, **lost},
                                ["--resume"], out)
            run.refused(less, f"{key}: {had}: ", *words)
            assert less.err.count(key) == 1, str(less)
        return r
    return kept
