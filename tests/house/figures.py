"""How the house tests hold the numbers of README, docs and the pages of lab/ to the files in `lab/results/`.

**A table** that shows measurements has a marker right above it, which mirrors its columns:

    <!-- figures: lab/results/step_qwen3-8b.json | - | time/step | mismatch/tokens -->

Each number of a column is that field of some row of the file, rounded as it is shown. `1,234` is 1234; `1.2%` is 0.012;
`12k` is 12000. A column that is `-` holds no measurement. Only some rows of the file count:

- those that hold as values all that a row of the table names in backticks (`fp8_full`, `fast`), and what its first cell
  says that looks like a precision, in backticks or not. Where there are none, the table is wrong;
- where the first column has a field: those whose field is the first cell's number;
- in a column `speedup[hidden_size=1024]`: those whose `hidden_size` is 1024;
- in a column whose header names a workload (`128 × 512+4096`), and in those to its right up to the next such header,
  those of that workload.

A cell with as many numbers as rows count shows them in the file's order. A cell `8,100 to 8,409` shows the lowest and
the highest of them. The path may be a pattern (`rollout_*.json`), and several paths may follow each other with a comma.
Behind its bench a file's name is a value of its rows too: `qwen3-0.6b` of those in `rollout_qwen3-0.6b.json`. Only in a
column `measured_model` a name is that of the model, as the command of the result gives it.

**Prose** with measured numbers (those with %, ms, µs, GB, tokens/s, TFLOP/s, TB/s, and decimals with `times`), a table
of decimals and an indented block have a marker as their first line, one of

    <!-- figures: lab/results/a.json | error -->     each number is that field of some row of the file
    <!-- by hand: where the numbers come from -->           nobody checks them but the author

The second may stand anywhere in the paragraph. A page that is by hand throughout says `<!-- by hand, the whole page:
... -->` below its title. Several fields may be named. A table of decimals is one with a column, not the first, in which
each cell is a number and some have a fraction.

**A dirty tree.** A result whose package or benchmark scripts are not those of its commit
(octetrl/telemetry/provenance.py), or whose commit says `-dirty`, has a † in the first cell of its row, or in its
paragraph; clean ones have none. A row with a field `dirty` says it of itself: that of a study's arm, whose runs may be
of other commits than those of the other arms.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from lab.record import is_dirty, model_of
from tests.house.markdown import Paragraph, Table
from tests.house.tree import REPO

NUMBER = re.compile(r"(?<![\w.])[-−+]?\d[\d,]*(?:\.\d+)?(?:e[-−+]?\d+)?(?:%|k(?!\w))?(?![\w])")
NAME = re.compile(r"`([^`\s]+)`")
PRECISION = re.compile(r"\b(?:bf16|fp8)(?:_\w+)?\b", re.IGNORECASE)
WORKLOAD = re.compile(r"\d+x\d+\+\d+(?:-\d+)?")
FIELD = re.compile(r"(?P<name>[^\s\[\]]+)(?:\[(?P<key>\w+)=(?P<value>[^\]]+)\])?")
UNIT = r"(?:%|\s?(?:ms|µs|GB|GB/s|TB/s|TFLOP/s|tokens/s|tokens a second)\b)"
MEASURED = re.compile(rf"(?<![\w.])(\d[\d,]*(?:\.\d+)?)(?:({UNIT})|(?<=\.\d)\stimes\b|(?<=\.\d\d)\stimes\b)")
RANGE = re.compile(r"\s*[-−+\d.,e%k]+ to [-−+\d.,e%k]+\s*")
PURE = re.compile(r"[-−+]?\d[\d,]*(?:\.\d+)?%?")
MODEL = "measured_model"
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


def measured_rows(pattern: str) -> list[Row]:
    """The rows of all files that a marker means, each with its file's name behind the bench."""
    found = [sorted(REPO.glob(one)) for one in pattern.split(",")]
    assert all(found), f"no file is {pattern}"
    return [row for paths in found for path in paths for row in _rows_of(path)]


@cache
def _rows_of(path: Path) -> list[Row]:
    result = json.loads(path.read_text(encoding="utf-8"))
    of_file = {"file": path.stem.partition("_")[2], "dirty": is_dirty(result), MODEL: model_of(result)}
    # a row of several runs may say itself whether it is dirty
    return [row | of_file | {"dirty": row.get("dirty", of_file["dirty"])} for row in result["rows"]]


# ---------------------------------------------------------------- tables


def named_rows(cells: list[str], rows: list[Row]) -> list[Row]:
    """The measured rows that a row of a table is about: all, unless it names what they hold."""
    names = {name for cell in cells for name in NAME.findall(cell)}
    names |= {word.lower() for word in PRECISION.findall(cells[0])}
    named = [row for row in rows if names <= {row[key] for key in row.keys() - {MODEL} if isinstance(row[key], str)}]
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
    """Raise naming the first number of the table that its column's field does not hold."""
    assert len(table.columns) == len(table.header), f"the marker of {table.header} names {len(table.columns)} columns"
    for cells in table.rows:
        of_columns = list(zip(cells, table.columns, workloads(table.header), strict=True))
        named = named_rows([cell for cell, field, _ in of_columns if field != MODEL], rows)
        if table.columns[0] != "-":
            (key,) = NUMBER.findall(cells[0])
            named = [row for row in named if shown_as(row[table.columns[0]], key)]
        said = f"row '{cells[0]}': † marks results of a dirty tree, and only those"
        assert ("†" in cells[0]) == any(row.get("dirty") for row in named), said
        for cell in (cell for cell, field, _ in of_columns if field == MODEL):
            named = [row for row in named if f"`{row.get(MODEL)}`" == cell]
            assert named, f"row '{cells[0]}': no measured row is of the model {cell}"
        for cell, field, workload in [one for one in of_columns[1:] if one[1] != MODEL]:
            where = f"row '{cells[0]}'" + (f", workload {workload}" if workload else "")
            held = [row for row in named if workload in (None, row["workload"])]
            _check_cell(cell, field, held, f"{table.marker}, {where}")


def _check_cell(cell: str, field: str, rows: list[Row], where: str) -> None:
    numbers = NUMBER.findall(cell)
    if field == "-" or not numbers:
        assert not numbers, f"{where}: the marker says that a column with {numbers} holds no measurement"
        return
    parts = FIELD.fullmatch(field)
    assert parts is not None, f"{where}: '{field}' is no field"
    if parts["key"] is not None:
        rows = [row for row in rows if str(row.get(parts["key"])) == parts["value"]]
    values = [float(row[parts["name"]]) for row in rows if isinstance(row.get(parts["name"]), int | float)]
    if values and RANGE.fullmatch(cell):
        agrees = [shown_as(extreme(values), number) for extreme, number in zip((min, max), numbers, strict=True)]
    elif len(numbers) == len(values):
        agrees = [shown_as(value, number) for value, number in zip(values, numbers, strict=True)]
    else:
        agrees = [any(shown_as(value, number) for value in values) for number in numbers]
    wrong = [number for number, right in zip(numbers, agrees, strict=True) if not right]
    assert not wrong, f"the table says {wrong[0]}, which {field} of {where} does not hold: {values[:8]}"


# ---------------------------------------------------------------- prose


def measured_numbers(text: str) -> list[str]:
    """The numbers of a paragraph that look measured, as `shown_as` reads them; code and links' targets aside."""
    text = re.sub(r"`[^`]*`|\]\([^)]*\)|<!--.*?-->", " ", text, flags=re.DOTALL)
    return [number + ("%" if unit == "%" else "") for number, unit in MEASURED.findall(text)]


def looks_measured(paragraph: Paragraph) -> bool:
    """Whether somebody must say where its numbers come from."""
    if paragraph.is_table:
        filled = [[cell for cell in column if cell] for column in paragraph.columns_of_cells]
        numbers = [column for column in filled if column and all(map(PURE.fullmatch, column))]
        return any("." in cell or "%" in cell for column in numbers for cell in column)
    return bool(measured_numbers(paragraph.text))


def check_paragraph(paragraph: Paragraph) -> None:
    """Raise unless a paragraph with measured numbers says where they come from, and is right."""
    if not looks_measured(paragraph) or paragraph.by_hand:
        return
    begin = paragraph.text[:60].replace("\n", " ")
    assert paragraph.file is not None, (
        f"measured numbers and no marker: '{begin}...' has {measured_numbers(paragraph.text)[:3]}; write"
        f" '<!-- by hand: where from, or a setting -->' in it, or a marker of a result and its field above it"
    )
    if paragraph.is_table:
        return  # `check_table`
    rows = measured_rows(paragraph.file)
    values = [
        float(row[field]) for row in rows for field in paragraph.fields if isinstance(row.get(field), int | float)
    ]
    assert ("†" in paragraph.text) == any(row["dirty"] for row in rows), f"'{begin}...': † marks a dirty tree's results"
    for number in measured_numbers(paragraph.text):
        assert any(shown_as(value, number) for value in values), (
            f"'{begin}...' says {number}, {paragraph.fields} holds no such value"
        )
