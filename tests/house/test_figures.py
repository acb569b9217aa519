"""Every number in the README's tables was measured and is kept: right above a table stands

    <!-- figures: benchmarks/results/step_h200.json -->

and each number in it, but for those of the first column, is some number of that file's rows, rounded as it is shown.
`1,234` is 1234; `1.2%` is 0.012; `12k` is 12000. Only some rows count:

- those that hold as values all that a row of the table names in backticks (`fp8_full`, `fast`), and what its first cell
  says that looks like a precision, in backticks or not. Where there are none, the table is wrong;
- in a column whose header names a workload (`128 × 512+4096`), and in those to its right up to the next such header,
  those of that workload.

The path may be a pattern (`rollout_*.json`). Behind its bench a file's name is a value of its rows too: `qwen3-0.6b` of
those in `rollout_qwen3-0.6b.json`. Tables in docs/ that have a marker are held to the same. In the README a table that
has none holds no numbers.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.house.markdown import Table, tables
from tests.house.tree import REPO

NUMBER = re.compile(r"(?<![\w.])[-−+]?\d[\d,]*(?:\.\d+)?(?:e[-−+]?\d+)?(?:%|k(?!\w))?(?![\w])")
NAME = re.compile(r"`([^`\s]+)`")
PRECISION = re.compile(r"\b(?:bf16|fp8)(?:_\w+)?\b", re.IGNORECASE)
WORKLOAD = re.compile(r"\d+x\d+\+\d+(?:-\d+)?")
HEAD = {"bench", "commit", "date", "machine", "versions", "command", "rows"}
README = REPO / "README.md"
DOCUMENTS = (README, *sorted((REPO / "docs").glob("*.md")))
Row = dict[str, Any]


def shown_as(measured: float, shown: str) -> bool:
    """Whether `measured`, rounded as many places as `shown` has, is what is shown."""
    digits = shown.replace(",", "").replace("−", "-").replace("+", "")
    unit = {"%": 0.01, "k": 1000.0}.get(digits[-1], 1.0)
    digits = digits.rstrip("%k")
    mantissa, _, exponent = digits.partition("e")
    places = len(mantissa.partition(".")[2])
    step = 10.0 ** (int(exponent or 0) - places) * unit
    return abs(measured - float(digits) * unit) <= 0.5 * step * (1 + 1e-9)


def named_rows(cells: list[str], rows: list[Row]) -> list[Row]:
    """The measured rows that a row of a table is about: all, unless it names what they hold."""
    names = {name for cell in cells for name in NAME.findall(cell)}
    names |= {word.lower() for word in PRECISION.findall(cells[0])}
    named = [row for row in rows if names <= {value for value in row.values() if isinstance(value, str)}]
    assert named, f"row '{cells[0]}' names {sorted(names)}, which no measured row holds"
    return named


def workloads(header: list[str]) -> list[str | None]:
    """For each column the workload that its header names, or else the last one named to its left."""
    named: list[str | None] = []
    for cell in header:
        found = WORKLOAD.search(cell.replace("×", "x").replace(" ", ""))
        named.append(found[0] if found else named[-1] if named else None)
    return named


def check_table(table: Table, rows: list[Row]) -> None:
    """Raise naming the first number of the table that no row of the file holds."""
    for cells in table.rows:
        named = named_rows(cells, rows)
        for cell, workload in list(zip(cells, workloads(table.header), strict=True))[1:]:
            held = [row for row in named if workload in (None, row["workload"])]
            measured = [float(value) for row in held for value in row.values() if isinstance(value, int | float)]
            for shown in NUMBER.findall(cell):
                found = any(shown_as(value, shown) for value in measured)
                where = f"row '{cells[0]}'" + (f", workload {workload}," if workload else "")
                assert found, f"the table says {shown} in {where} which {table.marker} does not hold"


def measured_rows(pattern: str) -> list[Row]:
    """The rows of all files that a marker means, each with its file's name behind the bench."""
    paths = sorted(REPO.glob(pattern))
    assert paths, f"no file is {pattern}"
    return [
        row | {"file": path.stem.partition("_")[2]}
        for path in paths
        for row in json.loads(path.read_text(encoding="utf-8"))["rows"]
    ]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_number_of_a_marked_table_was_measured(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    marked = [table for table in tables(text) if table.marker is not None]
    assert len(marked) == text.count("<!-- figures"), "a marker stands right above its table"
    for table in marked:
        check_table(table, measured_rows(str(table.marker)))


def test_tables_of_the_readme_without_a_marker_hold_no_numbers() -> None:
    for table in tables(README.read_text(encoding="utf-8")):
        if table.marker is None:
            numbers = [number for cells in table.rows for cell in cells[1:] for number in NUMBER.findall(cell)]
            assert not numbers, f"table {table.header} shows {numbers} and names no file they come from"


def test_results_say_where_they_come_from() -> None:
    for path in sorted((REPO / "benchmarks/results").glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        assert set(result) >= HEAD, f"{path.name} lacks {sorted(HEAD - set(result))}"
        assert path.name.startswith(f"{result['bench']}_"), f"{path.name} is of bench '{result['bench']}'"
        for row in result["rows"]:
            flat = all(isinstance(value, str | int | float | bool | None) for value in row.values())
            assert flat, f"{path.name}: a row is a flat object"
            assert {"precision", "workload"} <= set(row), f"{path.name}: a row names its precision and workload"


ROWS = [
    {"precision": "bf16", "workload": "64x512+1024", "tokens": 12345.6, "share": 0.0123},
    {"precision": "fp8", "workload": "64x512+1024", "tokens": 20001, "share": 1e-6},
    {"precision": "fp8", "workload": "8x512+4096", "tokens": 777, "numerics": "fast"},
]
DOCUMENT = """
<!-- figures: benchmarks/results/rollout_h200.json -->
| precision | tokens/s | saturated |
|---|---:|---|
| `bf16` | {} | {} |
"""


@pytest.mark.parametrize("cells", [("12,346", "1.2%"), ("12.3k", "0.012"), ("12,345.6", "1.23%"), ("12346 a", "-")])
def test_right_figures_pass(cells: tuple[str, str]) -> None:
    (table,) = tables(DOCUMENT.format(*cells))
    assert table.marker == "benchmarks/results/rollout_h200.json"
    check_table(table, ROWS)


@pytest.mark.parametrize("cells", [("12,347", "-"), ("20,001", "-"), ("12,346", "1.3%")])
def test_wrong_figures_are_noticed(cells: tuple[str, str]) -> None:
    (table,) = tables(DOCUMENT.format(*cells))
    with pytest.raises(AssertionError, match="does not hold"):
        check_table(table, ROWS)


@pytest.mark.parametrize("label", ["`fp8`", "fp8", "**FP8**", "`fp8`, at `64x512+1024`"])
def test_a_label_picks_its_rows(label: str) -> None:
    check_table(Table("a.json", ["", "tokens/s"], [[label, "20,001"]]), ROWS)
    with pytest.raises(AssertionError, match="does not hold"):
        check_table(Table("a.json", ["", "tokens/s"], [[label, "12,346"]]), ROWS)


@pytest.mark.parametrize("label", ["`fp8`, `fp8_full`", "fp8_full", "`bf16`, `fast`", "`slow`"])
def test_a_label_that_no_row_has_is_noticed(label: str) -> None:
    with pytest.raises(AssertionError, match="no measured row holds"):
        check_table(Table("a.json", ["", "tokens/s"], [[label, "20,001"]]), ROWS)


def test_a_label_that_names_nothing_is_about_all_rows() -> None:
    check_table(Table("a.json", ["tokens", "bf16", "fp8"], [["1,024", "12,346", "777"]]), ROWS)


@pytest.mark.parametrize("cells", [("20,001", "0.0001%", "777"), ("-", "-", "777")])
def test_figures_of_their_columns_workload_pass(cells: tuple[str, ...]) -> None:
    check_table(Table("a.json", ["", "64 × 512+1024", "share", "8x512+4096"], [["`fp8`", *cells]]), ROWS)


@pytest.mark.parametrize("cells", [("777", "-", "-"), ("-", "777", "-"), ("-", "-", "20,001")])
def test_figures_of_another_workload_are_noticed(cells: tuple[str, ...]) -> None:
    with pytest.raises(AssertionError, match=r"workload (64x512\+1024|8x512\+4096), which"):
        check_table(Table("a.json", ["", "64 × 512+1024", "share", "8x512+4096"], [["`fp8`", *cells]]), ROWS)


def test_a_pattern_tells_files_apart() -> None:
    rows = measured_rows("benchmarks/results/rollout_*.json")
    assert {"llama-3.1-8b", "qwen3-0.6b"} <= {row["file"] for row in rows}
    with pytest.raises(AssertionError, match="no file is"):
        measured_rows("benchmarks/results/no_such_*.json")
