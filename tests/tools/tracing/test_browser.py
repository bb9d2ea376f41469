# SPDX-License-Identifier: Apache-2.0
"""The report in a browser without a screen: it draws at two window sizes, light
and dark, without an error and without a page wider than the window."""
import base64
import json
import os
import pathlib
import re
import shutil
import subprocess

import pytest
import sample
import test_sample

from tracing import records

BROWSER = next((b for b in ("chromium", "chromium-browser", "google-chrome")
                if shutil.which(b)), None)
pytestmark = pytest.mark.skipif(not BROWSER, reason="Chromium is missing")
SIZES = ((1400, 1600), (480, 1800))
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
document.getElementById("all").click();
</script></body>"""

COUNT = """<body><script>
const picture = new Image(), found = {};
picture.onload = () => {
    const canvas = document.createElement("canvas");
    canvas.width = picture.width;
    canvas.height = picture.height;
    const pen = canvas.getContext("2d");
    pen.drawImage(picture, 0, 0);
    const d = pen.getImageData(0, 0, picture.width, picture.height).data;
    for (let i = 0; i < d.length; i += 4) {
        const color = d[i] << 16 | d[i + 1] << 8 | d[i + 2];
        found[color] = (found[color] || 0) + 1;
    }
    document.body.textContent = JSON.stringify(found);
};
picture.src = "data:image/png;base64,DATA";
</script></body>"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    f = tmp_path_factory.mktemp("browser")
    rank = records.read_rank(sample.unpack(f), f)
    test_sample.make(rank, f)
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


def colors(folder, shot):
    """{0xrrggbb: pixels} of a PNG, which the browser itself reads."""
    data = base64.b64encode(shot.read_bytes()).decode()
    (folder / "count.html").write_text(COUNT.replace("DATA", data))
    found = re.search(r"{.*}", browse(folder, "--dump-dom", page="count.html"))
    return {int(c): n for c, n in json.loads(found[0]).items()}


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


@pytest.mark.parametrize("theme", ("#light", "#dark"))
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_its_picture_has_the_colours_of_the_tasks(page, size, theme):
    shot = page / f"{size[0]}{theme[1:]}.png"
    browse(page, f"--screenshot={shot}", f"--window-size={size[0]},{size[1]}",
           theme=theme)
    keep = os.environ.get("IZ_TEST_PICTURES")
    if keep:
        shutil.copy(shot, pathlib.Path(keep) / shot.name)
    found = colors(page, shot)
    assert sum(found.values()) == size[0] * size[1]
    paper = 0xffffff if theme == "#light" else 0x14171b
    assert found.get(paper, 0) > 0.3 * sum(found.values())
    for color in (0x009e73, 0x0072b2, 0x56b4e9, 0xd55e00):
        # Of forward, backward, fetch and adam.
        # The legend and the tables have less than 500 of each.
        assert found.get(color, 0) > 1500, color
