"""`octetrl metrics`: what the metrics of a run mean (telemetry/glossary.py)."""

from __future__ import annotations

from typing import Annotated

import typer

from octetrl.config.errors import UserError, nearest


def metrics(
    word: Annotated[str | None, typer.Argument(metavar="[WORD]", help="A metric's name, or a part of it.")] = None,
) -> None:
    """Explain the metrics of a run: their units, and what good and bad values are."""
    from rich.console import Console
    from rich.table import Table

    from octetrl.telemetry.glossary import METRICS, explained

    named = explained(word) if word else None
    console, shown = Console(highlight=False), False
    for family, entries in METRICS.items():
        found = [one for one in entries if not word or one is named or (named is None and word in one.name)]
        if not found:
            continue
        table = Table(title=family, title_justify="left", box=None, padding=(0, 2, 0, 0), show_header=False)
        for one in found:
            unit = f" [{one.unit}]" if one.unit else ""
            table.add_row(one.name, f"{one.meaning}{unit} {one.look}".rstrip(), style=None)
        console.print(table, markup=False)
        shown = True
    if not shown:
        names = [one.name for entries in METRICS.values() for one in entries]
        raise UserError(
            f"metrics: no metric has '{word}' in its name; `octetrl metrics` lists all{nearest(word or '', names)}"
        )
