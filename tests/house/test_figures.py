"""Every number in the README's tables was measured and is kept: right above a table stands

    <!-- figures: benchmarks/results/step_h200.json -->

and each number in it, but for those of the first column, is some number of that file's rows, rounded as it is shown.
Where the first cell names a precision of the file (`fp8_full`), only the rows of that precision count. `1,234` is
1234; `1.2%` is 0.012; `12k` is 12000. A table that holds no numbers needs no marker.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.house.markdown import Table, tables
from tests.house.tree import REPO

NUMBER = re.compile(r"(?<![\w.])[-−+]?\d[\d,]*(?:\.\d+)?(?:e[-−+]?\d+)?(?:%|k(?!\w))?(?![\w])")
HEAD = {"bench", "commit", "date", "machine", "versions", "command", "rows"}


def shown_as(measured: float, shown: str) -> bool:
    """Whether `measured`, rounded as many places as `shown` has, is what is shown."""
    digits = shown.replace(",", "").replace("−", "-").replace("+", "")
    unit = {"%": 0.01, "k": 1000.0}.get(digits[-1], 1.0)
    digits = digits.rstrip("%k")
    mantissa, _, exponent = digits.partition("e")
    places = len(mantissa.partition(".")[2])
    step = 10.0 ** (int(exponent or 0) - places) * unit
    return abs(measured - float(digits) * unit) <= 0.5 * step * (1 + 1e-9)


def check_table(table: Table, rows: list[dict[str, Any]]) -> None:
    """Raise naming the first number of the table that no row of the file holds."""
    for cells in table.rows:
        label = cells[0].strip("`* ")
        matching = [row for row in rows if row.get("precision") == label] or rows
        measured = [float(value) for row in matching for value in row.values() if isinstance(value, int | float)]
        for cell in cells[1:]:
            for shown in NUMBER.findall(cell):
                found = any(shown_as(value, shown) for value in measured)
                assert found, f"the README says {shown} in row '{label}', which {table.marker} does not hold"


def test_every_number_of_the_readmes_tables_was_measured() -> None:
    for table in tables((REPO / "README.md").read_text(encoding="utf-8")):
        if table.marker is None:
            numbers = [number for cells in table.rows for cell in cells[1:] for number in NUMBER.findall(cell)]
            assert not numbers, f"table {table.header} shows {numbers} and names no file they come from"
        else:
            check_table(table, json.loads((REPO / table.marker).read_text(encoding="utf-8"))["rows"])


def test_results_say_where_they_come_from() -> None:
    for path in sorted((REPO / "benchmarks/results").glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        assert set(result) >= HEAD, f"{path.name} lacks {sorted(HEAD - set(result))}"
        assert path.name.startswith(f"{result['bench']}_"), f"{path.name} is of bench '{result['bench']}'"
        for row in result["rows"]:
            flat = all(isinstance(value, str | int | float | bool | None) for value in row.values())
            assert flat, f"{path.name}: a row is a flat object"
            assert {"precision", "workload"} <= set(row), f"{path.name}: a row names its precision and workload"


ROWS = [{"precision": "bf16", "tokens": 12345.6, "share": 0.0123}, {"precision": "fp8", "tokens": 20001, "share": 1e-6}]
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
