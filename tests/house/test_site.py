"""The site of docs/: every link and anchor resolves, every page is in the contents once, and a strict build passes."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import octetrl
from tests.house.markdown import without_code
from tests.house.tree import LAB_PAGES, REPO

DOCS = REPO / "docs"
PAGES = sorted(DOCS.glob("*.md"))
CONF = (DOCS / "conf.py").read_text(encoding="utf-8")


def anchors(document: str) -> set[str]:
    """The anchors of a page's headings, as repository browsers and MyST make them."""
    found: set[str] = set()
    for heading in re.findall(r"^#{1,4} (.+)$", without_code(document), flags=re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)|[`*]", r"\1", heading.strip())
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        number, name = 0, slug
        while name in found:
            number += 1
            name = f"{slug}-{number}"
        found.add(name)
    return found


def broken_links(document: str, folder: Path, own: set[str]) -> list[str]:
    """Links of a page to files and headings that do not exist."""
    broken = []
    for target in re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", without_code(document)):
        path, _, anchor = target.partition("#")
        if "://" in target:
            continue
        file = folder / path
        if path and not file.exists():
            broken.append(target)
        elif anchor:
            there = anchors(file.read_text(encoding="utf-8")) if path else own
            broken += [target] if anchor not in there else []
    return broken


def test_links_and_anchors_resolve() -> None:
    for page in (REPO / "README.md", REPO / "CONTRIBUTING.md", *PAGES, *LAB_PAGES):
        text = page.read_text(encoding="utf-8")
        assert not broken_links(text, page.parent, anchors(text)), page.name


def test_a_broken_link_is_noticed() -> None:
    page = "# A page\n\n## `Two` parts, *really*\n\n## Again\n\n## Again\n\n```\n# no heading [x](none.md)\n```\n"
    own = anchors(page)
    assert own == {"a-page", "two-parts-really", "again", "again-1"}
    links = "[a](#again-1) [b](#again-2) [c](fp8.md#memory) [d](fp8.md#memories) [e](none.md) [f](https://x.y/#z)"
    assert broken_links(links, DOCS, own) == ["#again-2", "fp8.md#memories", "none.md"]


def test_every_page_is_in_the_contents_once() -> None:
    """By docs/conf.py, which can be read without Sphinx."""
    assigned = {
        ast.unparse(node.targets[0]): node.value for node in ast.parse(CONF).body if isinstance(node, ast.Assign)
    }
    contents = [page for pages in ast.literal_eval(assigned["CONTENTS"]).values() for page in pages]
    assert sorted([*contents, "index"]) == [page.stem for page in PAGES]


def test_the_reference_has_every_public_name() -> None:
    text = (DOCS / "api.md").read_text(encoding="utf-8")
    assert {f"octetrl.{name}" for name in octetrl.__all__} == set(re.findall(r"^## `(\S+)`", text, flags=re.MULTILINE))
    documented = set(re.findall(r"^<!-- api: auto\w+ octetrl\.(\w+)", text, flags=re.MULTILINE))
    assert documented == set(octetrl.__all__) - {"__version__"}


@pytest.mark.slow
def test_it_builds_without_a_warning(tmp_path: Path) -> None:
    for module in ("sphinx", "myst_parser", "furo", "sphinx_copybutton"):
        pytest.importorskip(module, reason="pip install '.[docs]'")
    words = ["--quiet", "--fail-on-warning", "--keep-going", "-b", "html", "-d", str(tmp_path / "doctrees")]
    site = tmp_path / "site"
    built = subprocess.run(
        [sys.executable, "-m", "sphinx", *words, str(DOCS), str(site)], cwd=REPO, capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr
    first = (site / "index.html").read_text(encoding="utf-8")
    assert first.count('class="tile"') == 4 and "<!-- tiles" not in first
    assert {f"{page.stem}.html" for page in PAGES} <= {path.name for path in site.iterdir()}
    assert 'id="octetrl.train"' in (site / "api.html").read_text(encoding="utf-8")
    assert (site / "searchindex.js").is_file()
