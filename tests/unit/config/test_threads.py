"""How many cores are free, counted from two looks at the kernel's times."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from octetrl.config import threads
from octetrl.config.threads import free_cores

IDLE, BUSY, WAITS = "0 0 0 9 0 0 0 0 0 0", "5 2 2 0 0 0 0 0 9 9", "0 0 1 0 8 0 0 0 0 0"
START = "0 0 0 0 0 0 0 0 0 0"


@pytest.mark.parametrize(
    ("cores", "free"),
    [
        ([IDLE, IDLE, IDLE], 3),
        ([IDLE, BUSY, WAITS], 2),
        ([BUSY, BUSY, BUSY], 1),
        ([START, START, START], 3),  # no tick in between
        (["6 0 0 4 0 0 0 0 0 0"] * 3, 1),
    ],
)
def test_cores_that_idle_are_free(cores: list[str], free: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`guest` is counted in `user` already. The fourth core is not this process's."""
    looks = iter([[START] * 4, [*cores, IDLE]])

    def look() -> str:
        lines = [f"cpu{core} {times}" for core, times in enumerate(next(looks))]
        return "\n".join([f"cpu  {BUSY}", *lines, "intr 1 2 3", "ctxt 7"])

    stat = tmp_path / "stat"
    texts = iter([look(), look()])
    monkeypatch.setattr(threads, "STAT", stat)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    stat.write_text(next(texts))
    monkeypatch.setattr(time, "sleep", lambda _: stat.write_text(next(texts)))
    assert free_cores() == free


@pytest.mark.parametrize("text", [None, "", "cpu0 a b c d e\n"])
def test_a_machine_that_does_not_say_it_has_no_number(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "STAT", tmp_path / "stat")
    if text is not None:
        (tmp_path / "stat").write_text(text)
    assert free_cores(0.0) is None
