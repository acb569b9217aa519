"""The path on which a stranger reads one step: CONTRIBUTING.md has the list, docs/architecture.md the same in words."""

from __future__ import annotations

import re
from pathlib import Path

from tests.house.tree import REPO

FILES, LINES = 13, 2_600  # at most; lower the lines when the path gets shorter
FUSED_LINES = 3_200  # with the fused forms


def section(page: Path, title: str) -> str:
    text = page.read_text(encoding="utf-8")
    return text.split(f"\n## {title}", 1)[1].split("\n## ", 1)[0]


def num_lines(paths: list[str]) -> int:
    return sum(len((REPO / path).read_text(encoding="utf-8").splitlines()) for path in paths)


def test_one_step_is_read_in_few_files_and_both_pages_name_them() -> None:
    listed = section(REPO / "CONTRIBUTING.md", "Reading one step")
    path = re.findall(r"^\| `(octetrl/[\w/]+\.py)` \|", listed, re.MULTILINE)
    fused = re.findall(r"`(octetrl/[\w/]+\.py)`", listed.split("fused forms:", 1)[1])
    told = section(REPO / "docs" / "architecture.md", "Reading one step").split("One level deeper", 1)[0]
    assert path[0] == "octetrl/run/step.py"
    assert path == [f"octetrl/{name}" for name in re.findall(r"`([\w/]+\.py)`", told)], "the two pages differ"
    assert len(fused) == 5 and not set(fused) & set(path)
    assert len(path) <= FILES and num_lines(path) <= LINES
    assert num_lines(path + fused) <= FUSED_LINES
