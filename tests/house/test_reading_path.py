"""How much code one step enters, and the path on which CONTRIBUTING.md leads through it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from tests.house.tree import REPO

# At most, by step_trace.py; these may only fall.
ENTERED = {"files": 107, "lines": 19_515, "functions": 762, "executed": 3_393}
PATH = r"^\| `(octetrl/[\w/]+\.py)` \|"


def section(page: Path, title: str) -> str:
    text = page.read_text(encoding="utf-8")
    return text.split(f"\n## {title}", 1)[1].split("\n## ", 1)[0]


def test_one_step_enters_no_more_code_than_before() -> None:
    command = [sys.executable, "-m", "tests.house.step_trace", "--files"]
    traced = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True).stdout.splitlines()
    counts = json.loads(traced[-1])
    assert {name: most for name, most in ENTERED.items() if counts[name] > most} == {}, counts
    entered = {f"octetrl/{line.split()[0]}" for line in traced[:-1]}
    listed = re.findall(PATH, section(REPO / "CONTRIBUTING.md", "Reading one step"), re.MULTILINE)
    assert set(listed) <= entered, "a step does not enter these files"


def test_the_path_begins_with_the_step_and_names_the_fused_forms_apart() -> None:
    listed = section(REPO / "CONTRIBUTING.md", "Reading one step")
    path = re.findall(PATH, listed, re.MULTILINE)
    fused = re.findall(r"`(octetrl/[\w/]+\.py)`", listed.split("fused forms:", 1)[1])
    assert path[0] == "octetrl/run/step.py"
    assert len(fused) == 5 and not set(fused) & set(path)
