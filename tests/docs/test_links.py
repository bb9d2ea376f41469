# SPDX-License-Identifier: Apache-2.0
"""What the pages name is there: links with their headings, and every `name` in `file`,
where a file may be the end of a path and a folder stands for what is below it."""
import re

import pytest

from test_adding import ROOT

ROOMS = ("bench", "codelets", "configs", "docs", "models", "runtime", "tests", "tools")
PAGES = [p for r in (".", "docs", "bench/**", "tests/**") for p in ROOT.glob(r + "/*.md")]
NAMED = re.compile(r"((?:`[a-z_]\w*\*?`(?:,| and)?\s+)+)in\s+`([\w./-]*[./][\w./-]*\w)`")


def anchors(page):
    heads = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_what_a_page_names_is_there(page):
    text, files = page.read_text(), [f for r in ROOMS for f in (ROOT / r).rglob("*.*")]
    for to, _, anchor in re.findall(r"\]\(([^)#:\s]*)(#([^)\s]*))?\)", text):
        target = page.parent / to if to else page
        assert target.exists() and (not anchor or anchor in anchors(target)), (to, anchor)
    for names, end in NAMED.findall(text):
        there = "".join(f.read_text(errors="ignore") for f in files if f.is_file() and
                        (f"/{f}".endswith("/" + end) or f"/{end}/" in str(f)))
        lost = [n for n in re.findall(r"`([\w*]+)`", names)
                if not re.search(rf"\b{n}\b".replace("*", r"\w*"), there)]
        assert not lost, f"not in {end}: {lost}"
