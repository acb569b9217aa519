"""The table that a command of `octetrl bench` prints: a row for each arm and a column for each figure.

If that is wider than the terminal, the table is turned: arms side by side, a figure on each line. If that is too wide
as well, the arms are spread over several such tables. Into a pipe the table goes as it is. A cell is never cut,
because a cut figure is lost.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from octetrl.bench.turns import Row

WIDTH = 150  # of a table without a terminal, at least
MOST = 600  # columns that any table may need


def print_table(
    title: str,
    names: Sequence[str],
    columns: Mapping[str, tuple[str, str]],
    rows: Iterable[Row],
    legend: str | None = None,
) -> None:
    """`names`: keys of the text columns; `columns`: key of a row -> heading and format. A missing figure is `-`."""
    from rich.console import Console

    room = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for table, needed in fitting(room, title, names, columns, list(rows)):
        Console(width=max(needed, WIDTH if room is None else 1)).print(table)
    if legend:
        Console(width=room or max(needed, WIDTH)).print(legend, style="italic", highlight=False, markup=False)


def filled(columns: Mapping[str, tuple[str, str]], rows: Sequence[Row]) -> dict[str, tuple[str, str]]:
    """Columns that some row has a figure for."""
    return {key: shown for key, shown in columns.items() if any(key in row for row in rows)}


def fitting(
    room: int | None,
    title: str,
    names: Sequence[str],
    columns: Mapping[str, tuple[str, str]],
    rows: Sequence[Row],
) -> list[tuple[Table, int]]:
    """The tables for a terminal of `room` columns, and how many each takes. None: no terminal."""
    from rich.console import Console

    measure = Console(width=MOST).measure
    table = _with_rows(title, names, columns, rows)
    needed = measure(table).maximum
    if room is None or needed <= room:
        return [(table, needed)]
    for each in range(len(rows), 0, -1):  # arms of a table
        parts = [_turned(title, names, columns, rows[start : start + each]) for start in range(0, len(rows), each)]
        widths = [measure(part).maximum for part in parts]
        if max(widths) <= room or (each == 1 and max(widths) < needed):
            return list(zip(parts, widths, strict=True))
    return [(table, needed)]


def _with_rows(title: str, names: Sequence[str], columns: Mapping[str, tuple[str, str]], rows: Sequence[Row]) -> Table:
    from rich.table import Table

    table = Table(title=title)
    for name in names:
        table.add_column(_short(name), no_wrap=True)
    for heading, _ in columns.values():
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            *[str(row[name]) for name in names], *[_cell(row, key, form) for key, (_, form) in columns.items()]
        )
    return table


def _turned(title: str, names: Sequence[str], columns: Mapping[str, tuple[str, str]], rows: Sequence[Row]) -> Table:
    from rich.table import Table

    table = Table(title=title)
    table.add_column("\n".join(map(_short, names)), no_wrap=True)
    for row in rows:
        table.add_column("\n".join(str(row[name]) for name in names), justify="right", no_wrap=True)
    for key, (heading, form) in columns.items():
        table.add_row(heading.replace("\n", " "), *[_cell(row, key, form) for row in rows])
    return table


def _short(name: str) -> str:
    return name.rpartition("/")[2]


def _cell(row: Row, key: str, form: str) -> str:
    return format(row[key], form) if key in row else "-"
