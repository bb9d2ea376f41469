# SPDX-License-Identifier: Apache-2.0
"""tools/monitor on files as runs leave them: resumed, cut short, not finite; what it
exports is read back by other means than it was written with."""
import csv
import fcntl
import io
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as xml

import pytest

from run import ROOT, TIMEOUT_S

MONITOR = ROOT / "tools/monitor"


def line(step, loss, **more):
    return json.dumps({"step": step, "time": 1000.0 + step, "loss": loss,
                       "grad_norm": 2.0 / step, "lr": 1e-3,
                       "tokens_per_s": 100.0 * step, "seconds": 0.5,
                       "resident_bytes": step << 20, **more}) + "\n"


END = (json.dumps({"summary": {"reason": "finished", "steps": 30}}) + "\n" +
       json.dumps({"limit": {"by": "disk", "text": "the disk: it is slow"}}) +
       "\n")


def write_run(folder, text):
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text(text)
    return folder


def monitor(*args, rc=0, **env):
    r = subprocess.run([sys.executable, MONITOR, *map(str, args)], text=True,
                       capture_output=True, timeout=TIMEOUT_S,
                       env={**os.environ, **env})
    assert r.returncode == rc, r.stdout + r.stderr
    assert "Traceback" not in r.stderr, r.stderr
    return r


def shown(*args, **env):
    """What it draws where the output is no terminal."""
    pytest.importorskip("plotext")
    return monitor(*args, **env).stdout


def rows(run, *more):
    return list(csv.DictReader(io.StringIO(
        monitor(run, *more, "--csv", "-").stdout)))


@pytest.fixture
def resumed(tmp_path):
    """30 steps, then again from a checkpoint of step 20, to 25: cut in a line.
    Step 22 is not finite."""
    text = "".join(line(s, 5.0) for s in range(1, 31)) + END
    text += "".join(line(s, "nan" if s == 22 else 3.0) for s in range(21, 26))
    text += '{"step": 25, "validation_loss": 2.5}\nno json\n{"step": 26, "lo'
    return write_run(tmp_path / "a", text)


def test_what_a_resumed_run_repeats_counts_once(resumed):
    got = rows(resumed)
    assert [int(r["step"]) for r in got] == list(range(1, 26))
    assert [float(r["loss"]) for r in got[:20]] == [5.0] * 20
    assert [r["loss"] for r in got[20:]] == ["3.0", "nan", "3.0", "3.0", "3.0"]
    assert got[24]["validation_loss"] == "2.5"
    assert all(r["run"] == "a" for r in got)
    out = " ".join(shown(resumed).split())
    assert "step 25" in out and "resumed at step 21" in out
    assert "1 lines not understood" in out and "not finite: step 22" in out


@pytest.mark.parametrize("start, words", [
    (5, "step 5 loss 4.0000 500 tokens/s (resumed at step 6)"),
    (3, "step 3 loss 4.0000 300 tokens/s (resumed at step 4)")])
def test_a_resumed_run_goes_on_before_its_first_step(start, words, tmp_path):
    text = "".join(line(s, 4.0) for s in range(1, 6)) + END + \
        '{"start": {"program": "gpt2"}}\n' + \
        json.dumps({"resumed": {"from": start, "changed": {}}}) + "\n"
    out = " ".join(shown(write_run(tmp_path / "a", text)).split())
    assert words in out and "finished" not in out and "limited" not in out


def test_the_rate_is_that_of_what_the_model_reads(tmp_path):
    text = line(1, 2.0, tokens_per_s=23456.7).replace("tokens_per_s", "images_per_s")
    folder = write_run(tmp_path / "vit", text)
    assert rows(folder)[0]["items_per_s"] == "23456.7"
    out = shown(folder, "--once")
    assert "23457 images/s" in out and "throughput, images/s  23457" in out


def test_missing_fields_and_files(tmp_path):
    run = write_run(tmp_path / "b", '{"step": 1, "loss": 2}\n{"step": 2}\n[1]\n'
                    '{"step": 3, "loss": null, "lr": true}\n')
    assert [(r["step"], r["loss"]) for r in rows(run)] == [("1", "2.0")]
    empty = write_run(tmp_path / "c", "")
    assert "no step yet" in monitor(empty).stdout
    other = write_run(tmp_path / "d", "In the beginning\n")
    assert "no step yet  (1 lines not understood)" in monitor(other).stdout
    r = monitor(tmp_path / "none", rc=1)
    assert "none" in r.stderr and "No such file" in r.stderr
    assert "no series pace" in monitor(run, "--only", "pace", rc=2).stderr


def test_runs_of_one_name_are_told_apart(tmp_path):
    for x in "12":
        (tmp_path / x).mkdir()
        write_run(tmp_path / x / "out", line(1, float(x)))
    got = rows(tmp_path / "1/out", tmp_path / "2/out")
    assert len({r["run"] for r in got}) == 2


# ---- pictures and files, by the packages of tools/setup --python ----

@pytest.mark.parametrize("package, option", [
    ("matplotlib", "--svg"), ("plotly", "--html"), ("plotext<6", "--once"),
    ("tensorboard", "--tensorboard")])
def test_a_missing_package_is_named(package, option, resumed, tmp_path):
    if package == "plotly":  # the page has a picture for readers without scripts
        pytest.importorskip("matplotlib")
    (tmp_path / f"{package.partition('<')[0]}.py").write_text("raise ImportError\n")
    to = [] if option == "--once" else [tmp_path / "out"]
    r = monitor(resumed, option, *to, rc=1, PYTHONPATH=str(tmp_path))
    assert f"pip install '{package}'" in r.stderr
    assert not (tmp_path / "out").exists()


def test_tensorboard_reads_every_value(resumed, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event
    monitor(resumed, "--tensorboard", tmp_path / "tb")
    (file,) = (tmp_path / "tb/a").iterdir()
    first, *events = map(Event.FromString, RawEventFileLoader(str(file)).Load())
    got = {(v.tag, e.step): v.simple_value for e in events for v in e.summary.value}
    times = {e.step: e.wall_time for e in events}
    assert first.file_version == "brain.Event:2"
    assert {s for t, s in got if t == "train/loss"} == set(range(1, 26))
    assert got["train/loss", 7] == 5 and got["train/loss", 21] == 3
    assert math.isnan(got["train/loss", 22])
    assert got["validation/loss", 25] == 2.5 and times[9] == 1009
    assert got["speed/items_per_s", 9] == 900
    assert {t for t, s in got if s == 3} == {
        "train/loss", "train/grad_norm", "train/lr", "speed/items_per_s",
        "memory/resident_bytes"}
    before = file.read_bytes()
    monitor(resumed, "--tensorboard", tmp_path / "tb")  # replaces
    assert [f.read_bytes() for f in (tmp_path / "tb/a").iterdir()] == [before]
    write_run(resumed, line(1, 1e39, time=5000.0))
    assert "would mix" in monitor(resumed, "--tensorboard", tmp_path / "tb",
                                  rc=1).stderr
    monitor(resumed, "--tensorboard", tmp_path / "new")  # more than a float holds


@pytest.fixture
def drawn(monkeypatch):
    """What is drawn: the packages, and a function that reads runs."""
    pytest.importorskip("matplotlib")
    pytest.importorskip("plotly")
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    from monitoring import page, pictures, runs

    def read(*folders):
        found = runs.open_runs(map(str, folders))
        for r in found:
            r.read()
        return found
    return page, pictures, read


def test_a_step_that_is_not_finite_is_a_gap_with_a_mark(resumed, tmp_path, drawn):
    page, pictures, read = drawn
    both = read(resumed, write_run(tmp_path / "b", line(1, 4.0) + line(2, 3.0)))
    chart = page.chart(both, (), 5)
    of_loss = [t for t in chart.data if t.xaxis == "x"]
    raw, even, circles, *_ = of_loss
    assert [t.name for t in of_loss] == ["a", "a", "a", "b", "b"]
    assert raw.x == even.x == tuple(range(1, 26)) and circles.y == (2.5,)
    assert even.y[21] is None and None not in even.y[:21] and even.y[22] > raw.y[22]
    assert [a.x for a in chart.layout.annotations if a.text == "×"] == [22]
    axes = pictures.figure(both, (), 1).axes
    titles = ("loss", "gradient norm", "learning rate", "throughput", "resident memory")
    assert [a.get_title("left").partition(",")[0] for a in axes] == list(titles)
    assert math.isnan(axes[0].lines[0].get_ydata()[21])
    assert [list(x.get_xdata()) for x in axes[0].lines if x.get_marker() == "x"] == [
        [22], []]
    assert axes[0].get_xlim() == axes[4].get_xlim()
    ticks = pictures.figure(both[1:], (), 1).axes[0].get_xticks()
    assert list(ticks) == [round(x) for x in ticks], "half a step"


def test_the_page_needs_nothing_else(resumed, tmp_path, drawn):
    other = write_run(tmp_path / "<b>", line(1, 4.0) + line(2, 3.0) + END)
    monitor(resumed, other, "--html", tmp_path / "p.html")
    page = (tmp_path / "p.html").read_text()
    assert not re.search(r"<link|<img|<script[^>]* src=", page)
    assert "prefers-color-scheme: dark" in page
    assert "&lt;b&gt;" in page and "<b>:" not in page
    assert "limited by the disk" in page
    without = re.search("<noscript>(.*?)</noscript>", page, re.S)[1]
    assert xml.fromstring(without).tag.endswith("svg")


@pytest.mark.parametrize("name", ["_a", "lr_$5_$6", "a$\\frac$", os.fsdecode(b"a\xff")])
def test_a_run_may_have_any_name(name, tmp_path, drawn):
    """Pictures have legends in which $ begins mathematics and _ hides a line."""
    _, pictures, read = drawn
    run = write_run(tmp_path / name, line(1, 4.0) + line(2, 3.0))
    shown = name.encode(errors="surrogateescape").decode(errors="replace")
    (legend,) = pictures.figure(read(run), (), 1).legends
    assert [t.get_text() for t in legend.get_texts()] == [shown]
    monitor(run, "--html", tmp_path / "p", "--csv", tmp_path / "c")
    assert shown in (tmp_path / "p").read_text()
    assert (tmp_path / "c").read_text().splitlines()[1].partition(",")[0] == shown
    monitor(run)
    monitor(run, PYTHONIOENCODING="ascii")
    monitor(run, "--csv", "-", PYTHONIOENCODING="ascii")


def test_a_legend_has_the_runs_of_all_pictures(tmp_path, drawn):
    page, pictures, read = drawn
    both = read(write_run(tmp_path / "a", line(1, 4.0, router_balance=1.0)),
                write_run(tmp_path / "b", line(1, 4.0, loss_scale=2.0)))
    only = ("loss_scale", "router_balance")
    (legend,) = pictures.figure(both, only, 1).legends
    assert sorted(t.get_text() for t in legend.get_texts()) == ["a", "b"]
    assert sorted(t.name for t in page.chart(both, only, 1).data if t.showlegend) == [
        "a", "b"]


@pytest.mark.parametrize("to", ["--csv", "--csv -", "--svg", "--html", "--tensorboard"])
def test_a_full_disk_is_told_with_the_name(to, resumed, tmp_path):
    option, *to = to.split()
    os.symlink("/dev/full", tmp_path / "x")
    if option == "--tensorboard":  # its folder's only file
        pytest.importorskip("tensorboard")
        (tmp_path / "tb/a").mkdir(parents=True)
        os.symlink("/dev/full", tmp_path / "tb/a/events.out.tfevents.0000001001.izar")
        to = [tmp_path / "tb"]
    elif option != "--csv":
        pytest.importorskip("matplotlib")
        pytest.importorskip("plotly")
    path = str((to or [tmp_path / "x"])[0])
    with open("/dev/full", "w") as full:
        r = subprocess.run([sys.executable, MONITOR, resumed, option, path], stdout=full,
                           stderr=subprocess.PIPE, text=True, timeout=TIMEOUT_S)
    assert r.returncode == 1 and r.stderr == f"monitor: {path}: No space left on device\n"


def test_numbers_beyond_a_float_and_steps_of_years(tmp_path):
    run = write_run(tmp_path / "a", line(1, 4.0).replace("2.0", "1" + "0" * 400))
    assert rows(run)[0]["loss"] == "4.0" and "grad_norm" not in rows(run)[0]
    (run / "config.json").write_text('{"run": {"steps": 1000000000000000}}')
    assert "years left" in shown(run)
    assert "finite" in monitor(run, "--interval", "nan", rc=2).stderr


def test_png_and_svg(resumed, tmp_path, drawn):
    monitor(resumed, "--png", tmp_path / "p.png", "--svg", tmp_path / "p.svg")
    png = (tmp_path / "p.png").read_bytes()
    assert png[:8] == b"\x89PNG\r\n\x1a\n" and len(png) > 20000
    assert xml.parse(tmp_path / "p.svg").getroot().tag.endswith("svg")
    empty = write_run(tmp_path / "c", "")
    assert "no step to draw" in monitor(empty, "--png", tmp_path / "q", rc=1).stderr


# ---- the terminal ----

def test_letters_where_there_are_no_dots(resumed, tmp_path):
    other = write_run(tmp_path / "b", "".join(line(s, 4.0)
                                              for s in range(1, 9)))
    out = shown(resumed, other, PYTHONIOENCODING="ascii")
    assert out.isascii() and "a a: step 25" in out and "b b: step 8" in out
    plot = [x for x in out.splitlines() if "|" in x]
    assert any("a" in x for x in plot) and any("b" in x for x in plot)
    assert max(map(len, out.splitlines())) <= 110


class Terminal:
    """The tool on a terminal of 100 x 40, which `script` makes and writes down."""

    def __init__(self, run, term="xterm"):
        pytest.importorskip("plotext")
        self.file = run / "typescript"
        tool = shlex.join([sys.executable, str(MONITOR), str(run), "--interval", "0.05"])
        self.process = subprocess.Popen(
            ["script", "-qefc", f"stty rows 40 cols 100; exec {tool}", self.file],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
            env={**{k: v for k, v in os.environ.items() if k != "NO_COLOR"},
                 "TERM": term, "PYTHONIOENCODING": "utf-8"},
            # what starts the tests may have turned Ctrl-C off
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))

    @property
    def text(self):  # it may end within a character
        return self.file.read_text(errors="replace") if self.file.exists() else ""

    def until(self, what):
        end = time.monotonic() + TIMEOUT_S
        while what not in self.text:
            assert time.monotonic() < end, f"no {what!r} in\n{self.text}"
            time.sleep(0.05)

    def end(self):
        return self.process.wait(TIMEOUT_S)


def test_follows_a_file_until_the_run_ends(tmp_path):
    """One that is resumed has the file, and loads for a while."""
    run = write_run(tmp_path / "a", "".join(line(s, 4.0) for s in range(1, 6)) + END)
    with open(run / "metrics.jsonl", "a") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        t = Terminal(run)
        t.until("step 5")
        f.write('{"start": {"program": "gpt2"}}\n' + line(6, 3.75)[:20])
        f.flush()
        time.sleep(0.3)
        f.write(line(6, 3.75)[20:])
        f.flush()
        t.until("step 6")
        assert "not understood" not in t.text
        f.write(END)
    t.until("limited by the disk")
    assert t.end() == 0
    assert "\x1b[38;5;" in t.text, "colours"
    assert re.search("[\u2801-\u28ff]", t.text), "dots"


def test_a_dumb_terminal_gets_no_codes(tmp_path):
    t = Terminal(write_run(tmp_path / "a", line(1, 4.0)), "dumb")
    assert t.end() == 0 and "a: step 1" in t.text and "\x1b" not in t.text


def test_ctrl_c_ends_it(tmp_path):
    t = Terminal(write_run(tmp_path / "a", line(1, 4.0)))
    t.until("step 1")
    os.write(t.process.stdin.fileno(), b"\x03")
    assert t.end() == 0
    assert "Traceback" not in t.text


def test_a_run_as_it_is(place):
    """What a program writes, is understood."""
    r = place.good(1, {"run.steps": 4, "run.eval_batches": 1})
    got = rows(r.output)
    assert [float(x["loss"]) for x in got] == r.losses
    assert all(float(x["resident_bytes"]) > 1 << 20 for x in got)
    assert got[3]["validation_loss"] and float(got[3]["time"]) > 1e9
    shutil.copy(r.output / "metrics.jsonl", place.folder / "copy.jsonl")
    assert rows(place.folder / "copy.jsonl")[0]["run"] == "copy"
    out = shown(r.output)
    assert "step 4 of 4" in out and "finished" in out and "limited by" in out
