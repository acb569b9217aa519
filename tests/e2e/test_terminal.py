"""A run on a terminal: its phases at the bottom, a line a step, and two Ctrl-C, which leave nothing but whole lines.

test_resume.py presses it once."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import yaml

from tests.e2e.terminal import run_on_terminal, screen
from tests.e2e.tiny_run import recipe_tree

REPOSITORY = Path(__file__).parents[2]


def test_the_small_terminal() -> None:
    assert screen(b"one\r\ntwo\x1b[2K\rthree\x1b[1A\r\x1b[2Kfour\n", 80) == ["four", "three"]
    assert screen(b"abcdef\r\n\x1b[31mred\x1b[0m", 4) == ["abcd", "ef", "red"]


def test_a_run_that_is_stopped_twice(model: Path, tmp_path: Path) -> None:
    changes = {"steps": 400, "logging.console": "auto", "rollout.max_new_tokens": 24}
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe_tree(model, Path("run"), changes)))
    bottoms, pressed = set[str](), 0

    def on_screen(lines: list[str], press: Callable[[], None]) -> None:
        nonlocal pressed
        bottoms.update(re.findall(r"^  (\w+)[ \d/]+[━─]{8}", "\n".join(lines[-4:]), re.MULTILINE))
        steps = any(line.startswith("step ") for line in lines) and {"rollout", "train", "step"} <= bottoms
        stops = any("stopping after this step" in line for line in lines)
        if (steps and pressed == 0) or (stops and pressed == 1):
            pressed += 1
            press()

    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-m", "octetrl", "train", "r.yaml"]
    ended = run_on_terminal(command, tmp_path, environment, on_screen)
    text = "\n".join(ended.screen)
    assert ended.code == 130, text
    assert ended.received.startswith(b"  loading PyTorch\r") and "PyTorch" not in text, text
    assert {"rollout", "train", "step"} <= bottoms
    assert ended.shows_cursor and not re.search("[━─]", text), text
    *_, last, empty = ended.screen
    assert empty == "" and "Traceback" not in text
    assert re.match(r"octetrl: stopped", last) or "is saved; continue with" in text.replace("\n", ""), text
    assert pressed == 2
