# SPDX-License-Identifier: Apache-2.0
"""tools/trace around real runs: the traced tasks are those of the graph, the
bytes those that the run counts, and tracing changes no bit."""
import collections
import json
import re
import sys

import pytest

import run
from rows import standin

sys.path.insert(0, str(run.ROOT / "tools"))
from tracing import path, starvz  # noqa: E402

TRACE = run.ROOT / "tools" / "trace"
UNITS = run.MODEL["layers"] + 2
MICROS, SLICES = 2, 2
CONFIG = {
    **run.offload(3, "cpu", "cpu", None), "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": MICROS,
    "run.slices": SLICES, "run.steps": 7, "run.ring": UNITS,
}
ALONE = {**CONFIG, "train_batch_size": 8}  # for one rank


def trace(place, ranks, config, *options, env=None, out=None, vz=False):
    """Runs tools/trace; returns the run and the trace's folder."""
    path = place.config(config)
    out = out or path.with_suffix(".trace")
    output = json.loads(path.read_text())["run"]["output"]
    less = [] if vz else ["--no-starvz"]
    r = run.call(TRACE, out, *less, *options, "--",
                 *place.command(ranks, path), output=output, env=env)
    assert r.rc == 0, str(r)
    return r, out


def tasks(out):
    events = json.loads((out / "trace.json").read_text())["traceEvents"]
    return [e for e in events if e.get("cat") == "task"]


def counts(out):
    """{(rank, step): {kind: tasks}}; steps from 1."""
    found = collections.defaultdict(collections.Counter)
    for e in tasks(out):
        found[e["pid"], e["args"]["step"]][e["name"]] += 1
    return found


def of_a_step(fetches):
    """The graph's formula.  The embedding is reduced for its own use and for
    the head's, and a norm task adds the two; of the other units the last reduce
    takes the squares.  One more norm per loss."""
    return {"batch": MICROS * SLICES, "fetch": fetches,
            "forward": (UNITS - 1) * MICROS * SLICES,
            "backward": UNITS * MICROS * SLICES, "reduce": (UNITS + 1) * MICROS,
            "norm": 1 + MICROS * SLICES, "clip": 1, "adam": UNITS}


# A ring for all units fetches each once.  Embedding and blocks have about one
# size: with one slot, every block is fetched twice, the embedding three times
# (its own forward, the head's, its backward); the head has a slot of its own.
@pytest.mark.parametrize("ring,fetches",
                         ((UNITS, UNITS), (1, 2 * run.MODEL["layers"] + 4)))
def test_the_tasks_of_a_step_are_those_of_the_graph(place, ring, fetches):
    config = {**CONFIG, "run.ring": ring, "run.schedule": "breadth_first"}
    plain = place.good(2, config)
    r, out = trace(place, 2, config)
    assert r.numbers == plain.numbers
    found = counts(out)
    assert sorted(found) == [(rank, step) for rank in (0, 1)
                             for step in (3, 4, 5, 6)]
    for key, kinds in found.items():
        assert kinds == of_a_step(fetches), key
    about = json.loads((out / "raw/rank-0.json").read_text())
    assert {k["name"] for k in about["kinds"]} == {
        kind for kind, where in path.ADVICE if not where}


def test_the_bytes_are_those_that_the_run_counts(place):
    """All steps, so that the sums are the run's.  What collectives send beside
    parameters and gradients are the few numbers of clip."""
    r, out = trace(place, 2, CONFIG, "--steps", "0:7")
    sent = sum(e["args"].get("bytes", 0) for e in tasks(out)
               if e["pid"] == 0 and e["name"] in ("fetch", "reduce"))
    scalars = 7 * 8 * (5 + UNITS)
    told = r.summary["sent_bytes"]
    assert sent <= told <= sent + scalars + 1024, (sent, told)
    gathered = sum(e["args"]["bytes"] for e in tasks(out)
                   if e["pid"] == 0 and e["name"] == "fetch")
    assert 2 * gathered == r.summary["fetched_bytes"]


GPU = {**ALONE, "run.slices": 1, "run.device": "cuda", "run.workers": 1}
ONE_GPU = {"IZ_STANDIN_DEVICES": "1", "STARPU_SILENT": "1"}


@standin
def test_copies_of_a_gpu_are_counted_as_the_run_does(place):
    plain = place.good(1, GPU, env=ONE_GPU)
    r, out = trace(place, 1, GPU, "--steps", "0:7", env=ONE_GPU)
    assert r.numbers == plain.numbers
    events = json.loads((out / "trace.json").read_text())["traceEvents"]
    workers = {e["tid"]: e["args"]["name"] for e in events
               if e["name"] == "thread_name"}
    crossed = collections.Counter()
    for e in tasks(out):
        worker = workers[e["tid"]]
        crossed[worker] += e["args"].get("bytes", 0)
        if e["name"] in ("forward", "backward"):
            assert worker == "GPU"
    assert crossed["copies to GPU"] == r.summary["up_bytes"] > 0
    assert crossed["copies to host"] == r.summary["down_bytes"] > 0


@standin
def test_squares_of_host_and_gpu_have_names_of_their_own(place):
    """Each unit's sum, and of those that the GPU updates a part of the sums of
    its blocks, which are 8 bytes for 1024 elements."""
    _, out = trace(place, 1, {**GPU, "zero_optimization.offload_optimizer.ratio": 0},
                   env=ONE_GPU)
    sizes = collections.defaultdict(list)
    for record in (out / "raw/rank-0/data.rec").read_text().split("\n\n"):
        fields = dict(x.split(": ", 1) for x in record.splitlines())
        if "Name" in fields:
            sizes[fields["Name"]].append(int(fields["Size"]))
    assert sizes["squares"] == [8] * UNITS
    c = run.MODEL["width"]
    units = [(256 + 16) * c] + [12 * c * c + 13 * c] * run.MODEL["layers"] + [2 * c]
    assert sorted(sizes["block sums"]) == sorted(8 * -(-n // 1024) for n in units)
    data = json.loads((out / "raw/rank-0.json").read_text())["data"]
    assert data["block sums"] == data["squares"] == data["batch"]


def test_a_trace_replaces_an_earlier_one(place):
    """No file of the earlier, larger run is taken for one of this."""
    for ranks, config in ((2, CONFIG), (1, ALONE)):
        _, out = trace(place, ranks, config, out=place.folder / "trace")
    assert {rank for rank, _ in counts(out)} == {0}
    assert not (out / "raw" / "rank-1.json").exists()


def test_a_buffer_that_overflows_is_told(place):
    r, out = trace(place, 1, {**ALONE, "run.steps": 40}, "--steps", "0:40",
                   env={"STARPU_TRACE_BUFFER_SIZE": "1"})
    assert "in the middle of the run" in r.err
    assert "in the middle of the run" in (out / "report.html").read_text()


STEPS, BOTH = "IZ_TRACE_STEPS=1:2", "IZ_TRACE=/tmp IZ_TRACE_STEPS=1:2"


@pytest.mark.parametrize("settings, rank, words", (
    ((STEPS, STEPS), 0, "IZ_TRACE_STEPS: goes with IZ_TRACE"),
    (("", STEPS), 1, "IZ_TRACE_STEPS: goes with IZ_TRACE"),
    (("", BOTH), 1, "IZ_TRACE: rank 0 takes none"),
    ((BOTH, ""), 1, "IZ_TRACE is not set, but rank 0 traces steps 1:2"),
    ((BOTH, BOTH.replace("1:2", "1:3")), 1,
     "IZ_TRACE_STEPS: 1:3, those of rank 0 are 1:2"),
))
def test_what_ranks_cannot_trace_is_refused_once(settings, rank, words, place):
    r = place.apart([["env", *x.split()] for x in settings], CONFIG)
    run.refused(r, f"izar: rank {rank}: {words}")
    assert r.err.count("izar: rank ") == 1 and not r.steps, str(r)


def test_a_start_that_does_not_come_to_its_trace_says_so(place):
    """Steps are those of this start, of which a resumed run has few."""
    saved = place.good(1, {**ALONE, "run.save": True, "run.steps": 5})
    r = place.good(1, ALONE, ["--resume"], output=saved.output,
                   env={"IZ_TRACE": str(place.folder), "IZ_TRACE_STEPS": "2:4"})
    assert "there is no trace: this start did not come to step 3" in r.err


@pytest.mark.skipif(bool(starvz.missing()),
                    reason="StarVZ is missing (tools/setup --starvz)")
def test_starvz_has_the_tasks_of_all_ranks(place):
    """One picture, and tables with names, steps, positions and colours."""
    _, out = trace(place, 2, CONFIG, vz=True)
    folder = out / "starvz"
    assert (folder / "starvz.png").read_bytes()[:4] == b"\x89PNG"
    rows = [x.split("|") for x in starvz.ask_r(f"""suppressMessages(library(starvz))
        starvz_set_log(FALSE)
        d <- starvz_read('{folder}/data', '{folder}/starvz.yaml', selective = FALSE)
        a <- d$Application
        cat(paste('task', a$Node, a$ResourceId, a$Value, a$Iteration,
                  a$Subiteration, sep = '|'), sep = '\\n')
        cat('\\n')
        cat(paste('color', d$Colors$Value, d$Colors$Color, sep = '|'),
            sep = '\\n')""").splitlines()]
    events = json.loads((out / "trace.json").read_text())["traceEvents"]
    threads = {(e["pid"], e["tid"]): e["args"]["name"].replace("CPU", "compute")
               for e in events if e["name"] == "thread_name"}
    kinds = {k["name"]: k for k in json.loads(
        (out / "raw/rank-0.json").read_text())["kinds"]}
    want = collections.Counter(
        (str(e["pid"]), f'{e["pid"]}_CPU{e["tid"]} {threads[e["pid"], e["tid"]]}',
         kinds[e["name"]]["codelet"], str(e["args"]["step"]),
         str(e["args"]["position"])) for e in tasks(out))
    assert collections.Counter(tuple(r[1:]) for r in rows if r[0] == "task") == want
    assert {k[0] for k in want} == {"0", "1"} and {k[3] for k in want} == set("3456")
    assert {w.split()[1] for _, w, *_ in want} == {"compute", "collectives"}
    colors = {r[1]: r[2] for r in rows if r[0] == "color"}
    assert colors == {k[2]: kinds[k[2]]["color"] for k in want}


def test_a_command_without_a_trace_is_told(tmp_path):
    r = run.call(TRACE, tmp_path / "out", "--", "true")
    assert r.rc == 1 and f"no trace in {tmp_path}/out/raw: " in r.err


def test_it_ends_as_its_command_does(place):
    out = place.folder / "t"
    r = run.call(TRACE, out, "--no-starvz", "--", "sh", "-c", '"$@"; kill -TERM $$', "-",
                 *place.command(1, place.config(ALONE)))
    assert r.rc == 128 + 15, str(r)
    assert "ended with status 143" in (out / "report.html").read_text()


def test_a_trace_that_was_cut_off_is_refused(place):
    _, out = trace(place, 1, ALONE, "--steps", "1:5", out=place.folder / "a\udcff")
    assert sorted(counts(out)) == [(0, step) for step in (2, 3, 4, 5)]
    for file, part, words in (
            (next((out / "raw").glob("prof_file_*")), 2,
             "was cut off: 4 steps were traced|failed on rank 0"),
            (out / "raw/rank-0.json", 2, "rank-0.json: damaged or cut off")):
        data = file.read_bytes()
        file.write_bytes(data[:len(data) // part])
        r = run.call(TRACE, out, "--again", "--no-starvz")
        assert r.rc == 1 and re.search(words, r.err) and "Traceback" not in r.err, str(r)
        file.write_bytes(data)


@pytest.mark.parametrize("out, options, words", [
    ("/proc/x", ("--", "true"), "/proc/x: No such file"),
    ("FILE", ("--", "true"), "file: Not a directory"),
    ("NEW", ("--stuck", "BOXES"), "stuck-rank0.json: damaged or cut off")])
def test_a_place_that_cannot_be_is_named(out, options, words, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "stuck-rank0.json").write_text('{"about": {')
    places = {"FILE": tmp_path / "file", "NEW": tmp_path / "new", "BOXES": tmp_path}
    r = run.call(TRACE, *(places.get(x, x) for x in (out, *options)))
    assert r.rc == 1 and words in r.err and "Traceback" not in r.err, str(r)


@pytest.mark.parametrize("mine", ["mine", "raw/photo"])
def test_a_folder_of_something_else_is_left_alone(mine, tmp_path):
    file = tmp_path / mine
    file.parent.mkdir(exist_ok=True)
    file.write_text("")
    r = run.call(TRACE, tmp_path, "--", "true")
    assert r.rc == 1 and "holds no trace" in r.err and file.exists()
