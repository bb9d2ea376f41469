# SPDX-License-Identifier: Apache-2.0
"""The black box: what each rank writes of a run that does not go on."""
import json
import re
import signal

import run

LONG = {"train_batch_size": 4, "run.steps": 100000, "run.comm_timeout_s": 1.5,
        **run.offload(3, "cpu", "cpu", "")}


def boxes(output):
    """{rank: box} of those that are whole."""
    found = [json.loads(p.read_text()) for p in sorted(output.glob("stuck-rank*.json"))]
    return {b["about"]["rank"]: b for b in found}


def told(place, output):
    """What tools/trace says; it draws as well."""
    to = place.folder / "drawn"
    r = run.call(run.ROOT / "tools/trace", to, "--stuck", output)
    assert r.rc == 0 and json.loads((to / "trace.json").read_text()), str(r)
    page = (to / "report.html").read_text()
    assert "</html>" in page and "Steps 1 to 0" not in page
    assert "would shorten" not in page, "boxes lack what tasks waited for"
    return r.err


def check(box):
    """All members; the last tasks in order, and every task that waits behind one that
    has not ended."""
    assert {x["class"] for x in box["about"]["plan"]} >= {"parameters", "optimizer"}
    ends = [x["end_us"] for x in box["tasks"]]
    assert len(ends) == 1000 and ends == sorted(ends)
    unended = {x["number"] for x in box["unended"]}
    assert all(set(x.get("after", ())) <= unended for x in box["unended"])
    assert unended and all(("worker" in x) != ("after" in x) for x in box["unended"])


def test_quit_writes_boxes_and_the_run_goes_on(place, known):
    c = {"train_batch_size": 4, "run.steps": 600}
    r = place.start(2, c)
    r.until_step(60)
    r.signal(signal.SIGQUIT)
    r = r.finish()
    assert r.rc == 0 and r.numbers == known(2, c).numbers, str(r)
    assert len(re.findall(r"rank \d: SIGQUIT \(.*stuck-rank\d.json\): goes on", r.err)) == 2
    found = boxes(r.output)
    assert {n: b["reason"] for n, b in found.items()} == dict.fromkeys((0, 1), "SIGQUIT")
    for box in found.values():
        check(box)
    assert re.search(r"rank 1 on .*: SIGQUIT$", told(place, r.output), re.M)


def test_a_fatal_signal_has_its_end_behind_the_boxes_of_all(place):
    r = place.start(2, LONG)
    r.until_step(60)
    r.signal(signal.SIGSEGV, only=1)
    r = r.finish()
    assert r.rc != 0 and re.search(r"rank 1: SIGSEGV \(.*stuck-rank1.json\)\n", r.err), str(r)
    found = boxes(r.output)
    # The other one may be quick enough to see that this one is gone.
    assert set(found) == {0, 1} and found[1]["reason"] == "SIGSEGV"
    check(found[1])


def test_a_time_out_names_the_box_and_that_names_the_wait(place):
    r = place.start(2, LONG)
    r.until_step(60)
    r.signal(signal.SIGSTOP, only=1)
    r = r.finish()
    line = re.search(r"rank 0: (waited 1.5 s for (.*): is another .*) \((.*)\)\n", r.err)
    assert r.rc != 0 and line and line[3] == f"{r.output}/stuck-rank0.json", str(r)
    box = boxes(r.output)[0]
    check(box)
    assert box["reason"] == line[1] and box["collective"]["what"] == line[2]
    assert not box["collective"]["ended"]
    words = told(place, r.output)
    assert f"({line[2]}), since " in words and " waits for " in words
