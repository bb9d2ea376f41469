# SPDX-License-Identifier: Apache-2.0
"""The report in a browser without a screen: it draws at two window sizes, light
and dark, without an error and without a page wider than the window."""
import html
import json
import os
import pathlib
import re
import shutil
import subprocess

import pytest
import test_sample

BROWSER = next((b for b in ("chromium", "chromium-browser", "google-chrome")
                if shutil.which(b)), None)
pytestmark = pytest.mark.skipif(not BROWSER, reason="Chromium is missing")
SIZES = ((1400, 1600), (480, 2600))
# Asked of the page after it has drawn.
PROBE = """<script>
const e = document.documentElement;
e.dataset.wide = e.scrollWidth > innerWidth;
const c = document.getElementById("gantt"), r = c.getBoundingClientRect();
c.dispatchEvent(new PointerEvent("pointermove", {clientX: r.left + r.width / 2,
    clientY: r.top + 10, bubbles: true}));
const before = view.to - view.from;
document.getElementById("in").click();
e.dataset.zoomed = view.to - view.from < before;
document.getElementById("theme").click();
document.getElementById("theme").click();
const drag = (...xs) => xs.forEach((x, n) => c.dispatchEvent(new PointerEvent(
    ["pointerdown", "pointermove", "pointerup"][n], {clientX: r.left + x, clientY: r.top + 9})));
const press = id => {
    document.getElementById(id).click();
    return [view.from, view.to];
};
const key = k => {
    dispatchEvent(new KeyboardEvent("keydown", {key: k}));
    return [view.from, view.to];
};
const turn = ctrlKey => {
    c.dispatchEvent(new WheelEvent("wheel", {ctrlKey, deltaY: -100, cancelable: true,
        clientX: r.left + r.width / 2}));
    return [view.from, view.to];
};
const said = () => [...document.querySelectorAll(".of")].map(x => x.textContent);
const found = {range: D.range, ends: D.ends, all: press("all")};
found.steps = [1, 2, 3, 4, 5].map(() => press("step"));
found.keys = ["0", "n", "w", "s", "d", "ArrowLeft", "0"].map(key);
found.wheel = [turn(false), turn(true)];
press("all");
drag(300, 250, 200);
found.drag = [view.from, view.to];
press("all");
found.drag = [...found.drag, panels[0].time(200), panels[0].time(300)];
drag(300, 301, 302);
found.drag.push(view.from);
found.said = [said()];
const choice = document.getElementById("rank");
choice.value = "1";
choice.onchange();
found.said.push(said());
choice.value = "-1";
choice.onchange();
document.querySelector("#legend button").click();
found.legend = [];
for (let i = 0; i < 2; i++) {
    document.getElementById("theme").click();
    found.legend.push([e.dataset.theme, document.querySelectorAll("#legend .off").length]);
}
document.querySelector("#legend button").click();
found.rates = [0, 999.4, 999.6, 1e18].map(n => perSecond(n, "B"));
one().ready = [[], []];
renderAll();
found.hidden = panels.filter(p => !p.canvas.offsetWidth).map(p => p.canvas.id);
found.long = taskAt(panels[0], {b: [0, 1, 2, 3], d: [9e9, 1, 1, 1]}, [0, 1, 2, 3], 400);
found.ticks = [ticks(7e5, 1.3e6, 4), ticks(0, 9, 5), ticks(900, 1100, 5)].map(
    x => x.map(t => t[1]));
document.body.style.width = "60px"; // less than the names on the left take
renderAll();
document.body.style.width = "";
renderAll();
e.dataset.found = JSON.stringify(found);
</script></body>"""

@pytest.fixture(scope="module")
def page(tmp_path_factory):
    f = tmp_path_factory.mktemp("browser")
    test_sample.make(test_sample.two_ranks(f, 250, "sample"), f)
    text = (f / "report.html").read_text()
    (f / "probe.html").write_text(text.replace("</body>", PROBE))
    return f


def browse(folder, *options, page="report.html", theme=""):
    r = subprocess.run(
        [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu",
         "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars",
         f"--user-data-dir={folder}/profile", "--virtual-time-budget=5000",
         "--enable-logging=stderr", *options,
         (folder / page).as_uri() + theme],
        capture_output=True, text=True, timeout=300)
    assert r.returncode == 0, r.stderr[-2000:]
    console = [x for x in r.stderr.splitlines() if "CONSOLE" in x]
    assert not console, console
    return r.stdout


def check_controls(found):
    begin, end = found["range"]
    parts = [begin, *found["ends"], end]
    assert found["all"] == [begin, end]
    assert found["steps"] == [list(x) for x in zip(parts, parts[1:])] + [parts[:2]]
    all_, step, near, out, right, left, again = found["keys"]
    assert all_ == again == [begin, end] and step == parts[:2]
    assert near[1] - near[0] == pytest.approx((step[1] - step[0]) / 2)
    assert out == pytest.approx(step) and right[0] > out[0] > left[0] - 1
    assert found["wheel"][0] == [begin, end]
    assert found["wheel"][1][1] - found["wheel"][1][0] == pytest.approx(
        0.8 * (end - begin))
    assert found["drag"][:2] == pytest.approx(found["drag"][2:4])
    assert found["drag"][4] == begin, "a click is no drag"
    assert found["said"] == [[" of rank 0"] * 4, [" of rank 1"] * 4]
    # A change of colours keeps the kind that is chosen.
    assert sorted(found["legend"]) == [["dark", 8], ["light", 8]]
    assert found["rates"] == ["0.00 B/s", "999 B/s", "1.00 kB/s", "1.00e+3 PB/s"]
    assert found["hidden"] == ["ready"]
    assert found["long"] == 0, "a task that lasts longer than those behind it"
    assert found["ticks"] == [["0.8 s", "1.0 s", "1.2 s"],
                              ["0 µs", "2 µs", "4 µs", "6 µs", "8 µs"],
                              ["0.90 ms", "0.95 ms", "1.00 ms", "1.05 ms", "1.10 ms"]]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_it_draws_without_an_error(page, size):
    dom = browse(page, "--dump-dom", f"--window-size={size[0]},{size[1]}",
                 page="probe.html")
    tag = re.search(r"<html[^>]*>", dom).group(0)
    assert "data-error" not in tag, tag
    panels = len(re.findall("<canvas ", dom))
    assert f'data-drawn="{panels}"' in tag and panels >= 6, tag
    assert 'data-wide="false"' in tag and 'data-zoomed="true"' in tag, tag
    legend = re.search(r'id="legend">(.*?)</div>', dom).group(1)
    assert legend.count("<button") == 9
    check_controls(json.loads(html.unescape(
        re.search('data-found="(.*?)"', tag)[1])))


@pytest.mark.parametrize("theme", ("#light", "#dark"))
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_its_picture_has_the_colours_of_the_tasks(page, size, theme):
    Image = pytest.importorskip("PIL.Image", reason="matplotlib is missing")
    shot = page / f"{size[0]}{theme[1:]}.png"
    browse(page, f"--screenshot={shot}", f"--window-size={size[0]},{size[1]}",
           theme=theme)
    keep = os.environ.get("IZ_TEST_PICTURES")
    if keep:
        shutil.copy(shot, pathlib.Path(keep) / shot.name)
    with Image.open(shot) as picture:
        assert picture.size == size
        found = {"#%02x%02x%02x" % color: n for n, color in
                 picture.convert("RGB").getcolors(size[0] * size[1])}
    paper = "#ffffff" if theme == "#light" else "#14171b"
    assert found.get(paper, 0) > 0.3 * size[0] * size[1]
    for color in ("#009e73", "#0072b2", "#56b4e9", "#d55e00"):
        # Of forward, backward, fetch and adam.
        # The legend and the tables have less than 500 of each.
        assert found.get(color, 0) > 1000, color
