# SPDX-License-Identifier: Apache-2.0
"""The report in a browser without a screen: it draws at two window sizes, light
and dark, without an error and without a page wider than the window."""
import os
import pathlib
import re
import shutil
import struct
import subprocess
import zlib

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


def pixels(path):
    """Rows of RGB bytes of a PNG with 8 bits, all filters undone."""
    data, at, body = path.read_bytes(), 8, b""
    while at < len(data):
        size, kind = struct.unpack(">I4s", data[at:at + 8])
        part = data[at + 8:at + 8 + size]
        at += size + 12
        if kind == b"IHDR":
            width, height, depth, color = struct.unpack(">IIBB", part[:10])
            assert depth == 8 and color in (2, 6)
        if kind == b"IDAT":
            body += part
    n = 3 if color == 2 else 4
    raw, rows = zlib.decompress(body), []
    above = bytes(width * n)
    for y in range(height):
        line = bytearray(raw[y * (width * n + 1) + 1:(y + 1) * (width * n + 1)])
        undo(raw[y * (width * n + 1)], line, above, n)
        above = bytes(line)
        rows.append((above, n))
    return rows


def undo(kind, line, above, n):
    for i in range(len(line)):
        left = line[i - n] if i >= n else 0
        up, corner = above[i], above[i - n] if i >= n else 0
        if kind == 1:
            line[i] = (line[i] + left) & 255
        elif kind == 2:
            line[i] = (line[i] + up) & 255
        elif kind == 3:
            line[i] = (line[i] + (left + up) // 2) & 255
        elif kind == 4:
            p = left + up - corner
            best = min((abs(p - v), k, v)
                       for k, v in enumerate((left, up, corner)))[2]
            line[i] = (line[i] + best) & 255


def colors(path):
    """{(r, g, b): pixels}"""
    found = {}
    for line, n in pixels(path):
        for i in range(0, len(line), n):
            c = tuple(line[i:i + 3])
            found[c] = found.get(c, 0) + 1
    return found


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
    found = colors(shot)
    paper = (255, 255, 255) if theme == "#light" else (0x14, 0x17, 0x1b)
    assert found.get(paper, 0) > 0.3 * sum(found.values())
    for color in ((0, 0x9e, 0x73), (0, 0x72, 0xb2), (0x56, 0xb4, 0xe9),
                  (0xd5, 0x5e, 0)):  # forward, backward, fetch, adam
        # The legend and the tables have less than 500 of each.
        assert found.get(color, 0) > 1500, color
