# SPDX-License-Identifier: Apache-2.0
"""The converter on the small committed trace.  What it finds must be what the
simulation said of itself, which the program computes in C from its own log of
tasks, and what the arithmetic of the model says."""
import json
import os
import re
import resource
import shutil
import subprocess
import sys

import pytest
import sample

from tracing import (chrome, figures, path, records, report, run,
                     starvz)

LAYERS, WIDTH, SEQ, VOCAB, MICROS, UNITS = 3, 512, 256, 2048, 2, 5
BLOCK = 12 * WIDTH * WIDTH + 13 * WIDTH
EMBED = (VOCAB + SEQ) * WIDTH
HEAD = 2 * WIDTH


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    f = tmp_path_factory.mktemp("sample")
    sample.unpack(f)
    return f


@pytest.fixture(scope="module")
def rank(folder):
    return records.read_rank(sample.unpack(folder), folder)


@pytest.fixture(scope="module")
def says():
    return json.loads((sample.FILES / "simulation.json").read_text())


@pytest.fixture
def copy(folder, tmp_path):
    """The files of the sample, for a test that changes one."""
    for name in sample.CONVERTED:
        shutil.copy(folder / name, tmp_path / name)
    return tmp_path


@pytest.fixture(scope="module")
def window(rank):
    """(begin, end, steps)"""
    return figures.window([rank])


def of_kind(rank, name):
    k = rank.kinds.index(name)
    return [i for i in range(len(rank.tasks)) if rank.tasks.kind[i] == k]


# ---- counts ----

def test_counts(rank, says):
    """Per step; on one GPU a unit's first contribution of a step goes straight
    into the accumulator if types agree, here all are added on the host."""
    counts = {name: len(of_kind(rank, name)) / 3 for name in rank.kinds
              if of_kind(rank, name)}
    assert counts.pop("fetch") and counts == {
        "batch": MICROS, "forward": (UNITS - 1) * MICROS, "backward": UNITS * MICROS,
        "offload": (UNITS + 1) * MICROS, "reduce": (UNITS + 1) * MICROS,
        "norm": UNITS + MICROS, "clip": 1, "adam": 15}
    assert len(rank.tasks) == says["tasks"]
    assert says["lost_spans"] == 0


def test_steps_and_positions_in_the_graph(rank):
    t = rank.tasks
    assert sorted(set(t.step)) == [0, 1, 2]
    for i in of_kind(rank, "forward"):
        assert t.position[i] == t.unit[i] < UNITS - 1
    for kind in ("backward", "adam"):
        for i in of_kind(rank, kind):
            assert t.position[i] == 2 * UNITS - 1 - t.unit[i]
    assert {t.position[i] for i in of_kind(rank, "clip")} == {2 * UNITS}


# ---- bytes ----

def test_bytes_are_those_of_the_model_and_of_the_simulation(rank, says, down=2):
    """down: bytes of a gradient's element, 4 of a sum over micro-batches."""
    t = rank.tasks
    elements = {0: EMBED, UNITS - 1: HEAD}
    for kind, size in (("fetch", 2), ("offload", down)):
        for i in of_kind(rank, kind):
            assert t.bytes[i] == size * elements.get(t.unit[i], BLOCK)
    steps = 3
    up = sum(t.bytes[i] for i in of_kind(rank, "fetch"))
    back = sum(t.bytes[i] for i in of_kind(rank, "offload"))
    assert (up, back) == (steps * says["up_bytes"], steps * says["down_bytes"])
    adam = sum(t.bytes[i] for i in of_kind(rank, "adam"))
    assert adam == steps * 28 * (LAYERS * BLOCK + EMBED + HEAD)


def test_bytes_per_link(rank, window):
    begin, end, _ = window
    rows = {r["link"]: r for r in figures.links([rank], begin, end)}
    assert set(rows) == {"to the GPU", "to the host"}
    assert rows["to the GPU"]["bytes"] == 2 * 68541440
    assert rows["to the host"]["bytes"] == 2 * 47269888
    series = figures.link_series(rank, begin, end, 600)
    width = (end - begin) / 600 / 1e6
    for link, bins in series.items():
        inside = figures.link_series(rank, begin, end, 1)[link][0]
        assert sum(bins) * width == pytest.approx(inside * (end - begin) / 1e6,
                                                  rel=1e-9)


# ---- times ----

def test_the_step_is_that_of_the_simulation(rank, says):
    begin, end, steps = figures.window([rank])
    assert steps == 2
    assert (end - begin) / steps == pytest.approx(says["step_s"] * 1e6,
                                                  abs=1e-3)


# The machine file's rates: a copy takes 10 us and its bytes at 12 GB/s.
def test_a_copy_lasts_what_the_machine_says(rank):
    t = rank.tasks
    for i in of_kind(rank, "fetch") + of_kind(rank, "offload"):
        assert t.end[i] - t.begin[i] == pytest.approx(
            10 + t.bytes[i] / 12e3, abs=2e-3)


BUSY = {  # us in the window of two steps, worker by worker
    "GPU": 5867.928, "CPU 0": 5354.724, "CPU 1": 8838.010,
    "copies to GPU": 11723.574, "copies to host": 8118.316}


def test_busy_times(rank, window):
    begin, end, _ = window
    for r in figures.workers([rank], begin, end):
        work = (r["transfer_us"] if r["name"].startswith("copies") else
                r["busy_us"])
        assert work == pytest.approx(BUSY[r["name"]], abs=2e-3)
        assert (r["busy_us"] + r["transfer_us"] + r["runtime_us"] +
                r["idle_us"]) == pytest.approx(end - begin, abs=1e-6)


def test_a_task_that_was_handed_over_early_begins_when_its_worker_is_free(
        rank, copy):
    """A GPU is given its next task while it still has one."""
    text, n = re.subn(r"(?m)^StartTime: .*$", "StartTime: 0.001",
                      (copy / "tasks.rec").read_text())
    assert n > 240
    (copy / "tasks.rec").write_text(text)
    again = records.read_rank(rank.about, copy).tasks
    last = {}
    for i in range(len(again)):
        w = again.worker[i]
        if w in last:
            assert again.begin[i] == last[w]
        last[w] = again.end[i]


def test_hidden_parts_are_those_of_the_simulation(rank, says):
    """Which has all tasks that end before the window does."""
    _, end, _ = figures.window([rank])
    kinds = {}
    for k in figures.kinds([rank], 0, end):
        total, under = kinds.get(k["kind"], (0, 0))
        kinds[k["kind"]] = total + k["total_us"], under + k["hidden_us"]
    moves = [kinds[k] for k in ("fetch", "offload", "reduce")]
    assert 100 * kinds["adam"][1] / kinds["adam"][0] == pytest.approx(
        says["adam_hidden_percent"], abs=1e-3)
    assert 100 * sum(m[1] for m in moves) / sum(m[0] for m in moves) == (
        pytest.approx(says["copies_hidden_percent"], abs=1e-3))


def test_muon_is_of_the_optimizer_too(folder, window):
    about, (begin, end, _) = sample.unpack(folder), window
    about["kinds"].append({"name": "muon", "codelet": "adam", "color": "#b04a00"})
    rank = records.read_rank(about, folder)
    was = report.hidden_rows(figures.kinds([rank], begin, end))["optimizer"]
    for i in of_kind(rank, "adam")[::2]:
        rank.tasks.kind[i] = len(about["kinds"]) - 1
    now = report.hidden_rows(figures.kinds([rank], begin, end))["optimizer"]
    assert now == pytest.approx(was) and of_kind(rank, "muon")
    bands = {k["name"]: k["band"] for k in
             report.picture_data([rank], [{}], (begin, end))["kinds"]}
    assert bands["muon"] == bands["adam"] == 3 and bands["eval"] == bands["forward"] == 1


# ---- memory ----

def test_memory_stays_within_the_plan(rank, says):
    last = max(rank.tasks.end)
    tiers = figures.memory(rank, 0, last)
    assert tiers["device"]["plan"] == says["device_bytes"]
    assert tiers["cpu"]["plan"] == says["host_bytes"]
    for tier in tiers.values():
        for name, points in tier["series"].items():
            most = max(v for _, v in points)
            assert 0 < most <= tier["classes"][name], name
    ring = tiers["device"]["series"]["gathered units"]
    assert max(v for _, v in ring) == tiers["device"]["classes"][
        "gathered units"]
    # Between steps no gathered unit and no unit's gradient is needed.
    for name in ("gathered units", "unit gradients"):
        points = tiers["device"]["series"][name]
        empty = [t for t, v in points if v == 0 and t < last - 1]
        assert len(empty) >= 2, name
    states = tiers["cpu"]["series"]["optimizer"]
    assert {v for _, v in states if v} == {12 * (LAYERS * BLOCK + EMBED + HEAD)}


# ---- the critical path ----

def test_the_path_has_no_holes_and_ends_the_step(rank, window):
    found = path.analyse([rank], *window)
    assert sum(found["kinds"].values()) + found["gaps_us"] == pytest.approx(
        found["step_us"], rel=1e-9)
    assert found["chain"][-1]["kind"] == "clip"
    for a, b in zip(found["chain"], found["chain"][1:]):
        assert b["begin_us"] >= a["begin_us"]
    # The GPU idles most of the time: copies, not products, make this step long.
    assert found["saved"]["fetch"] > found["saved"]["backward"] > 0
    assert "fetches to the GPU" in found["words"][0]
    assert found["clocks"] == []


def test_half_the_time_for_everything_halves_a_replayed_step(rank, window):
    graph = path.Graph([rank])
    begin, end, _ = window
    first, last = graph.clips(begin, end)
    base = path.replay(graph, first, last, {})
    half = path.replay(graph, first, last, dict.fromkeys(rank.kinds, 0.5))
    assert half == pytest.approx(base / 2)
    assert base <= end - begin + 1


# ---- several ranks ----

def two_ranks(folder, shift_us, host):
    """The sample and a copy of it as another rank that is `shift_us` late."""
    about = {**sample.unpack(folder), "ranks": 2}
    late = {**about, "rank": 1, "host": host,
            "begin_ns": about["begin_ns"] + int(shift_us * 1e3)}
    ranks = [records.read_rank(a, folder) for a in (about, late)]
    for r in ranks:  # as if the copies up were collectives
        for i in of_kind(r, "fetch"):
            r.tasks.where[i] = figures.WORKER_KINDS.index("comm")
    records.align(ranks)
    return ranks


def test_ranks_of_one_host_are_on_one_clock(folder):
    ranks = two_ranks(folder, 250, "sample")
    for a, b in zip(ranks[0].tasks.begin, ranks[1].tasks.begin):
        assert b - a == pytest.approx(250)
    groups = figures.matched(ranks)
    assert len(groups) == len(of_kind(ranks[0], "fetch"))
    begin, end, _ = figures.window(ranks)
    took, waited, last = figures.waits(ranks, groups, begin, end)
    assert took[0] > waited[0] > 0 == waited[1] and set(last) == {1}
    # The column has these parts, and the clip of a step counts as a collective.
    for r in ranks:
        for i in of_kind(r, "clip"):
            r.tasks.where[i] = figures.WORKER_KINDS.index("comm")
            r.tasks.begin[i] -= 1e5 if r is ranks[0] else 0
    found = path.analyse(ranks, begin, end, 2)["waits"]
    assert 90 < found[0] < 100 and found[1] == 0
    rows = figures.links(ranks, begin, end)
    assert f"<td>{found[0]:.1f}</td></tr>" in report.link_table(rows, found)
    # The shortest copy takes 10.17 us, so those end before the other begins.
    assert figures.backward(ranks, groups)[1] == pytest.approx(239.8, abs=0.1)


def test_ranks_of_several_hosts_begin_together(folder):
    ranks = two_ranks(folder, 1e9, "another")
    assert ranks[0].tasks.begin[0] == ranks[1].tasks.begin[0]


# ---- the files ----

@pytest.fixture
def pair(folder, tmp_path):
    """(StarVZ's folder, ranks) of the sample as two ranks, of which the second
    began 250 us before the first."""
    ranks = two_ranks(folder, -250, "sample")
    for n in (0, 1):
        raw = tmp_path / "raw" / f"rank-{n}"
        raw.mkdir(parents=True)
        for name in sample.CONVERTED:
            shutil.copy(folder / name, raw / name)
        (raw / "dag.dot").write_text(
            'digraph G {\n\t "task_1"->"task_2"\n\t "task_2" [ href="x" ]\n}\n')
    starvz.write(tmp_path / "starvz", ranks, tmp_path / "raw")
    return tmp_path / "starvz", ranks


def test_columns_are_found_by_name(rank, copy):
    """A StarPU that puts a new column in front changes nothing."""
    text = []
    for line in (copy / "paje.trace").read_text().splitlines():
        if line.startswith("%EventDef"):
            text += [line, "%\tNovelty\tstring"]
        elif line.startswith("%"):
            text.append(line)
        else:
            text.append(re.sub(r"^(\S+)", r"\1\tnew", line))
    (copy / "paje.trace").write_text("\n".join(text) + "\n")
    again = records.read_rank(rank.about, copy)
    assert again.ready == rank.ready and again.zero_ms == rank.zero_ms
    assert again.runtime_us == rank.runtime_us and rank.runtime_us


def test_a_trace_without_its_begin_is_refused(rank, copy):
    text = (copy / "paje.trace").read_text()
    (copy / "paje.trace").write_text(
        text.replace("begin of the trace", "something else"))
    with pytest.raises(records.BadTrace, match="begins"):
        records.read_rank(rank.about, copy)


def make(ranks, folder):
    memories = [figures.memory(r, 0, max(r.tasks.end)) for r in ranks]
    found = path.analyse(ranks, *figures.window(ranks))
    report.write(folder / "report.html", ranks, memories, found,
                 "tools/simulate config.json", [])
    chrome.write(folder / "trace.json", ranks, memories)
    return folder


def test_trace_json_is_what_perfetto_reads(pair):
    """The Trace Event Format: complete events with ts and dur in us, names of processes
    and threads, counters.  It drops events of negative times.  Steps count as Paje's."""
    place, ranks = pair
    events = json.loads((make(ranks, place) / "trace.json").read_text())["traceEvents"]
    assert {e["ph"] for e in events} == {"M", "X", "C", "i"}
    assert min(e["ts"] for e in events if "ts" in e) == 0
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events
               if e["name"] == "thread_name"}
    assert sorted(threads.values()) == sorted([*BUSY] * 2)
    done = [e for e in events if e.get("cat") == "task"]
    assert len(done) == sum(len(r.tasks) for r in ranks)
    assert all(e["dur"] >= 0 and (e["pid"], e["tid"]) in threads for e in done)
    assert {e["args"]["step"] for e in done} == {1, 2, 3}
    ends = sorted(e["name"] for e in events if e["ph"] == "i")
    told = re.findall(r'"(end of step \d+)"', (place / "data/paje.trace").read_text())
    assert ends == sorted(told) and ends[0] == "end of step 1"


def test_pictures_show_as_many_whole_steps_as_they_hold(rank, window, monkeypatch):
    begin, end, _ = window
    ends = [e for _, e in figures.step_ends(rank)]
    for most, until in ((246, max(rank.tasks.end)), (245, ends[2]), (140, ends[1]),
                        (9, ends[1])):
        monkeypatch.setattr(report, "MOST_TASKS", most)
        assert report.picture_range([rank], begin, end)[1] == until, most


def test_of_many_ranks_the_first_one_is_chosen(rank):
    assert "selected" not in report.rank_choice([rank] * 4)
    assert '<option value="0" selected>' in report.rank_choice([rank] * 5)


def test_rates_have_three_figures():
    assert [report.rate(v, "B") for v in (0, 999.4, 999.6, 2.5e7, 3e18)] == [
        "", "999 B/s", "1 kB/s", "25 MB/s", "3e+03 PB/s"]


def test_the_report_needs_nothing_else(rank, tmp_path):
    text = (make([rank], tmp_path) / "report.html").read_text()
    for word in ("http:", "https:", "src=", "@import", "url("):
        assert word not in text


# ---- StarVZ ----

def test_starvz_gets_the_columns_that_it_knows(pair):
    target = pair[0] / "data/paje.trace"
    header = re.search(r"%EventDef\s+\S+\s+20\n(.*?)%EndEventDef",
                       target.read_text(), re.S)[1]
    assert [x.split()[1] for x in header.splitlines()] == starvz.EVENT_20
    long = [e for _, e in records.paje_events(target, {"SetState"})
            if len(e) > 5]
    assert len(long) == 2 * 246
    for e in long:
        assert list(e) == starvz.EVENT_20
        assert e["Iteration"] in "123" and 0 <= int(e["Subiteration"]) <= 10
    assert not list((pair[0].parent / "raw").rglob("paje.trace"))


def test_one_trace_has_all_ranks_on_one_clock(pair):
    """Each task once per rank, 0.25 ms apart; the same numbers in the records."""
    data, ranks = pair[0] / "data", pair[1]
    assert min(map(records.earliest, ranks)) == 0
    begins = [{}, {}]
    for _, e in records.paje_events(data / "paje.trace", {"SetState"}):
        if len(e) > 5:
            rank, job = e["JobId"].split("_")
            assert e["Container"].startswith(rank + "_w")
            begins[int(rank)].setdefault(job, float(e["Time"]))
    assert begins[0].keys() == begins[1].keys() and len(begins[0]) == 246
    for job, begin in begins[0].items():
        assert begin - begins[1][job] == pytest.approx(0.25, abs=1e-5)
    tasks = [r for r in records.records(data / "tasks.rec") if "EndTime" in r]
    for r in tasks:
        rank, job = r["JobId"].split("_")
        assert r["MPIRank"] == rank
        assert float(r["EndTime"]) > begins[int(rank)].get(job, 0)
        assert all(j.startswith(rank + "_") for j in r.get("DependsOn", "").split())
    work = [r for r in tasks if r["Name"] == "clip" or r["Name"] == "adam"]
    assert len(work) == 90
    assert {r["Iteration"] for r in work} == {"1", "2", "3"}
    assert {int(r["Subiteration"]) for r in work} == set(range(UNITS, 2 * UNITS))
    edges = re.findall(r'"task_(.*?)"->"task_(.*?)"', (data / "dag.dot").read_text())
    assert edges == [("0_1", "0_2"), ("1_1", "1_2")]


WORKERS = ("CUDA0_0 compute", "CPU0 host 0", "CPU1 host 1", "CPU2 copies to GPU",
           "CPU3 copies to host")


def test_workers_are_called_by_what_they_do(pair):
    names = [e["Name"] for _, e in records.paje_events(
        pair[0] / "data/paje.trace", {"CreateContainer"}) if e["Type"] == "W"]
    assert sorted(names) == sorted(f"{n}_{w}" for n in (0, 1) for w in WORKERS)


def test_an_edited_configuration_stays(pair, folder):
    place, ranks = pair
    (place / "starvz.yaml").write_text("mine: 1\n")
    for n in (0, 1):
        shutil.copy(folder / "paje.trace", place.parent / f"raw/rank-{n}")
    starvz.write(place, ranks, place.parent / "raw")
    assert (place / "starvz.yaml").read_text() == "mine: 1\n"


def test_colours_are_those_of_the_program(rank):
    text = starvz.configuration([rank])
    for k in rank.about["kinds"]:
        line = f'  {k["name"]}: {{color: "{k["color"]}", use: TRUE}}'
        assert (line in text) == (k["name"] == k["codelet"])
    assert len(rank.codelets) == 9 and rank.codelets < set(rank.kinds)
    colors = [k["color"] for k in rank.about["kinds"]]
    assert len(set(colors)) == len(colors)


def test_a_picture_of_many_ranks_has_some(rank):
    text = starvz.configuration([rank] * 9)
    assert "selected_nodes" in text
    assert "selected_nodes" not in starvz.configuration([rank] * 8)


@pytest.mark.skipif(not shutil.which("pj_dump"), reason="pajeng is missing")
def test_pj_dump_takes_the_trace(pair):
    # StarVZ sorts first, as pj_dump wants time to go on.
    r = subprocess.run(["pj_dump", "--user-defined", "--ignore-incomplete-links",
                        pair[0] / "data/paje.trace"], capture_output=True, text=True)
    assert r.returncode == 0 and "rror" not in r.stderr, r.stderr[-2000:]
    adam = [x for x in r.stdout.splitlines()
            if x.startswith("State") and ", adam," in x]
    assert len(adam) == 2 * 45


# ---- large traces ----

LARGE = 70000
MOST_BYTES = 512 << 20


def large_trace(folder, target):
    """The sample's records again and again, later and with new numbers."""
    tasks = list(records.records(folder / "tasks.rec"))
    for name in ("data.rec", "paje.trace"):
        shutil.copy(folder / name, target / name)
    with open(target / "tasks.rec", "w") as f:
        for n in range(LARGE // 246 + 1):
            for r in tasks:
                r = dict(r, JobId=str(int(r["JobId"]) + n * 10000))
                r.pop("DependsOn", None)
                for key in ("StartTime", "EndTime"):
                    if key in r:
                        r[key] = f"{float(r[key]) + n * 30:.6f}"
                f.write("".join(f"{k}: {v}\n" for k, v in r.items()) + "\n")


def test_a_large_trace_fits_into_memory(folder, tmp_path):
    """Under 512 MiB of address space."""
    large_trace(folder, tmp_path)
    (tmp_path / "program.py").write_text(f"""
import json, pathlib, sample, test_sample
f = pathlib.Path({str(tmp_path)!r})
a = json.loads((sample.FILES / "rank-0.json").read_text())
r = test_sample.records.read_rank(a, f)
assert len(r.tasks) >= {LARGE}
test_sample.make([r], f)
""")
    r = subprocess.run(
        [sys.executable, tmp_path / "program.py"], capture_output=True, text=True,
        timeout=600, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES,) * 2))
    assert r.returncode == 0, r.stderr[-2000:]
    text = (tmp_path / "report.html").read_text()
    assert "The pictures show part of the" in text
    assert len(text) < 12 << 20


# ---- made again ----

@pytest.mark.skipif(os.environ.get("IZ_TEST_SIMGRID") != "1",
                    reason="needs tools/setup --simgrid")
def test_a_simulation_is_traced_the_same_each_time(tmp_path):
    """With the graph as it is now, which the files need not be of: two traces
    are equal, and what they say is what the simulation says."""
    says = [sample.trace(tmp_path / x) for x in "ab"]
    assert says[0] == says[1]
    a, b = (run.read_all(tmp_path / x / "raw")[0] for x in "ab")
    for column in ("begin", "end", "kind", "worker", "where", "unit", "position",
                   "step", "bytes", "flops", "deps"):
        assert getattr(a.tasks, column) == getattr(b.tasks, column)
    test_the_step_is_that_of_the_simulation(a, says[0])
    test_hidden_parts_are_those_of_the_simulation(a, says[0])
    test_bytes_are_those_of_the_model_and_of_the_simulation(a, says[0], down=4)
    test_memory_stays_within_the_plan(a, says[0])
