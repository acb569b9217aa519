"""The table of a bench: as wide as it needs to be into a pipe, turned where a terminal is narrower."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from octetrl.cli.bench_table import MOST, fitting, print_table

NAMES = ("precision", "train/numerics")
COLUMNS = {f"time/{n}": (f"seconds\nof part {n}", ".2f") for n in range(9)}


def rows_of(count: int) -> list[dict[str, Any]]:
    rows = [{"precision": f"fp8_{n}", "train/numerics": "parity"} for n in range(count)]
    return [row | {f"time/{n}": 1000 * place + n for n in range(8)} for place, row in enumerate(rows)]  # the last: none


@pytest.mark.parametrize(
    ("room", "count", "turned"), [(None, 2, False), (300, 2, False), (80, 2, True), (20, 2, True), (80, 40, False)]
)
def test_no_figure_is_cut_and_arms_stand_side_by_side_where_that_is_narrower(
    room: int | None, count: int, turned: bool
) -> None:
    rows = rows_of(count)
    table, needed = fitting(room, "a title", NAMES, COLUMNS, rows)
    console = Console(width=needed, record=True, file=io.StringIO())
    console.print(table)
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= needed < MOST
    assert (needed <= 80) == turned and "…" not in text
    assert all(f"{1000 * place + n:.2f}" in text for place in range(count) for n in range(8))
    assert text.count(" - ") == count
    if turned:
        assert [line.split("│")[1].strip() for line in text.splitlines() if "seconds of part" in line] == [
            f"seconds of part {n}" for n in range(9)
        ]


def test_into_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("a title", NAMES, COLUMNS, rows_of(1), legend="part: a [part] of it")
    out = capsys.readouterr().out
    assert "fp8_0" in out and "part: a [part] of it" in out and "7.00" in out
