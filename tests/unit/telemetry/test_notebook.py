"""A run in a notebook, with a double of IPython's display."""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from octetrl.telemetry import notebook
from octetrl.telemetry.console import Console


class Displays:
    """What a notebook has received: one entry for each display, with its last content and how often it was updated."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kernel: object = "a kernel") -> None:
        self.shown: list[dict[str, str]] = []
        self.updates = 0
        shell = SimpleNamespace(kernel=kernel)
        monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
        monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=self.display))

    def display(self, data: dict[str, str], *, raw: bool, display_id: bool) -> Any:
        assert raw and display_id
        place = len(self.shown)
        self.shown.append(data)

        def update(data: dict[str, str], *, raw: bool) -> None:
            self.shown[place] = data
            self.updates += 1

        return SimpleNamespace(update=update)


def run_of(console: Console, steps: int) -> None:
    console.rows("grpo: <b>a model</b>", [("device", "CPU")])
    with console.steps(0):
        for step in range(1, steps + 1):
            with console.phase("rollout") as show:
                show(3, 4)
            metrics = {"reward/mean": step / 10, "loss": 1.0, "time/step": 0.1}
            console.step(step, metrics | ({"eval/accuracy": 0.5} if step % 2 == 0 else {}))
        console.warn("look at the rewards")
    console.rows("done: 4 steps", [("reward", "0.4")])


def test_one_display_has_the_last_numbers_and_the_curves(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    displays = Displays(monkeypatch)
    monkeypatch.setattr(notebook, "LEAST_SECONDS", 0.0)
    run_of(Console("auto", 4), 4)
    assert len(displays.shown) == 1 and displays.updates >= 6
    page = displays.shown[0]["text/html"]
    assert "reward 0.400" in page and "reward 0.300" not in page
    points = re.findall(r'<polyline[^>]*points="([^"]*)"', page)
    assert [len(curve.split()) for curve in points] == [4, 2], "the reward of each step, two evaluations"
    assert "look at the rewards" in page and "done: 4 steps" in page and "<b>a model" not in page
    assert displays.shown[0]["text/plain"].startswith("step 4/4  reward 0.400")
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


def test_it_is_not_updated_more_often_than_eyes_read(monkeypatch: pytest.MonkeyPatch) -> None:
    displays = Displays(monkeypatch)
    monkeypatch.setattr(notebook, "LEAST_SECONDS", 1e9)
    run_of(Console("auto", 4), 4)
    assert displays.updates == 2, "the end of the steps, and the last table"


@pytest.mark.parametrize(("mode", "kernel"), [("plain", "a kernel"), ("quiet", "a kernel"), ("auto", None)])
def test_elsewhere_it_is_text(
    mode: Any, kernel: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also in a terminal's IPython, which has no kernel."""
    displays = Displays(monkeypatch, kernel)
    run_of(Console(mode, 4), 4)
    assert not displays.shown
    captured = capsys.readouterr()
    assert ("reward 0.400" in captured.out) == (mode != "quiet") and "look at the rewards" in captured.err


@pytest.mark.parametrize("fails_at", [0, 3])
def test_a_display_that_fails_is_replaced_by_lines(
    fails_at: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At its start, or when the page is closed while the run goes on."""
    calls = 0

    def display(*_: Any, **__: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > fails_at:
            raise RuntimeError("comm is closed")
        return SimpleNamespace(update=display)

    Displays(monkeypatch)
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    monkeypatch.setattr(notebook, "LEAST_SECONDS", 0.0)
    run_of(Console("auto", 4), 4)
    captured = capsys.readouterr()
    assert captured.err.count("comm is closed") == 1 and "look at the rewards" in captured.err
    assert "step 4/4  reward 0.400" in captured.out and "done: 4 steps" in captured.out and calls == fails_at + 1
