"""The table of a bench: as wide as it needs to be into a pipe, turned where a terminal is narrower."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from octetrl.cli.bench_table import MOST, fitting, print_rows, print_table

NAMES = ("precision", "train/checkpointing")
COLUMNS = {f"time/{n}": (f"seconds\nof part {n}", ".2f") for n in range(9)}


def rows_of(count: int) -> list[dict[str, Any]]:
    rows = [{"precision": f"fp8_{n}", "train/checkpointing": "layer"} for n in range(count)]
    return [row | {f"time/{n}": 1000 * place + n for n in range(8)} for place, row in enumerate(rows)]  # the last: none


def test_a_column_without_a_figure_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    row = {"precision": "bf16", "arm": "seed=1", "workload": "8x4+4", "time/step": 1.5}
    print_rows("step", "a title", [row, row | {"arm": "seed=2", "memory/learn_peak_gb": 2.0}])
    out = capsys.readouterr().out
    assert "1.50" in out and "seed=2" in out and "learn: memory of learning" in out
    assert "8x4+4" not in out and "produce" not in out, "one workload, and no such figure"


@pytest.mark.parametrize(
    ("room", "count", "tables"), [(None, 2, 0), (300, 2, 0), (80, 2, 1), (80, 9, 2), (20, 2, 2)], ids=str
)
def test_no_figure_is_cut_and_arms_stand_side_by_side_where_that_is_narrower(
    room: int | None, count: int, tables: int
) -> None:
    """`tables`: of turned ones; 0: one with a row for each arm."""
    found = fitting(room, "a title", NAMES, COLUMNS, rows_of(count))
    text = ""
    for table, needed in found:
        console = Console(width=needed, record=True, file=io.StringIO())
        console.print(table)
        part = console.export_text()
        assert max(map(len, part.splitlines())) <= needed < MOST and (room is None or needed <= max(room, 40))
        text += part
    assert len(found) == max(tables, 1) and "…" not in text
    assert [text.count(f" {1000 * place + n:.2f} ") for place in range(count) for n in range(8)] == [1] * (8 * count)
    assert text.count(" - ") == count and text.count("seconds of part 3") == tables


def test_into_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("a title", NAMES, COLUMNS, rows_of(1), legend="part: a [part] of it")
    out = capsys.readouterr().out
    assert "fp8_0" in out and "part: a [part] of it" in out and "7.00" in out
